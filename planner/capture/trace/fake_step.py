"""A fake step: one call of the fake model through `torch.compile`, and its backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from traceback import clear_frames
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import get_gradient_edge

from planner.capture.passes.masks_of_ones import OF_ONES
from planner.capture.provenance import running_module
from planner.capture.regions.calls import RegionCall, ViewSums, version
from planner.capture.regions.fingerprint import fingerprint
from planner.capture.regions.region import Region
from planner.capture.regions.strides import as_captured, strides_out
from planner.capture.shapes import marked
from planner.capture.trace.apart import COMPILED, Apart, Paths
from planner.capture.trace.arrival import Arrivals
from planner.capture.trace.backward_trace import watch_backward
from planner.capture.trace.dynamo import (
    OP_BY_OP,
    CompileRegion,
    GraphCompiler,
    Partition,
    dynamo_settings,
    make_backend,
)
from planner.capture.trace.eager_parts import as_region_calls
from planner.capture.trace.layers import refuse_parametrized_rnns
from planner.capture.trace.loss_trace import LossFn, OutsideLoss, differentiable, that_applies, trace_loss
from planner.capture.trace.recording import EagerCall, Recording, held_by, held_by_variables
from planner.capture.trace.refusals import in_backward, refusal
from planner.capture.trace.view_sums import View, bytes_of_sums, viewed_outside
from planner.compat.dynamo import compile_call, forget_compiled
from planner.core.attributes import attributes_staying, kept_as_attributes, results_aside
from planner.core.call import bytes_of_elements, storages
from planner.core.layout import Order, memory_order
from planner.core.loop import LaidOut
from planner.core.maxima import Maxima
from planner.core.objects import leaves
from planner.errors import CaptureError, PlannerError

Detach = Callable[[fx.GraphModule], Collection[int]] | Mapping[str, tuple[int, ...]]


class NothingCapturedError(CaptureError):
    """No graph of the step needs a gradient, on the way that it went through the model's Python code."""


class FakeStep:
    """One call of the fake model through `torch.compile`, then its backward pass.

    Args:
        paths: of the modules that run apart.
        laid_out: for each Dynamo graph, by its key, the outputs whose gradients come in other layouts than their own.

    Attributes:
        calls: of compiled graphs, in order; one graph may serve several. After `gradients()`, calls for the ops that
            ran between them are among these.
        cut: for each Dynamo graph, by its key, the outputs that were cut off.
        reached: whether, by `gradients()`, a gradient reaches any of the compiled graphs.
        sums: by the identity of results that are views, and that other graphs take: as in `Link`.
        fed: of the leaves of the model's output, by position, those whose gradient a graph adds to: bytes of each. The
            graph has a place for them, whether it is planned that the loop gives them one or not.
        attributes, replaced: as in `TrainingGraph`.
        aside: results that modules keep as attributes; `fed` and `unreached` number them after the output's leaves.
        left: the storages of tensors that modules hold after the call, by `storage_key`.
        asked: what the inputs of graphs are asked for after other graphs have run.
        frames: how many frames torch.compile took; with more than one, Python runs between the graphs.
    """

    def __init__(
        self,
        recording: Recording,
        split: Partition,
        detach: Detach,
        compiler: GraphCompiler = OP_BY_OP,
        paths: Paths = COMPILED,
        laid_out: Mapping[str, LaidOut] | None = None,
    ) -> None:
        self.recording = recording
        self.split = split
        self.detach = detach
        self.compiler = compiler
        self.paths = paths
        self.laid_out = dict(laid_out or {})
        self.calls: list[RegionCall] = []
        self.cut: dict[str, tuple[int, ...]] = {}
        self.asked: tuple[str, ...] = ()
        self.frames = 0
        self.reached = False
        self.left: frozenset[int] = frozenset()
        self.aside: list[torch.Tensor] = []
        self.attributes: dict[str, int] = {}
        self.replaced: dict[str, int] = {}
        self.sums: dict[int, ViewSums] = {}
        self.fed: dict[int, int] = {}
        self._arrivals: dict[str, Arrivals] = {}
        self._came: dict[int, Order] = {}  # gradients of results, where the loss is known
        self._between: list[tuple[EagerCall, ...]] = []  # before each call that has a gradient, and after the last

    def run(self, model: nn.Module, args: Any, kwargs: Any, maxima: Maxima | None = None) -> Any:
        """Call the model, with symbols for the sizes that may be smaller; returns its output. Raises CaptureError."""
        refuse_parametrized_rnns(model)
        kept = kept_as_attributes(model)
        try:
            output = self._call(model, args, kwargs, maxima)
        except PlannerError:
            raise
        except Exception as e:
            raise CaptureError(refusal(model, e, eagerly=False)) from e
        self._between.append(self.recording.taken())
        self.aside = results_aside(model, leaves(output))
        self.left, self.attributes = held_by(model.modules()), attributes_staying(model, kept)
        read = storages([call.inputs for call in self.calls if call.region is not None]).keys()
        gone = {name: storages([t]) for name, t in kept.items() if name not in self.attributes}
        self.replaced = {name: sum(own.values()) for name, own in gone.items() if own.keys() & read}
        if all(call.region is None for call in self.calls):
            raise self.nothing_captured(model, args, kwargs, maxima)
        return output

    def _call(self, model: nn.Module, args: Any, kwargs: Any, maxima: Maxima | None, *, whole: bool = False) -> Any:
        """The output of the compiled model; with `whole`, what breaks the graph is raised."""

        def compiled_call(module: nn.Module) -> Callable[..., Any]:
            backend = make_backend(self._serve, self.compiler, asks=self._asks)
            return compile_call(module, backend, self._frame_begins, whole=whole)

        compiled, apart = compiled_call(model), Apart(model, self.paths, compiled_call)
        with self.recording.mode, dynamo_settings(), torch.enable_grad(), marked(args, kwargs, maxima), apart.here():
            self.recording.resume()
            try:
                return compiled(*args, **kwargs)
            finally:
                self.recording.pause()
                for each in (compiled, *(call for _, call in apart.inner)):
                    forget_compiled(each)

    def _asks(self) -> bool:
        if self.calls:
            self.asked = (OF_ONES,)
        return True

    def nothing_captured(self, model: nn.Module, args: Any, kwargs: Any, maxima: Maxima | None) -> CaptureError:
        """The error for a model whose graph breaks in a loop or block, so that torch.compile leaves all of it alone."""
        try:
            self._call(model, args, kwargs, maxima, whole=True)
        except Exception as e:
            error = NothingCapturedError(refusal(model, e, eagerly=False))
            clear_frames(e.__traceback__)  # a variable of torch's own holds the error, and so the frames of the loop
            return error
        return NothingCapturedError(
            f"{type(model).__name__}: torch.compile captured nothing of its forward pass that needs a gradient (it "
            "leaves alone what is under torch.compiler.disable). Plan with mode='eager', or a submodule it can capture"
        )

    def _frame_begins(self) -> AbstractContextManager[object]:
        self.frames += 1
        return nullcontext()

    def _serve(
        self, graph: fx.GraphModule, compile_region: CompileRegion, examples: Sequence[Any]
    ) -> Callable[..., Any]:
        key = fingerprint(graph.graph)
        cut = self.detach.get(key, ()) if isinstance(self.detach, Mapping) else self.detach(graph)
        self.cut[key] = tuple(cut)
        arrivals = self._arrivals[key] = Arrivals(self.cut[key], _ignored, laid_out=self.laid_out.get(key, ()))
        captured: list[Region] = []

        def partition(region: Region) -> tuple[fx.GraphModule, fx.GraphModule]:
            captured.append(region)
            return self.split(region)

        compiled = compile_region(partition, examples, arrivals, None)

        def call(*inputs: Any) -> Any:
            region = captured[0] if captured else None
            if region is not None:  # else its ops run as they are, and count as ops outside the regions
                self._between.append(self.recording.taken())
                self.recording.pause()
            # a variable for the frame would keep the frame, and all that it names, until Python's collector comes
            module = running_module(inspect.currentframe(), self.recording.paths)
            held = held_by_variables(inspect.currentframe())
            results = tuple(compiled(*inputs))
            if captured:
                results = tuple(as_captured(results, strides_out(captured[0])))
            self.recording.pause()  # a view of a tensor owns its edge
            edges = tuple(get_gradient_edge(t) if differentiable(t) else None for t in results)
            self.recording.resume()
            if region is not None:
                self.recording.resume()
            versions = tuple(map(version, inputs))
            self.calls.append(RegionCall(key, region, inputs, versions, results, edges, module, held))
            return results

        return call

    def gradients(
        self, output: Any, loss_fn: LossFn | None, unreached: Collection[int] = (), *, certain: bool = True
    ) -> tuple[dict[str, tuple[int, ...]], OutsideLoss]:
        """For each Dynamo graph, the outputs that no gradient reaches; and the loss outside the model.

        The backward pass runs for it; with the ops outside the regions, `calls` is complete afterwards.

        Args:
            output: of the model.
            loss_fn: as for `capture()`.
            unreached: the same.
            certain: as for `trace_loss()`.
        """
        loss_fn = that_applies(loss_fn, output)
        results = [(call, at, edge) for call in self.calls for at, edge in enumerate(call.edges) if edge is not None]
        edges = [edge for _, _, edge in results]
        ends = [t for t in leaves(output) if differentiable(t)]
        lost = {id(t) for at, t in enumerate([*leaves(output), *self.aside]) if at in unreached}
        own = {id(t) for t in ends} - lost
        eager = self._runs_outside()
        try:
            with self.recording.mode, torch.enable_grad():
                outside, loss = trace_loss(
                    output,
                    loss_fn,
                    ends if eager else [t for t in self.calls[-1].results if differentiable(t)],
                    unreached,
                    certain=certain,
                )
                if loss is not None:
                    roots, arriving = [loss], None
                else:
                    roots, arriving = ends, [torch.ones_like(t) for t in ends]
                views = viewed_outside([call.results[at] for call, at, _ in results])
                if not eager:
                    reached: Sequence[torch.Tensor | None]
                    again = bool(views or lost)
                    reached = torch.autograd.grad(roots, edges, arriving, allow_unused=True, retain_graph=again)
                    got = {id(c.results[at]) for (c, at, _), g in zip(results, reached, strict=True) if g is not None}
                    outside = replace(outside, sums=self._sums([v for v in views if id(v.tensor) in got], own))
                else:
                    outside = replace(outside, sums=self._sums(views, own))
                    regions = [call for call in self.calls if call.region is not None]
                    seen = watch_backward(self.recording, regions, self._between, roots, arriving, edges, ends)
                    reached = seen.reached
                    self.calls = list(as_region_calls(seen.parts, self.calls, leaves(output), seen.arrived))
        except PlannerError:
            raise
        except Exception as e:
            raise CaptureError(in_backward(e)) from e
        self.reached = loss is None or any(g is not None for g in reached)
        unused: set[tuple[int, int]] = set()  # by identity of the call, and position
        if loss is not None:
            found = list(zip(results, reached, strict=True))
            self._came = {id(call.results[at]): memory_order(g) for (call, at, _), g in found if g is not None}
            unused = {(id(call), at) for (call, at, _), g in found if g is None}
        elif loss_fn is None and not eager:
            gone = self._not_reached([*leaves(output), *self.aside], unreached)
            unused = {(id(call), at) for call, at, _ in results if id(call.results[at]) in gone}
        unused.update((id(call), at) for call in self.calls for at in _doubles(call))
        cut: dict[str, tuple[int, ...]] = {}
        for call in self.calls:
            here = tuple(at for at in range(len(call.results)) if (id(call), at) in unused)
            cut[call.key] = tuple(at for at in cut.get(call.key, here) if at in here)
        # with torch 2.11, Python's collector does not see the cycle from an edge over its graph to this step
        self.calls = [replace(call, edges=()) for call in self.calls]
        return {key: cut.get(key, ()) for key in self.cut}, outside

    def _sums(self, views: Sequence[View], own: Collection[int]) -> int:
        """The bytes of sums of gradients of views, where outputs of the model are all that these are.

        Those of views that other graphs take are entered.

        Args:
            views: the results that are such.
            own: identities of results; of the model's outputs, the others get no gradient.
        """
        taken = {id(t) for call in self.calls if call.region is not None for t in call.inputs}
        inner = {view.of for view in views if id(view.tensor) in taken}
        for of in inner:
            group = [view for view in views if view.of == of]
            outputs = bytes_of_elements([view.tensor for view in group if id(view.tensor) in own])
            found = ViewSums(bytes_of_sums(group), outputs)
            self.sums |= dict.fromkeys((id(view.tensor) for view in group), found)
        return bytes_of_sums([view for view in views if view.of not in inner and id(view.tensor) in own])

    def orders(self, output: Any, laid_out: LaidOut | None) -> dict[str, LaidOut]:
        """For each Dynamo graph that takes them so, the outputs whose gradients come in other layouts than their own.

        Args:
            output: of the model.
            laid_out: of its leaves, those that do; None: as here in the backward pass.
        """
        ends, came = leaves(output), dict(self._came)
        if laid_out is not None:
            came |= {id(t): memory_order(t) for t in ends if id(t) in came}
            came |= {id(ends[at]): order for at, order in laid_out if at < len(ends)}
        found = {}
        for call in self.calls:
            own = ((at, came[id(t)], t) for at, t in enumerate(call.results) if id(t) in came)
            here = tuple((at, order) for at, order, t in own if order != memory_order(t))
            arrivals = self._arrivals.get(call.key)  # none for ops between the graphs
            if here and arrivals is not None and arrivals.as_they_come:
                found[call.key] = here
        return found

    def _not_reached(self, ends: Sequence[Any], unreached: Collection[int]) -> set[int]:
        """The results that get no gradient from outside their graph, where some leaves of the output get none.

        Those alone that have a place in the graph nevertheless.
        """
        fed = {id(t) for call in self.calls for t in _fed(call.results, self._arrivals[call.key].feeds)}
        self.fed = {at: sum(storages(t).values()) for at, t in enumerate(ends) if id(t) in fed}
        roots = [t for at, t in enumerate(ends) if differentiable(t) and at not in unreached]
        results = [ends[at] for at in self.fed.keys() & set(unreached)]
        if not roots or not results:
            return set()
        reached = torch.autograd.grad(roots, results, [torch.ones_like(t) for t in roots], allow_unused=True)
        return {id(t) for t, g in zip(results, reached, strict=True) if g is None}

    def _runs_outside(self) -> bool:
        """Whether ops outside the regions allocate anything."""
        return any(storages([call.result for call in calls]) for calls in self._between)


def _doubles(call: RegionCall) -> set[int]:
    """The results of a graph that are another one, too, by which their gradient comes: autograd's node has a place for
    either, and a tensor is one of its outputs.
    """
    positions: dict[int, list[int]] = {}
    for at, edge in enumerate(call.edges):
        if edge is not None:
            positions.setdefault(id(call.results[at]), []).append(at)
    nodes = {at: edge.node for at, edge in enumerate(call.edges) if edge is not None}
    places = {at: edge.output_nr for at, edge in enumerate(call.edges) if edge is not None}
    found: set[int] = set()
    for double in (group for group in positions.values() if len(group) > 1):
        others = (at for (at, *more) in positions.values() if not more and nodes[at] is nodes[double[0]])
        before = {places[at] - at for at in others}  # the node's outputs before the graph's
        if len(before) == 1 and (own := places[double[0]] - before.pop()) in double:
            found.update(at for at in double if at != own)
    return found


def _fed(results: Sequence[Any], feeds: Mapping[int, frozenset[int]]) -> list[Any]:
    """The results of a graph to whose gradients it adds that of another one; no two that are only fed by each other, as
    where a tensor is returned twice.
    """
    found: set[int] = set()
    for at, others in feeds.items():
        if any(results[other] is not results[at] for other in others - found):
            found.add(at)
    return [results[at] for at in sorted(found)]


def _ignored() -> None:
    """Nothing: a gradient that reaches an output which gets none is seen at the output."""
