"""The only bridge between captured graphs and solvers: regions and estimates in, a `Problem` out, and schedules back.

Ops of all regions stand in the order of the step: every forward pass in order, the loss, every backward pass in reverse
order. The loss op stands for what happens between the passes: it reads the model's outputs and makes their gradients.
An op after a backward pass adds its gradients to those of other regions, and, where gradients accumulate, to those
that are there; the optimizer's step comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate as totals

from planner.capture.provenance import op_kind
from planner.capture.regions.calls import Link
from planner.capture.regions.region import Region
from planner.costs.ops import OpEstimate
from planner.lowering.links import join
from solvers import Op, Problem, Schedule

LOSS, ACCUMULATE, OPTIMIZER, COMMUNICATION = -1, -2, -3, -4  # ops of no region
COPIED = "accumulate gradients"  # the op that adds a region's gradients to others, and frees them


@dataclass(frozen=True, slots=True)
class LoweredOp:
    """Where an op of the problem comes from: `regions[region].ops[index]`, or LOSS, ACCUMULATE, ..."""

    region: int
    index: int


@dataclass(frozen=True)
class Lowered:
    """A problem and the way back from it.

    Attributes:
        problem: what solvers see.
        origin: for each op of the problem, where it comes from.
        value_offset: for each region, the problem's number of its first value.
        kinds: for each op of the problem, what it computes.
        gradients: values that are gradients of parameters and inputs, whole or in part.
        final: of these, the whole ones.
        gathered: values that are parameters, or buffers of them, of which other devices have a share.
    """

    problem: Problem
    origin: tuple[LoweredOp, ...]
    value_offset: tuple[int, ...]
    kinds: tuple[str, ...] = ()
    gradients: frozenset[int] = frozenset()
    final: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()


def lower(
    regions: Sequence[Region],
    estimates: Sequence[Sequence[OpEstimate]],
    *,
    links: Sequence[Link] = (),
    resident: int,
    loss_workspace: int = 0,
    loss_bytes: int = 0,
    tangents_pinned: bool = True,
    tangents_held: bool = False,
    accumulate: bool = False,
    optimizer_step: int | None = None,
    shard: int = 1,
    reduced: bool = False,
    granularity: int = 1,
    budget: int | None = None,
) -> Lowered:
    """Write the training step as a `Problem`.

    Args:
        regions: in the order in which their forward passes run.
        estimates: for each region, one per op.
        links: what the regions make for each other; other results of regions are held to the end.
        resident: bytes held beside the values.
        loss_workspace: bytes held only while the loss outside the model is computed, beside the gradients it makes.
        loss_bytes: bytes held from the loss to the end of the backward pass, for the same reason.
        tangents_pinned: whether the gradients that the loss makes are held to the end of the backward pass.
        tangents_held: whether the gradients that enter a region's backward pass are held until that has ended.
        accumulate: whether gradients are added to those of earlier microbatches (counted in `resident`), and freed.
        optimizer_step: bytes held only while the optimizer steps; None for no optimizer.
        shard: how many devices share each gradient, once it is made.
        reduced: whether `communication.communicate` will say what becomes of the gradients: nothing holds them here.
        granularity: what the allocator rounds sizes up to, in bytes.
        budget: bytes, None for no limit.
    """
    ops: list[Op] = []
    origin: list[LoweredOp] = []
    kinds: list[str] = []
    sizes: list[int] = []
    unsharded: list[int] = []  # bytes of each value that other devices take once it is made
    pinned: set[int] = set()
    outputs: list[int] = []
    incoming: list[int] = []
    offset = tuple(totals([0, *(len(region.values) for region in regions)]))
    joined = join(regions, links, offset)
    shared = {v for each in joined.gradients for v in each} if shard > 1 else set()

    def size(nbytes: int) -> None:
        share = -(-nbytes // shard) if len(sizes) in shared else nbytes
        sizes.append(-(-share // granularity) * granularity)
        unsharded.append(nbytes - share)

    for region, estimated in zip(regions, estimates, strict=True):
        nbytes = [v.nbytes for v in region.values]
        for op, estimate in zip(region.ops, estimated, strict=True):
            if estimate.excess and op.writes:
                nbytes[op.writes[0]] += estimate.excess
        for n in nbytes:
            size(n)
    for each in sorted((s for group in joined.sums.values() for s in group if s.writes), key=lambda s: s.writes or 0):
        size(each.size)

    def add(r: int, indices: range) -> None:
        start = offset[r]
        for i in indices:
            graph_op, cost = regions[r].ops[i], estimates[r][i]
            read = [joined.resolve(start + v) for v in graph_op.reads]
            read += [v for at in graph_op.takes for v in joined.taken.get((r, at), ())]
            if tangents_held and i + 1 == len(regions[r].ops):
                read += [joined.resolve(start + v) for v in regions[r].values_in(regions[r].tangents)]
            reads = tuple(dict.fromkeys(read))
            writes = tuple(start + v for v in graph_op.writes)
            name = graph_op.node.name if graph_op.kind == "call" else f"{graph_op.node.name}_{graph_op.kind}"
            workspace = cost.workspace + sum(unsharded[v] for v in writes)
            ops.append(Op(name, reads, writes, cost.seconds, workspace, not graph_op.keep_because, r))
            origin.append(LoweredOp(r, i))
            kinds.append(op_kind(graph_op.node) if graph_op.kind == "call" else "random state")

    for r, region in enumerate(regions):
        start = offset[r]
        pinned.update(start + v for v in region.values_in(region.returned))
        if not accumulate and not reduced:
            pinned.update(joined.gradients[r])
        # a frame of Python may hold what a graph has passed to it until the forward pass has ended
        made = {start + v for v in region.values_in(region.fwd_outputs)}
        outputs.extend(made if region.fingerprint else made - joined.freed)
        incoming.extend(start + v for v in region.values_in(region.tangents))
        add(r, range(region.boundary))
    boundary = len(ops)
    pinned.difference_update(joined.freed)
    if tangents_pinned:
        pinned.update(set(incoming).difference(joined.same))
    for v in joined.unused:
        sizes[v] = 0
    incoming.append(len(sizes))
    pinned.add(len(sizes))
    sizes.append(-(-loss_bytes // granularity) * granularity)

    def add_own(
        kind: int, name: str, reads: Sequence[int] = (), writes: Sequence[int] = (), workspace: int = 0
    ) -> None:
        ops.append(Op(name, tuple(dict.fromkeys(reads)), tuple(writes), 0.0, workspace, False, region=kind))
        origin.append(LoweredOp(kind, 0))
        kinds.append(name)

    add_own(LOSS, "loss", outputs, incoming, loss_workspace)
    for r in reversed(range(len(regions))):
        add(r, range(regions[r].boundary, len(regions[r].ops)))
        for each in joined.sums.get(r, ()):
            reads = [joined.resolve(v) if v in joined.unused else v for v in each.reads]
            add_own(ACCUMULATE, "add gradients", reads, () if each.writes is None else [each.writes])
        if accumulate and not reduced:
            add_own(ACCUMULATE, COPIED, joined.gradients[r])
    if optimizer_step is not None:
        add_own(OPTIMIZER, "optimizer step", workspace=optimizer_step)
    problem = Problem(tuple(ops), tuple(sizes), boundary, frozenset(pinned), resident, budget)
    final = frozenset[int]().union(*joined.gradients)
    return Lowered(problem, tuple(origin), offset[:-1], tuple(kinds), final | joined.parts, final)


def raise_schedule(lowered: Lowered, schedule: Schedule) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """For each region, the ops that its forward and its backward pass run, in order."""
    passes: list[tuple[list[int], list[int]]] = [([], []) for _ in lowered.value_offset]
    half = 0
    for step in schedule.steps:
        origin = lowered.origin[step]
        if origin.region == LOSS:
            half = 1
        elif origin.region >= 0:
            passes[origin.region][half].append(origin.index)
    return tuple((tuple(forward), tuple(backward)) for forward, backward in passes)
