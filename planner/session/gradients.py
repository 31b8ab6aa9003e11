"""Gradients of one step beside those of another: how far they are apart, and what rounding errors come to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from planner.core.call import here
from planner.core.host import aside

Gradients = dict[str, torch.Tensor]  # by the names of parameters

NUDGE = 256  # units in the last place of a parameter; kernels that add up in float are as far from eager's as that
NUDGES = 100  # times what such parameters come to is still a rounding error
CANCELLED = 1e-3  # a gradient of less than this share of the largest is compared with that share


def gradients_on_host(model: nn.Module) -> Gradients:
    """Copies of the gradients, dense, beside which the next step has to fit."""
    return {name: aside(_dense(p.grad)) for name, p in model.named_parameters() if p.grad is not None}


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return here(gradient) if gradient.layout is torch.strided else gradient.detach().cpu().to_dense()


def nudge(model: nn.Module) -> None:
    """Put each number of the parameters off by `NUDGE` units in the last place, up or down."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                up = torch.randint(2, p.shape, generator=generator, dtype=torch.int8).to(p)
                p.mul_(1 + NUDGE * torch.finfo(p.dtype).eps * (2 * up - 1))


def shaken(model: nn.Module, step: Callable[[], None], again: Callable[[], None]) -> Gradients:
    """The gradients of a step with parameters that are off in their last places: what rounding errors come to."""
    try:
        nudge(model)
        step()
        return gradients_on_host(model)
    finally:
        again()


def compare(
    ours: Gradients,
    theirs: Gradients,
    computed_in: torch.dtype | None = None,
    nudged: Gradients | None = None,
    nudges: int = NUDGES,
) -> tuple[float, bool]:
    """The largest difference of gradients by name, over the largest of each; and whether they may be called equal.

    A gradient whose terms cancel, as that of a bias of attention's keys, is rounding errors of larger ones: its
    difference is over a share of the largest gradient of all, `CANCELLED`, where that is more.

    Args:
        ours: gradients by the names of parameters.
        theirs: the same, to compare with.
        computed_in: the dtype of which rounding errors are, where it is less precise than the gradients.
        nudged: the same as `theirs` with parameters that differ in their last bits: a difference of `nudges` times what
            that comes to is no error (rounding errors of what cancels before a BatchNorm have no other scale). Where
            it comes to as much as the gradient itself, no digit of that is more than a rounding error, and those of
            another order of summation may be larger: up to the share of the largest gradient, `CANCELLED`.
        nudges: how often.
    """
    worst, agree = 0.0, ours.keys() == theirs.keys()
    least = CANCELLED * max(
        (g.abs().max().item() for g in theirs.values() if g.numel() and g.isfinite().all()), default=0
    )
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        scale = max(b.abs().max().item(), least, torch.finfo(b.dtype).tiny) if b.numel() else 1.0
        error = 0.0 if torch.allclose(a, b, 0, 0, equal_nan=True) else (a - b).abs().max().item() / scale
        worst = max(worst, error)
        # rounding errors add up over a reduction; a wrong mask or a stale buffer is far above this
        eps = max(torch.finfo(dtype).eps for dtype in (b.dtype, computed_in or b.dtype))
        alike = error <= min(1e3 * eps, 0.05)
        if not alike and nudged is not None:
            noise = _most(nudged[name] - b)
            alike = _most(a - b) <= max(nudges * noise, least if 2 * noise >= _most(b) else 0)
        agree &= alike
    return worst, agree


def _most(t: torch.Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0
