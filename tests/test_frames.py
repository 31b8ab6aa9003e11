"""Where calls map no memory of their own, whatever the depth; and what another thread runs."""

import inspect
import resource
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident

import pytest

from planner.compat.frames import frame_of, with_room

CALLS = 300


def leaf(x):
    a = b = c = d = e = f = g = h = i = j = k = m = x  # a larger frame than that of `below()`: it crosses every end
    return a, b, c, d, e, f, g, h, i, j, k, m


def faults_of_calls():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for i in range(CALLS):
        leaf(i)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def below(depth):
    return below(depth - 1) if depth else faults_of_calls()


def most_faults(function):
    with ThreadPoolExecutor(1) as anew:  # a thread begins with a chunk of its own
        return anew.submit(lambda: max(function(depth) for depth in range(400))).result()


def test_no_depth_makes_each_call_map_memory():
    assert most_faults(with_room(below)) < CALLS / 10 <= most_faults(below)


def test_errors_and_names_pass():
    def fails(x):
        raise ValueError(x)

    called = with_room(fails)
    assert called.__name__ == "fails"
    with pytest.raises(ValueError, match="why"):
        called("why")


def test_the_frames_of_a_thread_are_seen_from_another():
    def codes(thread):
        frame = frame_of(thread)
        while frame is not None:
            yield frame.f_code
            frame = frame.f_back

    with ThreadPoolExecutor(1) as other:
        seen = other.submit(lambda here: [*codes(here)], get_ident())
        assert inspect.currentframe().f_code in seen.result()
    assert frame_of(0) is None
