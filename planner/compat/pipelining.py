"""Schedules of `torch.distributed.pipelining`, by the names of their private parts. Torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stages_of(schedule: Any) -> list[Any]:
    """The stages of a schedule that this rank runs: `_stages` of a multi-stage one, else `_stage` (2.11 to 2.15)."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def buffers_stay(stage: Any) -> bool:
    """Whether a stage has buffers for what every microbatch receives, from step to step (2.11 to 2.14).

    In 2.15, it has each from its receipt to the end of its microbatch's backward pass, and lets go of outputs that were
    sent (`release_fwd_send_outputs`).
    """
    return not hasattr(stage, "release_fwd_send_outputs")


def loss_of(schedule: Any) -> Any:
    """A schedule's loss function, or None (`_loss_fn`, 2.11 to 2.15)."""
    return schedule._loss_fn


def microbatches_of(schedule: Any) -> int:
    """How many microbatches a step of a schedule has (`_n_microbatches`, 2.11 to 2.15)."""
    return int(schedule._n_microbatches)


def runs_backward(schedule: Any) -> bool:
    """Whether a schedule's steps run a backward pass now: not in `schedule.eval()` (`_has_backward`, 2.11 to 2.15)."""
    return bool(schedule._has_backward)


def step_of(schedule: Any) -> Callable[..., Any]:
    """The method that runs all microbatches of a step (`_step_microbatches`, 2.11 to 2.15)."""
    step: Callable[..., Any] = schedule._step_microbatches
    return step


def replace_step(schedule: Any, step: Callable[..., Any]) -> None:
    """Have a schedule run its steps by another function (`_step_microbatches`, 2.11 to 2.15)."""
    schedule._step_microbatches = step
