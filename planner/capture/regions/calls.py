"""The calls of compiled graphs in one step: their regions, and the tensors that these pass on and share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from planner.capture.recomputability import statistics_of
from planner.capture.regions.region import Region
from planner.compat.tensors import version_of
from planner.core.call import storages
from planner.errors import CaptureError


@dataclass(frozen=True)
class RegionCall:
    """One call of a compiled graph.

    Attributes:
        key: of the Dynamo graph; empty for ops that ran outside every graph.
        region: None for a graph without a gradient.
        inputs: its arguments.
        versions: of the inputs once it had returned; 0 for an input that is no tensor.
        results: its results.
        edges: where autograd takes the gradients of the results as they were returned; None for what needs none. The
            tensor has another one once it was written into.
        module: path of the module that called it.
        held: the storages of tensors that variables of the model's functions name while it runs, by `storage_key`.
    """

    key: str
    region: Region | None
    inputs: tuple[Any, ...]
    versions: tuple[int, ...]
    results: tuple[Any, ...]
    edges: tuple[GradientEdge | None, ...] = ()
    module: str = ""
    held: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ViewSums:
    """Gradients of all results that are views of one, which are made outside its region; bytes.

    Attributes:
        at_once: at most while they are added up, with the sum.
        outputs: of them, those that the model's outputs get.
    """

    at_once: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Link:
    """A tensor that regions take from another one, or share.

    Attributes:
        producer: (region, result) that makes it; None for a parameter or an input of the model.
        uses: (region, argument) of those that take it, in the order of the forward pass.
        held: whether something other than regions holds it to the end of the step, and may give it a gradient.
        sums: where it is a view that is made outside its region, with the others of the same result.
        stays: whether modules hold it to the end of the step.
        aside: its position among the leaves of the model's output and, after these, the results that modules keep as
            attributes, where it is one of the latter, to which the loop may give a gradient.
    """

    producer: tuple[int, int] | None
    uses: tuple[tuple[int, int], ...]
    held: bool
    sums: ViewSums | None = None
    stays: bool = False
    aside: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A value that variables of the model's functions hold while other regions run, which need not use it.

    Attributes:
        value: (region, value); of a region outside compiled graphs.
        until: (region, op) of the forward pass, the last one that runs meanwhile; None for the end of the step.
    """

    value: tuple[int, int]
    until: tuple[int, int] | None


def version(t: Any) -> int:
    """How often a tensor was written into; 0 for another object."""
    return version_of(t) if isinstance(t, torch.Tensor) else 0


def regions_of(calls: Sequence[RegionCall]) -> tuple[Region, ...]:
    """The region of each call that has one; results of ops that read a tensor overwritten after the call are kept.

    Raises:
        CaptureError: the backward pass reads such a tensor.
    """
    regions = []
    for call in calls:
        if call.region is not None:
            late = {at for at, t in enumerate(call.inputs) if version(t) != call.versions[at]}
            primals = {at for argument in late if (at := call.region.input_at(argument)) is not None}
            region = replace(call.region, module=call.module)
            regions.append(_keep_readers(region, primals) if primals else region)
    return tuple(regions)


def _keep_readers(region: Region, primals: set[int]) -> Region:
    ops = list(region.ops)
    for i, op in enumerate(ops):
        unread = statistics_of(op.node) if op.kind == "call" else []  # by a second run
        if any(at in primals and region.primals[at] not in unread for at in op.takes):
            if i >= region.boundary:
                raise CaptureError(
                    f"{op.node.format_node()} of the backward pass reads a buffer or an input that is overwritten "
                    "after its forward pass, so its gradient would be wrong. Write a new tensor instead"
                )
            ops[i] = replace(op, keep_because="it reads an input that is overwritten later")
    return replace(region, ops=tuple(ops))


def order_of(calls: Sequence[RegionCall]) -> dict[str, tuple[int | None, ...]]:
    """For each Dynamo graph, by key, the regions that its calls are, in order; None for a call without a gradient."""
    order: dict[str, tuple[int | None, ...]] = {}
    count = 0
    for call in calls:
        if call.key:
            order[call.key] = (*order.get(call.key, ()), None if call.region is None else count)
        count += call.region is not None
    return order


def outputs_of(calls: Sequence[RegionCall], output: Sequence[Any]) -> tuple[tuple[int, int] | None, ...]:
    """For each leaf of the model's output, the region and result that it is; None for another object."""
    found: dict[int, tuple[int, int]] = {}
    for r, call in enumerate(call for call in calls if call.region is not None):
        found |= {id(t): (r, at) for at, t in enumerate(call.results) if isinstance(t, torch.Tensor)}
    return tuple(found.get(id(leaf)) for leaf in output)


def parameters_of_calls(calls: Sequence[RegionCall], names: Mapping[int, str]) -> dict[tuple[int, int], str]:
    """The arguments of regions that are parameters of the model: (region, argument) -> name.

    Args:
        calls: in order.
        names: of the parameters, by their identity.
    """
    regions = enumerate(call for call in calls if call.region is not None)
    return {(r, at): names[id(t)] for r, call in regions for at, t in enumerate(call.inputs) if id(t) in names}


def links_of(
    calls: Sequence[RegionCall],
    output: Sequence[Any],
    sums: Mapping[int, ViewSums],
    left: frozenset[int] = frozenset(),
    aside: Sequence[torch.Tensor] = (),
) -> tuple[Link, ...]:
    """The tensors that regions pass to each other and share.

    Args:
        calls: in order.
        output: the leaves of the model's output.
        sums: as in `Link`, by the tensor's identity.
        left: the storages of tensors that modules hold once the model has returned.
        aside: the results that they keep as attributes.
    """
    places = {id(t): at for at, t in enumerate(aside, len(output))}
    seen: dict[int, torch.Tensor] = {}
    producers: dict[int, tuple[int, int]] = {}
    uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for r, call in enumerate(call for call in calls if call.region is not None):
        for at, t in enumerate(call.inputs):
            if isinstance(t, torch.Tensor):
                seen[id(t)] = t
                uses[id(t)].append((r, at))
        for at, t in enumerate(call.results):
            if isinstance(t, torch.Tensor) and id(t) not in seen:
                seen[id(t)] = t
                producers[id(t)] = (r, at)
    # storages of the model's outputs, and those shared with a tensor that no region produced
    elsewhere = set(storages(output))
    shared = Counter(s for t in seen.values() for s in storages(t))
    elsewhere |= {s for key, t in seen.items() if key not in producers for s in storages(t) if shared[s] > 1}
    links = []
    for key, takers in uses.items():
        t = seen[key]
        leaf = t.is_leaf and t.requires_grad  # autograd's node for its gradient holds it
        held = leaf or any(s in elsewhere for s in storages(t))
        if key in producers or (len(takers) > 1 and leaf):
            stays = not left.isdisjoint(storages(t))
            links.append(Link(producers.get(key), tuple(takers), held, sums.get(key), stays, places.get(key)))
    return tuple(links)


def held_of(calls: Sequence[RegionCall], left: Collection[int]) -> tuple[Held, ...]:
    """What variables hold of the values that are made outside compiled graphs, beyond the region that makes each.

    What compiled graphs return is counted to the end of the forward pass anyway.

    Args:
        calls: in order.
        left: the storages of tensors that modules hold once the model has returned.
    """
    made: dict[int, tuple[int, int]] = {}
    until: dict[tuple[int, int], tuple[int, int] | None] = {}
    for r, call in enumerate(call for call in calls if call.region is not None):
        region = call.region
        assert region is not None
        ops = range(region.boundary) if not call.key else range(region.boundary - 1, region.boundary)
        for i in ops:
            storages_held = call.held if call.key else region.ops[i].node.meta["held"]
            until |= {made[storage]: (r, i) for storage in storages_held & made.keys()}
        if not call.key:
            made |= {storage: (r, v) for storage, v in region.value_by_storage().items()}
    until |= {made[storage]: None for storage in made.keys() & left}
    return tuple(starmap(Held, until.items()))
