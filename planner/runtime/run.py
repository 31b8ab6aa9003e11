"""Puts plans on a model and takes them off: the model calls its compiled graphs, one plan per kind of call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..capture.dynamo import boxed, compile_call, dynamo_settings, make_backend
from ..capture.region import Region, fingerprint
from ..errors import ApplyError
from ..rewrite.emit import emit

Passes = tuple[tuple[int, ...], tuple[int, ...]]  # indices of a region's ops: forward, backward


@dataclass(frozen=True)
class Recipe:
    """How to run one kind of call.

    Attributes:
        passes: for each region, by fingerprint, the ops that its forward and backward run.
        detached: for each Dynamo graph, by key, the outputs that get no gradient.
    """

    passes: Mapping[str, Passes] = field(repr=False)
    detached: Mapping[str, tuple[int, ...]] = field(repr=False)


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


def call_signature(model: nn.Module, args: Any, kwargs: Any) -> tuple[object, ...]:
    """Equal for calls that one plan serves: same shapes, dtypes, devices, other arguments, modes, frozen parts."""

    def describe(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return (tuple(x.shape), x.dtype, x.device, x.requires_grad)
        return x if isinstance(x, (int, float, str, bool, type(None))) else type(x)

    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    kinds = {p.device.type for p in model.parameters()}
    return (
        tuple(map(describe, leaves)),
        str(spec),
        tuple(m.training for m in model.modules()),
        tuple((p.requires_grad, p.device, p.dtype) for p in model.parameters()),
        tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)),
    )


class Applied:
    """What stands in for the model's call while plans are applied, one per kind of call."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, Any]],
        warn: Callable[[Any], bool],
    ) -> None:
        self.make = make
        self.warn = warn  # asked before a step until it has said what there is to say
        self.warned = False
        self.recipes: dict[tuple[object, ...], Any] = {}
        self.plans: dict[tuple[object, ...], Any] = {}
        self.newest: Any = None
        self.call_eagerly = model._call_impl
        self.model = model

    def add(self, signature: tuple[object, ...], plan: Any, recipe: Any) -> None:
        self.recipes[signature] = recipe
        self.plans[signature] = plan
        self.newest = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.call_eagerly(*args, **kwargs)  # type: ignore[no-untyped-call]
        signature = call_signature(self.model, args, kwargs)
        if signature not in self.recipes:
            self.add(signature, *self.make(args, kwargs))
        self.warned = self.warned or self.warn(self.plans[signature])
        return self.run(self.recipes[signature], args, kwargs)

    def run(self, recipe: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the model under a plan."""
        raise NotImplementedError


class Runtime(Applied):
    """Runs compiled graphs."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, Any]],
        warn: Callable[[Any], bool],
    ) -> None:
        super().__init__(model, make, warn)
        self.regions_run = 0
        self.anchor = torch.zeros((), requires_grad=True)
        backend = make_backend(self._partition, boxed, self._detach, self._wrap)
        self.compiled = compile_call(model, backend)

    def run(self, recipe: Recipe, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        before = self.regions_run
        with dynamo_settings():
            result = self.compiled(*args, **kwargs)
        if self.regions_run == before:
            raise ApplyError(
                "torch.compile ran the model without its plan (TORCH_COMPILE_DISABLE, a stance, or a dispatch mode "
                "such as FlopCounterMode keeps it out); "
                "remove() the plan to run without one"
            )
        return result

    def _recipe_of(self, table: str, key: str) -> Any:
        for recipe in reversed(self.recipes.values()):
            if key in getattr(recipe, table):
                return getattr(recipe, table)[key]
        raise ApplyError(
            "the model's graph differs from the one that was planned (it depends on something beside its arguments); "
            "plan again with the model in the state in which it trains"
        )

    def _partition(self, region: Region) -> tuple[fx.GraphModule, fx.GraphModule]:
        return emit(region, *self._recipe_of("passes", region.fingerprint))

    def _detach(self, graph: fx.GraphModule) -> Collection[int]:
        found: Collection[int] = self._recipe_of("detached", fingerprint(graph.graph))
        return found

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


def attach(model: nn.Module, runtime: Applied) -> None:
    """Put a runtime on a model, in place: the object, its parameters' names and its `state_dict` stay.

    Raises:
        ApplyError: the model already runs under a plan, or is compiled.
    """
    current = attached(model)
    if current is not None:
        raise ApplyError(f"a plan is already applied to this {type(model).__name__}; remove() it first")
    _refuse_compiled(model, None)
    model._compiled_call_impl = runtime


def attached(model: nn.Module) -> Applied | None:
    """The runtime that a model runs under, or None."""
    current = getattr(model, "_compiled_call_impl", None)
    return current if isinstance(current, Applied) else None


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


def _refuse_compiled(model: nn.Module, runtime: Applied | None) -> None:
    if getattr(model, "_compiled_call_impl", None) is not runtime:
        raise ApplyError(f"this {type(model).__name__} is already compiled with model.compile(); plan it uncompiled")
