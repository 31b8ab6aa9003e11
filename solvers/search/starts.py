"""Schedules that a search starts from: segments, and segments inside segments."""

from __future__ import annotations

from collections.abc import Iterator

from solvers.search.annealing import Search
from solvers.search.chen import cuts, keep_across, segment_counts
from solvers.search.evaluation import Candidate


def chained(*starts: Iterator[Candidate | None]) -> Iterator[Candidate]:
    """The candidates of several iterators, one iterator after the other, without the policies that are too long."""
    return (start for each in starts for start in each if start is not None)


def segments(search: Search) -> Iterator[Candidate | None]:
    """The segmentations that `chen` tries."""
    problem = search.problem
    return (search.keep_only(keep_across(problem, cuts(problem, k))) for k in segment_counts(problem))


def nested(search: Search) -> Iterator[Candidate | None]:
    """Segments inside segments: values that cross an outer cut are kept, and inner segments are recomputed within."""
    problem = search.problem
    for outer in (1, *segment_counts(problem)[::3]):
        keep = keep_across(problem, cuts(problem, outer), last=False)
        yield search.keep_only(keep)
        for inner in (3, 8, 20):
            at = cuts(problem, outer * inner)
            hold = keep_across(problem, at, last=False)
            yield search.keep_only(keep, hold)
            yield search.nest(keep, hold, at)
