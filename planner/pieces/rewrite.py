"""Writes sets of ops that run in pieces as single ops of a region."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import map_nodes, tensors
from planner.capture.passes.order import Order
from planner.capture.provenance import op_kind
from planner.capture.regions.region import Region, analyse
from planner.core.call import storages
from planner.core.pieces import Split, cut, run_in_pieces
from planner.pieces.body import Body
from planner.pieces.groups import SUM, Group, can_be_cut
from planner.pieces.recognise import Found, recognise, results, source
from planner.pieces.rules import IN_PLACE
from planner.pieces.ways import given

_ATEN = torch.ops.aten
Inputs = Mapping[tuple[fx.Node, Group | None], fx.Node]
_HALF = (torch.float16, torch.bfloat16)  # sums of many pieces are kept in single precision


@dataclass(frozen=True)
class Piecewise:
    """A set of ops as a single one.

    Attributes:
        found: the set.
        reads: what it is given: nodes of the region, each with the group that is cut, or None.
        makes: the nodes that others read, each with the group that is cut, or SUM.
        views: ops of the set that others read, and that are views: they are written beside it, too.
    """

    found: Found
    reads: tuple[tuple[fx.Node, Group | None], ...]
    makes: tuple[tuple[fx.Node, Group], ...]
    views: frozenset[fx.Node]

    @property
    def own(self) -> frozenset[fx.Node]:
        """The ops that run nowhere else."""
        return frozenset(self.found.ways) - self.found.repeated


def in_pieces(region: Region, splits: Sequence[Split]) -> Region | None:
    """The region with sets of its ops in pieces; None where a split is not of it.

    Args:
        region: as captured.
        splits: each of other ops.
    """
    if not splits:
        return region
    sets: list[tuple[Piecewise, int]] = []
    for split in splits:
        if not 0 <= split.seed < len(region.order.nodes):
            return None
        found = piecewise(region, region.order.nodes[split.seed], (split.first, split.last))
        if not found or split.pieces > found[0].found.parts:
            return None
        sets += [(each, split.pieces) for each in found]
    taken = [node for each, _ in sets for node in each.own]
    if len(set(taken)) != len(taken):
        return None
    joint, order = _written(region, sets)
    analysed = analyse(joint, len(region.fwd_outputs), order)
    return replace(
        analysed,
        fingerprint=region.fingerprint,
        checkpointed=region.checkpointed,
        module=region.module,
        splits=tuple(splits),
    )


def piecewise(region: Region, seed: fx.Node, group: Group) -> tuple[Piecewise, ...]:
    """The sets around an op's result that is cut along a group, with what goes in and out; none where there is no such
    set, or where a result cannot be written in pieces.
    """
    sets = recognise(region, seed, group)
    found = tuple(_ends(each, sets) for each in sets)
    return tuple(each for each in found if each is not None) if None not in found else ()


def _ends(found: Found, sets: Sequence[Found]) -> Piecewise | None:
    reads: dict[tuple[fx.Node, Group | None], None] = {}
    for node, way in found.ways.items():
        for x, group in zip(given(node), way.reads, strict=True):
            if source(x)[0] not in found.ways:
                reads[x, group] = None
    makes: dict[fx.Node, Group] = {}
    views: set[fx.Node] = set()
    stack = [
        t for node in found.ways if node not in found.repeated for t in results(node) if _read_outside(t, found, sets)
    ]
    while stack:
        t = stack.pop()
        op, result = source(t)
        if op in found.ways and _is_view(op):
            views.add(op)
            stack.append(given(op)[0])
        elif op in found.ways and t not in makes:
            makes[t] = found.ways[op].makes[result]
            if (quotient := found.ways[op].quotient) is not None and result == quotient[0]:
                by = [other for other in results(op) if source(other)[1] == quotient[1]]
                if not by:
                    return None
                stack += by
    keys = [key for t in makes for key in storages(t.meta["val"])]
    if len(set(keys)) != len(keys) or any(g != SUM and not can_be_cut(t.meta["val"], g) for t, g in makes.items()):
        return None
    place = {node: at for at, node in enumerate(found.ways)}
    ordered = sorted(makes.items(), key=lambda pair: (place[source(pair[0])[0]], source(pair[0])[1]))
    return Piecewise(found, tuple(reads), tuple(ordered), frozenset(views))


def _read_outside(t: fx.Node, found: Found, sets: Sequence[Found]) -> bool:
    """Whether anything but the set reads a node, or another set that does not make it for itself."""
    repeating = [other for other in sets if source(t)[0] in other.repeated]
    return any(
        user not in found.ways and not any(user in other.ways for other in repeating)
        for user in t.users
        if user.target is not operator.getitem or source(user)[0] is not t
    )


def _is_view(op: fx.Node) -> bool:
    inputs = given(op)
    if op.target in IN_PLACE or len(inputs) != 1:
        return False
    return not storages(op.meta["val"]).keys().isdisjoint(storages(inputs[0].meta["val"]))


def _written(region: Region, sets: Sequence[tuple[Piecewise, int]]) -> tuple[fx.GraphModule, Order]:
    """The joint graph with the sets as single ops, and the order in which its nodes run."""
    sequence: list[Any] = list(region.order.nodes)
    for at, _ in enumerate(sets):
        sequence = _collapsed(sequence, [each for each, _ in sets], at)
    joint = fx.GraphModule(region.joint, fx.Graph())
    writer = _Writer(joint, {})
    for node in region.joint.graph.find_nodes(op="placeholder"):
        writer.copy(node)
    forward: set[fx.Node] = {writer.now[n] for n in region.order.forward if n.op == "placeholder"}
    for item in sequence:
        if isinstance(item, fx.Node):
            new = [writer.copy(item)]
            first = item in region.order.forward
        else:
            each, count = sets[item]
            new = writer.write(each, count, item)
            first = any(n in region.order.forward for n in each.own)
        forward.update(new if first else ())
    output = region.joint.graph.output_node()
    writer.copy(output)
    order = Order([n for n in joint.graph.nodes if n.op not in ("placeholder", "output")], forward)
    joint.recompile()
    return joint, order


def _collapsed(sequence: Sequence[Any], sets: Sequence[Piecewise], at: int) -> list[Any]:
    """The sequence with a set's ops as one item, its number; what depends on it comes after it."""
    each = sets[at]
    own = each.own
    gone = [
        i
        for i, n in enumerate(sequence)
        if isinstance(n, fx.Node) and source(n)[0] in own and source(n)[0] not in each.views
    ]
    last = max(gone)
    removed = set(gone)
    late: set[fx.Node] = {t for t, _ in each.makes}
    before: list[Any] = []
    after: list[Any] = []
    for i, item in enumerate(sequence[: last + 1]):
        if i in removed:
            continue
        single = isinstance(item, fx.Node)
        reads = item.all_input_nodes if single else [x for x, _ in sets[item].reads]
        if late.isdisjoint(reads):
            before.append(item)
        else:
            after.append(item)
            late.update([item] if single else [t for t, _ in sets[item].makes])
    return [*before, at, *after, *sequence[last + 1 :]]


class _Writer:
    """Writes a joint graph: knows, for each node of the captured one, the node that holds it now."""

    def __init__(self, joint: fx.GraphModule, now: dict[fx.Node, fx.Node]) -> None:
        self.joint, self.graph, self.now = joint, joint.graph, now

    def copy(self, node: fx.Node) -> fx.Node:
        """A node as it is."""
        new = self.graph.node_copy(node, lambda n: self.now[n])
        self.now[node] = new
        return new

    def write(self, each: Piecewise, count: int, number: int) -> list[fx.Node]:
        """A set as a single op, its results, and what has yet to be done to sums."""
        lengths = lengths_of(each.found.parts, count)
        names = [f"piece_{number}", f"piece_{number}_rest" if lengths[-1] != lengths[0] else f"piece_{number}"]
        main = max(each.own, key=lambda n: max(t.numel() for t in tensors(n)))
        values = [
            _sum_like(t.meta["val"]) if g == SUM and _unfinished(each, t) else t.meta["val"] for t, g in each.makes
        ]
        for name, length in dict(zip(names, (lengths[0], lengths[-1]), strict=True)).items():
            setattr(self.joint, name, body_of(each, values, length))
        bodies = [self.graph.get_attr(name) for name in names]
        makes = tuple(
            (tuple(v.shape), tuple(v.stride()), v.dtype, v.device, g)
            for v, (_, g) in zip(values, each.makes, strict=True)
        )
        node = self.graph.create_node(
            "call_function",
            run_in_pieces,
            (*bodies, lengths, tuple(g for _, g in each.reads), makes, *[self.now[x] for x, _ in each.reads]),
            name=f"{op_kind(main)}_in_{count}_pieces",
        )
        node.meta = {**main.meta, "val": tuple(values)}
        new = [*bodies, node]
        for i, ((t, _), value) in enumerate(zip(each.makes, values, strict=True)):
            part = self.graph.call_function(operator.getitem, (node, i))
            part.meta = {**t.meta, "val": value}
            self.now[t] = part
            new.append(part)
        return [*new, *self._finish(each)]

    def _finish(self, each: Piecewise) -> list[fx.Node]:
        """Means as quotients of sums, and sums in the dtype that they have in the region."""
        new = []
        sums = {source(t): self.now[t] for t, _ in each.makes}
        for t, group in each.makes:
            op, result = source(t)
            way, raw = each.found.ways[op], self.now[t]
            if group != SUM or not _unfinished(each, t):
                continue
            if way.quotient is not None and way.quotient[0] == result:
                raw = self.graph.call_function(_ATEN.div.Tensor, (raw, sums[op, way.quotient[1]]))
                raw.meta = {**t.meta, "val": _sum_like(t.meta["val"])}
                new.append(raw)
            if t.meta["val"].dtype in _HALF:
                raw = self.graph.call_function(_ATEN._to_copy.default, (raw,), {"dtype": t.meta["val"].dtype})
                new.append(raw)
            raw.meta = dict(t.meta)
            self.now[t] = raw
        return new


def _unfinished(each: Piecewise, t: fx.Node) -> bool:
    """Whether the sum over pieces is not yet the node's value."""
    op, result = source(t)
    quotient = each.found.ways[op].quotient
    return t.meta["val"].dtype in _HALF or (quotient is not None and quotient[0] == result)


def _sum_like(t: torch.Tensor) -> torch.Tensor:
    """A fake tensor for a sum that is not finished: in single precision, where the value is in half."""
    with t.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_like(t, dtype=torch.float32 if t.dtype in _HALF else t.dtype)


def lengths_of(parts: int, count: int) -> tuple[int, ...]:
    """The lengths of so many pieces at most: all alike, but that the last may be shorter."""
    length = -(-parts // count)
    return tuple(min(length, parts - start) for start in range(0, parts, length))


def body_of(each: Piecewise, values: Sequence[torch.Tensor], length: int) -> fx.GraphModule:
    """The graph of a piece: inputs, then parts of the results (`values`), which it writes; it returns nothing."""
    mode = values[0].fake_mode  # type: ignore[attr-defined]
    body = Body(mode, length)

    def placeholder(name: str, value: torch.Tensor, group: Group | None) -> fx.Node:
        with mode:
            like = value if group is None or group == SUM else cut(value, group, 0, length)
        return body.placeholder(name, like, tuple(like.shape), tuple(like.stride()))

    inputs = {(x, g): placeholder(f"given_{i}", x.meta["val"], g) for i, (x, g) in enumerate(each.reads)}
    slots = {t: placeholder(f"made_{i}", v, g) for i, (v, (t, g)) in enumerate(zip(values, each.makes, strict=True))}
    now: dict[fx.Node, fx.Node] = {}
    for node, way in each.found.ways.items():
        here = partial(_here, iter(way.reads), now, inputs)
        args, kwargs = map_nodes((tuple(node.args), dict(node.kwargs)), here)
        slot = slots.get(node)
        if slot is not None and node.target is _ATEN.mm.default and way.makes == (SUM,) and _same_dtype(slot, args):
            body.call(_ATEN.addmm_.default, slot, *args)
            continue
        made = way.write(body, args, kwargs) if way.write else body.call(node.target, *args, **kwargs)
        for t in results(node):
            now[t] = made if t is node else body.call(operator.getitem, made, source(t)[1])
            if (slot := slots.get(t)) is not None:
                total = way.makes[source(t)[1]] == SUM
                body.call(_ATEN.add_.Tensor if total else _ATEN.copy_.default, slot, now[t])
    body.graph.output(())
    body.graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), body.graph, class_name="Piece")


def _here(groups: Iterator[Group | None], now: Mapping[fx.Node, fx.Node], inputs: Inputs, x: fx.Node) -> fx.Node:
    """The node of a piece that stands for an argument, the next that is asked for."""
    group = next(groups)
    return inputs[x, group] if (x, group) in inputs else now[x]


def _same_dtype(slot: fx.Node, args: Iterable[fx.Node]) -> bool:
    return all(n.meta["val"].dtype == slot.meta["val"].dtype for n in args)
