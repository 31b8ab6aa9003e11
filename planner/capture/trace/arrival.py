"""The backward pass of a compiled graph, written for the gradients that arrive: those that do not are None."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import is_tangent
from planner.capture.passes.in_place_sums import add_apart
from planner.capture.passes.layouts import lay_out, rely_on_layouts
from planner.capture.passes.steps import steps_in
from planner.capture.passes.tangents import (
    add_entering,
    entering,
    feeds,
    leave_out,
    read_marks,
    sums_from,
    take_whole,
    whole_gradients,
)
from planner.capture.passes.whole_ops import write_whole
from planner.capture.trace.parts import HANDING, PART, Handing, Parts, in_parts
from planner.compat.autograd import leaves_of, running_node, skip_undefined
from planner.compat.fake import unset_fake_temporarily
from planner.compat.fx import boxed, takes_a_list
from planner.compat.inductor_random import draw_alike
from planner.compat.tensors import version_of
from planner.core.loop import LaidOut
from planner.errors import ApplyError, warn

_UNFUSED = (
    "gradients come to other outputs of the model than the plan counts on: this backward pass runs op by op, not as "
    "Inductor compiled it, and may take more memory. Plan with loss_fn=, which says which outputs do, or mode='aten'"
)
_WHOLE_OPS = (
    "a hook, retain_grad() or torch.autograd.grad asks for the gradient of a model output, or one arrives that was not "
    "planned, where the plan has that gradient in pieces: these ops run whole, and may take more memory than the "
    "budget. Plan with pieces=False, or do not ask for it"
)
Boxed = Callable[[list[Any]], Any]
WHOLE = "planned_whole"  # on autograd's node of a compiled graph: outputs whose whole gradients enter its backward pass


@dataclass(frozen=True)
class _Way:
    """One way through a backward pass.

    Attributes:
        missing: positions of the inputs that are gradients which did not arrive.
        late: positions of the outputs that a gradient arrived at, though none was planned.
        whole: positions of the outputs whose whole gradients enter.
        result: the output whose whole gradient is all that is computed; None for all that the pass returns.
    """

    missing: frozenset[int]
    late: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    result: int | None = None


@dataclass(frozen=True)
class _Entering:
    """A gradient that enters: its position among the graph's inputs, that of its output, and whether it is read."""

    place: int
    output: int
    read: bool


@dataclass(eq=False)
class Arrivals:
    """The backward pass of one compiled graph.

    Attributes:
        cut: positions of the outputs that are planned to get no gradient.
        unplanned: called where one of these gets a gradient that the graph has no place for.
        sizes: bytes of gradients that go out together, as in `in_parts`; none for all at the end.
        feeds: for each output whose gradient the graph adds to, the outputs whose gradients it is computed from.
        laid_out: of outputs whose gradients come in other layouts than their own, the positions, and the orders; None:
            where they do, AOTAutograd copies them.
        as_they_come: whether gradients enter in whatever layout they have, as in eager mode.
    """

    cut: Collection[int]
    unplanned: Callable[[], None]
    sizes: Sequence[int] = ()
    feeds: Mapping[int, frozenset[int]] = field(default_factory=dict)
    laid_out: LaidOut | None = ()
    as_they_come: bool = False
    _places: Collection[int] = ()  # outputs whose gradient the graph adds to without those that are cut
    _sums: Mapping[int, Sequence[int]] = field(default_factory=dict)  # that gradients which are cut would go through
    _other: Collection[fx.Node] = ()  # that read gradients which may be laid out otherwise since some were left out
    _graph: fx.GraphModule | None = None
    _inputs: int = 0
    _entering: tuple[_Entering, ...] = ()
    _written: dict[_Way, Boxed] = field(default_factory=dict)
    _parts: Parts | None = None
    _warned: bool = False
    _versions: dict[_Way, int] = field(default_factory=dict)  # of parameters, as an optimizer's step counts them up

    def read(self, joint: fx.Graph) -> None:
        """Read the joint graph, and take the gradients out that are not planned, in place."""
        read_marks(joint)
        self.feeds = feeds(joint)
        tangents = entering(joint)
        cut = {at: tangents[at] for at in self.cut if at in tangents}
        self._sums = {at: tuple(sums_from(tangent)) for at, tangent in cut.items()}
        self._other = leave_out(joint, cut.values())
        self._places = whole_gradients(joint).keys()

    def lay_out(self, joint: fx.Graph) -> None:
        """Have gradients enter the joint graph, of fixed sizes, in the layouts in which they come, in place.

        Where one comes to a kernel that relies on the layout with which the graph was traced, AOTAutograd copies them.
        """
        if self.laid_out is not None:
            self.as_they_come = not rely_on_layouts(joint)
            lay_out(joint, dict(self.laid_out) if self.as_they_come else {}, self._other)

    def write(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """Take a copy of the backward graph, to write others from, and cut it where its gradients are to go out."""
        self._parts = in_parts(backward, forward, self.sizes) if self.sizes else None
        self._graph = fx.GraphModule(backward, copy.deepcopy(backward.graph))
        add_apart(self._graph.graph)  # what enters in the place of a term must not be written into
        inputs = backward.graph.find_nodes(op="placeholder")
        position = {n: at for at, n in entering(backward.graph).items()}
        self._inputs = len(inputs)
        self._entering = tuple(
            _Entering(place, position.get(n, -1), bool(n.users)) for place, n in enumerate(inputs) if is_tangent(n)
        )

    def compile(self, graph: fx.GraphModule, compiled: Boxed | None = None) -> Boxed:
        """The backward graph as a callable for AOTAutograd, which runs by what arrives.

        Where gradients do not, ops that only they would need do not run, so that it holds no more than with all.

        Args:
            graph: the backward graph.
            compiled: the same, compiled for all gradients; None for op by op.
        """
        planned = boxed(graph) if compiled is None else _given_all(graph, compiled)

        def call(arguments: list[Any]) -> Any:
            node = running_node()
            way = self._way(arguments, frozenset(getattr(node, WHOLE, ())))
            if way == _Way(frozenset()):
                handing: Handing | None = getattr(node, HANDING, None)
                gradients = None if handing is None else handing.begin(arguments)
                return planned(arguments) if gradients is None else gradients
            if compiled is not None and not self._warned and self._seen_before_a_step(way, arguments):
                self._warned = True
                warn(_UNFUSED)
            for leaf in leaves_of(node, PART) if way.missing else ():
                skip_undefined(leaf)
            return self._by(way)(arguments)

        return takes_a_list(call)

    def _seen_before_a_step(self, way: _Way, arguments: Sequence[Any]) -> bool:
        """Whether gradients came in this way before parameters changed: in its first step a loop is not known yet."""
        now = sum(version_of(t) for t in arguments if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad)
        return self._versions.setdefault(way, now) != now

    def handing(self) -> Handing | None:
        """For a call of the graph, whose gradients go out in parts; None where they do not."""
        return None if self._parts is None else Handing(self._parts)

    def whole(
        self, saved: Sequence[Any], gradients: Mapping[int, torch.Tensor], whole: Collection[int], at: int
    ) -> torch.Tensor | None:
        """The whole gradient of an output.

        Args:
            saved: what the forward pass saved, in the order of the backward graph's inputs.
            gradients: of outputs, from outside, by their position.
            whole: of these, and of those that get none, the ones that are whole.
            at: position of the output.
        """
        arguments = [*saved, *[None] * (self._inputs - len(saved))]
        for each in self._entering:
            arguments[each.place] = gradients.get(each.output)
        way = self._way(arguments, frozenset(whole))
        found: torch.Tensor | None = self._by(replace(way, result=at))(arguments)[0]
        return found

    def watched(self, results: Sequence[Any]) -> tuple[Any, ...]:
        """The results of a graph whose outputs were all planned to get no gradient: one that does is still seen.

        AOTAutograd detaches the inputs of such a graph, so that its outputs would need no gradient.
        """
        cut = {at for at in self.cut if isinstance(results[at], torch.Tensor) and not results[at].requires_grad}
        if not cut or any(isinstance(t, torch.Tensor) and t.requires_grad for t in results):
            return tuple(results)
        anchor = torch.empty(0, requires_grad=True)
        return tuple(
            _Watched.apply(t, self.unplanned, anchor) if at in cut else t  # type: ignore[no-untyped-call]
            for at, t in enumerate(results)
        )

    def _way(self, arguments: Sequence[Any], whole: frozenset[int]) -> _Way:
        read = (e for e in self._entering if e.read or e.output in whole)
        missing = [e.place for e in read if arguments[e.place] is None]
        there = (e.output for e in self._entering if not e.read and arguments[e.place] is not None)
        late = frozenset(at for at in there if at in self.cut and at not in whole)
        if not late.issubset(self._places):
            self.unplanned()
        return _Way(frozenset(missing), late.intersection(self._places), whole)

    def _by(self, way: _Way) -> Boxed:
        if way not in self._written:
            assert self._graph is not None
            graph = copy.deepcopy(self._graph.graph)
            if (way.late or way.whole or way.result is not None) and write_whole(graph):
                warn(_WHOLE_OPS)
                add_apart(graph)
            inputs = graph.find_nodes(op="placeholder")
            for at in way.late:
                add_entering(graph, at, self._sums[at])
            for at in way.whole:
                take_whole(graph, at)
            if way.result is not None:
                graph.output_node().args = ((whole_gradients(graph)[way.result][0],),)
                for step in steps_in(graph):
                    graph.erase_node(step)
            leave_out(graph, [n for at, n in enumerate(inputs) if at in way.missing])
            draw_alike(graph)
            self._written[way] = boxed(fx.GraphModule(self._graph, graph))
        return self._written[way]


def _given_all(graph: fx.GraphModule, compiled: Boxed) -> Boxed:
    """What is compiled, called with tensors without memory for gradients that it does not read and that are None.

    Inductor's code looks at their sizes nevertheless (torch 2.11).
    """
    unread = {at: n.meta["val"] for at, n in enumerate(graph.graph.find_nodes(op="placeholder")) if not n.users}
    tangents = {at: t for at, t in unread.items() if isinstance(t, torch.Tensor)}
    with unset_fake_temporarily():
        empty = {at: torch.empty_strided(t.shape, t.stride(), device="meta") for at, t in tangents.items()}

    def call(arguments: list[Any]) -> Any:
        for at, t in empty.items():
            if arguments[at] is None:
                arguments[at] = t
        return compiled(arguments)

    return call


class _Watched(torch.autograd.Function):
    """An output that was planned to get no gradient: calls a function, should one arrive."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, arrives: Callable[[], None], anchor: torch.Tensor) -> torch.Tensor:
        ctx.arrives = arrives
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.arrives()
        return None, None, None


def refuse_second_order() -> None:
    """Raise ApplyError: a gradient that came out of a planned graph is itself differentiated."""
    raise ApplyError(
        "gradients of a planned model were differentiated again (create_graph=True: a gradient penalty, a Hessian), "
        "and its graphs have first derivatives only. Plan with mode='eager', remove() the plan for it, or plan only "
        "the parts of the model that it does not go through. The next step trains by the plan; zero_grad() first"
    )
