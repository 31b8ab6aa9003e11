"""Networks of `kornia`: descriptors, matching, edges, differentiable image processing."""

from __future__ import annotations

import kornia
import torch
from kornia import feature
from torch import nn

from ..case import Case, images, noise, uneven


class _Processing(nn.Module):
    """Blurs, gradients and colours between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = kornia.filters.gaussian_blur2d(self.first(x).relu(), (5, 5), (1.5, 1.5))
        x = kornia.filters.sobel(x) + kornia.filters.laplacian(x, 3)
        return kornia.color.rgb_to_ycbcr(self.last(x).sigmoid())


def _warp() -> Case:
    class Warp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.head = nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            matrix = self.head(self.body(x)).view(-1, 2, 3) + torch.eye(2, 3)
            return kornia.geometry.transform.warp_affine(x, matrix, (48, 48))

    return Case(Warp().train(), images(4, 64), uneven)


def _ssim() -> Case:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))
    target = images(4, 64).sigmoid()
    return Case(model.train(), images(4, 64), lambda y: kornia.losses.ssim_loss(y.sigmoid(), target, 5))


CASES = {
    "hard_net": lambda: Case(feature.HardNet(pretrained=False).train(), noise(32, 1, 32, 32), uneven),
    "hy_net": lambda: Case(feature.HyNet(pretrained=False).train(), noise(32, 1, 32, 32), uneven),
    "sos_net": lambda: Case(feature.SOSNet(pretrained=False).train(), noise(32, 1, 32, 32), uneven),
    "t_feat": lambda: Case(feature.TFeat(pretrained=False).train(), noise(32, 1, 32, 32), uneven),
    "de_fmo": lambda: Case(feature.DeFMO(pretrained=False).train(), noise(1, 6, 32, 32), uneven),
    "x_feat": lambda: Case(feature.XFeatModel().train(), images(2, 64), uneven),
    "rrdb_net": lambda: Case(kornia.models.RRDBNet(3, 3, scale=2, num_feat=8, num_block=2, num_grow_ch=4).train(),
                             images(2, 32), uneven),
    "tiny_vit": lambda: Case(kornia.contrib.TinyViT(64, embed_dims=(16, 24, 32, 48), num_heads=(1, 2, 2, 3),
                                                    depths=(1, 1, 1, 1), window_sizes=(4, 4, 4, 2)).train(),
                             images(4, 64), uneven),
    "processing": lambda: Case(_Processing().train(), images(4, 64).sigmoid(), uneven),
    "warp": _warp,
    "ssim_loss": _ssim,
}  # fmt: skip
