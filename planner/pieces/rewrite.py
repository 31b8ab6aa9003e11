"""Writes sets of ops that run in pieces as single ops of a region."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import may_write
from planner.capture.passes.order import Order
from planner.capture.passes.whole_ops import WholeOps, remember
from planner.capture.provenance import op_kind
from planner.capture.regions.region import Region, analyse
from planner.core.call import storages
from planner.core.pieces import Split, run_in_pieces
from planner.pieces.ends import Piecewise, piecewise
from planner.pieces.groups import SUM
from planner.pieces.known import Known
from planner.pieces.piece import body_of
from planner.pieces.recognise import results, source

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)  # sums of many pieces are kept in single precision


def in_pieces(region: Region, splits: Sequence[Split], known: Known | None = None) -> Region | None:
    """The region with sets of its ops in pieces; None where a split is not of it.

    Args:
        region: as captured.
        splits: each of other ops.
        known: the ways of the region's ops, as far as they were looked up before.
    """
    if not splits:
        return region
    sets: list[tuple[Piecewise, int]] = []
    known = known or Known()
    for split in splits:
        if not 0 <= split.seed < len(region.order.nodes):
            return None
        found = piecewise(region, region.order.nodes[split.seed], (split.first, split.last), known, split.hops)
        if not found or split.pieces > found[0].found.parts:
            return None
        sets += [(each, split.pieces) for each in found]
    taken = [node for each, _ in sets for node in each.own]
    if len(set(taken)) != len(taken):
        return None
    written = _written(region, sets)
    if written is None:
        return None
    joint, order = written
    analysed = analyse(joint, len(region.fwd_outputs), order, known_as=region.fingerprint)
    return replace(
        analysed,
        checkpointed=region.checkpointed,
        module=region.module,
        splits=tuple(splits),
        rnns_in_parts=region.rnns_in_parts,
    )


def _written(region: Region, sets: Sequence[tuple[Piecewise, int]]) -> tuple[fx.GraphModule, Order] | None:
    """The joint graph with the sets as single ops, and the order in which its nodes run; None where ops
    would wait for each other.
    """
    together = alone(region).with_sets([each for each, _ in sets])
    if together is None:
        return None
    joint = fx.GraphModule(region.joint, fx.Graph())
    for node in region.joint.graph.find_nodes(op="get_attr"):
        setattr(joint, node.target, getattr(region.joint, node.target))
    writer = _Writer(joint, {})
    for node in region.joint.graph.find_nodes(op="placeholder"):
        writer.copy(node)
    forward: set[fx.Node] = {writer.now[n] for n in region.order.forward if n.op == "placeholder"}
    for item in together.sequence:
        if isinstance(item, fx.Node):
            new, first = [writer.copy(item)], item in region.order.forward
        else:
            each, count = sets[item]
            new, first = writer.write(each, count, item), _of_forward_pass(region, each)
        forward.update(new if first else ())
    output = region.joint.graph.output_node()
    writer.copy(output)
    order = Order([n for n in joint.graph.nodes if n.op not in ("placeholder", "output")], forward)
    return joint, order  # nobody calls it: no code is made of it


@dataclass(frozen=True)
class Together:
    """Sets of a region's ops, no op in two, that can run as single ones, none of which waits for itself.

    Attributes:
        region: the graph.
        sets: of its ops.
        sequence: the nodes in the order in which they run, with each set as one item, its number.
        effects: the nodes that have effects.
    """

    region: Region
    sets: tuple[Piecewise, ...]
    sequence: tuple[Any, ...]
    effects: frozenset[fx.Node]

    def with_sets(self, more: Sequence[Piecewise]) -> Together | None:
        """The same with more sets; None where ops would wait for each other."""
        sets, sequence = (*self.sets, *more), list(self.sequence)
        for at in range(len(self.sets), len(sets)):
            collapsed = _collapsed(sequence, sets, at, self.effects)
            if collapsed is None:
                return None
            sequence = collapsed
        if not _in_order(self.region, sets, sequence):
            return None
        return Together(self.region, sets, tuple(sequence), self.effects)


def alone(region: Region) -> Together:
    """A region without sets."""
    nodes = region.order.nodes
    return Together(region, (), tuple(nodes), frozenset(node for node in nodes if node.is_impure()))


def _in_order(region: Region, sets: Sequence[Piecewise], sequence: Sequence[Any]) -> bool:
    """Whether everything is there before it is read, and no set of the forward pass comes after the backward pass."""
    there = set(region.joint.graph.find_nodes(op="placeholder"))
    turned = False  # whether an op of the backward pass came
    for item in sequence:
        single = isinstance(item, fx.Node)
        reads = item.all_input_nodes if single else [x for x, _ in sets[item].reads]
        first = item in region.order.forward if single else _of_forward_pass(region, sets[item])
        if not there.issuperset(reads) or (not single and first and turned):
            return False
        turned = turned or not first
        there.update([item] if single else [t for t, _ in sets[item].makes])
    return True


def _of_forward_pass(region: Region, each: Piecewise) -> bool:
    return any(n in region.order.forward for n in each.own)


def _collapsed(
    sequence: Sequence[Any], sets: Sequence[Piecewise], at: int, effects: frozenset[fx.Node]
) -> list[Any] | None:
    """The sequence with a set's ops as one item, its number, where the last of them was; None where that cannot be.

    What reads the set's results comes after it, and so does what writes into a tensor that the set reads, or that an op
    reads which comes after it. What draws random numbers, or has other effects, does not go past its like.
    """
    each = sets[at]
    inside = each.own - each.views
    removed = {i for i, n in enumerate(sequence) if isinstance(n, fx.Node) and source(n)[0] in inside}
    last = max(i for i in removed if source(sequence[i])[0] is sequence[i])  # results may be told apart much later
    late: set[fx.Node] = {t for t, _ in each.makes}
    still_read: set[int] = set()  # storages of which later ops read what they hold now
    effects_follow = False  # whether one that has effects comes after
    before: list[Any] = []
    after: list[Any] = []
    for i, item in enumerate(sequence[: last + 1]):
        single = isinstance(item, fx.Node)
        reads = item.all_input_nodes if single else [x for x, _ in sets[item].reads]
        writes = storages(item.args[0].meta.get("val")) if single and may_write(item) and item.args else {}
        has_effects = item in effects
        waits = not late.isdisjoint(reads) or not still_read.isdisjoint(writes) or (has_effects and effects_follow)
        if i not in removed and not waits:
            before.append(item)
            continue
        still_read.update(key for x in reads for key in storages(x.meta.get("val")))
        if i not in removed:
            after.append(item)
            effects_follow = effects_follow or has_effects
            late.update([item] if single else [t for t, _ in sets[item].makes])
    if not late.isdisjoint(x for x, _ in each.reads):
        return None
    rest = [item for i, item in enumerate(sequence[last + 1 :], last + 1) if i not in removed]
    return [*before, at, *after, *rest]


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
        main = each.main
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
        nodes = [n for op in each.found.ways for n in dict.fromkeys([op, *results(op)])]
        remember(node, WholeOps(tuple(x for x, _ in each.reads), tuple(nodes), tuple(t for t, _ in each.makes)))
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


def _sum_like(t: torch.Tensor) -> torch.Tensor:
    """A fake tensor for a sum that is not finished: in single precision, where the value is in half."""
    with t.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_like(t, dtype=torch.float32 if t.dtype in _HALF else t.dtype)


def lengths_of(parts: int, count: int) -> tuple[int, ...]:
    """The lengths of so many pieces at most: all alike, but that the last may be shorter."""
    length = -(-parts // count)
    return tuple(min(length, parts - start) for start in range(0, parts, length))


def _unfinished(each: Piecewise, t: fx.Node) -> bool:
    """Whether the sum over pieces is not yet the node's value."""
    op, result = source(t)
    quotient = each.found.ways[op].quotient
    return t.meta["val"].dtype in _HALF or (quotient is not None and quotient[0] == result)
