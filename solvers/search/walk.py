"""The random walk of the search: changes of a policy, and annealing over them; compiled as `kernels` is.

`arrays` says what the arrays are.
"""

from __future__ import annotations

import math

import numpy as np

from solvers.search.arrays import (
    Chain,
    Choices,
    Cooling,
    Floats,
    Goal,
    Journal,
    Odds,
    Policy,
    Random,
    Scratch,
    Tables,
)
from solvers.search.kernels import link, peak_of, unlink, unroll


def random(state: Random) -> float:
    """Uniform in [0, 1); xorshift64*, so that a search can be stopped and go on, and threads do not meet."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * 2.0**-53


def below(state: Random, n: int) -> int:
    """Uniform in 0..n-1."""
    return int(random(state) * n)


def put(t: Tables, p: Policy, s: Scratch, journal: Journal, g: int, keep: int, hold: int, drop: int, make: int) -> None:
    """Decide on a gap, noting the decision before in the journal; does nothing where the journal is full."""
    n = journal.used[0]
    if n >= len(journal.gap):
        return
    if not t.start[g] < drop < t.uses[g]:
        drop = -1
    if not t.start[g] < make < t.uses[g] or t.region[make] != t.region[t.producer[t.value[g]]]:
        make = -1
    journal.gap[n] = g
    journal.before[n, 0] = p.keep[g]
    journal.before[n, 1] = p.hold[g]
    journal.before[n, 2] = p.drop[g]
    journal.before[n, 3] = p.make[g]
    journal.used[0] = n + 1
    _write(p, s, g, keep, hold, drop, make)


def _write(p: Policy, s: Scratch, g: int, keep: int, hold: int, drop: int, make: int) -> None:
    p.keep[g] = keep
    p.hold[g] = hold
    if drop != p.drop[g]:
        unlink(s.drop_first, s.drop_next, p.drop[g], g)
        p.drop[g] = drop
        link(s.drop_first, s.drop_next, drop, g)
    if make != p.make[g]:
        unlink(s.make_first, s.make_next, p.make[g], g)
        p.make[g] = make
        link(s.make_first, s.make_next, make, g)


def take_back(p: Policy, s: Scratch, journal: Journal) -> None:
    """Undo a move, last change first."""
    for n in range(journal.used[0] - 1, -1, -1):
        b = journal.before[n]
        _write(p, s, journal.gap[n], b[0], b[1], b[2], b[3])


def _change(t: Tables, p: Policy, s: Scratch, odds: Odds, journal: Journal, rng: Random, g: int) -> None:
    """Decide anew on one gap."""
    keep, hold, drop, make = p.keep[g], p.hold[g], p.drop[g], p.make[g]
    what = random(rng)
    if what < odds.drop:
        later = t.start[g] + 1 + below(rng, t.uses[g] - t.start[g])
        drop = -1 if drop >= 0 and random(rng) < 0.5 else later
    elif keep:
        keep = 0
        hold = 1 if random(rng) < 0.7 else 0
        if random(rng) < 0.5:
            drop = -1
    elif what < odds.drop + odds.make:
        make = -1 if make >= 0 and random(rng) < 0.5 else _early(t, rng, g)
    elif what < odds.drop + odds.make + odds.hold:
        hold = 1 - hold
    else:
        keep = 1
    put(t, p, s, journal, g, keep, hold, drop, make)


def _early(t: Tables, rng: Random, g: int) -> int:
    """An op before which to recompute a gap's value early: mostly one that reads an input of the value's producer."""
    o = t.producer[t.value[g]]
    n = t.read_at[o + 1] - t.read_at[o]
    if n and random(rng) < 0.7:
        u = t.reads[t.read_at[o] + below(rng, n)]
        return int(t.uses[t.use_at[u] + below(rng, t.use_at[u + 1] - t.use_at[u])])
    return int(t.start[g]) + 1 + below(rng, t.uses[g] - t.start[g])


def _copy(t: Tables, p: Policy, s: Scratch, journal: Journal, g: int, to: int) -> None:
    """Decide on a gap as on another one of its class; times count from the gap's end."""
    shift = t.uses[to] - t.uses[g]
    drop = p.drop[g] + shift if p.drop[g] >= 0 else -1
    make = p.make[g] + shift if p.make[g] >= 0 else -1
    keep = 2 if p.keep[g] == 2 else 1 if p.keep[g] else 0  # 2: on the host, see `layout`
    put(t, p, s, journal, to, keep, 1 if p.hold[g] else 0, drop, make)


def first_at_least(ascending: Floats, x: float) -> int:
    """The first position whose number is at least x; the length where there is none."""
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < x:
            low = middle + 1
        else:
            high = middle
    return low


def move(t: Tables, p: Policy, s: Scratch, c: Choices, journal: Journal, rng: Random) -> None:
    """Change the policy at random."""
    journal.used[0] = 0
    n = len(c.gaps)
    at = min(n - 1, first_at_least(c.weight, random(rng)))
    g = c.gaps[at]
    k = c.class_of[g]
    members = c.class_at[k + 1] - c.class_at[k]
    what = random(rng)
    if members > 1 and what < c.odds.block:  # copy a stretch of decisions to or from the next block
        step = c.tied if random(rng) < 0.5 else -c.tied
        width = 1 << below(rng, 8)
        for i in range(at, min(n, at + width)):
            h = c.gaps[i]
            place, k = c.place[h] + step, c.class_of[h]
            if 0 <= place < c.class_at[k + 1] - c.class_at[k]:
                _copy(t, p, s, journal, h, c.members[c.class_at[k] + place])
        return
    _change(t, p, s, c.odds, journal, rng, g)
    if members > 1 and what < c.odds.block + c.odds.spread:  # change the blocks before and after in the same way
        reach = 1 << below(rng, 8)
        low, high = max(0, c.place[g] - below(rng, reach)), min(members, c.place[g] + 1 + below(rng, reach))
        for place in range(low, high):
            h = c.members[c.class_at[k] + place]
            if h != g:
                _copy(t, p, s, journal, g, h)
    elif what > 1.0 - c.odds.pair:  # the opposite `keep` for a second gap, mostly nearby
        other = c.gaps[below(rng, n)] if random(rng) < 0.3 else c.gaps[min(n - 1, max(0, at + below(rng, 17) - 8))]
        if other != g:
            put(t, p, s, journal, other, 0 if p.keep[g] else 1, 1 if p.hold[other] else 0, -1, p.make[other])


def tie(t: Tables, p: Policy, s: Scratch, c: Choices, journal: Journal) -> None:
    """After a move, decide on all gaps of its groups as on those that it changed."""
    if c.tied == 1:
        return
    for n in range(journal.used[0]):
        g = journal.gap[n]
        k = c.class_of[g]
        first = c.place[g] // c.tied * c.tied
        for place in range(first, min(c.class_at[k + 1] - c.class_at[k], first + c.tied)):
            h = c.members[c.class_at[k] + place]
            if h != g:
                _copy(t, p, s, journal, g, h)


def anneal(t: Tables, c: Choices, chain: Chain, goal: Goal, cooling: Cooling, begin: float, end: float) -> float:
    """Walk on, at temperatures from hot (at progress 0) to cold (at progress 1), while progress is begin to end.

    Progress is the number of simulated steps over `cooling.work`. A move is taken by the rule of Metropolis et al.
    (1953). The threshold is drawn first: no schedule is evaluated beyond the point where it exceeds the threshold.

    Returns:
        Progress at the end.
    """
    p, best, s, journal, rng, now = chain.here, chain.best, chain.room, chain.journal, chain.rng, chain.energy
    progress = begin
    ops = len(t.cost)
    while progress < end:
        temperature = cooling.hot * (cooling.cold / cooling.hot) ** progress
        move(t, p, s, c, journal, rng)
        tie(t, p, s, c, journal)
        most = now[0] - temperature * math.log(1.0 - random(rng))  # the highest energy that Metropolis' rule accepts
        steps, extra = unroll(t, p, s, most / goal.price)
        walked = ops
        peak = -1
        if steps >= 0:
            walked = steps
            left = most - goal.price * extra
            highest = goal.budget + left / goal.penalty
            peak = peak_of(t, s, steps, goal.resident, highest)
        progress += walked / cooling.work
        if peak < 0:
            take_back(p, s, journal)
            continue
        now[0] = goal.price * extra + goal.penalty * max(0.0, peak - goal.budget)
        if now[0] < now[1] and peak <= goal.ceiling:
            now[1] = now[0]
            for g in range(len(best.keep)):
                best.keep[g], best.hold[g] = p.keep[g], p.hold[g]
                best.drop[g], best.make[g] = p.drop[g], p.make[g]
    return progress
