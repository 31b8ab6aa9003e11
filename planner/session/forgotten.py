"""Frees planned models that nobody has any more."""

from __future__ import annotations

import gc
import weakref

from torch import nn

_MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # with plans


def free_others(model: nn.Module) -> None:
    """Free planned models that nobody has any more, such as an earlier copy: a model and what was compiled for it form
    reference cycles, and would hold its parameters until Python looks for these.
    """
    if any(other is not model for other in _MODELS):
        gc.collect()
    _MODELS.add(model)
