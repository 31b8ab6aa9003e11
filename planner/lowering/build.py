"""Builds the problem of one microbatch on one device: captured regions and estimates in, a `Step` out.

Ops of all regions stand in the order of the step: every forward pass in order, the loss, every backward pass in reverse
order. The loss op stands for the code between the passes: it reads the model's outputs and makes their gradients.
An op after a backward pass adds the gradients of the region to those of other regions, and, where gradients accumulate,
to those of earlier microbatches; the optimizer's step comes last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate as totals
from typing import Literal

from planner.capture.joint_graph import tensors
from planner.capture.provenance import op_kind, origins
from planner.capture.recomputability import is_random
from planner.capture.regions.calls import Held, Link
from planner.capture.regions.region import Region
from planner.compat.ops import name_of
from planner.core.plan import VARIABLES, Phase
from planner.core.step import OpOrigin, Row, Step
from planner.costs.ops import OpEstimate
from planner.lowering.links import LinkedValues, resolve_links
from solvers import Op, Problem, Schedule

LOSS, ACCUMULATE, OPTIMIZER, COMMUNICATION = -1, -2, -3, -4  # `Op.region` of ops that no region has
ADDED = "add gradients"  # the op that adds up gradients of one tensor
COPIED = "accumulate gradients"  # the op that adds a region's gradients to others, and frees them


@dataclass(frozen=True)
class BuildSettings:
    """The facts about a step that its graphs do not tell; bytes.

    Attributes:
        account: resident lines: name -> bytes.
        modules: the model's paths, as in `named_modules()`.
        loss_workspace: held only while the loss outside the model is computed, beside the gradients it makes.
        loss_forward: where the loop lets go of outputs on the way, held at most until it has; the gradients that the
            loss makes are among it.
        let_go: these outputs: regions and numbers of their results.
        at_once: of these, the ones that are gone before it computes anything.
        waited: of these, the ones that calls which wait hold as part of what the schedule keeps.
        loss_bytes: held by that loss until the end of the backward pass.
        tangents_pinned: the gradients that are made outside the regions and held to the end of the backward pass: all,
            or that of the loss, which is an output of the model's.
        tangents_held: whether the gradients that enter a region's backward pass are held until that has ended.
        accumulate: whether gradients are added to those of earlier microbatches (a line of `account`), and freed.
        optimizer_step: held only while the optimizer steps; None for no optimizer.
        shard: number of devices that share each gradient, once it is made.
        reduced: whether `insert_collectives` will say when gradients are freed: nothing holds them here.
        granularity: the allocator rounds sizes up to multiples of it.
        budget: None for no limit.
    """

    account: Mapping[str, int]
    modules: Collection[str] = ()
    loss_workspace: int = 0
    loss_forward: int = 0
    let_go: frozenset[tuple[int, int]] = frozenset()
    at_once: frozenset[tuple[int, int]] = frozenset()
    waited: frozenset[tuple[int, int]] = frozenset()
    loss_bytes: int = 0
    tangents_pinned: Literal["all", "loss", "none"] = "all"
    tangents_held: bool = False
    accumulate: bool = False
    optimizer_step: int | None = None
    shard: int = 1
    reduced: bool = False
    granularity: int = 1
    budget: int | None = None


@dataclass(frozen=True)
class _Parts:
    """The parts that a step is built of.

    Attributes:
        regions, estimates, settings: as for `build()`.
        offset: for each region, the problem's number of its first value; one more for the first number after all.
        linked: how values of regions are joined.
        sizes: of each value of the regions, and of each sum of gradients, in bytes.
        sharded_away: for each of these, the bytes that other devices take of it once it is made.
        places: for each region, the module and the user's line of each op.
        outputs: values that the loss reads.
        let_go: of these, the ones that the loop lets go of before the backward pass.
        at_once: of these, the ones that it lets go of before it computes anything.
        incoming: values that the loss makes: the gradients that come into regions.
    """

    regions: Sequence[Region]
    estimates: Sequence[Sequence[OpEstimate]]
    settings: BuildSettings
    offset: tuple[int, ...]
    linked: LinkedValues
    sizes: list[int]
    sharded_away: list[int]
    places: list[list[tuple[str, str]]]
    outputs: list[int]
    let_go: frozenset[int]
    at_once: frozenset[int]
    incoming: list[int]


def build(
    regions: Sequence[Region],
    estimates: Sequence[Sequence[OpEstimate]],
    links: Sequence[Link],
    settings: BuildSettings,
    named: Sequence[Held] = (),
) -> Step:
    """Write the training step as a `Problem`, with its provenance. O(ops + reads).

    Args:
        regions: in the order in which their forward passes run.
        estimates: for each region, one per op.
        links: tensors that regions make for each other; other results of regions are held to the end.
        settings: of the step.
        named: values of regions that Python's variables hold while other regions run.
    """
    parts = _parts(regions, estimates, links, settings)
    loss_saves, sizes = len(parts.sizes), [*parts.sizes, round_up(settings.loss_bytes, settings.granularity)]
    rows = list(_forward_rows(parts, named))
    at_once = parts.at_once if parts.let_go - parts.at_once else ()
    if at_once:
        rows.append(own_row(LOSS, "all outputs", "loss", parts.outputs))
    if parts.let_go:
        there = [v for v in parts.outputs if v not in at_once]
        rows.append(own_row(LOSS, "loss, with all outputs", "loss", there, (), settings.loss_forward))
    boundary = len(rows)
    waited = _let_go(regions, parts.offset, settings.waited)
    held = [v for v in parts.outputs if v not in parts.let_go or v in waited]
    rows.append(own_row(LOSS, "loss", "loss", held, [*parts.incoming, loss_saves], settings.loss_workspace))
    for r, region in reversed(list(enumerate(regions))):
        rows += _region_rows(parts, r, range(region.boundary, len(region.ops)))
        rows += _sum_rows(parts, r)
    if settings.optimizer_step is not None:
        rows.append(own_row(OPTIMIZER, "optimizer step", "optimizer", workspace=settings.optimizer_step))
    ops, table = zip(*rows, strict=True)
    resident = sum(settings.account.values())
    left = {parts.offset[each.value[0]] + each.value[1] for each in named if each.until is None}
    pinned = _pinned(parts) | left | {loss_saves}
    problem = Problem(ops, tuple(sizes), boundary, pinned, resident, settings.budget)
    final = frozenset[int]().union(*parts.linked.gradients)
    names = _names(regions)
    names += [""] * (len(sizes) - len(names))
    return Step(
        problem,
        settings.account,
        table,
        tuple(names),
        final | parts.linked.parts,
        final,
        optimizer_step=settings.optimizer_step,
    )


def _parts(
    regions: Sequence[Region],
    estimates: Sequence[Sequence[OpEstimate]],
    links: Sequence[Link],
    settings: BuildSettings,
) -> _Parts:
    offset = tuple(totals([0, *(len(region.values) for region in regions)]))
    linked = resolve_links(regions, links, offset)
    sizes, sharded_away = _value_sizes(regions, estimates, linked, settings)
    for v, nbytes in linked.made.items():
        sizes[v] = round_up(nbytes, settings.granularity)
    outputs: list[int] = []
    incoming: list[int] = []
    for region, start in zip(regions, offset, strict=False):
        # a frame of Python may hold what a graph has passed to it until the forward pass has ended
        returned = {start + v for v in region.values_in(region.fwd_outputs)}
        outputs.extend(returned if region.fingerprint else returned - linked.freed)
        incoming.extend(start + v for v in region.values_in(region.tangents))
    let_go, at_once = (_let_go(regions, offset, results) for results in (settings.let_go, settings.at_once))
    found = origins(((op.node, region.module) for region in regions for op in region.ops), settings.modules)
    places = [[next(found) for _ in region.ops] for region in regions]
    return _Parts(
        regions, estimates, settings, offset, linked, sizes, sharded_away, places, outputs, let_go, at_once, incoming
    )


def _let_go(regions: Sequence[Region], offset: Sequence[int], results: Collection[tuple[int, int]]) -> frozenset[int]:
    """The values of results that are let go of, as far as no other result has them."""
    gone: set[int] = set()
    for r, region in enumerate(regions):
        nodes = [region.output_at(at) for of, at in results if of == r]
        others = region.values_in(n for n in region.returned if n not in nodes)
        gone.update(offset[r] + v for v in set(region.values_in(nodes)).difference(others))
    return frozenset(gone)


def round_up(nbytes: int, granularity: int) -> int:
    """The least multiple of the granularity that is not less."""
    return -(-nbytes // granularity) * granularity


def own_row(
    kind: int, name: str, phase: Phase, reads: Iterable[int] = (), writes: Iterable[int] = (), workspace: int = 0
) -> Row:
    """An op that no region has; its time is not counted, and it runs once."""
    op = Op(name, tuple(dict.fromkeys(reads)), tuple(writes), 0.0, workspace, False, region=kind)
    return op, OpOrigin(name, phase)


def _value_sizes(
    regions: Sequence[Region],
    estimates: Sequence[Sequence[OpEstimate]],
    linked: LinkedValues,
    settings: BuildSettings,
) -> tuple[list[int], list[int]]:
    """Bytes of every value of the regions and of the sums of gradients; and bytes that other devices take of each."""
    nbytes: list[int] = []
    for region, estimated in zip(regions, estimates, strict=True):
        own = [v.nbytes for v in region.values]
        for op, estimate in zip(region.ops, estimated, strict=True):
            if estimate.excess and op.writes:
                own[op.writes[0]] += estimate.excess
        nbytes += own
    sums = [s for group in linked.sums.values() for s in group if s.writes]
    nbytes += [s.size for s in sorted(sums, key=lambda s: s.writes or 0)]
    shared = {v for each in linked.gradients for v in each} if settings.shard > 1 else set()
    shares = [-(-n // settings.shard) if v in shared else n for v, n in enumerate(nbytes)]
    sizes = [round_up(share, settings.granularity) for share in shares]
    return sizes, [n - share for n, share in zip(nbytes, shares, strict=True)]


def _names(regions: Sequence[Region]) -> list[str]:
    """For each value of the regions, its name in the emitted graphs; empty for states of generators."""
    names = []
    for region in regions:
        states = {v for op in region.ops if op.kind == "rng_state" for v in op.writes}
        names += ["" if v in states else value.owner.name for v, value in enumerate(region.values)]
    return names


def _forward_rows(parts: _Parts, named: Sequence[Held]) -> Iterator[Row]:
    """The forward passes of all regions, and until when variables hold what regions make."""
    last: dict[tuple[int, int], list[int]] = defaultdict(list)
    for each in named:
        if each.until is not None:
            last[each.until].append(parts.offset[each.value[0]] + each.value[1])
    for r, region in enumerate(parts.regions):
        for i in range(region.boundary):
            yield from _region_rows(parts, r, range(i, i + 1))
            if (r, i) in last:
                yield own_row(LOSS, VARIABLES, "forward", last[r, i])


def _region_rows(parts: _Parts, r: int, indices: range) -> Iterator[Row]:
    """Some ops of region number `r`."""
    region, start, linked = parts.regions[r], parts.offset[r], parts.linked
    for i in indices:
        graph_op, cost = region.ops[i], parts.estimates[r][i]
        reads = [linked.resolve(start + v) for v in graph_op.reads]
        reads += [v for at in graph_op.takes for v in linked.taken.get((r, at), ())]
        if parts.settings.tangents_held and region.boundary <= i == len(region.ops) - 1:
            reads += [linked.resolve(start + v) for v in region.values_in(region.tangents)]
        writes = tuple(start + v for v in graph_op.writes)
        workspace = cost.workspace + sum(parts.sharded_away[v] for v in writes)
        called, because = graph_op.kind == "call", graph_op.keep_because
        name = graph_op.node.name if called else f"{graph_op.node.name}_{graph_op.kind}"
        kind = op_kind(graph_op.node) if called else "random state"
        phase: Phase = "forward" if i < region.boundary else "backward"
        yield (
            Op(name, tuple(dict.fromkeys(reads)), writes, cost.seconds, workspace, not because, r),
            OpOrigin(
                kind,
                phase,
                *parts.places[r][i],
                r,
                i,
                because,
                called and is_random(graph_op.node),
                target=name_of(graph_op.node.target) if called else "",
            ),
        )


def _sum_rows(parts: _Parts, r: int) -> Iterator[Row]:
    """The ops after a region's backward pass that add its gradients to others."""
    linked, settings = parts.linked, parts.settings
    for each in linked.sums.get(r, ()):
        reads = [linked.resolve(v) if linked.made.get(v) == 0 else v for v in each.reads]
        writes = () if each.writes is None else [each.writes]
        yield own_row(ACCUMULATE, ADDED, "backward", reads, writes, each.workspace)
    if settings.accumulate and not settings.reduced:
        yield own_row(ACCUMULATE, COPIED, "backward", linked.gradients[r])


def _pinned(parts: _Parts) -> frozenset[int]:
    """The values that the caller, autograd or `.grad` hold to the end of the step."""
    settings, linked = parts.settings, parts.linked
    pinned: set[int] = set()
    tangents: set[int] = set()
    for r, region in enumerate(parts.regions):
        pinned.update(parts.offset[r] + v for v in region.values_in(region.returned))
        if not settings.accumulate and not settings.reduced:
            pinned.update(linked.gradients[r])
        every = settings.tangents_pinned == "all"
        held = [n for n in region.tangents if every or all(t.dim() == 0 for t in tensors(n))]
        tangents.update(parts.offset[r] + v for v in region.values_in(held))
    pinned -= linked.freed | parts.let_go
    if settings.tangents_pinned != "none":
        pinned.update(tangents.difference(linked.same))
    return frozenset(pinned)


def split_by_region(
    step: Step, schedule: Schedule, regions: int
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """For each of so many regions, the ops that its forward and its backward pass run, in order."""
    passes: list[tuple[list[int], list[int]]] = [([], []) for _ in range(regions)]
    half = 0
    for i in schedule.steps:
        origin = step.origins[i]
        if origin.phase == "loss":
            half = 1
        elif origin.region is not None:
            passes[origin.region][half].append(origin.index)
    return tuple((tuple(forward), tuple(backward)) for forward, backward in passes)


def made_again(
    step: Step, regions: Sequence[Region], passes: Sequence[Sequence[Sequence[int]]]
) -> list[tuple[int, ...]]:
    """For each region, as `PlannedRegion` has it, the results that ops of its backward pass make again.

    Args:
        step: with the values of the regions first.
        regions: of the step.
        passes: for each region, the ops of its forward and of its backward pass.
    """
    starts = totals((len(region.values) for region in regions), initial=0)
    found = []
    for start, region, (_, backward) in zip(starts, regions, passes, strict=False):
        results = {v for v in region.values_in(region.fwd_outputs) if start + v not in step.problem.pinned}
        again = {i for i in backward if i < region.boundary and len(region.ops[i].writes) > 1}
        found.append(tuple(sorted(results.intersection(v for i in again for v in region.ops[i].writes))))
    return found
