"""The compiled inner loop of the annealer: moves on a policy, taken back where they do not pay.

Moves change one gap, two near each other, the same gap of several repeated blocks, or copy a stretch of decisions from
one block to the next. Repeated blocks are known by `classes`: gaps that look the same to a few hops away.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .compiled import Choices, Goal, Ints, Policy, Scratch, Tables, below, link, peak_of, random, unlink, unroll


class Journal(NamedTuple):
    """The gaps that a move changed, with what they were before."""

    gap: Ints
    before: NDArray[np.int32]
    used: Ints


@njit(cache=True, nogil=True)
def put(t: Tables, p: Policy, s: Scratch, journal: Journal, g: int, keep: int, hold: int, drop: int, make: int) -> None:
    """Decide on a gap, noting what it was."""
    n = journal.used[0]
    if n >= journal.gap.shape[0]:
        return
    if not t.start[g] < drop < t.uses[g]:
        drop = -1
    if not t.start[g] < make < t.uses[g]:
        make = -1
    journal.gap[n] = g
    journal.before[n, 0] = p.keep[g]
    journal.before[n, 1] = p.hold[g]
    journal.before[n, 2] = p.drop[g]
    journal.before[n, 3] = p.make[g]
    journal.used[0] = n + 1
    _write(p, s, g, keep, hold, drop, make)


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def take_back(p: Policy, s: Scratch, journal: Journal) -> None:
    """Undo a move, last change first."""
    for n in range(journal.used[0] - 1, -1, -1):
        b = journal.before[n]
        _write(p, s, journal.gap[n], b[0], b[1], b[2], b[3])


@njit(cache=True, nogil=True)
def _change(t: Tables, p: Policy, s: Scratch, journal: Journal, rng: NDArray[np.uint64], g: int) -> None:
    """Decide anew on one gap."""
    keep, hold, drop, make = p.keep[g], p.hold[g], p.drop[g], p.make[g]
    what = random(rng)
    if what < 0.15:
        later = t.start[g] + 1 + below(rng, t.uses[g] - t.start[g])
        drop = -1 if drop >= 0 and random(rng) < 0.5 else later
    elif keep:
        keep = 0
        hold = 1 if random(rng) < 0.7 else 0
        if random(rng) < 0.5:
            drop = -1
    elif what < 0.45:
        make = -1 if make >= 0 and random(rng) < 0.5 else _early(t, rng, g)
    elif what < 0.7:
        hold = 1 - hold
    else:
        keep = 1
    put(t, p, s, journal, g, keep, hold, drop, make)


@njit(cache=True, nogil=True)
def _early(t: Tables, rng: NDArray[np.uint64], g: int) -> int:
    """An op before which to recompute a gap's value ahead of its need: mostly one that reads what that takes."""
    o = t.producer[t.value[g]]
    n = t.read_at[o + 1] - t.read_at[o]
    if n and random(rng) < 0.7:
        u = t.reads[t.read_at[o] + below(rng, n)]
        return int(t.uses[t.use_at[u] + below(rng, t.use_at[u + 1] - t.use_at[u])])
    return int(t.start[g]) + 1 + below(rng, t.uses[g] - t.start[g])


@njit(cache=True, nogil=True)
def _copy(t: Tables, p: Policy, s: Scratch, journal: Journal, g: int, to: int) -> None:
    """Decide on a gap as on another one of its class; times count from the gap's end."""
    shift = t.uses[to] - t.uses[g]
    drop = p.drop[g] + shift if p.drop[g] >= 0 else -1
    make = p.make[g] + shift if p.make[g] >= 0 else -1
    put(t, p, s, journal, to, p.keep[g], p.hold[g], drop, make)


@njit(cache=True, nogil=True)
def move(t: Tables, p: Policy, s: Scratch, c: Choices, journal: Journal, rng: NDArray[np.uint64]) -> None:
    """Change the policy at random."""
    journal.used[0] = 0
    n = c.gaps.shape[0]
    at = min(n - 1, np.searchsorted(c.weight, random(rng)))
    g = c.gaps[at]
    k = c.class_of[g]
    members = c.class_at[k + 1] - c.class_at[k]
    what = random(rng)
    if members > 1 and what < 0.2:  # a stretch of decisions, copied to or from the next block
        step = 1 if random(rng) < 0.5 else -1
        width = 1 << below(rng, 8)
        for i in range(at, min(n, at + width)):
            h = c.gaps[i]
            place, k = c.place[h] + step, c.class_of[h]
            if 0 <= place < c.class_at[k + 1] - c.class_at[k]:
                _copy(t, p, s, journal, h, c.members[c.class_at[k] + place])
        return
    _change(t, p, s, journal, rng, g)
    if members > 1 and what < 0.4:  # the same in blocks before and after this one
        reach = 1 << below(rng, 8)
        low, high = max(0, c.place[g] - below(rng, reach)), min(members, c.place[g] + 1 + below(rng, reach))
        for place in range(low, high):
            h = c.members[c.class_at[k] + place]
            if h != g:
                _copy(t, p, s, journal, g, h)
    elif what > 0.7:  # the opposite of a second one, mostly nearby
        other = c.gaps[below(rng, n)] if random(rng) < 0.3 else c.gaps[min(n - 1, max(0, at + below(rng, 17) - 8))]
        if other != g:
            put(t, p, s, journal, other, 1 - p.keep[g], p.hold[other], -1, p.make[other])


@njit(cache=True, nogil=True)
def anneal(
    t: Tables,
    p: Policy,
    best: Policy,
    s: Scratch,
    c: Choices,
    journal: Journal,
    rng: NDArray[np.uint64],
    goal: Goal,
    now: NDArray[np.float64],
    hot: float,
    cold: float,
    begin: float,
    end: float,
    work: float,
) -> float:
    """Walk from policy `p`, at temperatures from hot (at progress 0) to cold (at 1), while progress is begin to end.

    Progress is `steps simulated / work`. `now` is the energy here, and the best so far; both, the policies and the
    random state are left where a next call goes on.

    Returns:
        Progress at the end.
    """
    done = begin
    ops = t.cost.shape[0]
    while done < end:
        temperature = hot * (cold / hot) ** done
        move(t, p, s, c, journal, rng)
        most = now[0] - temperature * math.log(1.0 - random(rng))  # what Metropolis would still take
        steps, extra = unroll(t, p, s, most / goal.price)
        walked = ops
        peak = -1
        if steps >= 0:
            walked = steps
            left = most - goal.price * extra
            highest = goal.budget + left / goal.penalty
            peak = peak_of(t, s, steps, goal.resident, highest)
        done += walked / work
        if peak < 0:
            take_back(p, s, journal)
            continue
        now[0] = goal.price * extra + goal.penalty * max(0.0, peak - goal.budget)
        if now[0] < now[1] and peak <= goal.ceiling:
            now[1] = now[0]
            best.keep[:] = p.keep
            best.hold[:] = p.hold
            best.drop[:] = p.drop
            best.make[:] = p.make
    return done
