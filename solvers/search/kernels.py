"""The inner loop of the search: unroll a policy, measure its peak; plain Python that numba can compile.

`machine.machine_code` compiles it. The interpreter runs it, too, and takes lists in the place of arrays then; both give
the same numbers. `walk` changes policies, `arrays` says what the arrays are.

Why numba: on a published graph of 405 ops one evaluation (schedule, peak and cost) takes about 10 us compiled and
500 us interpreted; numpy has nothing to vectorize, since each recomputation depends on the ones before it.

What is written as a loop here (filling, copying, searching) is so because numba takes seconds to compile NumPy's own
functions for it.
"""

from __future__ import annotations

from solvers.search.arrays import Ints, Longs, Policy, Scratch, Tables


def link(first: Ints, following: Ints, at: int, g: int) -> None:
    """Put a gap on the list of an op."""
    if at >= 0:
        following[g] = first[at]
        first[at] = g


def unlink(first: Ints, following: Ints, at: int, g: int) -> None:
    """Take a gap off the list of an op."""
    if at < 0:
        return
    if first[at] == g:
        first[at] = following[g]
        return
    h = first[at]
    while following[h] != g:
        h = following[h]
    following[h] = following[g]


def link_all(policy: Policy, s: Scratch) -> None:
    """Build the event lists of a policy."""
    for i in range(len(s.drop_first)):
        s.drop_first[i] = s.make_first[i] = -1
    for g in range(len(policy.keep)):
        link(s.drop_first, s.drop_next, policy.drop[g], g)
        link(s.make_first, s.make_next, policy.make[g], g)


def unroll(t: Tables, p: Policy, s: Scratch, most: float) -> tuple[int, float]:
    """Write a policy's schedule into `s.steps`: first runs as their op i, re-runs as -1 - i.

    Every op runs once, in order; before each, the ops that its reads need again run in order (lazy recomputation).

    Returns:
        The number of steps, and the cost of the re-runs; -1 steps where that cost is more than `most`.
    """
    # Local names, and no calls in the loops: numba counts references wherever an array is passed on or taken from a
    # record, even into an inlined function, and here that would take longer than all the rest.
    read_at, reads, write_at, writes, use_at = t.read_at, t.reads, t.write_at, t.writes, t.use_at
    cost, producer, value, keep, hold, make = t.cost, t.producer, t.value, p.keep, p.hold, p.make
    steps, live, next_use, in_burst = s.steps, s.live, s.next_use, s.in_burst
    drop_first, drop_next, make_first, make_next = s.drop_first, s.drop_next, s.make_first, s.make_next
    _clear(t, s)
    last = len(steps) - len(cost)
    k, extra = 0, 0.0
    for b in range(len(cost)):
        begin = k
        g = make_first[b]
        while g >= 0:
            v = value[g]
            o = producer[v]
            if not live[v] and not in_burst[o] and k < last:
                in_burst[o] = 1
                steps[k] = o
                k += 1
            g = make_next[g]
        reader, at = b, begin
        while reader >= 0:  # op b, then each re-run: its reads are live, or their producers run again too
            for j in range(read_at[reader], read_at[reader + 1]):
                v = reads[j]
                o = producer[v]
                if not live[v] and not in_burst[o] and k < last:
                    in_burst[o] = 1
                    steps[k] = o
                    k += 1
            reader = steps[at] if at < k else -1
            at += 1
        if k > begin:
            _sort(steps, begin, k)
            for at in range(begin, k):
                o = steps[at]
                in_burst[o] = 0
                extra += cost[o]
                steps[at] = -1 - o
                for j in range(write_at[o], write_at[o + 1]):
                    v = writes[j]
                    g = next_use[v]
                    if g < use_at[v + 1] and (hold[g] or make[g] == b):
                        live[v] = 1
            if k >= last or extra > most:
                return -1, extra
        steps[k] = b
        k += 1
        for j in range(write_at[b], write_at[b + 1]):
            v = writes[j]
            live[v] = keep[next_use[v]] if next_use[v] < use_at[v + 1] else 0
        for j in range(read_at[b], read_at[b + 1]):
            v = reads[j]
            next_use[v] += 1
            live[v] = keep[next_use[v]] if next_use[v] < use_at[v + 1] else 0
        g = drop_first[b]
        while g >= 0:
            live[value[g]] = 0
            g = drop_next[g]
    return k, extra


def _clear(t: Tables, s: Scratch) -> None:
    """Before the first op no value is live, and the first gap of each value comes next."""
    for v in range(len(s.live)):
        s.live[v] = 0
        s.next_use[v] = t.use_at[v]
    for i in range(len(s.in_burst)):
        s.in_burst[i] = 0


def _sort(a: Ints, low: int, high: int) -> None:
    """Sort ascending, in place. A burst is nearly descending: reverse it, then sort by insertion."""
    i, j = low, high - 1
    while i < j:
        a[i], a[j] = a[j], a[i]
        i += 1
        j -= 1
    for i in range(low + 1, high):
        x = a[i]
        j = i - 1
        while j >= low and a[j] > x:
            a[j + 1] = a[j]
            j -= 1
        a[j + 1] = x


def beside(pairs: Longs, kept: int) -> int:
    """Bytes of the microbatches that wait, where each keeps `kept` bytes; the largest of the pairs."""
    most = 0
    for n in range(pairs.shape[0]):
        most = max(most, pairs[n, 0] * kept + pairs[n, 1])
    return most


def find_saved(t: Tables, s: Scratch, steps: int) -> int:
    """Find the values that the backward pass finds, and until when it reads these copies; the bytes that it frees."""
    read_at, reads, write_at, writes = t.read_at, t.reads, t.write_at, t.writes
    pinned, once, order, wanted, until = t.pinned, t.once, s.steps, s.wanted, s.saved_until
    first = len(t.cost)  # the next op to run for the first time
    for v in range(len(wanted)):
        wanted[v], until[v] = pinned[v], -1
    for at in range(steps - 1, -1, -1):
        again = order[at] < 0
        i = -1 - order[at] if again else order[at]
        if not again:
            first = i
        for j in range(write_at[i], write_at[i + 1]):
            v = writes[j]
            if not (again and first <= once[v]):
                wanted[v], until[v] = 0, -1
        for j in range(read_at[i], read_at[i + 1]):
            v = reads[j]
            if not wanted[v]:
                wanted[v], until[v] = 1, at
        if i == t.boundary and not again:
            break
    freed = 0
    for v in range(len(wanted)):
        if until[v] >= 0:
            freed += t.size[v]
    return freed


def peak_of(t: Tables, s: Scratch, steps: int, resident: int, most: float) -> int:
    """The peak of the schedule in `s.steps`, as `simulate` counts it; -1 where it is above `most`.

    One walk backwards: a value is live from the write before a read on. The bytes of waiting microbatches are known
    once the walk comes to the first backward op, where `live` says how much the schedule keeps.
    """
    read_at, reads, write_at, writes = t.read_at, t.reads, t.write_at, t.writes
    size, workspace, pinned, once, order, wanted = t.size, t.workspace, t.pinned, t.once, s.steps, s.wanted
    live = resident
    mark = t.until if t.until < len(t.cost) else t.boundary
    highest, ahead = 0, 0
    inside, freed = t.again >= 0 and mark == t.boundary, 0  # the backward pass, and the saved bytes freed in it so far
    if t.again >= 0:
        freed = find_saved(t, s, steps)
    saved_until = s.saved_until
    first = len(t.cost)  # the next op to run for the first time
    for v in range(len(size)):
        wanted[v] = pinned[v]
        if pinned[v]:
            live += size[v]
    peak = live
    if peak > most:
        return -1
    for at in range(steps - 1, -1, -1):
        i = order[at]
        again = i < 0
        if again:
            i = -1 - i
        else:
            first = i
        own = workspace[i]
        for j in range(write_at[i], write_at[i + 1]):
            v = writes[j]
            own += size[v]
            if wanted[v] and not (again and first <= once[v]):
                wanted[v] = 0
                live -= size[v]
        for j in range(read_at[i], read_at[i + 1]):
            v = reads[j]
            if not wanted[v]:
                wanted[v] = 1
                live += size[v]
            if inside and saved_until[v] == at:
                freed -= size[v]
        if inside:
            own += max(t.again, freed)
        if live + own > peak:
            peak = live + own
            if peak + ahead > most:
                return -1
        if i == mark and not again:
            if i == t.boundary:
                kept = live - resident
                highest = max(highest, peak + beside(t.backward, kept))
                ahead = beside(t.forward, kept)
                mark, inside = -1, False
                if highest > most:
                    return -1
            else:
                highest, mark, inside = peak, t.boundary, t.again >= 0
            peak = 0
    return max(highest, peak + ahead)
