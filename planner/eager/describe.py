"""A traced choice in the user's words: decisions, timeline, what takes the room, what could not be expressed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ..plan import Decision, Moment, Plan
from .surrogate import State, Surrogate
from .trace import Trace
from .wrap import Choice


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
            )
        )
    return tuple(found)


def kept_by(model: Surrogate, plan: Plan) -> frozenset[int]:
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


def moments(trace: Trace, held: Sequence[int], resident: int, optimizer_step: int | None) -> tuple[Moment, ...]:
    """The timeline, with what runs at each step; what is there all the time included."""
    found = [
        Moment(op.target.removeprefix("aten."), op.phase, op.again, resident + now)
        for op, now in zip(trace.ops, held, strict=True)
    ]
    if optimizer_step is not None:
        found.append(Moment("optimizer step", "optimizer", False, resident + _left(trace) + optimizer_step))
    return tuple(found)


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
    name = trace.ops[at].target.removeprefix("aten.")
    return {
        "activations": activations,
        "gradients": gradients,
        f"the op at the peak ({name})": held[at] - activations - gradients,
    }


def note(choice: Choice, refused: Mapping[str, str]) -> str:
    """What an eager plan does, and what it leaves out."""
    kept = sum(len(ops) for ops in choice.kept.values())
    told = (
        f"{len(choice.kept)} modules are checkpointed, {kept} results in them kept. Each runs again at once, up to the "
        "last value that its backward pass needs; a plan that is compiled can choose each value and its time."
        if choice.kept
        else "Nothing is checkpointed."
    )
    reasons: dict[str, list[str]] = {}
    for path, reason in refused.items():
        reasons.setdefault(reason, []).append(path)
    left = [
        f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''} ({reason})"
        for reason, paths in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    return f"{told} Cannot be checkpointed: {'; '.join(left[:4])}." if left else told
