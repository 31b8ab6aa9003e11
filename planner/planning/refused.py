"""Whatever a model's own code raises while a step of it is captured, in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from planner.errors import CaptureError, PlannerError


@contextmanager
def refused_in_words(model: nn.Module, what: str, advice: str) -> Iterator[None]:
    """CaptureError, with what cannot be done with the model and what to do, in the place of errors that say neither."""
    try:
        yield
    except (PlannerError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        raise CaptureError(f"{type(model).__name__} cannot be {what}: {type(e).__name__}: {e}. {advice}") from e
