"""The memory of an optimizer: its state and the temporaries of `optimizer.step()`, by steps of a copy on fakes."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import optim

from planner.capture.trace.loss_trace import LiveBytes
from planner.compat import pytree
from planner.compat.dispatch import lasting_modes_off
from planner.compat.fake import FakeTensorMode, unset_fake_temporarily
from planner.core.call import Call, here, storages
from planner.costs.measured_ops import measure
from planner.costs.sparse_steps import own_options, sparse_steps
from planner.errors import OptionError, warn
from planner.stepping.step import step_of

NUMBERS = 64  # bytes: the tensors that a CPU makes of the numbers which ops take, and fake tensors do not; 8 bytes each
MOST_SEEN = 64
NONE: Mapping[int, int] = MappingProxyType({})
_SEEN: dict[Any, OptimizerMemory] = {}  # by what was stepped
_FILLS = ("zeros", "ones", "full", "empty", "new_", "fill", "lift", "copy", "_to_copy", "clone")
FORMS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "forloop": {"foreach": False}}


@dataclass(frozen=True)
class OptimizerMemory:
    """The bytes of an optimizer, beside parameters and gradients.

    Attributes:
        state: live all the time, once it has stepped.
        step: the most that `optimizer.step()` holds at once beside the state: its temporaries.
        closure: what it holds beside the state while it calls a closure, which runs the model, once it has stepped.
    """

    state: int
    step: int
    closure: int = 0


def optimizer_memory(
    parameters: Iterable[torch.Tensor],
    optimizer: optim.Optimizer | str | None,
    *,
    cuda: bool,
    without: Collection[int] = (),
    sparse: Mapping[int, int] = NONE,
) -> OptimizerMemory:
    """The memory of an optimizer, by two steps of its own code on fake tensors; on a CPU, workspaces of ops that
    may have one (products, decompositions) are measured, each once. Sparse gradients are tried on small tables.

    Args:
        parameters: the tensors that are trained, for an optimizer given by name; real, meta or fake.
        optimizer: an optimizer, which has its own parameters and is not changed; or a name: a class of `torch.optim`
            in lower case or "momentum" (SGD with momentum 0.9), with the class's default options, and with
            "-foreach", "-fused" or "-forloop" for an implementation; None takes nothing.
        cuda: whether the parameters will be on a CUDA device. Torch then takes other implementations by default, and
            what an optimizer has on the CPU (step counters) is not counted.
        without: parameters that get no gradient, by identity: they have no state, and are not stepped.
        sparse: parameters whose gradients are sparse in their rows, by identity, each with the number of entries.

    Raises:
        OptionError: neither a name that is known nor an optimizer, a name that does not suit the parameters, or an
            optimizer that does not run on fake tensors (it needs a closure, or kernels of its own) and has no state
            yet. Where it has, that is counted, with a warning that the step's temporaries are not.

    Examples:
        >>> weight = torch.nn.Parameter(torch.empty(1024, 1024, device="meta"))  # 4 MiB
        >>> optimizer_memory([weight], "adamw-fused", cuda=True)
        OptimizerMemory(state=8388612, step=0, closure=0)
        >>> optimizer_memory([weight], "adamw", cuda=True)  # foreach, the default there
        OptimizerMemory(state=8388608, step=4194304, closure=0)
    """
    if optimizer is None:
        return OptimizerMemory(0, 0)
    if isinstance(optimizer, str):
        kind, options = _named(optimizer)
        trained = [p for p in parameters if p.requires_grad and id(p) not in without]
        try:
            return _two_steps(kind, options, [{"params": trained}], cuda) if trained else OptimizerMemory(0, 0)
        except Exception as e:
            raise OptionError(f"optimizer={optimizer!r} could not be tried on these parameters: {e}") from e
    if not isinstance(optimizer, optim.Optimizer):
        raise OptionError(
            f"optimizer={optimizer!r} is neither a name nor a torch.optim.Optimizer: give the object that steps the "
            "model, as torch.optim.AdamW(model.parameters()), a name ('adamw'), or nothing: it is found"
        )
    kind = type(optimizer)
    if type(optimizer) is optim.LBFGS:
        return _lbfgs(optimizer)
    try:
        groups = [{**g, "params": [p for p in g["params"] if id(p) not in without]} for g in optimizer.param_groups]
        if kind is optim.SparseAdam:  # which takes no others
            sparse = {**{id(p): 1 for g in groups for p in g["params"]}, **sparse}
        memory = _two_steps(kind, optimizer.defaults, groups, cuda, sparse)
        return replace(memory, state=memory.state + _of_frozen(optimizer, cuda))
    except Exception as e:
        state = list(optimizer.state.values())
        nbytes = sum(storages(state).values()) - (_on_cpu(state) if cuda else 0)
        if not nbytes:
            raise OptionError(
                f"optimizer {kind.__name__} could not be tried on fake tensors ({e}) and has no state yet: "
                "give the name of an optimizer that holds as much, or plan after its first step"
            ) from e
        warn(
            f"optimizer {kind.__name__} could not be tried on fake tensors ({e}): its state is counted as it is, "
            "what its step() allocates is not known and counted as nothing"
        )
        return OptimizerMemory(nbytes, 0)


def step_workspace(optimizer: optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, *, cuda: bool) -> int:
    """Bytes that a step of one parameter alone, by the options of its group, holds beside its state, or hardly less."""
    groups = [{**group, "params": [parameter]}]
    return _two_steps(type(optimizer), optimizer.defaults, groups, cuda).step + (0 if cuda else NUMBERS)


def _lbfgs(optimizer: optim.LBFGS) -> OptimizerMemory:
    """What LBFGS keeps once its history is full: two vectors per entry, a direction and a gradient.

    While it calls its closure, it has a gradient and two vectors for the next direction, and at most six that a line
    search goes by. Source: `torch.optim.LBFGS.step` and `_strong_wolfe`.
    """
    (group,) = optimizer.param_groups
    flat = sum(here(p).nbytes for p in group["params"])
    searches = group.get("line_search_fn") is not None
    return OptimizerMemory((2 * group["history_size"] + 2) * flat, 0, (9 if searches else 3) * flat)


def _named(name: str) -> tuple[type[optim.Optimizer], dict[str, Any]]:
    """A name's class and options."""
    # optimizers that need a closure or sparse gradients cannot be tried, nor train most models
    left_out = (optim.Optimizer, optim.LBFGS, optim.SparseAdam)
    known = [c for c in vars(optim).values() if inspect.isclass(c) and issubclass(c, optim.Optimizer)]
    classes = {c.__name__.lower(): c for c in known if c not in left_out} | {"momentum": optim.SGD}
    base, _, form = name.lower().partition("-")
    kind, options = classes.get(base), FORMS.get(form, {})
    if kind is None or (form and not options) or not options.keys() <= inspect.signature(kind).parameters.keys():
        raise OptionError(
            f"optimizer={name!r} is not known; give one of {', '.join(sorted(classes))}, for most of them also with "
            f"an implementation ({', '.join(f'adamw-{form}' for form in FORMS)}), or an optimizer object"
        )
    return kind, options | ({"momentum": 0.9} if base == "momentum" else {})


def _two_steps(
    kind: type[optim.Optimizer],
    options: Mapping[str, Any],
    groups: Iterable[Mapping[str, Any]],
    cuda: bool,
    sparse: Mapping[int, int] = NONE,
) -> OptimizerMemory:
    """Two steps of a fake optimizer: the first makes the state, and either may hold the most beside it.

    Each plan of a model asks several times; the answer for the same class, options and shapes is kept.

    Args:
        kind: its class.
        options: what to give its constructor, which may take only some of them.
        groups: its parameter groups, which hold all its options.
        cuda: where the fake parameters are.
        sparse: as for `optimizer_memory()`.
    """
    groups = list(groups)
    like = _described([dict(options), *groups])
    if like is None:
        return _steps_anew(kind, options, groups, cuda, sparse)
    entries = tuple(sparse.get(id(p), 0) for group in groups for p in group["params"])
    key = (kind, step_of(kind), like, cuda, torch.get_default_dtype(), entries)
    if key not in _SEEN:
        _SEEN[key] = _steps_anew(kind, options, groups, cuda, sparse)
        if len(_SEEN) > MOST_SEEN:
            del _SEEN[next(iter(_SEEN))]
    return _SEEN[key]


def _described(value: Any) -> Any:
    """A value that is equal for options and parameters that make an optimizer take the same bytes; None for others."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value), value
    if isinstance(value, (tuple, list)):
        parts = [_described(v) for v in value]
        return None if None in parts else (type(value), *parts)
    if type(value) is dict:
        options = {k: v for k, v in value.items() if k not in ("params", "param_names")}
        parts = [_described(v) for v in options.values()]
        local = [(p.requires_grad, here(p)) for p in value.get("params", ())]
        shapes = tuple((needs, tuple(t.shape), t.stride(), t.dtype) for needs, t in local)
        return None if None in parts else (tuple(options), *parts, shapes)
    return None


def _steps_anew(
    kind: type[optim.Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    cuda: bool,
    sparse: Mapping[int, int],
) -> OptimizerMemory:
    """As `_two_steps()`. Sparse gradients are stepped one by one."""
    tables = [{**g, "params": [p for p in g["params"] if p.requires_grad and id(p) in sparse]} for g in groups]
    if not any(g["params"] for g in tables):
        return _dense_steps(kind, options, groups, cuda)
    dense = [{**g, "params": [p for p in g["params"] if id(p) not in sparse]} for g in groups]
    memory = _dense_steps(kind, options, dense, cuda) if any(g["params"] for g in dense) else OptimizerMemory(0, 0)
    state, step = sparse_steps(kind, options, tables, [sparse[id(p)] for g in tables for p in g["params"]])
    return replace(memory, state=memory.state + state, step=max(memory.step, step))


def _dense_steps(
    kind: type[optim.Optimizer], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], cuda: bool
) -> OptimizerMemory:
    """As `_two_steps()`."""
    taken = inspect.signature(kind).parameters.keys() & options.keys()
    meter = _Meter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [_fake_group(group, "cuda" if cuda else "cpu") for group in groups]
        own = _own({name: options[name] for name in taken})
        with meter:
            twin = kind(fakes, **own)
            for group in twin.param_groups:
                if cuda and _foreach_by_default(kind, group):
                    group["foreach"] = True
            step = step_of(kind)
            step(twin)
            step(twin)
    peak = meter.peak if cuda else max(meter.peak, meter.with_workspaces())
    return OptimizerMemory(
        state=meter.live - (_on_cpu(list(twin.state.values())) if cuda else 0), step=peak - meter.live
    )


def _fake_group(group: Mapping[str, Any], device: str) -> dict[str, Any]:
    """A parameter group of fake parameters with gradients, with the same options; call it under a fake mode."""
    parameters = []
    for p in group["params"]:
        local = here(p)
        fake = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=device)
        fake.grad = torch.empty_like(fake) if p.requires_grad else None
        parameters.append(fake)
    return {**_own(group), "params": parameters}


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
    with unset_fake_temporarily():
        return own_options(options)


def _foreach_by_default(kind: type[optim.Optimizer], group: Mapping[str, Any]) -> bool:
    """Whether an optimizer takes the foreach implementation on CUDA, where nothing was asked for.

    Source: `torch.optim.optimizer._default_to_fused_or_foreach`, which refuses fake tensors, and its callers.
    """
    if group.get("foreach", False) is not None or group.get("fused") is not None or group.get("differentiable"):
        return False
    if issubclass(kind, optim.Adam) and isinstance(group["lr"], torch.Tensor):
        return bool(group["capturable"])
    return not issubclass(kind, optim.Adafactor)


def _of_frozen(optimizer: optim.Optimizer, cuda: bool) -> int:
    """Bytes of the state that it has of parameters which are trained no longer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [optimizer.state[p] for p in parameters if not p.requires_grad and p in optimizer.state]
    return sum(storages(state).values()) - (_on_cpu(state) if cuda else 0)


def _on_cpu(state: list[Any]) -> int:
    """Bytes of the tensors in an optimizer's state that are on the CPU."""
    leaves = (t for t in pytree.tree_leaves(state) if isinstance(t, torch.Tensor))
    return sum(storages([t for t in leaves if t.device.type == "cpu"]).values())


def _may_have_workspace(op: Any) -> bool:
    """Whether an op may hold more while it runs: it is not pointwise, gives no view, and neither fills nor copies."""
    without = torch.Tag.pointwise in op.tags or op.is_view or op.namespace != "aten"
    return not without and not op.__name__.startswith(_FILLS)


class _Meter(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts bytes, and answers where an optimizer asks a fake tensor for its value.

    Attributes:
        at: the most bytes live beside an op that may have a workspace, by the op's key.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, tuple[Call, int]] = {}

    def with_workspaces(self) -> int:
        """The most bytes live at once beside an op, with its workspace on a CPU, which is measured."""
        with lasting_modes_off():
            found = measure([call for call, _ in self.at.values()], torch.device("cpu"), progress=False)
        return max((live + found[key].workspace for key, (_, live) in self.at.items() if key in found), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # a step count so late that no optimizer is in its first steps; norms may be anything
            return 1000.0 if args[0].is_floating_point() else 1000
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if _may_have_workspace(func):
            key = (call := self.calls[-1]).key
            self.at[key] = call, max(self.live, self.at[key][1] if key in self.at else 0)
        return result
