"""Puts plans on a model and takes them off: the model calls its compiled graphs, one plan per kind of call."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..capture.checkpoints import Checkpoints
from ..capture.dynamo import CompileRegion, compile_call, detach_outputs, dynamo_settings, make_backend
from ..capture.region import Region, fingerprint
from ..capture.untouched import untouched
from ..errors import ApplyError
from ..rewrite.emit import emit
from .modes import backward_node, refuse_compiled, trains, unguarded, waits

# Where a model keeps its runtime beside `_compiled_call_impl`, which its copies lose. Python calls an object by its
# class's `__call__`; torch.compile, around a planned model, goes past the plan unless the object has one as well.
CARRIER = "__call__"


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


class GraphChanged(ApplyError):
    """A graph that no plan knows: the model changed in a way that its signature does not tell."""

    def __init__(self) -> None:
        super().__init__(
            "a part of the model's graph differs from the one that was planned, and other parts have run already: "
            "something that it depends on was changed (a module, a hook, a dropout rate). The next call plans anew"
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
    kinds = {p.device.type for p in model.parameters()} - {"meta"}
    return (
        tuple(map(describe, leaves)),
        str(spec),
        tuple((type(m), m.training) for m in model.modules()),
        tuple((tuple(p.shape), p.requires_grad, p.device, p.dtype) for p in model.parameters()),
        tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)),
    )


class Runtime:
    """What stands in for the model's call while plans are applied."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], tuple[Any, Recipe]],
        warn: Callable[[nn.Module, Any, bool], bool],
        checkpoints: Checkpoints = "replace",
    ) -> None:
        self.make = make
        self.warn = warn  # asked before a step until it has said what there is to say
        self.checkpoints = checkpoints
        self.warned = False
        self.recipes: dict[tuple[object, ...], Recipe] = {}
        self.plans: dict[tuple[object, ...], Any] = {}
        self.newest: Any = None
        self.call_eagerly = model._call_impl
        self.model = model
        self.current = Recipe({}, {})
        self.calls: Counter[str] = Counter()  # of each Dynamo graph, in this call of the model
        self.settled = False
        self.nodes: list[weakref.ref[Any]] = []  # of regions whose backward pass has not run
        self.anchor = torch.zeros((), requires_grad=True)
        self.unguarded: object = None
        self._compile()

    def _compile(self) -> None:
        """A call that has compiled nothing yet."""
        self.compiled = compile_call(self.model, make_backend(self._serve, self.checkpoints))

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime | None:
        """The model's copy trains by the same plans; a runtime that is copied without its model is nothing."""
        model = memo.get(id(self.model))
        if model is None:
            return None
        copied = Runtime(model, self.make, self.warn, self.checkpoints)
        for signature, plan in self.plans.items():
            request = replace(plan.request, model_ref=weakref.ref(model))
            copied.add(signature, replace(plan, request=request), self.recipes[signature])
        _put(model, copied)
        return copied

    def __reduce__(self) -> Any:
        """In a pickle, the model's own call: it loads without a plan, and where this package is not."""
        kind = type(self.model)
        if (kind.__reduce__, kind.__reduce_ex__) == (object.__reduce__, object.__reduce_ex__):
            return getattr, (self.model, CARRIER)
        return type(None), ()  # torch.fx.GraphModule, which would be pickled once more inside itself

    def add(self, signature: tuple[object, ...], plan: Any, recipe: Recipe) -> None:
        self.recipes[signature] = recipe
        self.plans[signature] = plan
        self.newest = plan

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model around this one would have it in its own graph, without the plan
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not trains(self.model, args, kwargs):
            return self.call_eagerly(*args, **kwargs)  # type: ignore[no-untyped-call]
        refuse_compiled(self.model, attached(self.model))
        signature = call_signature(self.model, args, kwargs)
        if signature not in self.recipes:
            self.add(signature, *self.make(self.model, args, kwargs))
        self.nodes = [node for node in self.nodes if waits(node)]
        self.warned = self.warned or self.warn(self.model, self.plans[signature], bool(self.nodes))
        if (state := unguarded(self.model)) != self.unguarded:
            self.unguarded = state
            self._compile()
        try:
            return self._run(signature, args, kwargs)
        except GraphChanged:
            if not self.calls and not self.settled:
                self.settled = True
                with untouched(self.model, args, kwargs) as (own_args, own_kwargs):  # it makes some parts of itself now
                    self.call_eagerly(*own_args, **own_kwargs)  # type: ignore[no-untyped-call]
                return self(*args, **kwargs)
            del self.recipes[signature], self.plans[signature]
            if self.calls:
                raise
            self.add(signature, *self.make(self.model, args, kwargs))
            return self._run(signature, args, kwargs)

    def _run(self, signature: tuple[object, ...], args: Any, kwargs: Any) -> Any:
        self.calls.clear()
        self.current = self.recipes[signature]
        try:
            with dynamo_settings():
                result = self.compiled(*args, **kwargs)
        except Exception:
            self._compile()  # torch.compile runs code that raised without its plan from then on
            raise
        if not self.calls:
            raise ApplyError(
                "torch.compile ran the model without its plan (TORCH_COMPILE_DISABLE, a stance, or a dispatch mode "
                "such as FlopCounterMode keeps it out); "
                "remove() the plan to run without one"
            )
        return result

    def _serve(self, graph: fx.GraphModule, compile_region: CompileRegion) -> Callable[..., Any]:
        key = fingerprint(graph.graph)
        if key not in self.current.calls:
            raise GraphChanged
        cut = self.current.detached[key]
        detach_outputs(graph, cut)
        device = next(self.model.parameters()).device
        compiled: dict[PlannedRegion | None, Callable[..., Any]] = {}

        def compiled_for(planned: PlannedRegion | None) -> Callable[..., Any]:
            def partition(region: Region) -> tuple[fx.GraphModule, fx.GraphModule]:
                if planned is None or region.fingerprint != planned.fingerprint:
                    raise GraphChanged
                return emit(region, planned.forward, planned.backward)

            if planned not in compiled:
                compiled[planned] = compile_region(partition)
            return compiled[planned]

        def planned_now() -> PlannedRegion | None:
            calls = self.current.calls.get(key, ())
            if self.calls[key] >= len(calls):
                raise GraphChanged
            return calls[self.calls[key]]

        compiled_for(planned_now())

        def call(*inputs: Any) -> Any:
            run = compiled_for(planned_now())
            self.calls[key] += 1
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


def attach(model: nn.Module, runtime: Runtime) -> None:
    """Put a runtime on a model, in place: the object, its parameters' names and its `state_dict` stay.

    Raises:
        ApplyError: the model, or a module in it, already runs under a plan, or is compiled.
    """
    current = attached(model)
    if current is not None:
        raise ApplyError(f"a plan is already applied to this {type(model).__name__}; remove() it first")
    refuse_compiled(model, None)
    _put(model, runtime)


def attached(model: nn.Module) -> Runtime | None:
    """The runtime that a model runs under, or None."""
    current = getattr(model, "_compiled_call_impl", None)
    return current if isinstance(current, Runtime) else None


def detach(model: nn.Module) -> None:
    """Take the plan off; raises ApplyError where there is none."""
    if attached(model) is None:
        raise ApplyError(f"no plan is applied to this {type(model).__name__}")
    _put(model, None)


@contextmanager
def taken_off(model: nn.Module) -> Iterator[None]:
    """The model without its plan, if it runs under one, for a while; ApplyError where it is compiled otherwise."""
    runtime = attached(model)
    refuse_compiled(model, runtime)
    _put(model, None)
    try:
        yield
    finally:
        _put(model, runtime)


def _put(model: nn.Module, runtime: Runtime | None) -> None:
    for name in ("_compiled_call_impl", CARRIER):
        model.__dict__.pop(name, None)
        if runtime is not None:
            model.__dict__[name] = runtime
