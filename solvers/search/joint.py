"""Annealing over what is kept on the device, kept on the host, and recomputed: `walk.anneal` with a link.

Compiled as `kernels` is.
"""

from __future__ import annotations

import math

from solvers.search.arrays import Chain, Choices, Cooling, Goal, Journal, Policy, Random, Scratch, Tables
from solvers.search.kernels import unroll
from solvers.search.layout import find_stays, lay_out, place_fetches, run_clocks
from solvers.search.walk import below, first_at_least, move, put, random, take_back, tie
from solvers.search.wires import AWAY, Line, Wires

MOVED = 0.6  # share of changes that decide which values stay on the host
WEIGHT = 3  # a step with moves is so much work
TWICE = 0.5  # share of these that decide on a second gap, too


def decide(t: Tables, w: Wires, p: Policy, s: Scratch, c: Choices, journal: Journal, rng: Random) -> None:
    """Change at random which values are kept on the device, kept on the host, or recomputed."""
    journal.used[0] = 0
    n = len(c.gaps)
    at = min(n - 1, first_at_least(c.weight, random(rng)))
    g = c.gaps[at]
    keep = _other(t, w, p, rng, g)
    _put(t, p, s, journal, g, keep)
    what = random(rng)
    if what < TWICE:
        other = c.gaps[below(rng, n)] if random(rng) < 0.5 else c.gaps[min(n - 1, max(0, at + below(rng, 33) - 16))]
        if other != g:
            _put(t, p, s, journal, other, _other(t, w, p, rng, other))
    elif what < TWICE + 0.2:  # the same gap of the blocks around
        k = c.class_of[g]
        members = c.class_at[k + 1] - c.class_at[k]
        reach = 1 << below(rng, 5)
        low, high = max(0, c.place[g] - below(rng, reach)), min(members, c.place[g] + 1 + below(rng, reach))
        for place in range(low, high):
            h = c.members[c.class_at[k] + place]
            if h != g and (keep != AWAY or w.movable[t.value[h]]):
                _put(t, p, s, journal, h, keep)


def _other(t: Tables, w: Wires, p: Policy, rng: Random, g: int) -> int:
    """Another decision for a gap."""
    v = t.value[g]
    keep = int(p.keep[g])
    if not w.movable[v]:
        return 1 - keep if keep < AWAY else 1
    if w.lasting[v]:
        return AWAY if keep != AWAY else 1
    return (keep + 1 + below(rng, 2)) % 3


def _put(t: Tables, p: Policy, s: Scratch, journal: Journal, g: int, keep: int) -> None:
    put(t, p, s, journal, g, keep, int(p.hold[g]), int(p.drop[g]) if keep else -1, int(p.make[g]))


def anneal_moves(
    t: Tables,
    line: Line,
    choices: tuple[Choices, Choices],
    chain: Chain,
    goal: Goal,
    cooling: Cooling,
    begin: float,
    end: float,
) -> float:
    """As `walk.anneal`, with moves: waiting costs as much as running.

    `choices` are the gaps of values that may be recomputed, and the gaps of these and of values that may leave.
    """
    w, y = line
    p, best, s, journal, rng, now = chain.here, chain.best, chain.room, chain.journal, chain.rng, chain.energy
    progress = begin
    while progress < end:
        temperature = cooling.hot * (cooling.cold / cooling.hot) ** progress
        if len(choices[0].gaps) and random(rng) >= MOVED:
            move(t, p, s, choices[0], journal, rng)
        else:
            decide(t, w, p, s, choices[1], journal, rng)
        tie(t, p, s, choices[1], journal)
        most = now[0] - temperature * math.log(1.0 - random(rng))  # the highest energy that Metropolis' rule accepts
        steps, extra = unroll(t, p, s, most / goal.price)
        walked = len(t.cost)
        energy, peak = math.inf, 0
        if steps >= 0:
            walked = WEIGHT * steps
            find_stays(t, w, p, s, y, steps, goal.resident)
            peak = lay_out(t, w, y, steps)
            energy = goal.price * extra + goal.penalty * max(0.0, peak - goal.budget)
            if energy <= most:
                place_fetches(t, w, s, y, steps, max(goal.budget, float(peak)))
                energy += goal.price * run_clocks(t, w, s, y, steps, (most - energy) / goal.price)
        progress += walked / cooling.work
        if energy > most:
            take_back(p, s, journal)
            continue
        now[0] = energy
        if energy < now[1] and peak <= goal.ceiling:
            now[1] = energy
            for g in range(len(best.keep)):
                best.keep[g], best.hold[g] = p.keep[g], p.hold[g]
                best.drop[g], best.make[g] = p.drop[g], p.make[g]
    return progress
