"""The inner loop of the search with a link: where each value that leaves is sent, freed and fetched, and what it costs.

Compiled as `kernels` is.

A *stay* is a time between two uses of a value that the policy has it spend on the host. The value leaves the device
when its last use before ends, and takes its place again just before the next: what is held then decides whether the
schedule fits. The room that is left shortens stays, so that nothing waits: first each fetch is moved forward until the
link can be done in time, from the end of the schedule to its beginning; then, on the clocks, a value whose copy is not
out yet is freed later. What does not fit waits. The host takes values in the order in which they are sent, while it has
room.
"""

from __future__ import annotations

import math

from solvers.search.arrays import Policy, Scratch, Tables
from solvers.search.wires import AWAY, Wires, Yard


def find_stays(t: Tables, w: Wires, p: Policy, s: Scratch, y: Yard, steps: int, resident: int) -> None:
    """Find the stays of a schedule, ending first those that begin last, and the bytes held as if none left.

    One walk backwards, as in `kernels.peak_of`.
    """
    read_at, reads, write_at, writes, use_at = t.read_at, t.reads, t.write_at, t.writes, t.use_at
    size, once, keep, order, wanted = t.size, t.once, p.keep, s.steps, s.wanted
    gap, next_read, newest, held, first = y.gap, y.next_read, y.newest, y.held, y.first
    live = resident + _end(t, s, y)
    first[steps] = len(t.cost)
    for at in range(steps - 1, -1, -1):
        i = order[at]
        again = i < 0
        if again:
            i = -1 - i
        first[at] = first[at + 1] if again else i
        own = t.workspace[i]
        for j in range(write_at[i], write_at[i + 1]):
            v = writes[j]
            own += size[v]
            if not again and wanted[v] and gap[v] < use_at[v + 1] and keep[gap[v]] == AWAY:
                _stay(t, w, y, v, at)
            k = newest[v]
            while k >= 0 and y.send[k] < 0:  # the stays of this copy
                y.send[k] = at + 1
                k = y.next_send[k]
            if wanted[v] and not (again and first[at] <= once[v]):
                wanted[v] = 0
                live -= size[v]
        for j in range(read_at[i], read_at[i + 1]):
            v = reads[j]
            if not again:
                if wanted[v] and gap[v] < use_at[v + 1] and keep[gap[v]] == AWAY:
                    _stay(t, w, y, v, at)
                gap[v] -= 1
            if not wanted[v]:
                wanted[v] = 1
                live += size[v]
            next_read[v] = at
        held[at] = live + own


def _end(t: Tables, s: Scratch, y: Yard) -> int:
    """After the last step only pinned values are live, and no value has a stay; the bytes of these values."""
    live = 0
    for v in range(len(t.size)):
        s.wanted[v] = t.pinned[v]
        if t.pinned[v]:
            live += t.size[v]
        end = t.use_at[v + 1]
        y.gap[v] = end - 1 if end > t.use_at[v] and t.uses[end - 1] == len(t.cost) else end
        y.newest[v] = -1
    y.used[0] = 0
    return live


def _stay(t: Tables, w: Wires, y: Yard, v: int, at: int) -> None:
    """Note a stay after the use at a step, unless it would hold less than one step."""
    if not w.movable[v]:
        return
    home = t.region[t.producer[v]]
    free, fetch = at + 1, y.next_read[v]
    while free < fetch and t.region[y.first[free]] != home:
        free += 1
    while fetch > free and t.region[y.first[fetch]] != home:
        fetch -= 1
    if fetch <= free:
        return
    k = y.used[0]
    y.used[0] = k + 1
    if y.newest[v] < 0:
        y.last[v] = y.next_read[v]
    y.value[k], y.left[k], y.needed[k], y.send[k], y.free[k], y.fetch[k] = v, at, y.next_read[v], -1, free, fetch
    y.next_send[k] = y.newest[v]  # until all are found, a list of the value's stays
    y.newest[v] = k


def lay_out(t: Tables, w: Wires, y: Yard, steps: int) -> int:
    """Let the stays begin that the host has room for; the peak, with stays as long as they can be."""
    for at in range(steps + 1):
        y.at_send[at] = y.at_free[at] = y.at_fetch[at] = y.at_read[at] = -1
        y.change[at] = 0
    for k in range(y.used[0]):
        v = y.value[k]
        home = t.region[t.producer[v]]
        while t.region[y.first[y.send[k]]] != home:
            y.send[k] += 1
        y.next_send[k] = -1
        if y.newest[v] == k:
            y.next_send[k] = y.at_send[y.send[k]]
            y.at_send[y.send[k]] = k
    _limit_host(t, w, y, steps)
    for k in range(y.used[0]):
        v = y.value[k]
        if v < 0 or y.newest[v] < 0:
            y.value[k] = -1
            continue
        y.change[y.free[k]] -= t.size[v]
        y.change[y.fetch[k]] += t.size[v]
        y.next_free[k] = y.at_free[y.free[k]]
        y.at_free[y.free[k]] = k
        y.next_read_at[k] = y.at_read[y.needed[k]]
        y.at_read[y.needed[k]] = k
    peak, change = 0, 0
    for at in range(steps):
        change += y.change[at]
        y.held[at] += change
        peak = max(peak, y.held[at])
    return peak


def _limit_host(t: Tables, w: Wires, y: Yard, steps: int) -> None:
    """Send no value for which the host has no room when it would be sent."""
    taken = 0
    for at in range(steps):
        k = y.at_send[at]
        before = -1
        while k >= 0:
            v = y.value[k]
            if taken + t.size[v] <= w.host:
                taken += t.size[v]
                y.change[y.last[v] + 1] -= t.size[v]
                before = k
            else:
                y.newest[v] = -1
                if before < 0:
                    y.at_send[at] = y.next_send[k]
                else:
                    y.next_send[before] = y.next_send[k]
            k = y.next_send[k]
        taken += y.change[at + 1]
        y.change[at + 1] = 0


def place_fetches(t: Tables, w: Wires, s: Scratch, y: Yard, steps: int, budget: float) -> None:
    """Move each fetch forward, as far as there is room, until the link has time for it; the last ones first."""
    cost, held, clock = t.cost, y.held, y.clock
    now = 0.0
    for at in range(steps):
        i = s.steps[at]
        clock[at] = now
        now += cost[i if i >= 0 else -1 - i]
        held[at] = int(budget) - held[at]  # from here on, the room
    clock[steps] = now
    idle = now  # the link is idle until then
    for at in range(steps - 1, -1, -1):
        k = y.at_read[at]
        while k >= 0:
            v = y.value[k]
            home = t.region[t.producer[v]]
            begin = min(idle, clock[at]) - w.back[v]
            f = y.fetch[k]
            while (
                clock[f] > begin and f - 1 > y.free[k] and held[f - 1] >= t.size[v] and t.region[y.first[f - 1]] == home
            ):
                f -= 1
                held[f] -= t.size[v]
            y.fetch[k] = f
            y.next_fetch[k] = y.at_fetch[f]
            y.at_fetch[f] = k
            idle = max(begin, min(idle, clock[f]))
            k = y.next_read_at[k]


def run_clocks(t: Tables, w: Wires, s: Scratch, y: Yard, steps: int, most: float) -> float:
    """Free values once their copies are out, as far as there is room, and run the three clocks.

    Returns:
        The time that steps wait; infinite where it is more than `most`.
    """
    now = stall = out = back = 0.0
    y.used[1] = 0
    coming = 0  # position from which to look for the next fetch
    for at in range(steps):
        while coming < steps and (coming < at or y.at_fetch[coming] < 0):
            coming += 1
        k = y.at_send[at]
        while k >= 0:
            v = y.value[k]
            begin = max(out, now)
            out = begin + w.out[v]
            if back > begin or (coming < steps and now + y.clock[coming] - y.clock[at] < out):
                out = begin + w.out_shared[v]
            y.done[k] = out
            k = y.next_send[k]
        k = y.at_free[at]
        while k >= 0:
            y.free[k] = at
            if y.newest[y.value[k]] == k and y.done[k] > now:
                y.waiting[y.used[1]] = k
                y.used[1] += 1
            k = y.next_free[k]
        if y.used[1]:
            waited = _free(t, y, at, now)
            stall += waited - now
            now = waited
        k = y.at_fetch[at]
        while k >= 0:
            v = y.value[k]
            begin = max(back, now)
            back = begin + (w.back_shared[v] if out > begin else w.back[v])
            y.done[k] = back
            k = y.next_fetch[k]
        k = y.at_read[at]
        while k >= 0:
            if y.done[k] > now:
                stall += y.done[k] - now
                now = y.done[k]
            k = y.next_read_at[k]
        if stall > most:
            return math.inf
        i = s.steps[at]
        now += t.cost[i if i >= 0 else -1 - i]
    return stall


def _free(t: Tables, y: Yard, at: int, now: float) -> float:
    """Free the values whose copies are out, and wait for others until the rest has room in a step; the time then."""
    while True:
        rest, kept, soonest, must = 0, 0, math.inf, 0.0
        for n in range(y.used[1]):
            k = y.waiting[n]
            if y.done[k] <= now:
                y.free[k] = at
                continue
            y.waiting[kept] = k
            kept += 1
            rest += t.size[y.value[k]]
            soonest = min(soonest, y.done[k])
            if at + 1 >= y.fetch[k] or t.region[y.first[at + 1]] != t.region[t.producer[y.value[k]]]:
                must = max(must, y.done[k])
        y.used[1] = kept
        if must > now:
            now = must
        elif rest <= y.held[at] or not kept:
            y.held[at] -= rest
            return now
        else:
            now = soonest


def judge_moves(
    t: Tables, w: Wires, p: Policy, s: Scratch, y: Yard, steps: int, resident: int, budget: float
) -> tuple[int, float]:
    """Lay out the moves of the schedule in `s.steps`: its peak, and how long steps wait.

    Stays are shortened up to the budget, or to the peak of the longest stays where that is above the budget.
    """
    find_stays(t, w, p, s, y, steps, resident)
    room = max(budget, float(lay_out(t, w, y, steps)))
    place_fetches(t, w, s, y, steps, room)
    stall = run_clocks(t, w, s, y, steps, math.inf)
    least = y.held[0]
    for at in range(steps):
        least = min(least, y.held[at])
    return int(room) - least, stall
