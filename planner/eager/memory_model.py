"""What a choice of checkpointed modules would hold, from the trace of a step without any: fast, and nearly right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.eager.candidates import Candidate
from planner.eager.costs import OpCost
from planner.eager.trace import Trace

State = Mapping[str, frozenset[int]]  # path of each checkpointed module -> the ops whose results are kept


@dataclass(frozen=True)
class MemoryModel:
    """A step without checkpoints, and what may be checkpointed in it.

    A storage that autograd saves in a checkpointed module is freed when the forward pass last reads it, and is there
    again from the time the module has run again on; the module's arguments stay until its backward pass has ended.

    Attributes:
        trace: the step.
        costs: of its ops.
        held: bytes that it holds while each op runs.
        sizes: bytes of each storage.
        last_read: for each storage, the last op of the forward pass that reads it.
        candidates: what may be checkpointed, by path.
        savers: for each storage that autograd saves, the module calls that save it.
        spikes: for each candidate, bytes that running it again takes for a moment, beyond what it saves.
    """

    trace: Trace
    costs: Sequence[OpCost]
    held: NDArray[np.int64]
    sizes: Sequence[int]
    last_read: Sequence[int]
    candidates: Mapping[str, Candidate]
    savers: Mapping[int, Sequence[int]]
    spikes: Mapping[str, int]

    def seconds(self, state: State) -> float:
        """Time of what runs again."""
        return sum(self.seconds_of(path, kept) for path, kept in state.items())

    def runs_again(self, state: State) -> set[int]:
        """The ops that run again."""
        ranges = ((range(c.begin, c.stop), kept) for path, kept in state.items() for c in [self.candidates[path]])
        return {i for ops, kept in ranges for i in ops if i not in kept}

    def seconds_of(self, path: str, kept: frozenset[int]) -> float:
        candidate = self.candidates[path]
        return sum(self.costs[i].seconds for i in range(candidate.begin, candidate.stop) if i not in kept)

    def timeline(self, state: State) -> tuple[NDArray[np.int64], dict[int, int]]:
        """Bytes held while each op runs; and, for each storage that is freed early, the op before which it is."""
        trace, total = self.trace, len(self.trace.ops)
        changes = np.zeros(total + 2, np.int64)
        again: dict[int, list[tuple[int, int]]] = {}  # storage -> when it is there once more
        until: dict[int, int] = {}  # storage -> how long it is held as an argument, or because it is kept
        for path, kept in state.items():
            candidate = self.candidates[path]
            for s in candidate.inputs:
                until[s] = max(until.get(s, 0), candidate.ends)
            for i in kept:
                for s in trace.ops[i].writes:
                    until[s] = max(until.get(s, 0), candidate.starts)
            for s, needed in candidate.saved.items():
                again.setdefault(s, []).append((candidate.starts, needed))
            changes[candidate.starts] += self.spikes[path]
            changes[candidate.starts + 1] -= self.spikes[path]
        wrapped = [self.candidates[path].calls for path in state]
        dropped: dict[int, int] = {}
        for s in until.keys() | again.keys():
            born, end = trace.born[s], trace.died[s]
            if born < 0 or end >= total:
                continue
            if s in again and all(any(c in calls for calls in wrapped) for c in self.savers[s]):
                end = dropped[s] = max(self.last_read[s] + 1, until.get(s, 0))
            end = max(end, until.get(s, 0))
            changes[trace.died[s]] += self.sizes[s]
            changes[end] -= self.sizes[s]
            for start, needed in again.get(s, ()):
                if start >= end:
                    changes[start] += self.sizes[s]
                    changes[needed] -= self.sizes[s]
        return self.held + np.cumsum(changes[:total]), dropped


def memory_model(
    trace: Trace, costs: Sequence[OpCost], held: Sequence[int], sizes: Sequence[int], candidates: Sequence[Candidate]
) -> MemoryModel:
    """Made of a detailed trace; arguments as the attributes of `MemoryModel`."""
    last_read = [*trace.born]
    for i, op in enumerate(trace.ops):
        if op.phase != "backward":
            for s in op.reads:
                last_read[s] = i
    savers: dict[int, list[int]] = {}
    for saved in trace.saved:
        savers.setdefault(saved.storage, []).append(saved.within)
    spikes = {candidate.path: _spike(candidate, trace, costs, sizes) for candidate in candidates}
    by_path = {candidate.path: candidate for candidate in candidates}
    return MemoryModel(trace, costs, np.array(held, np.int64), sizes, last_read, by_path, savers, spikes)


def _spike(candidate: Candidate, trace: Trace, costs: Sequence[OpCost], sizes: Sequence[int]) -> int:
    """Bytes that running a module again takes at most, beyond what it saves."""
    changes = [0] * (candidate.stop - candidate.begin + 1)
    for i in range(candidate.begin, candidate.stop):
        for s in trace.ops[i].writes:
            changes[i - candidate.begin] += sizes[s]
            if s not in candidate.saved and trace.died[s] < candidate.stop:
                changes[max(trace.died[s], i + 1) - candidate.begin] -= sizes[s]
    now = most = 0
    for i in range(candidate.begin, candidate.stop):
        now += changes[i - candidate.begin]
        most = max(most, now + costs[i].workspace)
    return max(0, most - sum(sizes[s] for s in candidate.saved))
