"""Runs the compiled graphs of a planned model, one plan per kind of call."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, cast

import torch
from torch import nn

from planner.capture.shapes import enlarged
from planner.capture.trace.apart import Apart, Paths
from planner.capture.trace.dynamo import make_backend, op_by_op
from planner.capture.trace.layers import helpers
from planner.capture.trace.state_guard import Undoing, untouched
from planner.compat.dynamo import compile_call
from planner.compat.fake import FakeTensorMode
from planner.compat.joint_trace import traces_of
from planner.core.maxima import Maxima, sizes_in
from planner.core.options import Checkpoints
from planner.core.plan import PlanRecord
from planner.core.recipe import Choice, Recipe
from planner.errors import ApplyError, BatchError, CaptureError, InfeasibleBudgetError, PlannerError, warn
from planner.offload.store import Store
from planner.requests.planned import Planned
from planner.runtime.cuda_graphs import captures
from planner.runtime.events import PlanProvider
from planner.runtime.families import Family, GraphChanged, Shapes, recipe_of
from planner.runtime.interception import Applied
from planner.runtime.modes import unguarded
from planner.runtime.regions import Regions
from planner.runtime.signature import Role, Signature, has_strings, without_numbers
from planner.runtime.uncompiled import Uncompiled, may_fit
from planner.runtime.unread import signature_of
from planner.runtime.ways import Ways, has_ways

SETTLES = 2  # calls of a kind, after which its graphs are expected to stay: the first may make what the second uses


def _always(recipe: Recipe) -> Callable[[], Recipe]:
    return lambda: recipe


class Runtime(Applied):
    """Runs compiled graphs.

    Args:
        stores: makes the place where values go that leave the device.

    Attributes:
        shapes: the plans that serve calls of several shapes.
        serving: which of them serves a kind of call, by signature.
        came: how many calls of a kind were served, up to those in which graphs settle.
        ways: the plans of calls that are of one kind and have different graphs.
        regions: runs the model's graphs.
        uncompiled: the calls that ran as they are.
        current: the recipe by which the model is called, or was called last, where no family serves the call.
        present: the kind of the call that runs by it; None where a family serves the call.
        traced: whether torch.compile has taken the model's call since it was compiled anew.
        asks_ones: whether a graph asks whether masks of its inputs hold ones only.
    """

    def __init__(
        self,
        model: nn.Module,
        provider: PlanProvider,
        shapes: Shapes,
        checkpoints: Checkpoints = "replace",
        *,
        stores: Callable[[], Store | None] = lambda: None,
        step_in_backward: bool = False,
        alone: bool = False,
    ) -> None:
        super().__init__(model, provider, alone=alone)
        self.checkpoints, self.stores = checkpoints, stores
        self.step_in_backward = step_in_backward
        self.shapes = shapes
        self.serving: dict[Signature, Family] = {}
        self.came: Counter[Signature] = Counter()
        self.undoing = Undoing()
        self.ways = Ways(type(model).__name__)
        own = weakref.proxy(self)  # torch holds what it compiled until the model is gone
        self.regions = Regions(model, stores(), lambda key: own._takes_way(key))
        regions = weakref.ref(self.regions)  # a call's results must not hold the model
        self.uncompiled = Uncompiled(lambda: (there := regions()) is not None and there.ran > 0)
        self.settled = self.traced = self.asks_ones = False
        self.unguarded: object = None
        self.current = Recipe({}, {})
        self.present: Signature | None = None
        self._apart: dict[Paths, Apart] = {}
        self._compile_anew()

    def _compile_anew(self) -> None:
        """Forget what was compiled."""
        own = weakref.proxy(self)
        self.regions.forget()
        self.traced = False
        self._apart.clear()
        self.compiled = self._compiled(lambda: own.current)
        for families in self.shapes.families.values():
            for family in families:
                family.compiled = self._compiled(_always(recipe_of(family.plan)))

    def _compiled(self, recipe: Callable[[], Recipe], module: nn.Module | None = None) -> Callable[..., Any]:
        """The call of the model, or of a module in it."""
        own = cast(Runtime, weakref.proxy(self))

        def settings() -> AbstractContextManager[None]:
            own.traced = True
            return own.regions.settings()

        traces = traces_of(self.model)
        compiler = op_by_op(self.checkpoints, step_in_backward=self.step_in_backward, traces=traces)
        backend = make_backend(self.regions.serving(recipe), compiler, asks=lambda: own._asks())
        return compile_call(module or self.model, backend, settings)

    def _asks(self) -> bool:
        """Whether the values of a graph's inputs may tell which graph runs."""
        if captures(self.model):
            raise ApplyError(
                "a mask of attention is asked whether it holds ones only, which a CUDA graph cannot: call the model "
                "without an attention_mask that lets everything through, or remove() the plan"
            )
        self.asks_ones = True
        return True

    def like(self, model: nn.Module) -> Runtime:
        shapes, steps = self.shapes.without_families(), self.step_in_backward
        copied = Runtime(model, self.provider, shapes, self.checkpoints, stores=self.stores, step_in_backward=steps)
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
        self.peaks.plan_made()
        self._came(args, kwargs)
        if maxima is not None:
            self.shapes.limit(maxima)
        recipe = planned.record.recipe
        if isinstance(recipe, Recipe) and recipe.maxima is not None:
            self._add_family(signature_of(self.model, args, kwargs, recipe.maxima), planned.record)
            return
        if maxima is not None:
            self.shapes.apart.add(signature_of(self.model, args, kwargs, maxima))
            args, kwargs = enlarged(args, kwargs, maxima, FakeTensorMode(allow_non_fake_inputs=True))
        super().add(args, kwargs, planned)

    def forget(self, role: Role | None = None) -> None:
        super().forget(role)
        self.serving = {signature: family for signature, family in self.serving.items() if signature in self.plans}
        self.ways.keep(self.plans.keys())
        self.shapes = self.shapes.without_families()
        self.shapes.apart.clear()

    def waiting_calls(self) -> frozenset[int]:
        return self.regions.waiting() | self.uncompiled.waiting()

    def when_used(self, number: int, then: Callable[[], object]) -> None:
        self.regions.when_used(number, then)
        self.uncompiled.when_used(number, then)

    def call_number(self) -> int | None:
        return self.regions.call

    def made(self) -> list[torch.Tensor]:
        return [t for ref in self.regions.made if (t := ref()) is not None]

    def _kind(self, args: Any, kwargs: Any) -> Signature:
        return signature_of(self.model, args, kwargs, self.shapes.sizes(args, kwargs))

    def _came(self, args: Any, kwargs: Any) -> None:
        sizes = sizes_in(args, kwargs)
        self.shapes.note(signature_of(self.model, args, kwargs, sizes), sizes, together=self._in_first_step())

    def _in_first_step(self) -> bool:
        """Whether a call comes in the first step, after others: shapes that differ there are those of one step."""
        return self.watch is not None and not self.watch.was_trained() and self.waiting() > 0

    def find(self, signature: Signature, args: Any, kwargs: Any) -> None:
        try:
            self._find(signature, args, kwargs)
        except BaseException:
            self.regions.abandoned = True
            raise

    def _find(self, signature: Signature, args: Any, kwargs: Any) -> None:
        self._came(args, kwargs)
        sizes, kind = self.shapes.sizes(args, kwargs), self._kind(args, kwargs)
        if sizes.sizes and kind not in self.shapes.apart:
            family = self.shapes.find(kind, sizes) or self._new_family(kind, sizes, args, kwargs)
            if family is not None:
                self.serving[signature] = family
                self.plans[signature] = family.plan
        if signature not in self.plans and not self._runs_as_it_is(signature, args, kwargs):
            super().find(signature, args, kwargs)
            self.ways.comes(without_numbers(signature), signature, "is called with other numbers than before")

    def _runs_as_it_is(self, signature: Signature, args: Any, kwargs: Any) -> bool:
        """Whether a smaller batch, as the last of an epoch, runs uncompiled: where nothing must be recomputed."""
        sizes, most = sizes_in(args, kwargs), self.newest
        if (
            most is None
            or self.agrees
            or self._in_first_step()
            or not self.shapes.shrunk(signature_of(self.model, args, kwargs, sizes), sizes)
        ):
            return False
        record, several = most.record, most.record.options.in_flight > 1 or most.record.step.occupancy is not None
        if several or (record.overhead and not may_fit(record, (args, kwargs))):
            return False
        try:
            planned = self.provide(args, kwargs, compiled=False)
        except PlannerError:
            return False
        choice = planned.record.recipe
        if not isinstance(choice, Choice) or choice.kept:
            return False
        self.plans[signature] = planned.record
        return True

    def _new_family(self, kind: Signature, sizes: Maxima, args: Any, kwargs: Any) -> Family | None:
        """A family for such calls; None where they are planned apart."""
        wanted = self.shapes.wanted(kind, sizes)
        for maxima in wanted:
            try:
                planned = self.provide(args, kwargs, maxima)
            except (BatchError, CaptureError, InfeasibleBudgetError) as e:
                self.shapes.refused(kind, maxima, e, last=maxima is wanted[-1])
            else:
                self.add(args, kwargs, planned, maxima)
                self.shapes.planned(maxima)
                return self.shapes.find(kind, sizes)
        return None

    def run(self, signature: Signature, args: Any, kwargs: Any) -> Any:
        assert self.state is not None
        plan = self.plans[signature]
        if self.watch is not None:
            self.watch.compiled = isinstance(plan.recipe, Recipe) or plan.options.mode == "eager"
        if isinstance(plan.recipe, Choice):
            self.regions.call_begins()
            return self.uncompiled.run(
                self.model, plan.recipe, self.regions.call, lambda: self.call_eagerly(*args, **kwargs)
            )
        if plan.recipe.asks and self.came[signature] and not self.regions.ran:  # once, all layers may have been dropped
            nothing = (
                f"{type(self.model).__name__}: torch.compile captures nothing of it, as its code decides by "
                f"{' and '.join(plan.recipe.asks)}. Plan with mode='eager', or a submodule without it"
            )
            self.add(args, kwargs, self.provide(args, kwargs, refused=nothing))
            return self.run(signature, args, kwargs)
        if (found := unguarded(self.state.classes)) != self.unguarded:
            self.unguarded = found
            self._compile_anew()
        try:
            return self._run(signature, args, kwargs)
        except GraphChanged:
            padded = self.asks_ones and any(self.came.values())
            if not (self.regions.calls or self.settled or padded):
                # some models make parts of themselves in their first call
                self.settled = True
                with untouched(self.model, args, kwargs) as (own_args, own_kwargs):
                    self.call_eagerly(*own_args, **own_kwargs)
                self._compile_anew()  # what was compiled before may be cut into other graphs
                return self(*args, **kwargs)
            undone = self._undoes(signature)
            tried = self.plans.pop(signature)
            if (family := self.serving.pop(signature, None)) is not None:
                self.shapes.differs(self._kind(args, kwargs))
            if self.regions.calls and not undone and (family is None or signature in family.came):
                raise
        return self._run_otherwise(signature, tried, args, kwargs)

    def _run_otherwise(self, signature: Signature, tried: PlanRecord, args: Any, kwargs: Any) -> Any:
        """Call the model by another plan: its graphs are not those of the one that was tried."""
        others = self.ways.others(signature, tried)
        if others is None:
            self._compile_anew()
        for way in others or ():
            self.plans[signature] = way
            with suppress(GraphChanged):
                return self._run(signature, args, kwargs)
        self.add(args, kwargs, self.provide(args, kwargs, median=False))
        if isinstance(self.plans[signature].recipe, Choice):
            return self.run(signature, args, kwargs)
        self._comes_otherwise(signature, tried)
        try:
            return self._run(signature, args, kwargs)
        except GraphChanged:
            changed = (
                f"{type(self.model).__name__}: the graphs of this step are not those that were planned for it a moment "
                "ago: they depend on what changes from call to call (a counter, a random number of Python's), or on "
                "strides that an op gives to real tensors only. Plan with mode='eager', or a submodule without it"
            )
            if self.regions.calls and not self._undoes(signature):  # a part of the step has run
                raise ApplyError(changed) from None
        self.add(args, kwargs, self.provide(args, kwargs, refused=changed))
        return self.run(signature, args, kwargs)

    def _comes_otherwise(self, signature: Signature, tried: PlanRecord) -> None:
        """Such a call was planned anew, as its graphs were not those of the plan that was tried."""
        if has_ways(signature, tried):
            return
        why = "has other graphs than before, as where a number that it keeps changes,"
        self.ways.comes(signature, self.newest and self.newest.record.recipe, why)
        if signature not in self.ways:
            self._compile_anew()

    def _takes_way(self, key: str) -> bool:
        """Whether such a call came before in a way whose plan has the graph that begins it; that one is taken again."""
        signature = self.present
        if signature is None:
            return False
        found = self.ways.beginning(signature, self.plans[signature], key)
        if found is not None:
            self.plans[signature], self.current = found, recipe_of(found)
        return found is not None

    def _undoes(self, signature: Signature) -> bool:
        """Whether the model's state is put back where a graph turns out to be another after others have run."""
        recipe = recipe_of(self.plans[signature])
        several = len(recipe.calls) > 1 and (self.came[signature] < SETTLES or has_strings(signature))
        changes = bool(recipe.asks) or several
        return changes and not captures(self.model)  # the copies would wait for the device

    def has_run(self, signature: Signature) -> bool:
        plan = self.plans.get(signature)
        return plan is not None and (isinstance(plan.recipe, Choice) or self.regions.has_run(recipe_of(plan)))

    def drawn_again(self, signature: Signature) -> list[str]:
        recipe = self.plans[signature].recipe
        return self.regions.drawn_again(recipe) if isinstance(recipe, Recipe) else []

    def _leaving_alone(self, recipe: Recipe) -> AbstractContextManager[None]:
        """Has torch.compile leave alone the modules that run apart."""
        paths = Paths(recipe.apart, recipe.inner)
        if not recipe.apart:
            return nullcontext()
        if paths not in self._apart:
            own = weakref.proxy(self)
            self._apart[paths] = Apart(self.model, paths, lambda module: self._compiled(lambda: own.current, module))
        return self._apart[paths].here()

    def _run(self, signature: Signature, args: Any, kwargs: Any) -> Any:
        self.regions.call_begins()
        frames, family = self.regions.frames, self.serving.get(signature)
        self.present = signature if family is None else None
        try:
            plan = self.plans[signature]
            with self.regions.running(plan), self._leaving_alone(recipe_of(plan)):
                if family is not None:
                    result = family.run(self.model, signature, args, kwargs)
                else:
                    self.current = recipe_of(plan)
                    undoes = self._undoes(signature)
                    kept = self.model, self.current.written, (args, kwargs)
                    undone = self.undoing.on(GraphChanged, *kept) if undoes else nullcontext()
                    with helpers(), undone:
                        result = self.compiled(*args, **kwargs)
        except BaseException as e:  # an interruption, too
            self.regions.abandoned = True
            if self.regions.compiling or not isinstance(e, GraphChanged):
                self._compile_anew()  # torch.compile runs code that it failed to compile without its plan from then on
            raise
        may_drop_all = self.traced and recipe_of(self.plans[signature]).asks
        if not self.regions.calls and not may_drop_all:
            if self.regions.frames == frames or not self.came[signature]:
                raise ApplyError(
                    "torch.compile ran the model without its plan (TORCH_COMPILE_DISABLE, a stance, or a dispatch mode "
                    "such as FlopCounterMode keeps it out); "
                    "remove() the plan to run without one"
                )
            self._goes_without(signature)
        if self.came[signature] < SETTLES:
            self.came[signature] += 1
        return result

    def _goes_without(self, signature: Signature) -> None:
        """Such calls ran by their plan before; torch.compile, which looked at the code again, has captured nothing."""
        del self.plans[signature]
        self.unplanned.add(signature)
        warn(
            f"calls of this {type(self.model).__name__} run without their plan from now on: something "
            "that its code reads has changed since the last one (an attribute, as a BatchNorm's momentum), and "
            "torch.compile captures nothing of the way that it takes now. Once that is as it was, remove() the plan "
            "and apply() it again"
        )
