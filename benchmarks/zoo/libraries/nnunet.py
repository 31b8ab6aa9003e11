"""The architectures of nnU-Net, of `dynamic_network_architectures`, on volumes."""

from __future__ import annotations

from typing import Any

from dynamic_network_architectures.architectures import primus, resnet, unet
from torch import nn

from ..case import Case, noise, uneven

STAGES: dict[str, Any] = {
    "input_channels": 1, "n_stages": 3, "features_per_stage": (8, 12, 16), "conv_op": nn.Conv3d, "kernel_sizes": 3,
    "strides": (1, 2, 2), "num_classes": 3, "n_conv_per_stage_decoder": 1, "conv_bias": True,
    "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"affine": True}, "nonlin": nn.LeakyReLU,
    "nonlin_kwargs": {"inplace": True}, "deep_supervision": True,
}  # fmt: skip


def _volume(model: nn.Module, sides: int = 3) -> Case:
    return Case(model.train(), noise(2, 1, *[32] * sides), uneven)


CASES = {
    "plain_unet": lambda: _volume(unet.PlainConvUNet(**STAGES, n_conv_per_stage=2)),
    "plain_unet_dropout": lambda: _volume(
        unet.PlainConvUNet(**STAGES, n_conv_per_stage=1, dropout_op=nn.Dropout3d, dropout_op_kwargs={"p": 0.1})),
    "residual_encoder_unet": lambda: _volume(unet.ResidualEncoderUNet(**STAGES, n_blocks_per_stage=(1, 2, 2))),
    "residual_unet": lambda: _volume(unet.ResidualUNet(**STAGES, n_blocks_per_stage=(1, 1, 1))),
    "resnet_cifar": lambda: _volume(resnet.ResNet18_CIFAR(3, 1, input_dimension=2, stochastic_depth_p=0.1), 2),
    "primus": lambda: _volume(primus.Primus(1, 48, (8, 8, 8), 3, eva_depth=2, eva_numheads=4, input_shape=(32,) * 3)),
}  # fmt: skip
