"""What a plan for a GPU cannot promise, or what runs slower under it there: warned of before it is made."""

from __future__ import annotations

import torch
from torch import nn

from planner.core.options import Options
from planner.errors import warn

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def warn_on_gpu(model: nn.Module, where: torch.device, options: Options) -> None:
    """Warn of what a model and torch's settings mean for a plan that runs on a CUDA device; nothing elsewhere."""
    if where.type != "cuda":
        return
    if options.mode != "eager" and any(isinstance(m, nn.RNNBase) for m in model.modules()):
        warn(
            f"{type(model).__name__} has recurrent layers: torch.compile takes them apart into steps of plain ops, "
            "many times slower than cuDNN's kernels on a GPU. mode='eager' plans with cuDNN's; or plan the parts of "
            "the model around them"
        )
    if torch.backends.cudnn.benchmark and any(isinstance(m, _CONVOLUTIONS) for m in model.modules()):
        warn(
            "torch.backends.cudnn.benchmark is on: in its first steps, cuDNN tries convolutions with workspaces as "
            "large as what is free, which no budget holds. Set it to False, or cap the process with "
            "torch.cuda.set_per_process_memory_fraction()"
        )
