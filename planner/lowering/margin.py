"""How much the GPU's caching allocator needs beside what is asked of it, and plans that leave it that much."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil

import torch

from planner.core.call import storages
from planner.core.options import GB
from planner.devices.caching_allocator import Event, events_of, reserved, smallest_limit
from planner.errors import InfeasibleBudgetError, PlanWarning, gb
from planner.lowering.build import OPTIMIZER, Lowered
from planner.requests.request import Request
from solvers import Schedule, Solution, every_op_once, simulate
from solvers.schedule import waiting_bytes

CONTEXT, MARGIN = "CUDA context", "fragmentation margin"  # lines of the account
ROUNDS, GROWTH = 3, 0.15  # solves, and what each adds to the margin that its predecessor's schedule would need
EXPANDABLE = 0.03  # of what is asked for, where segments can grow

Lines = dict[str, int]
Solve = Callable[[Request, Lowered, Lines], Solution]


def add_margin(
    request: Request, lowered: Lowered, lines: Lines, schedule: Schedule | None = None, growth: float = 0.0
) -> tuple[Lowered, Lines]:
    """The problem with room left for the fragmentation that a schedule causes, as `estimate.caching` simulates it.

    Args:
        request: what is planned.
        lowered: its problem, without a margin.
        lines: the account, without a margin.
        schedule: what runs; None for every op once.
        growth: share of the margin to add.
    """
    if not fragments(request, lines):
        return lowered, lines
    # that of one microbatch: what others hold is counted as if nothing lay between it
    problem, own = lowered.problem, replace(lowered.problem, waiting=None)
    schedule = schedule or every_op_once(problem)
    peak = simulate(problem, schedule).peak
    if expandable():
        margin = EXPANDABLE * min(peak, request.budget_bytes / (1 + EXPANDABLE))
    else:
        need = smallest_limit(_events(request, lowered, lines, schedule)) + lines[CONTEXT]
        margin = (1 + growth) * max(0, need - simulate(own, schedule).peak)
    lines = {**lines, MARGIN: round(margin)}
    return replace(lowered, problem=replace(problem, resident=problem.resident + lines[MARGIN])), lines


def solve_with_margin(
    request: Request, lowered: Lowered, lines: Lines, solve: Solve
) -> tuple[Lowered, Solution, Lines]:
    """Solve, and solve again with a larger margin where the simulated allocator runs out of memory.

    The first margin is that of keeping everything, whatever the budget is, so that a budget that was named as feasible
    is. Where no margin that fits is enough, the note of the solution says so.
    """
    if not fragments(request, lines):
        return lowered, solve(request, lowered, lines), lines
    schedule: Schedule | None = None
    best: tuple[Lowered, Solution, Lines] | None = None
    limit = request.budget_bytes - lines[CONTEXT]
    for n in range(ROUNDS):
        roomy, account = add_margin(request, lowered, lines, schedule, GROWTH * n)
        try:
            solution = solve(request, roomy, account)
        except InfeasibleBudgetError as e:
            if best is None and expandable():  # a larger budget needs a larger margin
                asked = round(e.minimum_gb * GB) - account[MARGIN]
                least = ceil(asked * (1 + EXPANDABLE)) + 1
                raise InfeasibleBudgetError(e.budget_gb, least, {**e.takes, MARGIN: least - asked}) from None
            if best is None:
                raise
            break
        best = roomy, solution, account
        schedule = solution.schedule
        others = max(waiting_bytes(lowered.problem, schedule.steps), default=0)
        if expandable() or not reserved(_events(request, lowered, lines, schedule), limit - others).out_of_memory:
            return best
    assert best is not None
    roomy, solution, account = best
    missing = smallest_limit(_events(request, lowered, lines, solution.schedule)) + others - limit
    note = (
        f"The caching allocator may need {gb(missing)} more than the budget, by simulation, for what lies between its "
        "blocks: train with PYTORCH_ALLOC_CONF=expandable_segments:True, which avoids most of that, or give more."
    )
    warnings.warn(note, PlanWarning, stacklevel=5)
    return roomy, replace(solution, note=f"{solution.note} {note}".strip()), account


def fragments(request: Request, lines: Mapping[str, int]) -> bool:
    """Whether there is a caching allocator, and no margin for it yet."""
    return request.device.type == "cuda" and MARGIN not in lines


def expandable() -> bool:
    """Whether PyTorch's allocator is told to let segments grow."""
    settings = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower() for name in settings)


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


def _events(request: Request, lowered: Lowered, lines: Mapping[str, int], schedule: Schedule) -> list[Event]:
    before, state, split = resident_tensors(request, lines)
    steps = {
        i: split(lowered.problem.ops[i].workspace)
        for i, origin in enumerate(lowered.origin)
        if origin.region == OPTIMIZER
    }
    return events_of(lowered.problem, schedule, before, state=state, workspaces=steps)
