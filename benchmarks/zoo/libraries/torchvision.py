"""Models of `torchvision`: classification, segmentation, video, optical flow, and detectors with their losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchvision import models
from torchvision.models import detection, optical_flow, segmentation, video

from ..case import Case, images, noise, uneven

BARE = {"weights": None, "weights_backbone": None}


def _classifier(build: Callable[..., nn.Module], size: int = 64, batch: int = 8, **options: Any) -> Callable[[], Case]:
    return lambda: Case(build(num_classes=10, **options).train(), images(batch, size), uneven)


def _segmenter(build: Callable[..., nn.Module], **options: Any) -> Callable[[], Case]:
    return lambda: Case(build(**BARE, num_classes=5, **options).train(), images(2, 64), uneven)


def _video(build: Callable[..., nn.Module], frames: int = 8, size: int = 32, **options: Any) -> Callable[[], Case]:
    return lambda: Case(build(num_classes=10, **options).train(), noise(2, 3, frames, size, size), uneven)


def _targets() -> list[dict[str, torch.Tensor]]:
    boxes = torch.tensor([[4.0, 4.0, 30.0, 30.0], [20.0, 12.0, 56.0, 50.0]])
    masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
    masks[:, 10:30, 22:28] = 1
    return [{"boxes": boxes, "labels": torch.tensor([1, 2]), "masks": masks} for _ in range(2)]


def _detector(build: Callable[..., nn.Module], **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        model = build(**BARE, num_classes=3, min_size=64, max_size=64, **options)
        return Case(model.train(), (list(images(2, 64)), _targets()), _all)

    return make


def _all(losses: Any) -> torch.Tensor:
    return torch.stack(list(losses.values())).sum()


class _Pyramid(nn.Module):
    """A detector's backbone with its feature pyramid, without the parts whose sizes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = detection.backbone_utils.resnet_fpn_backbone(backbone_name="resnet18", weights=None)
        self.head = detection.retinanet.RetinaNetHead(self.body.out_channels, 3, num_classes=3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(list(self.body(x).values()))


def _vision_transformer(**options: Any) -> nn.Module:
    return models.VisionTransformer(
        image_size=64, patch_size=8, num_layers=3, num_heads=3, hidden_dim=48, mlp_dim=96, dropout=0.1, **options
    )


def _swin(**options: Any) -> nn.Module:
    return models.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], dropout=0.1, **options)


def _swin_v2(**options: Any) -> nn.Module:
    block = models.swin_transformer.SwinTransformerBlockV2
    return models.SwinTransformer(
        [4, 4], 24, [2, 2], [2, 4], [4, 4], block=block, downsample_layer=models.swin_transformer.PatchMergingV2,
        **options,
    )  # fmt: skip


def _convnext(**options: Any) -> nn.Module:
    stages = [models.convnext.CNBlockConfig(a, b, 1) for a, b in ((16, 32), (32, 48), (48, None))]
    return models.ConvNeXt(stages, stochastic_depth_prob=0.1, **options)


def _raft() -> Case:
    model = optical_flow.raft_small(weights=None)
    batch = {"image1": images(1, 128), "image2": images(1, 128).flip(0) * 0.9, "num_flow_updates": 2}
    return Case(model.train(), batch, uneven)


def _pyramid() -> Case:
    return Case(_Pyramid().train(), images(2, 64), uneven)


CASES = {
    "resnet18": _classifier(models.resnet18, size=96),
    "resnet50": _classifier(models.resnet50, width_per_group=8),
    "inception": _classifier(models.inception_v3, size=75, batch=2, aux_logits=False, init_weights=False),
    "mobilenet_v2": _classifier(models.mobilenet_v2, width_mult=0.25),
    "mobilenet_v3_small": _classifier(models.mobilenet_v3_small, reduced_tail=True),
    "efficientnet_v2": _classifier(models.efficientnet_b0, batch=4),
    "shufflenet": _classifier(models.shufflenet_v2_x0_5),
    "squeezenet": _classifier(models.squeezenet1_1, batch=16),
    "densenet": _classifier(models.DenseNet, growth_rate=8, block_config=(2, 2, 2, 2), num_init_features=16,
                            drop_rate=0.1),
    "densenet_checkpointed": _classifier(models.DenseNet, growth_rate=8, block_config=(2, 2), num_init_features=16,
                                         memory_efficient=True),
    "googlenet": _classifier(models.googlenet, size=64, batch=8, init_weights=False, aux_logits=False),
    "mnasnet": _classifier(models.MNASNet, alpha=0.25, dropout=0.2),
    "regnet": _classifier(models.regnet_y_400mf, batch=4),
    "convnext": _classifier(_convnext),
    "vision_transformer": _classifier(_vision_transformer),
    "swin": _classifier(_swin),
    "swin_v2": _classifier(_swin_v2),
    "max_vit": _classifier(models.MaxVit, batch=2, input_size=(64, 64), stem_channels=16, partition_size=2,
                           block_channels=[16, 24], block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.1),
    "fcn": _segmenter(segmentation.fcn_resnet50),
    "lraspp": _segmenter(segmentation.lraspp_mobilenet_v3_large),
    "deeplabv3": _segmenter(segmentation.deeplabv3_mobilenet_v3_large),
    "r3d": _video(video.r3d_18, frames=4, size=32),
    "r2plus1d": _video(video.r2plus1d_18, frames=4, size=32),
    "feature_pyramid": _pyramid,
    "fcos": _detector(detection.fcos_resnet50_fpn),
    "retinanet": _detector(detection.retinanet_resnet50_fpn),
    "ssdlite": lambda: Case(detection.ssdlite320_mobilenet_v3_large(**BARE, num_classes=3).train(),
                            (list(images(2, 64)), _targets()), _all),
    "faster_rcnn": _detector(detection.fasterrcnn_mobilenet_v3_large_fpn),
    "mask_rcnn": _detector(detection.maskrcnn_resnet50_fpn),
    "raft": _raft,
}  # fmt: skip
