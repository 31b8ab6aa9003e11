"""A traced choice in the user's words: decisions, timeline, what takes the room, what could not be expressed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from planner.capture.provenance import kind_of
from planner.capture.trace.data_dependent import told
from planner.core.account import BACKWARD, GRADIENTS, KEPT, PASSING, RECOMPUTED, resident
from planner.core.plan import Action, BaselineMoment, Decision, Held, Moment, PlanRecord
from planner.core.recipe import Choice
from planner.eager.memory_model import State, Surrogate
from planner.eager.search import Step
from planner.eager.trace import Trace


def decisions(model: Surrogate, state: State, refused: Mapping[str, str]) -> tuple[Decision, ...]:
    """One per storage that the forward pass makes and autograd saves, in their order."""
    trace, (_, dropped) = model.trace, model.timeline(state)
    starts = {s: model.units[path].starts for path in state for s in model.units[path].saved}
    runs_again = {
        i: model.costs[i].seconds
        for path, kept in state.items()
        for i in range(model.units[path].begin, model.units[path].stop)
        if i not in kept
    }
    forced = {i: model.costs[i].keep_because for path in state for i in model.units[path].forced}
    counted: Counter[str] = Counter()
    names = {}
    for i, op in enumerate(trace.ops):
        short = op.target.removeprefix("aten.").split(".")[0]
        names[i] = f"{short}_{counted[short]}" if counted[short] else short
        counted[short] += 1
    found = []
    for s in _needed(trace):
        i = trace.born[s]
        op = trace.ops[i]
        again = s in dropped and dropped[s] < starts[s] and i in runs_again
        found.append(
            Decision(
                name=names[i],
                action="recompute" if again else "keep",
                nbytes=model.sizes[s],
                recompute_seconds=runs_again[i] / len(op.writes) if again else 0.0,
                module=op.module,
                source=op.source,
                reason=forced.get(i, "" if again else refused.get(op.module, "")),
                op=kind_of(op.target),
            )
        )
    return tuple(found)


def kept_by(model: Surrogate, plan: PlanRecord) -> frozenset[int]:
    """Ops whose results another plan for the same model keeps, as far as they can be told: by module, op and order."""

    def by_place(found: Sequence[Decision]) -> dict[tuple[str, str], list[int]]:
        places: dict[tuple[str, str], list[int]] = {}
        for at, d in enumerate(found):
            places.setdefault((d.module, re.sub(r"_\d+$", "", d.name)), []).append(at)
        return places

    own = decisions(model, {}, {})
    makers = [model.trace.born[s] for s in _needed(model.trace)]
    theirs = by_place(plan.decisions)
    kept: set[int] = set()
    for place, ats in by_place(own).items():
        same = theirs.get(place, [])
        if len(same) == len(ats):
            kept.update(
                makers[at] for at, other in zip(ats, same, strict=True) if plan.decisions[other].action == "keep"
            )
    return frozenset(kept)


def _needed(trace: Trace) -> list[int]:
    """Storages that the forward pass makes and autograd saves."""
    saved = dict.fromkeys(saved.storage for saved in trace.saved)
    return [s for s in saved if trace.born[s] >= 0 and trace.ops[trace.born[s]].phase == "forward"]


def moments(step: Step, lines: Mapping[str, int], optimizer_step: int | None) -> tuple[Moment, ...]:
    """The timeline, with what runs at each step; what is there all the time included.

    Args:
        step: traced.
        lines: what is there all the time: name -> bytes.
        optimizer_step: bytes held only while the optimizer steps; None where it is not counted.
    """
    trace, sizes, always = step.trace, step.sizes, resident(lines)
    total = len(trace.ops)
    backward = next((i for i, op in enumerate(trace.ops) if op.phase == "backward"), total)
    kinds = [_kind(trace, s, backward) if born >= 0 else KEPT for s, born in enumerate(trace.born)]
    ends: list[list[int]] = [[] for _ in range(total + 1)]
    for s, (born, died) in enumerate(zip(trace.born, trace.died, strict=True)):
        if born >= 0:
            ends[max(died, born + 1)].append(s)
    live = list(always)
    found = []
    for i, (op, cost, now) in enumerate(zip(trace.ops, step.costs, step.held, strict=True)):
        for s in ends[i]:
            live[kinds[s]] -= sizes[s]
        for s in op.writes:
            live[kinds[s]] += sizes[s]
        held = live[:-1]
        held[KEPT] += now + sum(always) - sum(held) - cost.workspace  # what no dispatch mode sees is saved
        held_now = Held._make([*held, cost.workspace])
        found.append(Moment(kind_of(op.target), op.phase, op.again, held_now, cost.seconds, op.module, op.source))
    if optimizer_step is not None:
        left = list(always)
        for s, (size, died) in enumerate(zip(trace.sizes, trace.died, strict=True)):
            left[kinds[s]] += size * (died == total)
        found.append(Moment("optimizer step", "optimizer", False, Held._make([*left[:-1], optimizer_step])))
    return tuple(found)


def _kind(trace: Trace, storage: int, backward: int) -> int:
    """Which of the bytes in `Held` a storage is; `backward` is the first op of the backward pass."""
    op = trace.ops[trace.born[storage]]
    if op.again:
        return RECOMPUTED
    if op.phase != "backward":
        return KEPT if trace.died[storage] > backward else PASSING
    return GRADIENTS if trace.died[storage] == len(trace.ops) else BACKWARD


def baseline_moments(
    baseline: Step, made: Sequence[Decision], model: Surrogate, state: State, timed: Sequence[Moment]
) -> tuple[BaselineMoment, ...]:
    """The step without checkpoints, and what the plan does with each op.

    Args:
        baseline: the step.
        made: what `decisions` makes of the state.
        model: the surrogate of the step.
        state: what is checkpointed.
        timed: the step's timeline.
    """
    trace = baseline.trace
    again = {
        i
        for path, kept in state.items()
        for i in range(model.units[path].begin, model.units[path].stop)
        if i not in kept
    }
    actions: dict[int, Action] = {}
    for s, d in zip(_needed(trace), made, strict=True):
        i = trace.born[s]
        actions[i] = "recompute" if "recompute" in (d.action, actions.get(i)) else d.action
    found = []
    for i, m in enumerate(timed):
        action: Action | None = None
        nbytes, reads = 0, tuple[int, ...]()
        if i < len(trace.ops):
            op = trace.ops[i]
            action = "recompute" if i in again and op.distinct else actions.get(i)
            nbytes = sum(baseline.sizes[s] for s in op.writes)
            reads = tuple(dict.fromkeys(trace.born[s] for s in op.reads if 0 <= trace.born[s] < i))
        runs = 1 + (i in again)
        found.append(
            BaselineMoment(m.op, m.phase, m.held_bytes, m.seconds, m.module, m.source, nbytes, runs, action, reads)
        )
    return tuple(found)


def peak_of(trace: Trace, held: Sequence[int], optimizer_step: int | None) -> int:
    """The most bytes that a step holds, beside what is there all the time; arguments as for `moments`."""
    last = () if optimizer_step is None else (_left(trace) + optimizer_step,)
    return max((*held, *last), default=0)


def _left(trace: Trace) -> int:
    return sum(
        size for size, born, died in zip(trace.sizes, trace.born, trace.died, strict=True) if died == len(trace.ops)
    )


def peak_account(trace: Trace, held: Sequence[int], sizes: Sequence[int], optimizer_step: int | None) -> dict[str, int]:
    """What the step's own memory is made of at its peak: name -> bytes; sums to its peak."""
    at = max(range(len(held)), key=held.__getitem__, default=0)
    left = _left(trace)
    if optimizer_step is not None and left + optimizer_step > held[at]:
        return {"activations": 0, "gradients": left, "the op at the peak (optimizer step)": optimizer_step}
    alive = [s for s, (b, d) in enumerate(zip(trace.born, trace.died, strict=True)) if 0 <= b < at < d]
    activations = sum(
        sizes[s] for s in alive if trace.ops[trace.born[s]].phase == "forward" or trace.ops[trace.born[s]].again
    )
    gradients = sum(sizes[s] for s in alive) - activations
    name = kind_of(trace.ops[at].target).strip("_")
    return {
        "activations": activations,
        "gradients": gradients,
        f"the op at the peak ({name})": held[at] - activations - gradients,
    }


def note(choice: Choice, refused: Mapping[str, str], asked: Sequence[str]) -> str:
    """What an eager plan does, and what it leaves out; `asked` are lines that ask for values of tensors."""
    kept = sum(len(ops) for ops in choice.kept.values())
    done = (
        f"{len(choice.kept)} modules are checkpointed, {kept} results in them kept. Each runs again at once, up to the "
        "last value that its backward pass needs; a plan that is compiled can choose each value and its time."
        if choice.kept
        else "Nothing is checkpointed."
    )
    if asked:
        done += f" {told(asked, 'may take more')}"
    reasons: dict[str, list[str]] = {}
    for path, reason in refused.items():
        reasons.setdefault(reason, []).append(path)
    left = [
        f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''} ({reason})"
        for reason, paths in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    return f"{done} Cannot be checkpointed: {'; '.join(left[:4])}." if left else done
