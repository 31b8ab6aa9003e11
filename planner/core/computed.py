"""Arguments of a model that the loop has computed: they get a gradient and are no leaves of autograd's graph."""

from __future__ import annotations

from typing import Any

import torch


class _Computed(torch.autograd.Function):
    """What made an argument of the model: its gradient goes there, and no further."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return t.data  # no view of `t`: the model may write into it

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None


def as_computed(t: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that was computed from something that gets a gradient; what made it is let go of."""
    made: torch.Tensor = _Computed.apply(torch.empty(0, requires_grad=True, device="cpu"), t.detach())  # type: ignore[no-untyped-call]
    return made
