"""A schedule, written as the forward and the backward `torch.fx.GraphModule` of a region.

An op that runs again is cloned where the schedule runs it; views are cheap and are derived anew where they are needed.
Saved tensors are outputs of the forward graph and inputs of the backward graph. The generated code frees a tensor after
its last use, as `torch.fx` does for every variable.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import map_nodes, tensors
from planner.capture.passes.checkpoints import clone_of
from planner.capture.passes.dropout import drawn_by
from planner.capture.recomputability import RUNNING_STATISTICS
from planner.capture.regions.region import GraphOp, Region
from planner.capture.shapes import is_size
from planner.codegen.copies import copy_views
from planner.codegen.formulas import as_formulas_give
from planner.codegen.moving import Moving
from planner.codegen.noise import make_noise_in_place
from planner.codegen.products import fold_products
from planner.codegen.replay import run_and_save_state, run_with_state
from planner.codegen.saved import save_no_unread
from planner.codegen.views import compose_views, keep_views, stride_views
from planner.compat.fx import root_of
from solvers import Move


def emit(
    region: Region,
    forward: Sequence[int],
    backward: Sequence[int],
    moves: Sequence[Move] = (),
    store: int = 0,
    *,
    made_again: Collection[int] = (),
    fused: bool = False,
    on_fakes: bool = False,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Write the forward and backward graphs of a region.

    Args:
        region: the captured region.
        forward: indices into `region.ops`, in the order in which the forward pass runs them.
        backward: the same for the backward pass.
        moves: as in `PlannedRegion`.
        store: where values go that leave, by `offload.transfers.enter`; 0 for graphs that are only shown.
        made_again: as in `PlannedRegion`.
        fused: whether a compiler is to fuse the ops, which looks through views but not through strides.
        on_fakes: whether the graphs run on fake tensors only: what saves a kernel or a call is left undone.

    Returns:
        Forward: primals -> forward outputs, then the tensors and then the sizes that are kept. Backward: these sizes
        and tensors, then the gradients that come in -> the gradients that go out. This is the contract of an
        AOTAutograd partition function.
    """
    called = [op.node for i in (*forward, *backward) if (op := region.ops[i]).kind == "call"]
    runs = Counter(clone_of(node) or node for node in called)
    replayed = {node for node, times in runs.items() if times > 1}
    moving = Moving(region, forward, backward, moves, store)
    first = _Writer(region, replayed, moving)
    for node in region.primals:
        first.placeholder(node)
    for at, i in enumerate(forward):
        first.move(at)
        first.run(region.ops[i])
    outputs = [first.get(n) if isinstance(n, fx.Node) else n for n in region.fwd_outputs]
    second = _Writer(region, replayed, moving, first)
    second.pinned.difference_update(made_again)
    for node in region.tangents:
        second.placeholder(node)
    for at, i in enumerate(backward, len(forward)):
        second.move(at)
        second.run(region.ops[i])
    grads = [second.get(n) if isinstance(n, fx.Node) else n for n in region.grads]
    sizes = [n for n in second.kept if is_size(n)]
    for n in reversed(sizes):
        root_of(second.graph).append(second.now[n])
    saved = [*(n for n in second.kept if not is_size(n)), *sizes]
    _close(first, [*outputs, *(second.kept[n] for n in saved)], region.output_descs[: len(outputs)])
    _close(second, grads, region.output_descs[len(outputs) :])
    if not on_fakes:
        _tidy(first.graph, second.graph, [second.given[n] for n in saved], len(outputs), fused)
    return _module(region, first, "forward"), _module(region, second, "backward")


def _tidy(forward: fx.Graph, backward: fx.Graph, saved: Sequence[fx.Node], results: int, fused: bool) -> None:
    """Take out of both graphs what costs a kernel, a call or a saved tensor, and changes nothing.

    Args:
        forward: the graph of the forward pass.
        backward: that of the backward pass.
        saved: inputs of the backward graph that the forward graph makes.
        results: how many results the forward graph has before these.
        fused: as for `emit()`.
    """
    for graph in (forward, backward):
        make_noise_in_place(graph)
    before, after = compose_views(forward), compose_views(backward)
    save_no_unread(forward, backward, saved, results)
    keep_views(forward, backward, before, after, results)
    if not fused:
        stride_views(forward, before)
        stride_views(backward, after)
        fold_products(forward, backward, results)
        for graph in (forward, backward):
            copy_views(graph)
            as_formulas_give(graph)


def runnable(region: Region, forward: Sequence[int], backward: Sequence[int]) -> bool:
    """Whether these steps run every op of a region, first in their order, and ops that must not run twice only once."""
    first = 0
    for steps, end in ((forward, region.boundary), (backward, len(region.ops))):
        for i in steps:
            if i == first:
                first += 1
            elif not 0 <= i < first or region.ops[i].keep_because:
                return False
        if first != end:
            return False
    return True


def keep_everything(region: Region, *, on_fakes: bool = False) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graphs of a region that recompute nothing; `on_fakes` as for `emit()`."""
    return emit(region, range(region.boundary), range(region.boundary, len(region.ops)), on_fakes=on_fakes)


class _Writer:
    """Writes one graph: knows, for each node of the joint graph, the node that holds it now."""

    def __init__(self, region: Region, replayed: set[fx.Node], moving: Moving, before: _Writer | None = None) -> None:
        self.region = region
        self.moving = moving
        self.graph = fx.Graph()
        self.replayed = replayed  # nodes that run more than once
        self.before = before  # the forward pass, when this is the backward pass
        self.kept: dict[fx.Node, fx.Node] = {}  # node of the joint graph -> output of the forward graph
        self.given: dict[fx.Node, fx.Node] = {}  # the same -> input of this graph
        self.now: dict[fx.Node, fx.Node] = {}
        self.states: dict[fx.Node, fx.Node] = {}  # random node -> its generator state
        self.ran: set[fx.Node] = set()
        self.last_run: fx.Node | None = None
        self.last_kept: fx.Node | None = None
        # what a later run of its op makes is another copy, or of scratch statistics
        self.pinned = {*region.values_in(region.fwd_outputs), *region.statistics()}
        self.ticket: fx.Node | None = None  # of the frame that values leave to
        self.coming: dict[fx.Node, fx.Node] = {}  # node that is fetched -> the tensor that is not to be read yet

    def placeholder(self, node: fx.Node) -> fx.Node:
        self.now[node] = new = self._input(node)
        return new

    def _input(self, node: fx.Node) -> fx.Node:
        new = self.graph.placeholder(node.name)
        # the generated code unpacks inputs by target: a name already taken by a clone would bind two inputs to one
        new.target = new.name
        new.meta = dict(node.meta)
        return new

    def _kept(self, node: fx.Node) -> fx.Node:
        """An input for a tensor that the forward pass saved; these stand before the gradients that come in."""
        with self.graph.inserting_after(self.last_kept or root_of(self.graph)):
            self.last_kept = self.given[node] = self._input(node)
        return self.last_kept

    def get(self, node: fx.Node) -> fx.Node:
        """The node that holds `node` now: already written, kept by the forward pass, or a view derived anew."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self.now or self._fetch(top):
                stack.pop()
            elif todo := [n for n in top.all_input_nodes if n not in self.now and not self._fetch(n)]:
                stack.extend(todo)
            else:
                self._copy(top)
                stack.pop()
        return self.now[node]

    def _fetch(self, node: fx.Node) -> bool:
        """Bring a kept tensor from the forward pass, or one that comes back; False for a view, which is derived."""
        if (coming := self.coming.pop(node, None)) is not None:
            self.now[node] = self.moving.ready(self.graph, self._frame(), coming, node)
            return True
        if node.op == "get_attr":
            new = self.graph.get_attr(str(node.target))
            new.meta = dict(node.meta)
            self.now[node] = new
            return True
        if self.before is None or not self._is_base(node):
            return False
        self.kept[node] = self.before.get(node)
        self.now[node] = self._kept(node)
        return True

    def _is_base(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return True
        return any(self.region.values[v].owner is node for v in self.region.value_of[node])

    def _copy(self, node: fx.Node) -> fx.Node:
        assert self.moving.away.isdisjoint(self.region.value_of[node]), f"{node} is read while it is away"
        new = self.graph.node_copy(node, lambda n: self.now[n])
        self.now[node] = new
        return new

    def run(self, op: GraphOp) -> None:
        """Write one op, and right after it the outputs that others name: a tuple would hold them all alive."""
        node = op.node
        if op.kind == "rng_state":
            return  # written together with the op whose state it is
        original = clone_of(node) or node
        again = original is not node or node in self.ran or (self.before is not None and node in self.before.ran)
        self.ran.add(node)
        statistics = RUNNING_STATISTICS.get(node.target, ()) if again else ()
        for n in node.all_input_nodes:
            if not any(n is node.args[at] for at in statistics):
                self.get(n)
        # the caller holds a pinned value's first copy: nothing else may hold the second
        fresh = [v for v in op.writes if not (again and v in self.pinned)]
        if again:
            self._forget(fresh)
        self.moving.away.difference_update(op.writes)
        if original in self.replayed and any(self.region.values[v].owner is original for v in op.reads):
            new = self._random(node, again)
        elif self.last_run is not None and drawn_by(node) == (clone_of(self.last_run) or self.last_run).name:
            new = self.graph.call_function(operator.getitem, (self.now[self.last_run], 0))
            new.meta = dict(node.meta)
        elif statistics:
            new = self._on_scratch_statistics(node, statistics)
        else:
            new = self.graph.node_copy(node, lambda n: self.now[n])
        new.meta["runs_again"] = again
        self.last_run = node
        self.now[node] = new
        for user in node.users:
            if user.target is operator.getitem and any(self.region.values[v].owner is user for v in fresh):
                self._copy(user)

    def _forget(self, values: Collection[int]) -> None:
        """Views of copies that are being replaced must not be used again."""
        gone = set(values)
        self.now = {n: new for n, new in self.now.items() if gone.isdisjoint(self.region.value_of[n])}
        self.coming = {n: new for n, new in self.coming.items() if gone.isdisjoint(self.region.value_of[n])}

    def move(self, at: int) -> None:
        """Write the moves that are done just before a step."""
        for move in self.moving.before(at):
            owner = self.region.values[move.value].owner
            if move.kind == "fetch":
                self.coming[owner] = self.moving.fetch(self.graph, self._frame(), move.value)
                continue
            held = self.get(owner)
            if move.kind == "send":
                self.moving.send(self.graph, self._frame(), held, move.value)
            else:
                self.moving.free(self.graph, self._frame(), held, move.value)
                self._forget([move.value])

    def _frame(self) -> fx.Node:
        """The ticket of the frame: opened by the forward pass where that moves anything, and kept."""
        if self.ticket is None and self.before is not None and self.before.ticket is not None:
            kept = self.before.ticket
            self.kept[kept] = kept
            self.ticket = self._kept(kept)
        elif self.ticket is None:
            self.ticket = self.moving.begin(self.graph)
        return self.ticket

    def _random(self, node: fx.Node, again: bool) -> fx.Node:
        """A random op: the first run saves the generator's state, later ones run under it."""
        target: Any = node.target
        args, kwargs = self._arguments(node.args, node.kwargs)
        original, device = clone_of(node) or node, next(tensors(node)).device.type
        if not again:
            pair = self.graph.call_function(run_and_save_state, (device, target, *args), kwargs)
            state = self.graph.create_node("call_function", operator.getitem, (pair, 0), name=f"{node.name}_rng_state")
            fake_mode = next(tensors(node)).fake_mode  # type: ignore[attr-defined]
            state.meta["val"] = fake_mode.from_tensor(torch.get_rng_state(), static_shapes=True)
            self.states[node] = state
            new = self.graph.call_function(operator.getitem, (pair, 1))
        else:
            given = (self._state(original), device, target, *args)
            new = self.graph.call_function(run_with_state, given, kwargs)
        new.meta = dict(node.meta)
        return new

    def _arguments(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mapped: tuple[tuple[Any, ...], dict[str, Any]] = map_nodes(
            (tuple(args), dict(kwargs)), lambda n: self.now.get(n, n)
        )
        return mapped

    def _state(self, node: fx.Node) -> fx.Node:
        if node not in self.states:
            assert self.before is not None
            kept = self.before.states[node]
            self.kept[kept] = kept
            self.states[node] = self._kept(kept)
        return self.states[node]

    def _on_scratch_statistics(self, node: fx.Node, statistics: Sequence[int]) -> fx.Node:
        """Run a BatchNorm again without reading or depending on its running statistics."""
        args = list(node.args)
        for at in statistics:
            if isinstance(old := node.args[at], fx.Node):
                like = next(tensors(old))
                options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
                args[at] = self.graph.call_function(torch.ops.aten.zeros.default, (list(like.shape),), options)
        new_args, kwargs = self._arguments(args, node.kwargs)
        new = self.graph.call_function(node.target, new_args, kwargs)  # type: ignore[arg-type]
        new.meta = dict(node.meta)
        return new


def _close(writer: _Writer, outputs: list[Any], descs: Sequence[Any]) -> None:
    node = writer.graph.output(tuple(outputs))
    node.meta["desc"] = [*descs, *[None] * (len(outputs) - len(descs))]
    # fake tensors have other strides than a few kernels return (BatchNorm and the backward pass of dropout, transposed
    # on a CPU): then there is no view, and `reshape` copies as eager code does
    for view in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        for node in writer.graph.find_nodes(op="call_function", target=view):
            node.target = torch.ops.aten.reshape.default


def _module(region: Region, writer: _Writer, name: str) -> fx.GraphModule:
    writer.graph.lint()
    return fx.GraphModule(region.joint, writer.graph, class_name=f"Planned{name.capitalize()}")
