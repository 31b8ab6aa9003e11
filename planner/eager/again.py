"""Whether checkpointed modules do the same when they run again, where Python code decides what they compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from planner.core.recipe import Choice, Kept
from planner.eager.trace import ModuleCall, Trace, TracedOp


def modules_unlike_again(trace: Trace, choice: Choice, norms: Collection[str]) -> set[str]:
    """The paths of modules in which a checkpointed call runs another op, has other numbers for it, or reads other
    tensors from outside, when it runs again: an iterator, a variable or a mode around it differs by then.

    Args:
        trace: of a step with the choice.
        choice: what was checkpointed.
        norms: the paths of normalisations, whose statistics are frozen meanwhile.
    """
    found = set()
    for path, kept in choice.kept.items():
        calls = [call for call in trace.calls if call.path == path]
        first = next((call for call in calls if call.phase == "forward"), None)
        again = next((call for call in calls if call.phase == "backward"), None)
        if first is not None and again is not None:
            for one, other in zip(_ops(trace, first, kept, norms), _ops(trace, again, {}, norms), strict=False):
                if _seen(trace, one, first) != _seen(trace, other, first):
                    found |= {path, one.module, other.module}
                    break
    return found


def _ops(trace: Trace, call: ModuleCall, kept: Kept, norms: Collection[str]) -> Iterator[TracedOp]:
    """The ops of a call, views left out, that run again, too."""
    counted = (op for op in trace.ops[call.begin : call.end] if not op.view)
    return (op for at, op in enumerate(counted) if at not in kept and op.module not in norms)


def _seen(trace: Trace, op: TracedOp, first: ModuleCall) -> object:
    """What tells an op from another one: it, its numbers and shapes, and the tensors from before the first call."""
    outside = {s for s in op.reads if trace.born[s] < first.begin}
    return op.target, op.module, None if op.distinct is None else op.distinct.key, outside
