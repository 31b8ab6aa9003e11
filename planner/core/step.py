"""A training step as a `Problem`, with a provenance table that says what each op and each value is; and its replays.

Whatever wants to show or weigh a schedule (timelines, decisions, the account at the peak, the fragmentation margin)
reads these records alone. Compiled steps are lowered to them from captured graphs. Eager steps are lowered from traces:
the step without checkpoints is one `Step`, and the step with the chosen modules checkpointed is another, whose re-runs
are ops of their own; `Runs` says of the first what becomes of its ops in the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from planner.core.plan import Phase
from solvers import Op, Problem, Schedule, Timeline, simulate
from solvers.moves import events
from solvers.schedule import waiting_bytes


@dataclass(frozen=True, slots=True)
class OpOrigin:
    """One row of the provenance table: where an op of the problem comes from.

    Attributes:
        kind: the op computes this, as "gelu".
        phase: of the training step in which the op runs first.
        module: path of the module that the op belongs to, as in `named_modules()`.
        source: the user's own line: "file:line: code".
        region: number of the captured region that has the op; None for an op that no region has, as the loss.
        index: number of the op in its region.
        keep_because: why the op must not run twice; empty where it may.
        random: whether the op draws random numbers, so that a second run has to replay the first one's generator state.
        again: whether the op runs again what an earlier op of the problem has run, as in the trace of an eager step.
        target: the op's own name, as "aten.gelu.default"; empty for an op that no region has.
    """

    kind: str
    phase: Phase
    module: str = ""
    source: str = ""
    region: int | None = None
    index: int = 0
    keep_because: str = ""
    random: bool = False
    again: bool = False
    target: str = ""


Row = tuple[Op, OpOrigin]  # an op of a problem, with its row of the provenance table


@dataclass(frozen=True)
class Step:
    """One training step: the problem that solvers see, and the provenance of its ops and values.

    Ops of the phases "forward" and "loss" come first, and `problem.boundary` is at, or just after, the last op of the
    loss: the values held there are saved for the backward pass.

    Attributes:
        problem: ops, values and what is resident.
        account: lines of the budget that are resident: name -> bytes; they add up to `problem.resident`.
        origins: one row per op of the problem.
        names: for each value, its name in the emitted graphs; empty for a value that no decision is about (the state of
            a random generator, a communication buffer, a sum of gradients).
        gradients: values that are gradients of parameters and inputs, whole or in part.
        final: of these, the whole ones.
        gathered: values that are parameters, or buffers of them, which devices share and gather for use.
        optimizer_step: bytes of the temporaries of the optimizer's step; None where no optimizer is counted.
        groups: sets of ops that are kept or recomputed together; none where each op is decided alone.
        holds: reads and writes, as pairs (op, value), that only say from when on, or until when, autograd or a name in
            Python holds the value: the op does not use or make it.
    """

    problem: Problem
    account: Mapping[str, int]
    origins: tuple[OpOrigin, ...]
    names: tuple[str, ...]
    gradients: frozenset[int] = frozenset()
    final: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    optimizer_step: int | None = None
    groups: tuple[frozenset[int], ...] = ()
    holds: frozenset[tuple[int, int]] = frozenset()


Pass = Callable[[Step], Step]


def run_passes(step: Step, passes: Iterable[Pass]) -> Step:
    """The step after every pass, in order."""
    for apply in passes:
        step = apply(step)
    return step


def with_line(step: Step, name: str, nbytes: int) -> Step:
    """The step with one more line of resident bytes."""
    problem = replace(step.problem, resident=step.problem.resident + nbytes)
    return replace(step, problem=problem, account={**step.account, name: nbytes})


@dataclass(frozen=True)
class Replay:
    """A schedule, replayed once.

    Attributes:
        schedule: the ops that run, in order.
        timeline: bytes held, and values freed, at each of its steps.
        others: for each of its steps, bytes of other microbatches that are in flight.
        saved_for_backward: values held when the first backward op starts.
    """

    schedule: Schedule
    timeline: Timeline
    others: tuple[int, ...]
    saved_for_backward: frozenset[int]


def replay(problem: Problem, schedule: Schedule, timeline: Timeline | None = None) -> Replay:
    """Replay a schedule. O(steps + reads).

    Args:
        problem: one training step.
        schedule: the ops that run.
        timeline: that of the schedule, where it is known already.

    Raises:
        solvers.ProblemError: a step reads a value that is not held.
    """
    timeline = timeline or simulate(problem, schedule)
    steps = schedule.steps
    saved: set[int] = set()
    if problem.boundary in steps:
        saved = live_before(problem, schedule, timeline, steps.index(problem.boundary))
    return Replay(schedule, timeline, tuple(waiting_bytes(problem, steps)), frozenset(saved))


@dataclass(frozen=True)
class Runs:
    """What a plan makes of the ops of a step.

    Attributes:
        times: how often each op runs.
        saved_for_backward: values that are held from the forward pass on, when the first backward op starts.
        copied: of these, values of which a re-run makes copies for itself, while the others read the first one.
        away: for each value that leaves the device, the steps before which it first goes, and is last on its way back.
    """

    times: Mapping[int, int]
    saved_for_backward: frozenset[int]
    copied: frozenset[int] = frozenset()
    away: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def runs_of(planned: Replay) -> Runs:
    """What a schedule makes of the ops. O(steps)."""
    gone: dict[int, int] = {}
    back: dict[int, int] = {}
    for move in planned.schedule.moves:
        if move.kind == "free":
            gone.setdefault(move.value, move.at)
        elif move.kind == "fetch":
            back[move.value] = move.at
    away = {v: (at, back.get(v, at)) for v, at in gone.items()}
    return Runs(Counter(planned.schedule.steps), planned.saved_for_backward, away=away)


def needed_in_backward(step: Step, value: int) -> bool:
    """Whether an op of the backward pass reads a value."""
    return any(step.origins[i].phase == "backward" for i in step.problem.readers[value])


def live_before(problem: Problem, schedule: Schedule, timeline: Timeline, at: int) -> set[int]:
    """The values held when step `at` of a schedule starts, and the moves before it are done. O(at)."""
    live: set[int] = set()
    for step, move in events(schedule.steps, schedule.moves):
        if move is not None and move.kind == "free":
            live.discard(move.value)
        elif move is not None:
            live.add(move.value)
        elif step == at:
            break
        else:
            live.update(problem.ops[schedule.steps[step]].writes)
            live.difference_update(timeline.frees[step])
    return live
