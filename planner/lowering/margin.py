"""How many bytes the GPU's caching allocator needs beside those that are asked of it, as a line of the account."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from planner.compat.cuda import allocator_settings
from planner.core.call import storages
from planner.core.step import Step, with_line
from planner.devices.caching_allocator import Event, events_of, smallest_limit
from planner.requests.request import Request
from solvers import Schedule, Timeline, every_op_once, simulate

CONTEXT, MARGIN = "CUDA context", "fragmentation margin"  # lines of the account
EXPANDABLE = 0.03  # of the bytes that are asked for, where segments can grow
STEPS = 4  # that are simulated: held to a limit, blocks lie otherwise in the third step than in the second


def add_margin(step: Step, request: Request, schedule: Schedule | None = None, growth: float = 0.0) -> Step:
    """Leave room for the fragmentation that a schedule causes, as `devices.caching_allocator` simulates it.

    Args:
        step: without a margin.
        request: what is planned.
        schedule: of the step; None for every op once.
        growth: share of the margin to add.
    """
    if not fragments(request, step.account):
        return step
    # the margin of one microbatch: others are counted as if nothing lay between their tensors
    problem, own = step.problem, replace(step.problem, waiting=None)
    schedule = schedule or every_op_once(problem)
    if expandable():
        peak = simulate(problem, schedule).peak
        most = peak if problem.budget is None else problem.budget / (1 + EXPANDABLE)
        margin = EXPANDABLE * min(peak, most)
    else:
        timeline = simulate(own, schedule)
        need = smallest_limit(allocator_events(step, request, schedule, timeline)) + step.account[CONTEXT]
        margin = (1 + growth) * max(0, need - timeline.peak)
    return with_line(step, MARGIN, round(margin))


def fragments(request: Request, lines: Mapping[str, int]) -> bool:
    """Whether there is a caching allocator, and no margin for it yet."""
    return request.device.caches and MARGIN not in lines


def expandable() -> bool:
    """Whether PyTorch's allocator is told to let segments grow, by the environment or in code."""
    environment = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    given = [text.replace(" ", "").lower() for text in (*environment, allocator_settings())]
    return any("expandable_segments:true" in text for text in given)


def resident_tensors(
    request: Request, lines: Mapping[str, int]
) -> tuple[list[int], list[int], Callable[[int], list[int]]]:
    """Bytes of each tensor that is there before the first step, and of each that the optimizer makes in it.

    Also a function that splits what the optimizer's step takes into tensors.
    """
    tensors = [-(-n // request.options.shard) for n in storages(list(request.model.parameters())).values()]

    def split(nbytes: int) -> list[int]:
        """One tensor or more for each parameter, as optimizers have them."""
        copies = max(1, round(nbytes / sum(tensors)))
        return [-(-n * nbytes // (copies * sum(tensors))) for n in tensors] * copies if nbytes else []

    apart = ("parameters", "optimizer state", CONTEXT)
    other = [n for name, n in lines.items() if name not in apart]
    state = split(lines["optimizer state"])
    stepped = isinstance(request.optimizer, torch.optim.Optimizer) and bool(request.optimizer.state)
    return [*tensors, *other, *(state if stepped else ())], [] if stepped else state, split


def allocator_events(step: Step, request: Request, schedule: Schedule, timeline: Timeline | None = None) -> list[Event]:
    """The allocations and frees of `STEPS` training steps in a row by a schedule, with this `timeline` if known."""
    before, state, split = resident_tensors(request, step.account)
    problem = step.problem
    pieces = {i: split(problem.ops[i].workspace) for i, o in enumerate(step.origins) if o.phase == "optimizer"}
    return events_of(problem, schedule, before, state=state, workspaces=pieces, steps=STEPS, timeline=timeline)
