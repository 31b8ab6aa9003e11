"""A choice of checkpointed modules, told of the step without checkpoints: what runs again, what is kept, and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from planner.capture.trace.data_dependent import counted_as_here, told
from planner.core.plan import PlanRecord
from planner.core.recipe import Choice
from planner.core.step import Runs, Step, needed_in_backward
from solvers.groups.grouped import State
from solvers.groups.memory_model import MemoryModel


def with_candidates(step: Step, model: MemoryModel, state: State, refused: Mapping[str, str]) -> Step:
    """The step without checkpoints, its candidates as groups, with the reasons for which a choice keeps values.

    Args:
        step: without checkpoints.
        model: of the same step.
        state: the modules that are checkpointed.
        refused: path of each module that cannot be checkpointed -> why.
    """
    forced = {i for path in state for i in model.groups[path].forced}
    reasons = (
        origin.keep_because if i in forced else refused.get(origin.module, "") for i, origin in enumerate(step.origins)
    )
    return replace(
        step,
        origins=tuple(replace(o, keep_because=why) for o, why in zip(step.origins, reasons, strict=True)),
        groups=tuple(frozenset(range(group.begin, group.stop)) for group in model.groups.values()),
    )


def runs_under(step: Step, model: MemoryModel, state: State) -> Runs:
    """What becomes of the ops of the step without checkpoints, by the memory model; arguments as `with_candidates`."""
    made = step.problem.producer
    again, dropped = model.runs_again(state), model.timeline(state)[1]
    starts = {v: model.groups[path].starts for path in state for v in model.groups[path].saved}
    saved = {v for v, name in enumerate(step.names) if name}
    gone = {v for v in saved if made[v] in again and v in dropped and dropped[v] < starts[v]}
    return Runs(
        times={i: 1 + (i in again) for i in range(len(step.problem.ops))},
        saved_for_backward=frozenset(saved - gone),
        copied=frozenset(v for v in saved - gone if made[v] in again),
    )


def kept_by(step: Step, plan: PlanRecord) -> frozenset[int]:
    """Ops whose results another plan for the same model keeps, as far as they can be told: by module, op and order.

    Args:
        step: without checkpoints.
        plan: the other one.
    """

    def by_place(rows: Iterable[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
        places: dict[tuple[str, str], list[int]] = {}
        for at, (module, name) in enumerate(rows):
            places.setdefault((module, re.sub(r"_\d+$", "", name)), []).append(at)
        return places

    problem = step.problem
    needed = [v for v, name in enumerate(step.names) if name and needed_in_backward(step, v)]
    makers = [problem.producer[v] for v in needed]
    own = by_place((step.origins[i].module, step.names[v]) for i, v in zip(makers, needed, strict=True))
    theirs = by_place((d.module, d.name) for d in plan.decisions)
    kept: set[int] = set()
    for place, ats in own.items():
        same = theirs.get(place, [])
        if len(same) == len(ats):
            kept.update(
                makers[at] for at, other in zip(ats, same, strict=True) if plan.decisions[other].action == "keep"
            )
    return frozenset(kept)


def note(
    choice: Choice, refused: Mapping[str, str], asked: Sequence[str], sized: Collection[str], *, packed: bool = False
) -> str:
    """What an eager plan does, and what it leaves out.

    Args:
        choice: what is checkpointed.
        refused: path of each module that cannot be checkpointed -> why.
        asked: the lines that ask for values of tensors.
        sized: paths of the modules in which sizes depend on values.
        packed: whether sequences are packed.
    """
    kept = sum(len(ops) for ops in choice.kept.values())
    done = (
        f"{len(choice.kept)} modules are checkpointed, {kept} results in them kept. Each runs again at once, up to the "
        "last activation that its backward pass needs; a compiled plan can choose each activation and its time."
        if choice.kept
        else "Nothing is checkpointed."
    )
    if asked:
        done += f" {told(asked, 'may take more')}"
    if sized:
        done += f" {counted_as_here(sorted(sized))}"
    if packed:
        done += " Packed sequences are counted as if each were as long as the longest may be: others take less."
    reasons: dict[str, list[str]] = {}
    for path, reason in refused.items():
        reasons.setdefault(reason, []).append(path)
    left = [
        f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''} ({reason})"
        for reason, paths in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    return f"{done} Cannot be checkpointed: {'; '.join(left[:4])}." if left else done
