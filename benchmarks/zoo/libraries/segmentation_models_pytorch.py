"""Segmentation of `segmentation_models_pytorch`: one decoder after the other, on small encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import segmentation_models_pytorch as smp
import torch

from ..case import Case, images, integers, uneven


def _model(build: Any, encoder: str = "mobilenet_v2", size: int = 64, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        model = build(encoder, encoder_weights=None, classes=3, **options)
        return Case(model.train(), images(2, size), uneven)

    return make


def _dice() -> Case:
    def loss(output: torch.Tensor) -> torch.Tensor:
        return smp.losses.DiceLoss("multiclass")(output, target) + smp.losses.FocalLoss("multiclass")(output, target)

    target = integers(3, 2, 64, 64)
    return Case(smp.Unet("mobilenet_v2", encoder_weights=None, classes=3).train(), images(2, 64), loss)


CASES = {
    "unet": _model(smp.Unet, decoder_channels=(64, 48, 32, 24, 16), decoder_attention_type="scse"),
    "unet_dice_and_focal": _dice,
    "unet_plus_plus": _model(smp.UnetPlusPlus, decoder_channels=(48, 32, 24, 16, 12)),
    "linknet": _model(smp.Linknet),
    "fpn": _model(smp.FPN),
    "pspnet": _model(smp.PSPNet),
    "pan": _model(smp.PAN, size=128),
    "deeplabv3": _model(smp.DeepLabV3, decoder_channels=32),
    "deeplabv3_plus": _model(smp.DeepLabV3Plus),
    "manet": _model(smp.MAnet, encoder_depth=4, decoder_channels=(64, 48, 32, 24), decoder_pab_channels=16),
    "upernet": _model(smp.UPerNet, decoder_channels=48),
    "segformer": _model(smp.Segformer, encoder="mit_b0"),
}  # fmt: skip
