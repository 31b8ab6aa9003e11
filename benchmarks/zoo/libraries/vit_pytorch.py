"""Vision transformers of `vit_pytorch`: images, volumes, video, sequences, self-supervised."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import vit_pytorch

from ..case import Case, images, noise, uneven

SMALL = {"image_size": 64, "patch_size": 8, "num_classes": 10, "dim": 48, "heads": 3, "mlp_dim": 96}
DEEP = {**SMALL, "depth": 3}
DROP = {"dropout": 0.1}


def _model(module: str, name: str, *shape: int, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        model = getattr(import_module(f"vit_pytorch.{module}"), name)(**options)
        return Case(model.train(), noise(*shape) if shape else images(4, 64), uneven)

    return make


def _self_supervised(module: str, name: str, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        encoder = vit_pytorch.ViT(**DEEP, pool="mean")
        model = getattr(import_module(f"vit_pytorch.{module}"), name)(encoder=encoder, **options)
        return Case(model.train(), images(4, 64))

    return make


CASES = {
    "vit": _model("vit", "ViT", **DEEP, **DROP, emb_dropout=0.1),
    "simple_vit": _model("simple_vit", "SimpleViT", **DEEP),
    "deep_vit": _model("deepvit", "DeepViT", **DEEP, **DROP),
    "cait": _model("cait", "CaiT", **DEEP, cls_depth=1, layer_dropout=0.05),
    "t2t": _model("t2t", "T2TViT", image_size=64, num_classes=10, dim=48, depth=2, heads=3, mlp_dim=96,
                  t2t_layers=((7, 4), (3, 2))),
    "cct": _model("cct", "CCT", img_size=64, embedding_dim=48, num_layers=2, num_heads=3, mlp_ratio=2,
                  num_classes=10),
    "cvt": _model("cvt", "CvT", num_classes=10, s1_emb_dim=16, s2_emb_dim=24, s3_emb_dim=48, s2_depth=1, s3_depth=1,
                  s2_heads=2, s3_heads=3, dropout=0.1),
    "levit": _model("levit", "LeViT", image_size=64, num_classes=10, dim=(24, 32, 48), depth=1, heads=(2, 3, 4),
                    mlp_mult=2, dropout=0.1),
    "max_vit": _model("max_vit", "MaxViT", num_classes=10, dim=16, depth=(1, 1), dim_head=8, window_size=4),
    "mobile_vit": _model("mobile_vit", "MobileViT", image_size=(64, 64), dims=[24, 32, 48],
                         channels=[8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64], num_classes=10, depths=(1, 1, 1)),
    "nest": _model("nest", "NesT", image_size=64, patch_size=4, num_classes=10, dim=24, heads=2, num_hierarchies=2,
                   block_repeats=(1, 1)),
    "pit": _model("pit", "PiT", **{**SMALL, "dim": 48}, depth=(1, 1), dropout=0.1),
    "twins": _model("twins_svt", "TwinsSVT", num_classes=10, s1_emb_dim=16, s2_emb_dim=24, s3_emb_dim=32,
                    s4_emb_dim=48, s1_local_patch_size=4, s2_local_patch_size=4, s3_local_patch_size=4,
                    s4_local_patch_size=2, s1_global_k=2, s2_global_k=2, s3_global_k=2, s4_global_k=2, s3_depth=1,
                    s4_depth=1),
    "small_dataset": _model("vit_for_small_dataset", "ViT", **DEEP, **DROP),
    "patch_dropout": _model("vit_with_patch_dropout", "ViT", **DEEP, patch_dropout=0.25),
    "sequence": _model("vit_1d", "ViT", 4, 3, 256, seq_len=256, patch_size=8, num_classes=10, dim=48, depth=3,
                       heads=3, mlp_dim=96),
    "volume": _model("vit_3d", "ViT", 2, 1, 16, 32, 32, image_size=32, frames=16, image_patch_size=8,
                     frame_patch_size=4, num_classes=10, dim=48, depth=3, heads=3, mlp_dim=96, channels=1),
    "video": _model("vivit", "ViViT", 2, 3, 8, 32, 32, image_size=32, frames=8, image_patch_size=8, frame_patch_size=2,
                    num_classes=10, dim=48, spatial_depth=2, temporal_depth=2, heads=3, mlp_dim=96),
    "masked_autoencoder": _self_supervised("mae", "MAE", masking_ratio=0.75, decoder_dim=32, decoder_depth=2),
}  # fmt: skip
