"""The search's data as arrays.

All arrays are indexed by op, value or gap. A gap is the time between two consecutive uses of a value: from `start[g]`
(its producer or a reader) to `uses[g]` (the next reader, or the number of ops for the end of the schedule). Gaps are
numbered as `uses` is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Random = NDArray[np.uint64]


class Tables(NamedTuple):
    """A problem as arrays; lists of lists are flat, list i at `[at[i]:at[i + 1]]`.

    Attributes:
        read_at, reads: for each op, the values it reads.
        write_at, writes: for each op, the values it writes.
        use_at, uses: for each value, the ends of its gaps.
        size: bytes of each value.
        cost, workspace, region: of each op.
        producer: for each value, the op that writes it.
        pinned: for each value, 1 where it is pinned.
        once: for each value, the last op during whose first run only its first copy counts (`Problem.shared_until`);
            all, where it is pinned.
        value, start: of each gap.
        forward, backward: rows (number, bytes beside) of waiting microbatches in each pass.
        boundary, until: the backward pass starts at op `boundary`, and no microbatch waits from op `until` on; both are
            -1 where no microbatch ever waits.
        again: bytes of the results of a first backward pass, where there is a second; -1 where there is none.
    """

    read_at: Ints
    reads: Ints
    write_at: Ints
    writes: Ints
    use_at: Ints
    uses: Ints
    size: Longs
    cost: Floats
    workspace: Longs
    producer: Ints
    pinned: Bytes
    once: Ints
    value: Ints
    start: Ints
    region: Ints
    forward: Longs
    backward: Longs
    boundary: int
    until: int
    again: int


class Policy(NamedTuple):
    """The decision on every gap.

    Attributes:
        keep: 1 keeps the value from the gap's start on; 0 drops it there.
        hold: 1 keeps a value that was recomputed for an earlier reader to the gap's end; 0 drops it again.
        drop: the value is dropped after the first run of this op even where `keep` is 1; -1 for no such op.
        make: the value is recomputed before the first run of this op and kept from there on; -1 recomputes it when a
            reader needs it.
    """

    keep: Bytes
    hold: Bytes
    drop: Longs
    make: Longs


class Scratch(NamedTuple):
    """Working memory of the kernels, allocated once.

    Attributes:
        steps: the schedule.
        live: for each value, 1 where it is live at this point of the schedule.
        next_use: for each value, the gap that comes next.
        in_burst: for each op, 1 where it is among the re-runs before the next first run.
        wanted: for each value, 1 where a later step reads it.
        drop_first, drop_next: for each op a linked list of the gaps that drop their value after it.
        make_first, make_next: for each op a linked list of the gaps that recompute their value before it.
        saved_until: for each value that is saved for the backward pass, the last step that reads that copy; else -1.
    """

    steps: Ints
    live: Bytes
    next_use: Ints
    in_burst: Bytes
    wanted: Bytes
    drop_first: Ints
    drop_next: Ints
    make_first: Ints
    make_next: Ints
    saved_until: Ints


class Odds(NamedTuple):
    """Probabilities of the moves.

    Attributes:
        block: a stretch of decisions is copied to or from the next repeated block.
        spread: a change is copied to the same gap of the blocks around.
        pair: a change is followed by the opposite `keep` of a second gap.
        drop: a change concerns the gap's `drop`.
        make: a change concerns the `make` of a gap whose value is not kept.
        hold: a change concerns the `hold` of a gap whose value is not kept; else it concerns its `keep`.
    """

    block: float
    spread: float
    pair: float
    drop: float
    make: float
    hold: float


class Choices(NamedTuple):
    """The gaps that a search decides on.

    Attributes:
        gaps: those gaps, ascending by their start.
        class_at, members: the gaps of each class, in order: `members[class_at[c]:class_at[c + 1]]`. A class is the same
            gap of all repeated blocks.
        class_of: for each gap, its class; -1 where the gap is not among `gaps`.
        place: for each gap, its position in its class.
        weight: cumulated probabilities of choosing each of `gaps`; the last is 1.
        odds: probabilities of the moves.
        tied: so many successive gaps of a class make a group, for which one decision is made.
    """

    gaps: Ints
    class_at: Ints
    members: Ints
    class_of: Ints
    place: Ints
    weight: Floats
    odds: Odds
    tied: int


class Goal(NamedTuple):
    """Energy = price * cost of re-runs + penalty * bytes above `budget`; the best policy peaks at most at `ceiling`."""

    price: float
    penalty: float
    budget: float
    ceiling: float
    resident: int


class Journal(NamedTuple):
    """The gaps that a move changed, with their decisions before it."""

    gap: Ints
    before: Longs
    used: Ints


class Chain(NamedTuple):
    """The state of one walk, on which a next call of `anneal` goes on.

    Attributes:
        here: the policy that the walk is at.
        best: the policy of least energy so far.
        energy: the energies of both.
        room: working memory, its event lists those of `here`.
        journal: the last move.
        rng: state of the random numbers.
    """

    here: Policy
    best: Policy
    energy: Floats
    room: Scratch
    journal: Journal
    rng: Random


class Cooling(NamedTuple):
    """Temperatures fall geometrically from `hot` to `cold` while `work` steps are simulated."""

    hot: float
    cold: float
    work: float
