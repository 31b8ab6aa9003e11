"""Costs of an op that runs in pieces: the seconds of what runs in them, and the most that is held inside one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from torch import fx

from planner.capture.passes.order import traced_order
from planner.capture.regions.region import Region, analyse
from planner.core.pieces import run_in_pieces
from solvers import Op, Problem, every_op_once, simulate


class Cost(Protocol):
    """The costs of one op, as `planner.costs.ops.OpEstimate` has them."""

    @property
    def seconds(self) -> float: ...
    @property
    def flops(self) -> int: ...
    @property
    def workspace(self) -> int: ...
    @property
    def excess(self) -> int: ...


Runs = Sequence[tuple[Region, int]]  # the graph of a piece, and how often it runs


def pieces_of(node: fx.Node) -> Runs:
    """The graphs that a node runs in pieces; none for an op that runs whole."""
    if node.target is not run_in_pieces:
        return ()
    names = [str(cast(fx.Node, body).target) for body in node.args[:2]]
    times = len(cast("tuple[int, ...]", node.args[2]))
    runs = dict.fromkeys(names, 0)
    runs[names[0]] += times - 1
    runs[names[1]] += 1
    found = []
    for name, count in runs.items():
        body: fx.GraphModule = getattr(node.graph.owning_module, name)
        found.append((analyse(body, 0, traced_order(body.graph), "a piece runs as it is"), count))
    return found


def cost_in_pieces(runs: Runs, of: Mapping[fx.Node, Cost], granularity: int) -> tuple[float, int, int]:
    """Seconds and FLOPs of all pieces, and the bytes that are held inside one at most, beside inputs and results.

    Args:
        runs: as of `pieces_of`.
        of: the costs of the ops in them.
        granularity: the allocator rounds sizes up to multiples of it.
    """
    seconds, flops, most = 0.0, 0, 0
    for region, times in runs:
        costs = [of[op.node] for op in region.ops]
        seconds += times * sum(cost.seconds for cost in costs)
        flops += times * sum(cost.flops for cost in costs)
        sizes = [value.nbytes for value in region.values]
        for op, cost in zip(region.ops, costs, strict=True):
            if op.writes:
                sizes[op.writes[0]] += cost.excess
        pairs = zip(region.ops, costs, strict=True)
        ops = tuple(Op(op.node.name, op.reads, op.writes, cost.seconds, cost.workspace) for op, cost in pairs)
        problem = Problem(ops, tuple(-(-n // granularity) * granularity for n in sizes), len(ops))
        most = max(most, simulate(problem, every_op_once(problem)).peak)
    return seconds, flops, most
