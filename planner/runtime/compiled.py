"""Runs the compiled graphs of a planned model, one plan per kind of call."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn

from planner.capture.regions.fingerprint import fingerprint
from planner.capture.regions.region import Region
from planner.capture.shapes import enlarged
from planner.capture.trace.dynamo import CompileRegion, detach_outputs, dynamo_settings, make_backend
from planner.capture.trace.layers import capturable_layers
from planner.capture.trace.state_guard import undone_on, untouched
from planner.codegen.emit import emit, runnable
from planner.compat.dynamo import compile_call
from planner.compat.fake import FakeTensorMode
from planner.core.maxima import Maxima
from planner.core.options import Checkpoints
from planner.core.plan import PlanRecord
from planner.core.recipe import PlannedRegion, Recipe
from planner.errors import ApplyError, BatchError, CaptureError, PlanWarning
from planner.requests.planned import Planned
from planner.runtime.events import PlanProvider
from planner.runtime.families import Family, GraphChanged, Shapes, recipe_of
from planner.runtime.interception import Applied
from planner.runtime.modes import backward_node, unguarded, waits
from planner.runtime.signature import Signature, call_signature
from solvers.progress import bar, clock

WARN_WAYS, MOST_WAYS = 8, 32  # through a model's code: when to warn, and how many plans to keep


class _NoGradient(torch.autograd.Function):
    """Stands for an output that was planned to get no gradient: says so, should one arrive."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ApplyError(
            "a gradient reached a model output that the plan was told gets none: the loss was taken from the model's "
            "own `loss`. Plan with loss_fn=lambda output: ... for a loss computed from other outputs"
        )


def _always(recipe: Recipe) -> Callable[[], Recipe]:
    return lambda: recipe


class Runtime(Applied):
    """Runs compiled graphs.

    Attributes:
        shapes: the plans that serve calls of several shapes.
        serving: which of them serves a kind of call, by signature.
        ways: for a kind of call whose graphs depend on values, the plans of all that came, the latest first.
        calls: how often each Dynamo graph was called in this call of the model.
        cuts: the outputs that are cut off in what is compiled, for each Dynamo graph, by key.
        serves: whether torch.compile waits for one of our graphs.
        regions_run: how often one was, in all calls.
    """

    def __init__(
        self,
        model: nn.Module,
        provider: PlanProvider,
        shapes: Shapes,
        checkpoints: Checkpoints = "replace",
        *,
        alone: bool = False,
    ) -> None:
        super().__init__(model, provider, alone=alone)
        self.checkpoints = checkpoints
        self.shapes = shapes
        self.serving: dict[Signature, Family] = {}
        self.ways: dict[Signature, list[PlanRecord]] = {}
        self.calls: Counter[str] = Counter()
        self.regions_run = 0
        self.settled = False
        self.nodes: list[weakref.ref[Any]] = []  # of regions whose backward pass has not run
        self.anchor = torch.zeros((), requires_grad=True)
        self.unguarded: object = None
        self.cuts: dict[str, tuple[int, ...]] = {}
        self.serves = False
        self.current = Recipe({}, {})
        self.begun: list[Recipe] = []  # whose graphs are compiled, or were begun to be
        self.shown: Any = None  # the progress of that
        self._compile_anew()

    def _compile_anew(self) -> None:
        """Forget what was compiled."""
        own = weakref.proxy(self)  # torch holds what it compiled until the model is gone
        self.begun = []
        self.compiled = self._compiled(lambda: own.current)
        self.cuts.clear()
        self.serves = False
        for families in self.shapes.families.values():
            for family in families:
                family.compiled = self._compiled(_always(recipe_of(family.plan)))

    def _compiled(self, recipe: Callable[[], Recipe]) -> Callable[..., Any]:
        own = cast(Runtime, weakref.proxy(self))  # torch holds what it compiled
        backend = make_backend(partial(Runtime._serve, own, recipe), self.checkpoints)
        return compile_call(self.model, backend, dynamo_settings)

    def like(self, model: nn.Module) -> Runtime:
        copied = Runtime(model, self.provider, self.shapes.without_families(), self.checkpoints)
        copied.plans = {signature: plan for signature, plan in self.plans.items() if signature not in self.serving}
        copied.newest = self.newest and self.newest.of(model)
        for kind, families in self.shapes.families.items():
            for family in families:
                copied._add_family(kind, family.plan)
        return copied

    def _add_family(self, kind: Signature, plan: PlanRecord) -> None:
        recipe = recipe_of(plan)
        assert recipe.maxima is not None
        graphs = sum(map(len, recipe.calls.values()))
        self.shapes.add(kind, Family(recipe.maxima, plan, self._compiled(_always(recipe)), graphs))

    def add(self, args: Any, kwargs: Any, planned: Planned, maxima: Maxima | None = None) -> None:
        self.newest = planned
        if maxima is not None:
            self.shapes.limit(maxima)
        largest = recipe_of(planned.record).maxima
        if largest is not None:
            self._add_family(call_signature(self.model, args, kwargs, largest), planned.record)
            return
        if maxima is not None:
            self.shapes.apart.add(call_signature(self.model, args, kwargs, maxima))
            args, kwargs = enlarged(args, kwargs, maxima, FakeTensorMode(allow_non_fake_inputs=True))
        super().add(args, kwargs, planned)

    def forget(self) -> None:
        super().forget()
        self.serving.clear()
        self.shapes = self.shapes.without_families()
        self.shapes.apart.clear()

    def waits(self) -> bool:
        self.nodes = [node for node in self.nodes if waits(node)]
        return bool(self.nodes)

    def _kind(self, args: Any, kwargs: Any) -> Signature:
        return call_signature(self.model, args, kwargs, self.shapes.sizes(args, kwargs))

    def find(self, signature: Signature, args: Any, kwargs: Any) -> None:
        sizes, kind = self.shapes.sizes(args, kwargs), self._kind(args, kwargs)
        if sizes.sizes and kind not in self.shapes.apart:
            family = self.shapes.find(kind, sizes)
            if family is None:
                maxima = self.shapes.wanted(sizes)
                try:
                    self.add(args, kwargs, self.provide(args, kwargs, maxima), maxima)
                    family = self.shapes.find(kind, sizes)
                except (BatchError, CaptureError):
                    if not self.shapes.warned:
                        self.shapes.warned = True
                        warnings.warn(
                            "a batch with the largest sizes does not go together with what else this call is given: "
                            "it is planned for itself. dynamic={...} has to name every tensor that shares a size",
                            PlanWarning,
                            stacklevel=4,
                        )
                    self.shapes.apart.add(kind)
            if family is not None:
                self.serving[signature] = family
                self.plans[signature] = family.plan
        if signature not in self.plans:
            super().find(signature, args, kwargs)

    def run(self, signature: Signature, args: Any, kwargs: Any) -> Any:
        assert self.state is not None
        if (found := unguarded(self.state.classes)) != self.unguarded:
            self.unguarded = found
            self._compile_anew()
        try:
            return self._run(signature, args, kwargs)
        except GraphChanged:
            if not self.calls and not self.settled:
                # some models make parts of themselves in their first call
                self.settled = True
                with untouched(self.model, args, kwargs) as (own_args, own_kwargs):
                    self.call_eagerly(*own_args, **own_kwargs)
                self._compile_anew()  # what was compiled before may be cut into other graphs
                return self(*args, **kwargs)
            tried = self.plans.pop(signature)
            family = self.serving.pop(signature, None)
            if family is not None:
                self.shapes.differs(self._kind(args, kwargs))
            if self.calls and not recipe_of(tried).asks and (family is None or signature in family.came):
                raise
        for way in self._other_ways(signature, tried):
            self.plans[signature] = way
            with suppress(GraphChanged):
                return self._run(signature, args, kwargs)
        self.add(args, kwargs, self.provide(args, kwargs, median=False))
        self._compile_anew()
        try:
            return self._run(signature, args, kwargs)
        except GraphChanged:
            raise ApplyError(
                f"{type(self.model).__name__}: the graphs of this step are not those that were planned for it a moment "
                "ago: they depend on what changes from call to call (a counter, a random number of Python's), or on "
                "strides that an op gives to real tensors only. Plan with mode='eager', or a submodule without it"
            ) from None

    def _other_ways(self, signature: Signature, tried: PlanRecord) -> list[PlanRecord]:
        """The plans of other ways that such a call has taken; the one that was tried becomes the latest of all."""
        if not recipe_of(tried).asks or recipe_of(tried).maxima is not None:
            return []
        ways = [way for way in self.ways.get(signature, ()) if way.recipe is not tried.recipe]
        if len(ways) == MOST_WAYS:
            ways.clear()
            self._compile_anew()
        self.ways[signature] = [tried, *ways]
        if len(ways) == WARN_WAYS:
            warnings.warn(
                f"the model took {WARN_WAYS + 1} ways through its code, by what its Python code asks of tensors "
                f"({'; '.join(recipe_of(tried).asks)}): each is planned and compiled for itself. Where they do not "
                "end, take the question out of forward(), or plan a submodule without it",
                PlanWarning,
                stacklevel=5,
            )
        return ways

    def _run(self, signature: Signature, args: Any, kwargs: Any) -> Any:
        self.calls.clear()
        family = self.serving.get(signature)
        try:
            with self._compiling(self.plans[signature]):
                if family is not None:
                    result = family.run(self.model, signature, args, kwargs)
                else:
                    self.current = recipe_of(self.plans[signature])
                    if any(self.cuts.get(key, cut) != cut for key, cut in self.current.detached.items()):
                        self._compile_anew()
                    undone = undone_on(GraphChanged, self.model) if self.current.asks else nullcontext()
                    with capturable_layers(), undone:
                        result = self.compiled(*args, **kwargs)
        except BaseException as e:  # an interruption, too
            if self.serves or not isinstance(e, GraphChanged):
                self._compile_anew()  # torch.compile runs code that it failed to compile without its plan from then on
            raise
        if not self.calls and not (self.regions_run and recipe_of(self.plans[signature]).asks):  # all may be dropped
            raise ApplyError(
                "torch.compile ran the model without its plan (TORCH_COMPILE_DISABLE, a stance, or a dispatch mode "
                "such as FlopCounterMode keeps it out); "
                "remove() the plan to run without one"
            )
        return result

    @contextmanager
    def _compiling(self, plan: PlanRecord) -> Iterator[None]:
        """Shows how many graphs of a plan are compiled, where that has not been done."""
        recipe = recipe_of(plan)
        if any(r is recipe for r in self.begun):
            yield
            return
        self.begun.append(recipe)
        graphs = {planned for order in recipe.calls.values() for planned in order}
        with bar("compiling", plan.options.progress, total=len(graphs), unit=" graphs") as self.shown:
            try:
                with clock(self.shown):
                    yield
            finally:
                self.shown = None

    def _serve(
        self,
        recipe: Callable[[], Recipe],
        graph: fx.GraphModule,
        compile_region: CompileRegion,
        examples: Sequence[Any],
    ) -> Callable[..., Any]:
        key = fingerprint(graph.graph)
        device = next(self.model.parameters()).device
        compiled: dict[PlannedRegion | None, Callable[..., Any]] = {}
        cut: tuple[int, ...] | None = None

        def compiled_for(planned: PlannedRegion | None, given: Sequence[Any]) -> Callable[..., Any]:
            def partition(region: Region) -> tuple[fx.GraphModule, fx.GraphModule]:
                if planned is None or region.fingerprint != planned.fingerprint:
                    raise GraphChanged
                if not runnable(region, planned.forward, planned.backward):
                    raise GraphChanged
                return emit(region, planned.forward, planned.backward)

            nonlocal cut
            if cut is None:
                wanted = recipe().detached.get(key, ())
                if not all(0 <= at < len(graph.graph.output_node().args[0]) for at in wanted):  # type: ignore[arg-type]
                    raise GraphChanged
                cut = self.cuts[key] = wanted
                detach_outputs(graph, cut)
            if planned not in compiled:
                compiled[planned] = compile_region(partition, given)
                if self.shown is not None:
                    self.shown.update()
            return compiled[planned]

        def planned_now() -> PlannedRegion | None:
            calls = recipe().calls.get(key, ())
            if self.calls[key] >= len(calls):
                raise GraphChanged
            return calls[self.calls[key]]

        if key in recipe().calls:
            self.serves = True
            compiled_for(planned_now(), examples)
            self.serves = False
        del examples

        def call(*inputs: Any) -> Any:
            run = compiled_for(planned_now(), inputs)
            self.calls[key] += 1
            self.regions_run += 1
            # a random op's state is that of the current device's generator
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                results = run(*inputs)
            if (node := backward_node(results)) is not None:
                self.nodes.append(node)
            if not cut:
                return results
            return tuple(
                _NoGradient.apply(r, self.anchor) if i in cut else r  # type: ignore[no-untyped-call]
                for i, r in enumerate(results)
            )

        return call
