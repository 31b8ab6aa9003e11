"""Runs the graphs that Dynamo captures of a planned model, each by the region that was planned for it."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn

from planner.capture.regions.fingerprint import fingerprint
from planner.capture.regions.region import Region
from planner.capture.regions.strides import as_captured, strides_out
from planner.capture.trace.arrival import Arrivals
from planner.capture.trace.dynamo import CompileRegion, Serve, dynamo_settings
from planner.capture.trace.layers import rnns_in_parts
from planner.capture.trace.quiet import collect
from planner.codegen.replay import run_and_save_state
from planner.compat.dynamo import guarded_by_aot
from planner.core.plan import PlanRecord
from planner.core.recipe import PlannedRegion, Recipe
from planner.devices.accelerator import accelerator_of
from planner.errors import ApplyError
from planner.inductor.backend import compiling
from planner.inductor.emit import emit_planned
from planner.offload.store import Store
from planner.offload.transfers import enter
from planner.parallel.buckets import gradients_together
from planner.parallel.group import together
from planner.runtime.families import GraphChanged, recipe_of
from planner.runtime.modes import backward_node, waits
from planner.runtime.outputs import with_nodes
from solvers.progress import bar, clock


def _unplanned() -> None:
    raise ApplyError(
        "a gradient reached a model output that the plan was told gets none: the loss was taken from the model's "
        "own `loss`. Plan with loss_fn=lambda output: ... for a loss computed from other outputs"
    )


class Regions:
    """The state of a model's graphs, from compiling them to their backward passes.

    Attributes:
        calls: how often each graph ran in this call of the model, by the graph's fingerprint.
        call: the number of this call.
        compiling: whether torch.compile waits for one of these graphs to be compiled.
        ran: how often a region ran, in all calls of the model.
        frames: how many frames torch.compile has taken.
        abandoned: whether a call has ended with an exception since the last one: its frames, and what torch.compile
            has made of them, are in reference cycles, with all that they refer to.
        made: the tensors that the graphs returned in this call of the model.
        store: where values go that leave the device; None where none do.
        other_way: whether the recipe of this call is now one that has a graph, by its fingerprint, which came first.
    """

    def __init__(
        self, model: nn.Module, store: Store | None = None, other_way: Callable[[str], bool] = lambda _: False
    ) -> None:
        self.model = model
        self.other_way = other_way
        self.store = store
        self.store_number = 0 if store is None else enter(store)
        self.calls: Counter[str] = Counter()
        self.compiling = self.abandoned = False
        self.ran = self.frames = 0
        self.call = 0
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.nodes: list[tuple[int, weakref.ref[Any]]] = []  # of regions whose backward pass has not run, by the call
        self.graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()  # that torch.compile was given callables for
        self.ready: dict[tuple[str, object], _Compiled] = {}  # graphs that were compiled before, as `take_over` says
        self.begun: list[Recipe] = []  # whose graphs are compiled, or were begun to be
        self.shown: Any = None  # the progress of that
        self._drawn: list[tuple[Recipe, str]] = []  # random ops that the backward pass of a recipe draws again

    def forget(self) -> None:
        """Forget all that is compiled."""
        self.begun = []
        self._drawn = []
        self.compiling = False

    def take_over(self, other: Regions) -> None:
        """Have graphs of the same model that Inductor compiled for another runtime, for it to go, run in this one."""
        self.ready = {(graph.key, kind): own for graph in other.graphs for kind, own in graph.fused.items()}

    def waiting(self) -> frozenset[int]:
        """The calls of the model that wait for their backward pass: a region of theirs holds its activations."""
        self.nodes = [(call, node) for call, node in self.nodes if waits(node)]
        return frozenset(call for call, _ in self.nodes)

    def when_used(self, number: int, then: Callable[[], object]) -> None:
        """Call a function when the backward pass of a call that waits for it begins, for each of its regions."""
        for node in [node for call, held in self.nodes if call == number and (node := held()) is not None]:
            node.register_prehook(lambda _: then() and None)

    def others_waiting(self, node: Any) -> int:
        """How many calls of the model wait for their backward pass, beside the one that a node is of."""
        own = {call for call, held in self.nodes if held() is node}
        return len({call for call, held in self.nodes if waits(held)} - own)

    def call_begins(self) -> None:
        """The model is called. What a call before has raised, with its frames and their tensors, does not stay."""
        if self.abandoned:
            self.abandoned = False
            collect()
        self.calls.clear()
        self.made.clear()
        self.call += 1

    def serving(self, recipe: Callable[[], Recipe]) -> Serve:
        """The function that gives torch.compile a callable for each graph, by the recipe of the call that runs."""
        return partial(_serve, cast(Regions, weakref.proxy(self)), recipe)  # torch holds what it compiled

    def has_run(self, recipe: Recipe) -> bool:
        """Whether the graphs of a recipe are compiled."""
        return not self.compiling and any(r is recipe for r in self.begun)

    def drawn_again(self, recipe: Recipe) -> list[str]:
        """The random ops that the compiled graphs of a recipe run again, under the state of the generator."""
        return [name for r, name in self._drawn if r is recipe]

    def wrote(self, recipe: Recipe, forward: fx.GraphModule) -> None:
        """A forward graph is written for a recipe."""
        saving = forward.graph.find_nodes(op="call_function", target=run_and_save_state)
        states = (next(iter(node.users)) for node in saving)
        self._drawn += [(recipe, state.name.removesuffix("_rng_state")) for state in states]

    def settings(self) -> AbstractContextManager[None]:
        """Those under which torch.compile takes a frame, which is counted."""
        self.frames += 1
        return dynamo_settings()

    @contextmanager
    def running(self, plan: PlanRecord) -> Iterator[None]:
        """A call by a plan. Cycles of frames that compiled it do not stay.

        They refer to the result, which would seem to be held by the loop until the collector comes to them.
        """
        frames, recipe, promoted = self.frames, recipe_of(plan), _promotions()
        with nullcontext() if any(r is recipe for r in self.begun) else self._progress(plan, recipe):
            yield
        if self.frames != frames:
            collect(1 if _promotions() == promoted else 2)  # those that the collector has passed on are old

    @contextmanager
    def _progress(self, plan: PlanRecord, recipe: Recipe) -> Iterator[None]:
        """Shows how many graphs of a plan are compiled, which has not been done."""
        self.begun.append(recipe)
        graphs = {planned for order in recipe.calls.values() for planned in order}
        with bar("compiling", plan.options.progress, total=len(graphs), unit=" graphs") as self.shown:
            try:
                with clock(self.shown):
                    yield
            finally:
                self.shown = None


def _promotions() -> int:
    """How often the collector has passed on what it found in use to the oldest generation."""
    return int(gc.get_stats()[1]["collections"])


def _serve(
    regions: Regions,
    recipe: Callable[[], Recipe],
    graph: fx.GraphModule,
    compile_region: CompileRegion,
    examples: Sequence[Any],
) -> Callable[..., Any]:
    served = _Graph(regions, recipe, graph, compile_region)
    regions.graphs.add(served)
    if served.key in recipe().calls:
        regions.compiling = True
        served.compiled_for(served.planned_now(), examples)
        regions.compiling = False
    return served.run


_Compiled = tuple[Callable[..., Any], Arrivals, Mapping[int, tuple[int, ...]]]  # and strides of results


class _Graph:
    """A graph that Dynamo captured, compiled once for each region that is planned for it."""

    def __init__(
        self, regions: Regions, recipe: Callable[[], Recipe], graph: fx.GraphModule, compile_region: CompileRegion
    ) -> None:
        self.regions, self.recipe, self.graph, self.compile_region = regions, recipe, graph, compile_region
        self.key = fingerprint(graph.graph)
        self.device = next(regions.model.parameters()).device
        self.compiled: dict[object, _Compiled] = {}  # by region, cut, and buckets
        self.fused: dict[object, _Compiled] = {}  # of these, by Inductor, and with no guards that Dynamo does not know
        self._latest: tuple[object, _Compiled] | None = None  # of these, that ran last

    def planned_now(self) -> PlannedRegion | None:
        """The region of the present call of this graph."""
        at = self.regions.calls[self.key]
        if self.key not in self.recipe().calls and not self.regions.calls:
            self.regions.other_way(self.key)
        calls = self.recipe().calls.get(self.key, ())
        if at >= len(calls):
            raise GraphChanged
        return calls[at]

    def compiled_for(self, planned: PlannedRegion | None, inputs: Sequence[Any]) -> _Compiled:
        """This graph as it was planned, and its backward pass; compiled on such inputs if it has not been."""

        def partition(region: Region) -> tuple[fx.GraphModule, fx.GraphModule]:
            if planned is None or region.fingerprint != planned.fingerprint:
                raise GraphChanged
            written = emit_planned(region, planned, self.regions.store_number)
            if written is None:
                raise GraphChanged
            self.regions.wrote(self.recipe(), written[0])
            if len(self.recipe().calls) > 1:  # others read what this one returns
                strides.update(strides_out(region))
            return written

        cut = self.recipe().detached.get(self.key, ())
        # what the loop of several processes does is not looked at
        laid_out = None if together(self.regions.model) else self.recipe().laid_out.get(self.key, ())
        fused = planned is not None and planned.realised is not None
        kind = planned, cut, laid_out, () if fused else gradients_together(self.regions.model)
        if self._latest is not None and self._latest[0] == kind:  # the hash of a long schedule takes longer
            return self._latest[1]
        if kind not in self.compiled:
            strides: dict[int, tuple[int, ...]] = {}
            arrivals = Arrivals(cut, _unplanned, kind[3], laid_out=laid_out)
            by = None
            if planned is not None and planned.realised is not None:
                by = compiling(own=planned.own, settings=planned.settings, near=planned.near)
            if (ready := self.regions.ready.pop((self.key, kind), None)) is not None:
                self.compiled[kind] = ready
            else:
                with rnns_in_parts(on=planned is not None and planned.rnns_in_parts):
                    self.compiled[kind] = self.compile_region(partition, inputs, arrivals, by), arrivals, strides
                if by is not None and not guarded_by_aot():
                    self.fused[kind] = self.compiled[kind]
            if self.regions.shown is not None:
                self.regions.shown.update()
        self._latest = kind, self.compiled[kind]
        return self.compiled[kind]

    def run(self, *inputs: Any) -> Any:
        """The graph's outputs, by the region that is planned for this call."""
        run, arrivals, strides = self.compiled_for(self.planned_now(), inputs)
        self.regions.calls[self.key] += 1
        self.regions.ran += 1
        # a random op's state is that of the current device's generator
        accelerator = accelerator_of(self.device)
        with nullcontext() if accelerator is None else accelerator.current(self.device):
            results = run(*inputs)
        if (node := backward_node(results)) is not None:
            self.regions.nodes.append((self.regions.call, node))
        outputs = as_captured(with_nodes(results, arrivals), strides)
        self.regions.made += [weakref.ref(t) for t in outputs if isinstance(t, torch.Tensor)]
        return outputs
