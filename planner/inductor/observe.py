"""A dry run, read as a region whose ops are the launches of the wrappers: the `Step` with the exact peak is of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import tensors
from planner.capture.regions.region import GraphOp, GraphValue, Region
from planner.core.step import Step
from planner.costs.measure_op import Allocated
from planner.costs.measured_ops import measure
from planner.costs.ops import OpEstimate, roofline_seconds
from planner.devices.specs import Device
from planner.inductor.backend import Look
from planner.inductor.dry_run import DryRun, Launch
from planner.inductor.emit import OP
from planner.inductor.realise import Fused


@dataclass(frozen=True)
class Observed:
    """A step as wrappers run it.

    Attributes:
        region: its ops are launches, each run once.
        estimates: one for each.
        kinds: what to call each launch.
        again: for each, whether most of what it makes, in bytes, has been made before.
        steps: for each, the coarse ops whose results it makes.
        makers: for each value, the coarse op whose result it is; None for a gradient that comes in and for others.
    """

    region: Region
    estimates: tuple[OpEstimate, ...]
    kinds: tuple[str, ...]
    again: tuple[bool, ...]
    steps: tuple[tuple[int, ...], ...]
    makers: tuple[int | None, ...]


def workspaces(looks: Iterable[Look], here: torch.device | None, progress: bool | None) -> dict[str, Allocated]:
    """What the ops that are no kernels of Inductor's own take beside their results, by `Call.key`."""
    calls = [launch.call for each in looks for launch in each.run.launches if launch.call is not None]
    return measure(calls, here, progress=progress) if here is not None else {}


def observe(fused: Fused, look: Look, device: Device, taken: Mapping[str, Allocated]) -> Observed:
    """Read a look at a schedule of a region's coarse ops. O(launches + what they read).

    Args:
        fused: the region.
        look: what Inductor makes of the schedule.
        device: whose rates.
        taken: as `workspaces` returns them.
    """
    run, fine = look.run, fused.fine
    nodes = [_nodes(launch, look) for launch in run.launches]
    number, values = _values(run, fused, nodes)
    reads, held = _reads(run, number)
    excess = _excess(run)
    takes = defaultdict(list)
    for at, storage in enumerate(run.inputs):
        if storage is not None:
            takes[storage].append(at)
    ops, estimates, kinds, again, steps = [], [], [], [], []
    for i, launch in enumerate(run.launches):
        made = [n for n in nodes[i] if OP in n.meta]
        coarse = tuple(dict.fromkeys(n.meta[OP] for n in made))
        node = fused.coarse.ops[coarse[-1]].node if coarse else fine.ops[0].node
        writes = tuple(number[v] for v in launch.writes if v in number)
        primals = tuple(at for v in launch.reads for at in takes.get(v, ()))
        op_reads = tuple(dict.fromkeys(v for v in (*reads[i], *held[i]) if v not in writes))
        ops.append(GraphOp(node, "call", op_reads, writes, "", primals))
        allocated = taken.get(launch.call.key) if launch.call is not None else None
        more = allocated or Allocated(0, 0)
        seconds = launch.nbytes / device.bandwidth + device.launch
        if launch.call is not None and coarse:
            seconds = max(seconds, roofline_seconds(node, device))
        estimates.append(OpEstimate(seconds, 0, excess[i] + more.workspace, more.excess))
        kinds.append(_kind(launch))
        again.append(_mostly_again(made))
        steps.append(coarse)
    makers: list[int | None] = [None] * len(values)
    for i, op in enumerate(ops):
        for v in op.writes:
            makers[v] = next((s for s in steps[i] if fused.coarse.ops[s].node is values[v].owner), None)
    region = replace(
        fine,
        ops=tuple(ops),
        boundary=run.boundary,
        values=tuple(values),
        value_of=_value_of(run, fine, number),
        primal_of=_primal_of(run, fine),
    )
    return Observed(region, tuple(estimates), tuple(kinds), tuple(again), tuple(steps), tuple(makers))


def _mostly_again(made: Sequence[fx.Node]) -> bool:
    """Whether emitted nodes whose results a launch makes are, by their bytes, mostly runs of what has run before."""
    sizes = {True: 0, False: 0}
    for node in made:
        sizes[bool(node.meta.get("runs_again"))] += sum(t.nbytes for t in tensors(node))
    return sizes[True] > sizes[False]


def told(step: Step, observed: Sequence[Observed | None]) -> Step:
    """The step that was built of these regions, its ops called by their kernels, with what runs again marked."""
    origins = list(step.origins)
    for i, origin in enumerate(origins):
        if origin.region is not None and (own := observed[origin.region]) is not None:
            origins[i] = replace(origin, kind=own.kinds[origin.index], again=own.again[origin.index])
    return replace(step, origins=tuple(origins))


def _kind(launch: Launch) -> str:
    """A kernel's name without what numbers it: "fused_gelu_view" of "cpp_fused_gelu_view_3"; an op's own name."""
    if launch.call is not None:
        return launch.name.split(".")[1]
    parts = launch.name.split("_")
    name = "_".join(parts[parts.index("fused") :] if "fused" in parts else parts).rstrip("0123456789_")
    return name if len(name) <= 60 else f"{name[:57]}..."


def _nodes(launch: Launch, look: Look) -> list[fx.Node]:
    """The emitted nodes whose results a launch makes."""
    realised = (look.backward if launch.backward else look.forward).realised
    return [realised[name] for name in launch.made if name in realised]


def _values(run: DryRun, fused: Fused, nodes: Sequence[Sequence[fx.Node]]) -> tuple[dict[int, int], list[GraphValue]]:
    """For each storage that is counted, the number of its value; and these."""
    owners: dict[int, fx.Node] = {}
    for launch, made in zip(run.launches, nodes, strict=True):
        tagged = [fused.coarse.ops[n.meta[OP]].node for n in made if OP in n.meta]
        for v, node in zip(launch.writes, [*tagged, *[fused.fine.ops[0].node] * len(launch.writes)], strict=False):
            owners[v] = node
    ends = zip([*run.results, *run.gradients], [*fused.fine.fwd_outputs, *fused.fine.grads], strict=True)
    for storage, end in ends:
        if storage in owners and isinstance(end, fx.Node):
            owners[storage] = _base(fused, end)
    for tangent, node in zip(run.tangents, fused.fine.tangents, strict=True):
        if tangent is not None and node.users:
            owners[tangent] = node
    order = sorted(owners)
    return {v: n for n, v in enumerate(order)}, [GraphValue(owners[v], run.sizes[v]) for v in order]


def _base(fused: Fused, node: fx.Node) -> fx.Node:
    """The node that makes what a node is, or is a view of."""
    held = fused.fine.value_of[node]
    writers = [op.node for op in fused.fine.ops if held and held[0] in op.writes]
    return writers[0] if writers else node


def _reads(run: DryRun, number: Mapping[int, int]) -> tuple[list[list[int]], list[list[int]]]:
    """For each launch, the values that it reads, and those that are held until it has ended."""
    reads = [[number[v] for v in launch.reads if v in number] for launch in run.launches]
    held: list[list[int]] = [[] for _ in run.launches]
    made = {v: i for i, launch in enumerate(run.launches) for v in launch.writes}
    for v, n in number.items():
        if (last := run.freed[v]) is not None:
            held[max(last, made.get(v, 0))].append(n)
    return reads, held


def _excess(run: DryRun) -> list[int]:
    """For each launch, bytes that are held beside what its region says: made before others are freed."""
    live = 0
    found = []
    freed = defaultdict(list)
    made = {v: i for i, launch in enumerate(run.launches) for v in launch.writes}
    made |= {v: run.boundary for v in run.tangents if v is not None}
    for v, last in enumerate(run.freed):
        if last is not None and v in made:
            freed[max(last, made[v])].append(v)
    for i, launch in enumerate(run.launches):
        live += sum(run.sizes[v] for v in launch.writes)
        live += sum(run.sizes[v] for v in run.tangents if v is not None) if i == run.boundary else 0
        found.append(max(0, launch.held - live))
        live -= sum(run.sizes[v] for v in freed[i])
    return found


def _value_of(run: DryRun, fine: Region, number: Mapping[int, int]) -> dict[fx.Node, tuple[int, ...]]:
    """The values of the graph's ends: its results, the gradients that come in and those that go out."""
    held: dict[fx.Node, tuple[int, ...]] = dict.fromkeys(fine.joint.graph.nodes, ())
    storages = [*run.results, *run.gradients, *run.tangents]
    for v, node in zip(storages, [*fine.fwd_outputs, *fine.grads, *fine.tangents], strict=True):
        if isinstance(node, fx.Node) and v is not None and v in number:
            held[node] = (number[v],)
    return held


def _primal_of(run: DryRun, fine: Region) -> dict[fx.Node, tuple[int, ...]]:
    """The positions of the primals that results of the graph are, or are views of."""
    given: dict[Any, int] = {}
    for at, v in enumerate(run.inputs):
        if v is not None:
            given.setdefault(v, at)
    found: dict[fx.Node, tuple[int, ...]] = {n: (at,) for at, n in enumerate(fine.primals)}
    for v, node in zip([*run.results, *run.gradients], [*fine.fwd_outputs, *fine.grads], strict=True):
        if isinstance(node, fx.Node) and v is not None and v in given:
            found[node] = (given[v],)
    return found
