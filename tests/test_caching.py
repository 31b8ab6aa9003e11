"""The simulated allocator: worked cases, a naive second implementation, and the real one where there is a GPU."""

import gzip
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.devices.caching_allocator import FREE, Event, Reserved, events_of, lasting_limit, reserved, smallest_limit
from solvers import Op, Problem, Schedule, every_op_once, simulate, solve

from .problems import random_training_graph, small_problems

KiB, MiB = 2**10, 2**20


def held_and_reserved(*events: Event, limit: int | None = None) -> tuple[int, int]:
    found = reserved(events, limit)
    assert not found.out_of_memory
    return found.allocated_peak, found.reserved_peak


@pytest.mark.parametrize(
    ("nbytes", "handed_out", "segment"),
    [
        (0, 0, 0),
        (1, 512, 2 * MiB),
        (513, 1 * KiB, 2 * MiB),
        (1 * MiB, 1 * MiB, 2 * MiB),
        (1 * MiB + 1, 1 * MiB + 512, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (10 * MiB + 1, 10 * MiB + 512, 12 * MiB),
        (11 * MiB - 512, 11 * MiB - 512, 12 * MiB),
        (11 * MiB, 12 * MiB, 12 * MiB),  # a rest of 1 MiB is too small to be split off
    ],
)
def test_one_request(nbytes, handed_out, segment):
    assert held_and_reserved((nbytes, 0)) == (handed_out, segment)


def test_a_small_segment_is_used_to_its_last_512_bytes():
    full = [(1 * MiB, 0), (1 * MiB - 512, 1), (512, 2)]
    assert held_and_reserved(*full) == (2 * MiB, 2 * MiB)
    assert held_and_reserved(*full, (1, 3)) == (2 * MiB + 512, 4 * MiB)


def test_the_pools_share_nothing():
    assert held_and_reserved((2 * MiB, 0), (FREE, 0), (1 * MiB, 1)) == (2 * MiB, 22 * MiB)


def test_the_smallest_block_that_fits_is_taken():
    two_free = [(12 * MiB, 0), (16 * MiB, 1), (FREE, 1), (FREE, 0)]
    assert held_and_reserved(*two_free, (11 * MiB, 2), (16 * MiB, 3)) == (28 * MiB, 28 * MiB)


def test_free_neighbours_are_joined():
    thirds = [(6 * MiB, 0), (6 * MiB, 1), (6 * MiB, 2)]
    assert held_and_reserved(*thirds, (FREE, 0), (FREE, 2), (FREE, 1), (20 * MiB, 3)) == (20 * MiB, 20 * MiB)
    assert held_and_reserved(*thirds, (FREE, 0), (FREE, 2), (12 * MiB, 3)) == (18 * MiB, 32 * MiB)


def test_empty_segments_are_given_back_before_memory_runs_out():
    events = [(30 * MiB, 0), (10 * MiB, 1), (FREE, 0), (40 * MiB, 2)]
    assert held_and_reserved(*events) == (50 * MiB, 80 * MiB)
    assert held_and_reserved(*events, limit=50 * MiB) == (50 * MiB, 50 * MiB)
    assert reserved(events, 50 * MiB).retries == 1
    assert reserved(events, 50 * MiB - 1).out_of_memory


def test_segments_in_use_are_not_given_back():
    """Of 40 MiB, 12 are used; no 32 are free in one piece."""
    events = [(40 * MiB, 0), (FREE, 0), (12 * MiB, 1), (32 * MiB, 2)]
    assert reserved(events, 71 * MiB).out_of_memory
    assert smallest_limit(events) == 72 * MiB


class Naive:
    """Segments as lists of [bytes, key or None], scanned from the start for everything."""

    def __init__(self, limit):
        self.limit = limit
        self.segments: list[tuple[bool, list[list]]] = []  # small?, blocks
        self.retries = 0

    def held(self):
        return sum(size for _, blocks in self.segments for size, _ in blocks)

    def used(self):
        return sum(size for _, blocks in self.segments for size, key in blocks if key is not None)

    def allocate(self, size, key):
        small = size <= MiB
        fitting = [
            (block[0], number, offset)
            for number, (pool, blocks) in enumerate(self.segments)
            for offset, block in enumerate(blocks)
            if pool == small and block[1] is None and block[0] >= size
        ]
        if not fitting:
            new = 2 * MiB if small else 20 * MiB if size < 10 * MiB else (size + 2 * MiB - 1) // (2 * MiB) * 2 * MiB
            if self.limit is not None and self.held() + new > self.limit:
                self.retries += 1
                self.segments = [(p, b) for p, b in self.segments if len(b) > 1 or b[0][1] is not None]
                if self.held() + new > self.limit:
                    return False
            self.segments.append((small, [[new, None]]))
            fitting = [(new, len(self.segments) - 1, 0)]
        whole, number, offset = min(fitting)
        cut = whole - size >= 512 if small else whole - size > MiB
        self.segments[number][1][offset : offset + 1] = [[size, key], [whole - size, None]] if cut else [[whole, key]]
        return True

    def free(self, key):
        for _, blocks in self.segments:
            for block in blocks:
                if block[1] == key:
                    block[1] = None
            for at in range(len(blocks) - 1, 0, -1):
                if blocks[at][1] is None and blocks[at - 1][1] is None:
                    blocks[at - 1][0] += blocks.pop(at)[0]


def naive(events, limit) -> Reserved:
    cache, asked, most, used, held = Naive(limit), {}, 0, 0, 0
    for nbytes, key in events:
        if nbytes == FREE:
            del asked[key]
            cache.free(key)
        elif nbytes:
            if not cache.allocate((nbytes + 511) // 512 * 512, key):
                return Reserved(most, used, held, cache.retries, True)
            asked[key] = (nbytes + 511) // 512 * 512
        else:
            asked[key] = 0
        most, used, held = max(most, sum(asked.values())), max(used, cache.used()), max(held, cache.held())
    return Reserved(most, used, held, cache.retries, False)


@st.composite
def some_events(draw) -> list[Event]:
    """Up to 60 events; sizes around every size at which the allocator does something else."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    edges = [0, 512, 256 * KiB, MiB, MiB + 512, 5 * MiB, 9 * MiB, 10 * MiB, 11 * MiB, 19 * MiB, 20 * MiB, 33 * MiB]
    events: list[Event] = []
    live: list[int] = []
    for key in range(draw(st.integers(1, 60))):
        if live and rng.random() < 0.45:
            events.append((FREE, live.pop(rng.randrange(len(live)))))
        else:
            events.append((max(0, rng.choice(edges) + rng.choice((0, 0, 1, -1, 512, -512, 300 * KiB))), key))
            live.append(key)
    return events


@given(some_events(), st.sampled_from([None, 0.3, 0.6, 0.8, 0.95]))
def test_it_does_as_the_naive_one(events, share):
    unlimited = reserved(events)
    assert unlimited == naive(events, None)
    assert unlimited.requested_peak <= unlimited.allocated_peak <= unlimited.reserved_peak
    if share is not None:
        limit = int(share * unlimited.reserved_peak)
        assert reserved(events, limit) == naive(events, limit)


@given(some_events())
def test_memory_runs_out_just_below_the_smallest_limit(events):
    limit = smallest_limit(events)
    assert reserved(events).requested_peak <= limit
    assert not reserved(events, limit).out_of_memory
    assert limit == 0 or naive(events, limit - 1).out_of_memory


@given(small_problems())
def test_events_hold_what_the_schedule_holds(problem):
    problem = replace(
        problem,
        sizes=tuple(512 * size for size in problem.sizes),
        ops=tuple(replace(op, workspace=512 * op.workspace) for op in problem.ops),
        resident=0,
        budget=None,
    )
    for schedule in (every_op_once(problem), solve(problem.with_budget(2**40), "chen").schedule):
        assert_holds(problem, schedule)


def test_events_hold_what_a_schedule_that_recomputes_holds():
    problem = random_training_graph(seed=1, forward=12)
    tight = problem.with_budget(simulate(problem, every_op_once(problem)).peak * 3 // 4)
    schedule = solve(tight, "chen").schedule
    assert len(schedule.steps) > len(problem.ops)
    assert_holds(replace(problem, resident=0), schedule)


def test_a_second_copy_of_what_is_held_is_freed_at_once():
    ops = (Op("a", (), (0, 1), 1.0), Op("u", (1,), (2,), 1.0), Op("loss", (2,), (3,), 1.0), Op("w", (1, 3), (4,), 1.0))
    problem = Problem(ops, (4096, 1024, 512, 512, 512), boundary=2, pinned=frozenset({0}))
    assert_holds(problem, Schedule((0, 1, 2, 0, 3)))


def assert_holds(problem, schedule):
    """The peak is the timeline's above what is resident; what is left at the end is what was there and the state."""
    peak = simulate(problem, schedule).peak
    for resident, state in (((), ()), ((512, 1024), (1536, 0))):
        events = events_of(problem, schedule, resident, state=state, steps=3)
        sizes = {key: nbytes for nbytes, key in events if nbytes != FREE}
        assert len(sizes) == sum(nbytes != FREE for nbytes, _ in events)
        assert max(accumulate((-sizes[k] if n == FREE else n for n, k in events), initial=0)) == peak + sum(
            resident + state
        )
        left = sizes.keys() - {key for nbytes, key in events if nbytes == FREE}
        assert sorted(sizes[key] for key in left) == sorted(resident + state)


def test_workspace_in_pieces_needs_no_room_in_one_piece():
    problem = random_training_graph(seed=2, forward=3)
    problem = replace(problem, ops=(*problem.ops[:-1], replace(problem.ops[-1], workspace=60 * MiB)))
    schedule, last = every_op_once(problem), len(problem.ops) - 1
    hole = [30 * MiB, 30 * MiB]
    whole = reserved(events_of(problem, schedule, ()))
    pieces = reserved(events_of(problem, schedule, (), workspaces={last: hole}))
    assert whole.requested_peak == pieces.requested_peak
    free_holes = [(30 * MiB, -1), (30 * MiB, -2), (FREE, -1), (FREE, -2)]
    in_holes = reserved([*free_holes, *events_of(problem, schedule, (), workspaces={last: hole})])
    assert in_holes.reserved_peak == pieces.reserved_peak
    assert reserved([*free_holes, *events_of(problem, schedule, ())]).reserved_peak == whole.reserved_peak + 60 * MiB


H100 = json.loads(gzip.decompress((Path(__file__).parent / "allocator_h100.json.gz").read_bytes()))


def recorded(name: str, steps: int) -> list[Event]:
    """Two planned steps of a model on an H100 under torch 2.11, by the allocator's own history, again and again."""
    trace = H100[name]
    resident = [(nbytes, -1 - n) for n, nbytes in enumerate(trace["resident"])]
    step = [(nbytes, key) for nbytes, key in trace["steps"]]
    return [*resident, *step * (steps // 2)]  # a key may come again once it is free


@pytest.mark.parametrize("name", H100)
def test_what_an_h100_reserved_is_what_the_simulation_reserves(name):
    """To the byte, free to grow and held to the plan's budget, where Llama ran out of memory in its third step."""
    trace = H100[name]
    assert reserved(recorded(name, 2)).reserved_peak == trace["reserved"]
    first, later = (reserved(recorded(name, steps), trace["limit"]) for steps in (2, 4))
    assert not first.out_of_memory
    if (most := trace["reserved_within_limit"]) is None:
        assert later.out_of_memory
    else:
        assert not later.out_of_memory
        assert later.reserved_peak == most


@pytest.mark.parametrize("name", H100)
def test_a_limit_that_is_named_lasts_where_it_is_rounded_up(name):
    events = recorded(name, 4)
    least = lasting_limit(events)
    assert least >= smallest_limit(events)
    for share in (1.0, 1.0003, 1.0007, 1.001):
        assert not reserved(events, int(share * least)).out_of_memory
    assert lasting_limit(events, least + MiB) > least


ON_GPU = """
import json, sys, torch
events, limit = json.load(sys.stdin)
total = torch.cuda.get_device_properties(0).total_memory
if limit is not None:
    torch.cuda.set_per_process_memory_fraction((limit + 4096) / total)
held, failed = {}, False
for nbytes, key in events:
    if nbytes < 0:
        del held[key]
        continue
    try:
        held[key] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        failed = True
        break
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), failed]))
"""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is false")
@pytest.mark.parametrize("share", [None, 0.9, 0.5])
def test_it_does_as_the_real_one(share):
    problem = random_training_graph(seed=3, forward=60)
    problem = replace(problem, sizes=tuple(size * 400 for size in problem.sizes))
    events = events_of(problem, every_op_once(problem), [3 * MiB, 700 * KiB, 5000], state=[6 * MiB, 1400 * KiB])
    limit = None if share is None else int(share * reserved(events).reserved_peak)
    found = reserved(events, limit)
    environment = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")}
    ran = subprocess.run(
        [sys.executable, "-c", ON_GPU],
        input=json.dumps([events, limit]), capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    assert json.loads(ran.stdout) == [found.allocated_peak, found.reserved_peak, found.out_of_memory]
