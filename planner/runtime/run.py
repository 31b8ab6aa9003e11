"""Puts plans on a model and takes them off: the model calls its compiled graphs, one plan per kind of call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..capture.dynamo import boxed, compile_call, dynamo_settings, make_backend
from ..capture.private import FakeTensorMode
from ..capture.region import Region, fingerprint
from ..capture.shapes import Maxima, enlarged, layout
from ..errors import ApplyError
from ..rewrite.emit import emit
from .shapes import Family, GraphDiffers, Shapes

Passes = tuple[tuple[int, ...], tuple[int, ...]]  # indices of a region's ops: forward, backward


@dataclass(frozen=True)
class Recipe:
    """How to run one kind of call.

    Attributes:
        passes: for each region, by fingerprint, the ops that its forward and backward run.
        detached: for each Dynamo graph, by key, the outputs that get no gradient.
        maxima: where sizes are symbols in the graphs, the largest for which the plan holds.
    """

    passes: Mapping[str, Passes] = field(repr=False)
    detached: Mapping[str, tuple[int, ...]] = field(repr=False)
    maxima: Maxima | None = field(default=None, repr=False)


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


def call_signature(model: nn.Module, args: Any, kwargs: Any, maxima: Maxima | None = None) -> tuple[object, ...]:
    """Equal for calls that one plan serves: same shapes, dtypes, devices, other arguments, modes, frozen parts.

    Where sizes may be smaller than maxima, these do not count. A tensor that is passed twice is one input of a graph.
    """

    def describe(path: Any, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            free = maxima.of(pytree.keystr(path)) if maxima else {}
            shape = tuple(None if d in free else n for d, n in enumerate(x.shape))
            same = first.setdefault(id(x), len(first))
            return (shape, layout(x) if free else x.stride(), x.dtype, x.device, x.requires_grad, same)
        return x if isinstance(x, (int, float, str, bool, type(None))) else type(x)

    first: dict[int, int] = {}
    leaves, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    kinds = {p.device.type for p in model.parameters()}
    return (
        tuple(describe(*leaf) for leaf in leaves),
        str(spec),
        tuple(m.training for m in model.modules()),
        tuple((p.requires_grad, p.device, p.dtype) for p in model.parameters()),
        tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)),
    )


class Runtime:
    """What stands in for the model's call while plans are applied.

    Attributes:
        plans: for each kind of call, by signature, its plan.
        newest: the plan made last.
        shapes: the plans that serve calls of several shapes.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[tuple[Any, ...], Mapping[str, Any], Maxima | None], tuple[Any, Recipe]],
        warn: Callable[[Any], bool],
        shapes: Shapes,
    ) -> None:
        self.make = make
        self.warn = warn  # asked before a step until it has said what there is to say
        self.warned = False
        self.recipes: dict[tuple[object, ...], Recipe] = {}
        self.plans: dict[tuple[object, ...], Any] = {}
        self.newest: Any = None
        self.shapes = shapes
        self.serving: dict[tuple[object, ...], Family] = {}
        self.call_eagerly = model._call_impl
        self.model = model
        self.regions_run = 0
        self.anchor = torch.zeros((), requires_grad=True)
        self.compiled = self._compiled(self.recipes.values, ApplyError)

    def _compiled(self, recipes: Callable[[], Iterable[Recipe]], error: type[ApplyError]) -> Callable[..., Any]:
        """The model's call, by the recipes that are there when it is traced; the error is for a graph without one."""

        def of(table: str, key: str) -> Any:
            for recipe in reversed([*recipes()]):
                if key in getattr(recipe, table):
                    return getattr(recipe, table)[key]
            raise error(
                "the model's graph differs from the one that was planned (it depends on something beside its "
                "arguments); plan again with the model in the state in which it trains"
            )

        def partition(region: Region) -> tuple[fx.GraphModule, fx.GraphModule]:
            return emit(region, *of("passes", region.fingerprint))

        def detach(graph: fx.GraphModule) -> Collection[int]:
            found: Collection[int] = of("detached", fingerprint(graph.graph))
            return found

        return compile_call(self.model, make_backend(partition, boxed, detach, self._wrap))

    def add(self, args: Any, kwargs: Any, plan: Any, recipe: Recipe, maxima: Maxima | None = None) -> None:
        """Let a plan serve such calls; where it was made for maxima, those of smaller sizes too."""
        self.newest = plan
        if maxima is not None:
            self.shapes.limit(maxima)
        if recipe.maxima is not None:
            compiled = self._compiled(lambda: [recipe], GraphDiffers)
            family = Family(recipe.maxima, plan, compiled, len(recipe.detached))
            self.shapes.add(call_signature(self.model, args, kwargs, recipe.maxima), family)
            return
        if maxima is not None:
            self.shapes.apart.add(call_signature(self.model, args, kwargs, maxima))
            args, kwargs = enlarged(args, kwargs, maxima, FakeTensorMode(allow_non_fake_inputs=True))
        signature = call_signature(self.model, args, kwargs)
        self.recipes[signature] = recipe
        self.plans[signature] = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.call_eagerly(*args, **kwargs)  # type: ignore[no-untyped-call]
        signature = call_signature(self.model, args, kwargs)
        if signature not in self.plans:
            self._serve(signature, args, kwargs)
        self.warned = self.warned or self.warn(self.plans[signature])
        before = self.regions_run
        result = self._run(signature, args, kwargs)
        if self.regions_run == before:
            raise ApplyError(
                "torch.compile ran the model without its plan (TORCH_COMPILE_DISABLE, a stance, or a dispatch mode "
                "such as FlopCounterMode keeps it out); "
                "remove() the plan to run without one"
            )
        return result

    def _run(self, signature: tuple[object, ...], args: Any, kwargs: Any) -> Any:
        family = self.serving.get(signature)
        if family is not None:
            try:
                return family.run(self.model, signature, args, kwargs)
            except GraphDiffers:
                del self.serving[signature], self.plans[signature]
                self.shapes.differs(self._kind(args, kwargs))
                self.add(args, kwargs, *self.make(args, kwargs, None))
        with dynamo_settings():
            return self.compiled(*args, **kwargs)

    def _kind(self, args: Any, kwargs: Any) -> tuple[object, ...]:
        return call_signature(self.model, args, kwargs, self.shapes.sizes(args, kwargs))

    def _serve(self, signature: tuple[object, ...], args: Any, kwargs: Any) -> None:
        """Find a plan for a kind of call that comes for the first time, or make one."""
        sizes, kind = self.shapes.sizes(args, kwargs), self._kind(args, kwargs)
        if sizes.sizes and kind not in self.shapes.apart:
            family = self.shapes.find(kind, sizes)
            if family is None:
                maxima = self.shapes.wanted(sizes)
                self.add(args, kwargs, *self.make(args, kwargs, maxima), maxima)
                family = self.shapes.find(kind, sizes)
            if family is not None:
                self.serving[signature] = family
                self.plans[signature] = family.plan
        if signature not in self.plans:
            self.add(args, kwargs, *self.make(args, kwargs, None))

    def _wrap(self, compiled: Callable[..., Any], cut: Collection[int]) -> Callable[..., Any]:
        device = next(self.model.parameters()).device

        def call(*inputs: Any) -> Any:
            self.regions_run += 1
            # a random op's state is that of the current device's generator
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                results = compiled(*inputs)
            if not cut:
                return results
            return tuple(
                _NoGradient.apply(r, self.anchor) if i in cut else r  # type: ignore[no-untyped-call]
                for i, r in enumerate(results)
            )

        return call


def attach(model: nn.Module, runtime: Runtime) -> None:
    """Put a runtime on a model, in place: the object, its parameters' names and its `state_dict` stay.

    Raises:
        ApplyError: the model already runs under a plan, or is compiled.
    """
    current = attached(model)
    if current is not None:
        raise ApplyError(f"a plan is already applied to this {type(model).__name__}; remove() it first")
    _refuse_compiled(model, None)
    model._compiled_call_impl = runtime


def attached(model: nn.Module) -> Runtime | None:
    """The runtime that a model runs under, or None."""
    current = getattr(model, "_compiled_call_impl", None)
    return current if isinstance(current, Runtime) else None


def detach(model: nn.Module) -> None:
    """Take the plan off; raises ApplyError where there is none."""
    if attached(model) is None:
        raise ApplyError(f"no plan is applied to this {type(model).__name__}")
    model._compiled_call_impl = None


@contextmanager
def taken_off(model: nn.Module) -> Iterator[None]:
    """The model without its plan, if it runs under one, for a while; ApplyError where it is compiled otherwise."""
    runtime = attached(model)
    _refuse_compiled(model, runtime)
    model._compiled_call_impl = None
    try:
        yield
    finally:
        model._compiled_call_impl = runtime


def _refuse_compiled(model: nn.Module, runtime: Runtime | None) -> None:
    if getattr(model, "_compiled_call_impl", None) is not runtime:
        raise ApplyError(f"this {type(model).__name__} is already compiled with model.compile(); plan it uncompiled")
