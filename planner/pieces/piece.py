"""The graph of one piece of a set of ops."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import fx

from planner.capture.joint_graph import map_nodes
from planner.core.pieces import cut
from planner.pieces.body import Body
from planner.pieces.ends import Piecewise
from planner.pieces.groups import SUM, Group
from planner.pieces.recognise import results, source

_ATEN = torch.ops.aten
Inputs = Mapping[tuple[fx.Node, Group | None], fx.Node]


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
