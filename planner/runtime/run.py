"""Puts plans on a model and takes them off: the model calls its compiled graphs, one plan per kind of call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..capture.dynamo import CompileRegion, compile_call, detach_outputs, dynamo_settings, make_backend
from ..capture.region import Region, fingerprint
from ..errors import ApplyError
from ..rewrite.emit import emit


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """What a region runs: indices of its ops, for a region of this fingerprint."""

    fingerprint: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """How to run one kind of call of the model.

    Attributes:
        calls: for each Dynamo graph, by key, what each of its calls in a step runs; None for one without a gradient.
        detached: for each Dynamo graph, by key, the outputs that get no gradient.
    """

    calls: Mapping[str, tuple[PlannedRegion | None, ...]] = field(repr=False)
    detached: Mapping[str, tuple[int, ...]] = field(repr=False)


class GraphDiffersError(ApplyError):
    """The model's graph is not the one that was planned."""

    def __init__(self) -> None:
        super().__init__(
            "the model's graph differs from the one that was planned (it depends on something beside its arguments); "
            "plan again with the model in the state in which it trains"
        )


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


class Runtime:
    """What stands in for the model's call while plans are applied."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, Recipe]],
        warn: Callable[[Any], bool],
    ) -> None:
        self.make = make
        self.warn = warn  # asked before a step until it has said what there is to say
        self.warned = False
        self.recipes: dict[tuple[object, ...], Recipe] = {}
        self.plans: dict[tuple[object, ...], Any] = {}
        self.newest: Any = None
        self.call_eagerly = model._call_impl
        self.model = model
        self.anchor = torch.zeros((), requires_grad=True)
        self.current = Recipe({}, {})
        self.calls: Counter[str] = Counter()  # of each Dynamo graph, in this call of the model
        self.compiled = compile_call(model, make_backend(self._serve))

    def add(self, signature: tuple[object, ...], plan: Any, recipe: Recipe) -> None:
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
        result = self._run(signature, args, kwargs)
        if not self.calls:
            raise ApplyError(
                "torch.compile ran the model without its plan (TORCH_COMPILE_DISABLE, a stance, or a dispatch mode "
                "such as FlopCounterMode keeps it out); "
                "remove() the plan to run without one"
            )
        return result

    def _run(self, signature: tuple[object, ...], args: Any, kwargs: Any) -> Any:
        self.calls.clear()
        self.current = self.recipes[signature]
        with dynamo_settings():
            return self.compiled(*args, **kwargs)

    def _serve(self, graph: fx.GraphModule, compile_region: CompileRegion) -> Callable[..., Any]:
        key = fingerprint(graph.graph)
        if key not in self.current.calls:
            raise GraphDiffersError
        cut = self.current.detached[key]
        detach_outputs(graph, cut)
        device = next(self.model.parameters()).device
        compiled: dict[PlannedRegion | None, Callable[..., Any]] = {}

        def compiled_for(planned: PlannedRegion | None) -> Callable[..., Any]:
            def partition(region: Region) -> tuple[fx.GraphModule, fx.GraphModule]:
                if planned is None or region.fingerprint != planned.fingerprint:
                    raise GraphDiffersError
                return emit(region, planned.forward, planned.backward)

            if planned not in compiled:
                compiled[planned] = compile_region(partition)
            return compiled[planned]

        def planned_now() -> PlannedRegion | None:
            calls = self.current.calls.get(key, ())
            if self.calls[key] >= len(calls):
                raise GraphDiffersError
            return calls[self.calls[key]]

        compiled_for(planned_now())

        def call(*inputs: Any) -> Any:
            run = compiled_for(planned_now())
            self.calls[key] += 1
            # a random op's state is that of the current device's generator
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                results = run(*inputs)
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
