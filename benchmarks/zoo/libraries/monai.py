"""Models of `monai` for volumes: segmentation, registration, generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from monai.networks import nets
from torch import nn

from ..case import Case, images, noise, uneven

VOLUME = (16, 16, 16)
LARGER = (32, 32, 32)
IN_OUT = {"in_channels": 1, "out_channels": 2}


def _volume(model: Callable[..., nn.Module], size: tuple[int, ...] = LARGER, **options: Any) -> Callable[[], Case]:
    return lambda: Case(model(**options).train(), noise(1, options.get("in_channels", 1), *size), uneven)


def _regions() -> Case:
    net = nets.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 12, 16], deep_supervision=True,
                       deep_supr_num=1, dropout=0.1)  # fmt: skip
    return Case(net.train(), noise(1, 1, *LARGER), uneven)


def _diffusion() -> Case:
    model = nets.DiffusionModelUNet(
        3, 1, 1, num_res_blocks=1, channels=(8, 16), attention_levels=(False, True), norm_num_groups=4,
        num_head_channels=8,
    )  # fmt: skip
    return Case(model.train(), {"x": noise(1, 1, *VOLUME), "timesteps": torch.tensor([3])}, uneven)


def _morph() -> Case:
    return Case(nets.VoxelMorph(half_res=True, integration_steps=3).train(), (noise(1, 1, *LARGER),) * 2, uneven)


CASES = {
    "unet": _volume(nets.UNet, spatial_dims=3, **IN_OUT, channels=(8, 12, 16), strides=(2, 2), num_res_units=1,
                    dropout=0.1),
    "dyn_unet": _regions,
    "basic_unet": _volume(nets.BasicUNet, **IN_OUT, features=(8, 8, 12, 16, 16, 8), dropout=0.1),
    "basic_unet_plus_plus": _volume(nets.BasicUNetPlusPlus, **IN_OUT, features=(8, 8, 12, 16, 16, 8)),
    "attention_unet": _volume(nets.AttentionUnet, spatial_dims=3, **IN_OUT, channels=(8, 12, 16), strides=(2, 2)),
    "seg_res_net": _volume(nets.SegResNet, **IN_OUT, blocks_down=(1, 1), blocks_up=(1,), dropout_prob=0.1),
    "seg_res_net_vae": _volume(nets.SegResNetVAE, input_image_size=LARGER, **IN_OUT, blocks_down=(1, 1),
                               blocks_up=(1,), vae_nz=16),
    "unetr": _volume(nets.UNETR, **IN_OUT, img_size=LARGER, feature_size=8, hidden_size=48, mlp_dim=96, num_heads=3,
                     dropout_rate=0.1),
    "swin_unetr": _volume(nets.SwinUNETR, (64, 64, 32), **IN_OUT, feature_size=12, depths=(1, 1, 1, 1),
                          num_heads=(1, 1, 2, 2), window_size=2),
    "med_ne_xt": _volume(nets.MedNeXt, init_filters=8, **IN_OUT, kernel_size=3, blocks_down=(1, 1, 1, 1),
                         blocks_bottleneck=1, blocks_up=(1, 1, 1, 1)),
    "high_res_net": _volume(nets.HighResNet, VOLUME, **IN_OUT),
    "vit_autoencoder": _volume(nets.ViTAutoEnc, in_channels=1, img_size=LARGER, patch_size=(4, 4, 4), hidden_size=48,
                               mlp_dim=96, num_layers=3, num_heads=3),
    "resnet": _volume(nets.ResNet, block="basic", layers=[1, 1, 1, 1], block_inplanes=[8, 16, 24, 32],
                      n_input_channels=1, num_classes=3),
    "densenet": _volume(nets.DenseNet, spatial_dims=3, **IN_OUT, init_features=8, growth_rate=8,
                        block_config=(2, 2, 2), dropout_prob=0.1),
    "flexible_unet": lambda: Case(
        nets.FlexibleUNet(3, 2, "efficientnet-b0", decoder_channels=(32, 24, 16, 12, 8)).train(), images(2), uneven),
    "autoencoder_kl": _volume(nets.AutoencoderKL, VOLUME, spatial_dims=3, num_res_blocks=1, channels=(8, 16),
                              attention_levels=(False, True), norm_num_groups=4),
    "vq_vae": _volume(nets.VQVAE, spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 16), num_res_layers=1,
                      num_res_channels=(8, 16), downsample_parameters=((2, 4, 1, 1),) * 2,
                      upsample_parameters=((2, 4, 1, 1, 0),) * 2, embedding_dim=8),
    "diffusion_unet": _diffusion,
    "voxel_morph": _morph,
}  # fmt: skip
