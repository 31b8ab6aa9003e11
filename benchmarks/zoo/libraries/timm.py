"""Image models of `timm`: convolutional, attention, mixers and state-space-like, at 64 pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
from timm.models import metaformer, mlp_mixer

from ..case import Case, images, uneven


def _model(name: str, size: int = 64, batch: int = 8, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        model = timm.create_model(name, num_classes=10, **options)
        return Case(model.train(), images(batch, size), uneven)

    return make


def _mixer() -> Case:
    model = mlp_mixer.MlpMixer(10, img_size=64, patch_size=8, num_blocks=3, embed_dim=48)
    return Case(model.train(), images(8, 64), uneven)


def _poolformer() -> Case:
    return Case(
        metaformer.MetaFormer(num_classes=10, depths=(1,) * 4, dims=(16, 24, 32, 48)).train(), images(8), uneven
    )


ONE = {"depths": (1, 1, 1, 1)}
VIT = {"img_size": 64, "embed_dim": 48, "depth": 3, "num_heads": 3}
CASES = {
    "resnet10t": _model("resnet10t", channels=(16, 32, 48, 64), drop_path_rate=0.1),
    "resnet26t": _model("resnet26t", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32)),
    "seresnext26t": _model("seresnext26t_32x4d", layers=(1, 1, 1, 1), cardinality=4, base_width=4, batch=4),
    "test_resnet": _model("test_resnet"),
    "efficientnet_b0": _model("efficientnet_lite0", batch=4, drop_path_rate=0.1),
    "test_efficientnet": _model("test_efficientnet"),
    "mobilenetv3_small": _model("mobilenetv3_small_050"),
    "mobilenetv4": _model("mobilenetv4_conv_small_035"),
    "mnasnet_small": _model("mnasnet_small"),
    "ghostnet": _model("ghostnet_050"),
    "lcnet": _model("lcnet_050"),
    "regnety": _model("regnety_002", batch=4),
    "densenet": _model("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    "test_nfnet": _model("test_nfnet"),
    "test_byobnet": _model("test_byobnet"),
    "dla34": _model("dla46_c"),
    "hardcorenas": _model("hardcorenas_a"),
    "convnext": _model("convnext_atto", **ONE, dims=(16, 32, 48, 64), drop_path_rate=0.1),
    "convnextv2": _model("convnextv2_atto", **ONE, dims=(16, 32, 48, 64), drop_path_rate=0.1),
    "test_mambaout": _model("test_mambaout"),
    "edgenext": _model("edgenext_xx_small", dims=(16, 24, 32, 48), depths=(1, 1, 1, 1), batch=4),
    "inception_next": _model("inception_next_atto", **ONE, dims=(16, 32, 48, 64)),
    "repvit": _model("repvit_m0_9", embed_dim=(16, 24, 32, 48), depth=(1, 1, 1, 1)),
    "fastvit": _model("fastvit_t8", layers=(1, 1, 1, 1), embed_dims=(32, 32, 64, 64), batch=4),
    "vit_tiny": _model("vit_tiny_patch16_224", **VIT, patch_size=8, drop_path_rate=0.1, proj_drop_rate=0.1),
    "deit3": _model("deit3_small_patch16_224", **VIT, patch_size=8),
    "test_vit": _model("test_vit", size=160),
    "swin": _model("swin_tiny_patch4_window7_224", img_size=64, embed_dim=24, depths=(2, 2), num_heads=(2, 4),
                   window_size=4, drop_path_rate=0.1),
    "swinv2": _model("swinv2_tiny_window8_256", img_size=64, embed_dim=24, depths=(2, 2), num_heads=(2, 4),
                     window_size=4),
    "beit": _model("beit_base_patch16_224", **VIT, patch_size=8),
    "eva02": _model("eva02_tiny_patch14_224", **VIT, patch_size=8),
    "cait": _model("cait_xxs24_224", **VIT, patch_size=8),
    "xcit": _model("xcit_nano_12_p16_224", img_size=64, embed_dim=48, depth=2, num_heads=3),
    "mixer": _mixer,
    "poolformer": _poolformer,
    "pvt_v2": _model("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64), num_heads=(1, 2, 3, 4)),
    "maxvit": _model("maxvit_rmlp_pico_rw_256", img_size=64, embed_dim=(32, 32, 64, 64), depths=(1, 1, 1, 1), batch=4),
    "twins_svt": _model("twins_svt_small", img_size=64, embed_dims=(16, 24, 32, 48), depths=(2, 2, 2, 2),
                        num_heads=(1, 1, 2, 3)),
    "levit": _model("levit_128s", batch=4, img_size=64, embed_dim=(32, 48, 64), num_heads=(2, 3, 4), depth=(1, 1, 1)),
    "features_only": _model("resnet10t", channels=(16, 32, 48, 64), features_only=True),
}  # fmt: skip
