"""Plans for stages of `torch.distributed.pipelining`: `plan_schedule(ScheduleGPipe(stage, 8, loss_fn), budget_gb=12)`.

What a stage holds beside its plan is read off torch/distributed/pipelining/stage.py and schedules.py (2.13 and 2.15):
receive buffers, up to 2.14 for every microbatch from step to step; what is on its way, which the handles of the sends
keep; outputs of the last stage, until they are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from planner.api.front import plan
from planner.api.plan import Plan
from planner.capture.trace.loss_trace import gradients_received
from planner.compat.pipelining import (
    buffers_stay,
    loss_of,
    microbatches_of,
    replace_step,
    runs_backward,
    stages_of,
    step_of,
)
from planner.core.occupancy import Occupancy
from planner.core.options import GB, OLD_MODES
from planner.costs.static_memory import storage_bytes
from planner.errors import BudgetError, OptionError, gb
from planner.requests.batch import LATER
from planner.requests.planned import Pending
from planner.runtime.aside import taken_off
from planner.runtime.interception import attached

FORWARD, BACKWARD = "F", "B"  # kinds of actions that compute, as schedules name them
SPLIT = ("I", "W")  # a backward pass in two parts: for inputs, for weights
COMPUTE = (FORWARD, BACKWARD, *SPLIT)
STEP = 2  # microbatches as which a stage's own step counts where stages share a budget


def plan_schedule(schedule: Any, *, budget_gb: float | str | None = None, **options: Any) -> tuple[Plan, ...]:
    """Have the stages that this rank runs train by plans that count the microbatches in flight.

    How many of them wait is read off the schedule's own order of actions, what the stage holds for each off its source.
    The plans are made in the first `schedule.step()`, each rank for itself.

    Args:
        schedule: ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS, or another one that runs
            whole backward passes, with a `loss_fn`.
        budget_gb: as in `plan()`, for all that this rank holds: several stages share what their parameters and
            gradients leave of it, in proportion to their microbatches in flight.
        options: as in `plan()`; `accumulate` says that gradients are there when a step of the schedule begins.

    Returns:
        A plan for each stage of this rank, in their order; they are applied, and made in the first step.

    Raises:
        OptionError: it is no schedule, one without a loss, or one that splits backward passes.
        BudgetError: the stages' parameters and gradients alone take more.
        PlannerError: of `plan()`, for other arguments; and in the first step, where no plan fits.
    """
    name = type(schedule).__name__
    stages, order = _stages(schedule, name)
    _check(schedule, name, stages, order, options)
    loss = _Loss(schedule, stages)
    flights = [_flight(schedule, stage, _actions(order, name), stages) for stage in stages]
    most = [1 + max(others for others, _ in flight.backward) for flight in flights]
    shares = _shares(stages, most, budget_gb, options)
    made = []
    for stage, flight, number, share in zip(stages, flights, most, shares, strict=True):
        accumulate = _added(flight) or bool(options.get("accumulate"))
        asked = {**options, "accumulate": accumulate, "in_flight": number}
        own = loss if stage.is_last else gradients_received
        pending = plan(stage.submod, LATER, budget_gb=share, loss_fn=own, **asked).source
        assert isinstance(pending, Pending)
        made.append(Plan(replace(pending, request=replace(pending.request, occupancy=flight))))
    for at, each in enumerate(made):
        try:
            each.apply()
        except BaseException:  # an interruption, too
            for before in made[:at]:
                before.remove()
            raise
    replace_step(schedule, loss.watched)
    return tuple(made)


def _stages(schedule: Any, name: str) -> tuple[list[Any], Any]:
    """The stages of this rank, and its actions in order; OptionError where it is no schedule."""
    # torch.distributed.pipelining takes a second to import
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    if isinstance(schedule, PipelineScheduleSingle):
        stages = stages_of(schedule)
        return stages, (getattr(schedule, "pipeline_order", None) or {}).get(stages[0].stage_index)
    if isinstance(schedule, PipelineScheduleMulti):
        return stages_of(schedule), schedule.pipeline_order.get(schedule.rank)
    raise OptionError(f"plan_schedule() needs a schedule of torch.distributed.pipelining; it was given a {name}")


def _check(schedule: Any, name: str, stages: list[Any], order: Any, options: Mapping[str, Any]) -> None:
    """Raise OptionError where a schedule runs no whole backward passes, or an option is the schedule's own."""
    if loss_of(schedule) is None:
        raise OptionError(f"{name} has no loss_fn, so that it runs no backward pass: there is nothing to plan")
    if not order:
        raise OptionError(f"{name} does not say in which order it runs its microbatches; plan its stages with plan()")
    for given in ("loss_fn", "in_flight"):
        if given in options:
            raise OptionError(f"{given} is the schedule's own; leave it out")
    if options.get("mode") not in (None, "aten", *OLD_MODES):
        raise OptionError(f"mode={options['mode']!r} does not count microbatches in flight; leave it out")
    for stage in stages:
        if stage.dw_builder is not None:
            raise OptionError(
                f"stage {stage.stage_index} has a dw_builder, which splits its backward pass; leave it out"
            )


def _actions(order: Iterable[Any], name: str) -> list[tuple[int, str]]:
    """(stage, kind) of the actions that compute, in order; raises OptionError where a backward pass is split."""
    found: list[tuple[int, str]] = []
    for action in order:
        if action is None:
            continue
        parts = _actions(action.sub_actions, name) if action.sub_actions else []
        kind = action.computation_type.value
        found += parts or ([(action.stage_index, kind)] if kind in COMPUTE else [])
    if any(kind in SPLIT for _, kind in found):
        raise OptionError(
            f"{name} runs the backward pass of a stage in two parts, for inputs and for weights, and a plan runs it as "
            "one; take Schedule1F1B or ScheduleInterleaved1F1B, or train without a plan"
        )
    return found


def _flight(schedule: Any, stage: Any, actions: Iterable[tuple[int, str]], stages: Iterable[Any]) -> Occupancy:
    """What is in flight at a stage, and what it holds beside its plan."""
    from torch.distributed.pipelining.schedules import Schedule1F1B

    waiting = done = 0
    pairs: dict[str, set[tuple[int, int]]] = {FORWARD: set(), BACKWARD: set()}
    for index, kind in actions:
        if index != stage.stage_index:
            continue
        if kind == FORWARD:
            pairs[FORWARD].add((waiting, done))
            waiting += 1
        else:
            waiting, done = waiting - 1, done + 1
            pairs[BACKWARD].add((waiting, done - 1))
    count = microbatches_of(schedule)
    here = {other.stage_index for other in stages}
    # the handles of sends are kept to the end of the step, by Schedule1F1B until the next one
    on_way = 1 if isinstance(schedule, Schedule1F1B) else count
    sends_gradients = not stage.is_first and stage.stage_index - 1 not in here
    sends_outputs = not stage.is_last and stage.stage_index + 1 not in here
    stays = buffers_stay(stage)
    most = max(others for others, _ in (*pairs[FORWARD], *pairs[BACKWARD]))
    inputs, received = (count, count) if stays else _received(schedule, stage, most + 1, count)
    if stage.is_last:  # the losses, which the schedule keeps, hold their graphs' leaves
        inputs = count
    return Occupancy(
        forward=tuple(sorted(pairs[FORWARD])),
        backward=tuple(sorted(pairs[BACKWARD])),
        inputs=0 if stage.is_first else inputs - 1,
        received=0 if stage.is_last else received,
        leaves_inputs=on_way if sends_gradients else 0,
        leaves_outputs=count if stage.is_last else on_way if sends_outputs and stays else 0,
        merged=count if stage.is_last else 0,
        sent=on_way if sends_outputs and not stays and len(here) == 1 else 0,  # several stages wait for sends later
    )


def _received(schedule: Any, stage: Any, most: int, count: int) -> tuple[int, int]:
    """For how many microbatches a stage has inputs, and gradients of outputs, at once, where no buffers stay.

    Args:
        schedule: that the stage is of.
        stage: that receives.
        most: how many microbatches are in flight at once.
        count: how many there are.
    """
    if not hasattr(schedule, "pipeline_order_with_comms"):  # of one stage, which receives right before it computes
        return most, 1
    alive = {"RECV_F": 0, "RECV_B": 0}
    highest = dict(alive)
    for action in schedule.pipeline_order_with_comms[schedule.rank]:
        kind = action.computation_type.value
        if action.stage_index == stage.stage_index and kind in alive:
            alive[kind] += 1
            highest[kind] = max(highest[kind], alive[kind])
        elif action.stage_index == stage.stage_index and kind == BACKWARD:
            alive = {name: number - 1 for name, number in alive.items()}
    # what comes from a stage of the same rank is not received
    return highest["RECV_F"] or count, highest["RECV_B"] or count


def _added(flight: Occupancy) -> bool:
    """Whether gradients of earlier microbatches are there whenever as much waits as ever does."""
    return all(
        done or any(more >= others and later for more, later in pairs)
        for pairs in (flight.forward, flight.backward)
        for others, done in pairs
    )


def _shares(
    stages: list[Any], most: list[int], budget_gb: float | str | None, options: dict[str, Any]
) -> list[float | str | None]:
    """Each stage's part of the budget, where so many microbatches are in flight at each at most."""
    budget = plan(stages[0].submod, LATER, budget_gb=budget_gb, **options).budget_bytes  # refuses arguments now
    if len(stages) == 1:
        return [budget_gb]
    fixed = [2 * storage_bytes(stage.submod.parameters()) for stage in stages]
    if (left := budget - sum(fixed)) <= 0:
        raise BudgetError(f"the stages of this rank have {gb(sum(fixed))} of parameters and gradients, of {gb(budget)}")
    # what a stage's step takes beside what it keeps is there once, whatever waits
    parts = [number + STEP for number in most]
    return [(own + left * part / sum(parts)) / GB for own, part in zip(fixed, parts, strict=True)]


class _Loss:
    """The loss of the last stage, from its output: the schedule's own, for the targets of the step that runs."""

    def __init__(self, schedule: Any, stages: list[Any]) -> None:
        self.schedule = schedule
        self.stages = stages
        self.targets: Any = None
        self.more: dict[str, Any] = {}
        self.run = step_of(schedule)

    def watched(
        self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """One step of the schedule; in `schedule.eval()`, without plans: nothing waits for a backward pass."""
        self.targets, self.more = target_mbs, kwargs.get("loss_kwargs") or {}
        with ExitStack() as off:
            for stage in self.stages:
                if not runs_backward(self.schedule) and attached(stage.submod) is not None:
                    off.enter_context(taken_off(stage.submod))
            return self.run(arg_mbs, kwarg_mbs, target_mbs, *args, **kwargs)

    def __call__(self, output: Any) -> torch.Tensor:
        loss: torch.Tensor = loss_of(self.schedule)(output, self.targets[0], **self.more)
        return loss

    @property
    def held(self) -> list[Any]:
        """What is held all the time for it."""
        return list(self.targets or ())
