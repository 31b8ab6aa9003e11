"""The exact peak and cost of policies, and their schedules: interpreted at first, by machine code once that pays.

Importing numba and loading (on a new machine: compiling) the kernels takes longer than to interpret them for the few
dozen policies that a search looks at before it anneals. Both give the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from solvers.problem import Problem
from solvers.schedule import Schedule
from solvers.search.arrays import Policy, Scratch, Tables
from solvers.search.machine import INTERPRETED, Kernels, machine_code
from solvers.search.policy import scratch, tables

PATIENCE = 150_000  # ops, of all policies together, that are interpreted: 0.5 s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy with its schedule's peak in bytes and the cost of its schedule's re-runs.

    Where there is a link, `extra` counts waiting, too, and `room` is what the layout of moves may take, see `layout`.
    """

    policy: Policy
    peak: int
    extra: float
    room: float = 0.0


class Evaluator:
    """A problem as arrays, with the working memory to judge its policies.

    Attributes:
        tables: the problem.
        scratch: the working memory for machine code.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables: Tables = tables(problem)
        self.scratch: Scratch = scratch(self.tables)
        self._interpreted = 0
        self._lists: tuple[Tables, Scratch] = _as_lists(self.tables), _as_lists(self.scratch)

    def judge(self, policy: Policy, room: Scratch | None = None) -> Candidate | None:
        """The peak and cost of a policy; None where its schedule is far too long.

        Args:
            policy: what to judge.
            room: working memory of its own, for machine code; it has the policy's event lists afterwards.
        """
        code, t, s, steps, extra = self._unroll(policy, room)
        if steps < 0:
            return None
        return Candidate(policy, code.peak_of(t, s, steps, self.problem.resident, np.inf), extra)

    def schedule(self, policy: Policy) -> Schedule | None:
        """A policy's schedule; None where it has more than `policy.STRETCH` steps for each op. O(steps * reads)."""
        _, _, s, steps, _ = self._unroll(policy)
        return Schedule(tuple(int(i) if i >= 0 else -1 - int(i) for i in s.steps[:steps])) if steps >= 0 else None

    def _unroll(self, policy: Policy, room: Scratch | None = None) -> tuple[Kernels, Tables, Scratch, int, float]:
        """The kernels that did it, what they take, the number of steps (-1 where they are too many), their cost."""
        code, t, s, p = INTERPRETED, *self._lists, policy
        if room is not None or self._interpreted > PATIENCE or machine_code.cache_info().currsize:
            code, t, s = machine_code(), self.tables, room or self.scratch
        else:
            p = _as_lists(policy)
        code.link_all(p, s)
        steps, extra = code.unroll(t, p, s, np.inf)
        self._interpreted += max(steps, len(t.cost))
        return code, t, s, steps, extra


def _as_lists(record: Any) -> Any:
    """A record of arrays with lists in their place, which are quicker to interpret; tables with columns stay."""
    return record._make(a.tolist() if isinstance(a, np.ndarray) and a.ndim == 1 else a for a in record)
