"""What the user asked for, checked before anything is done."""

from __future__ import annotations

import math
import numbers
import re
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from planner.capture.passes.checkpoints import Checkpoints
from planner.capture.shapes import Maxima, sizes_in, tensors_of
from planner.core.account import PLANNED
from planner.core.call import storages
from planner.core.identity import TensorKind, batch_kinds
from planner.devices.specs import Device, find_device
from planner.errors import BatchError, BudgetError, ModelError, OptionError, PlanWarning, gb
from planner.parallel.buckets import Buckets
from planner.parallel.meshes import on_mesh
from solvers import SOLVERS

if TYPE_CHECKING:
    from planner.core.plan import Plan
    from planner.lowering.microbatches import Flight

GB = 2**30
Costs = Literal["roofline", "measured"]
Dynamic = bool | Mapping[str | int, Mapping[int, int]]
Mode = Literal["compiled", "eager"]
MODES = get_args(Mode)
LATER: Any = object()  # for a batch: that of the first training step, whatever a model has for an example


class Options(TypedDict, total=False):
    """The options of `plan()` that everything which plans takes, and that say nothing of a budget."""

    optimizer: torch.optim.Optimizer | str | None
    loss_fn: Callable[[Any], torch.Tensor] | None
    device: str | torch.device | None
    accumulate: bool
    shard: int
    checkpoints: Checkpoints
    costs: Costs | None
    account_gb: Mapping[str, float] | None
    time_limit: float | None
    progress: bool | None
    dynamic: Dynamic
    in_flight: int


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `plan()`, checked; the model is held weakly.

    Attributes beside them:
        device: what is planned for.
        measure_on: the same as a torch device, where it is here.
        maxima: the sizes that are planned for where those of the batch may be smaller; None where all are as in `args`.
        likely: where the model's code decides by a random number, whether to plan for what it does most often, or for
            what it does in this call.
        where: where the model was.
        given: `device`, `budget_gb` and `costs` as the user gave them, for a model that has moved since.
        known: a plan whose schedule is taken where the step turns out to be the one that it was made for.
        batch: the tensors of the batch, where the batch itself is not kept.
        flight: what is in flight, where that is more than `in_flight` says: a stage of a pipeline.
        follows: whether there is an error, and no solver, where the known plan is not for this step.
        buckets: of DistributedDataParallel, which holds them beside the model.
    """

    model_ref: weakref.ref[nn.Module]
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any]
    budget_gb: float
    solver: str
    optimizer: torch.optim.Optimizer | str | None
    loss_fn: Callable[[Any], torch.Tensor] | None
    device: Device
    measure_on: torch.device | None
    accumulate: bool
    shard: int
    checkpoints: Checkpoints
    costs: Costs
    account_gb: Mapping[str, float]
    time_limit: float | None
    progress: bool | None
    where: torch.device
    given: Mapping[str, Any]
    dynamic: Dynamic = False
    maxima: Maxima | None = None
    mode: Mode = "compiled"
    likely: bool = True
    known: Plan | None = None
    batch: tuple[TensorKind, ...] | None = None
    in_flight: int = 1
    flight: Flight | None = None
    follows: bool = False
    buckets: Buckets | None = None

    @property
    def gradients_copied(self) -> bool:
        """Whether gradients go where others are held already, and are freed."""
        return self.accumulate or (self.buckets is not None and self.buckets.views)

    @property
    def source(self) -> str:
        """Where a plan for it is from, in words."""
        return "the known plan"

    @property
    def batch_kinds(self) -> tuple[TensorKind, ...] | None:
        """The tensors of the batch, at the largest sizes; None where no batch is known."""
        return self.batch if self.args is None else batch_kinds(self.args, self.kwargs, self.maxima)

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes; 1 GB is 2**30 bytes."""
        return round(self.budget_gb * GB)

    @property
    def model(self) -> nn.Module:
        """The model; raises ModelError when it is gone."""
        model = self.model_ref()
        if model is None:
            raise ModelError("the model that this plan was made for no longer exists")
        return model


def check(
    model: Any,
    batch: Any,
    kwargs: Any,
    *,
    budget_gb: Any,
    solver: Any = "auto",
    optimizer: Any = None,
    loss_fn: Any = None,
    device: Any = None,
    accumulate: Any = False,
    shard: Any = 1,
    checkpoints: Any = "replace",
    costs: Any = None,
    account_gb: Any = None,
    time_limit: Any = None,
    progress: Any = None,
    dynamic: Any = False,
    mode: Any = "compiled",
    in_flight: Any = 1,
) -> Request:
    """The request, or the first thing that is wrong with it: ModelError, BudgetError, BatchError or OptionError."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"plan() needs a torch.nn.Module; it was given {model!r} of type {type(model).__name__}")
    refuse_wrapped(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(f"{type(model).__name__}: no parameter needs a gradient, so there is no training step to plan")
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise ModelError(
            f"{type(model).__name__} has lazy parameters without a shape; run it once on a batch, then plan"
        )
    where, target = _where(model, device)
    if solver not in SOLVERS:
        raise OptionError(f"solver={solver!r} is not known; give one of {', '.join(SOLVERS)}")
    if not _whole(in_flight) or in_flight < 1:
        raise OptionError(
            f"in_flight={in_flight!r} must be how many forward passes wait for their backward pass at once, with the "
            "one that runs: 1, 2, ..."
        )
    check_mode(mode, in_flight)
    if mode == "eager" and dynamic:
        raise OptionError(
            f"dynamic={dynamic!r} is for compiled plans; with mode='eager', leave it out: each new shape is checked "
            "against the budget, and planned anew where it does not fit"
        )
    if time_limit is not None and not _positive(time_limit):
        raise OptionError(f"time_limit={time_limit!r} must be a positive number of seconds, or None")
    check_loss_fn(loss_fn)
    if not isinstance(accumulate, bool):
        raise OptionError(f"accumulate={accumulate!r} must be True where gradients are there already, or False")
    if not isinstance(shard, int) or isinstance(shard, bool) or shard < 1:
        raise OptionError(f"shard={shard!r} must be a number of devices that share the parameters: 1, 2, ...")
    if on_mesh(model) and (mode == "eager" or shard > 1):
        what = "mode='eager'" if mode == "eager" else f"shard={shard}"
        raise OptionError(
            f"{what} is for models on one device, and the parameters of this {type(model).__name__} are shared by "
            "several already (fully_shard, parallelize_module): leave it out"
        )
    if checkpoints not in get_args(Checkpoints):
        raise OptionError(f"checkpoints={checkpoints!r} must be one of {', '.join(map(repr, get_args(Checkpoints)))}")
    measured = _measured(where, target, costs)
    if not isinstance(account_gb or {}, Mapping) or not all(
        isinstance(name, str) and name not in PLANNED and _real(size) and size >= 0
        for name, size in (account_gb or {}).items()
    ):
        raise OptionError(
            f"account_gb={account_gb!r} must be a mapping from names of lines to GB, as p.account has them; what the "
            f"plan decides ({', '.join(PLANNED)}) cannot be set"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise BatchError(f"kwargs={kwargs!r} must be a mapping of keyword arguments, or None")
    args, extra = arguments(model, batch, kwargs)
    request = Request(
        model_ref=weakref.ref(model),
        args=args,
        kwargs=extra,
        budget_gb=0.0,
        solver=solver,
        optimizer=optimizer,
        loss_fn=loss_fn,
        device=target,
        accumulate=accumulate,
        shard=shard,
        checkpoints=checkpoints,
        account_gb=dict(account_gb or {}),
        time_limit=time_limit,
        progress=progress,
        dynamic=_checked_dynamic(dynamic),
        maxima=None if args is None else maxima_of(dynamic, args, extra),
        where=where,
        given={"device": device, "budget_gb": budget_gb, "costs": costs},
        mode=mode,
        in_flight=in_flight,
        **measured,
    )
    return replace(request, budget_gb=_budget(request))


def with_batch(
    request: Request, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], maxima: Maxima | None = None
) -> Request:
    """The same request for another model or batch; for the device where the model is now, unless one was given.

    Raises:
        ModelError, OptionError, BudgetError: the model has moved to where the request cannot be met.
    """
    refuse_wrapped(model)
    found = replace(request, model_ref=weakref.ref(model), args=args, kwargs=dict(kwargs), maxima=maxima)
    where, device = _where(model, request.given["device"])
    if where == request.where:
        return found
    measured = _measured(where, device, request.given["costs"])
    found = replace(found, where=where, device=device, **measured)
    return replace(found, budget_gb=_budget(found))


def _where(model: nn.Module, device: Any) -> tuple[torch.device, Device]:
    """Where a model is, and what to plan for."""
    where = next(model.parameters()).device
    if len(devices := {p.device for p in model.parameters()}) > 1:
        raise ModelError(
            f"{type(model).__name__} has parameters on several devices ({', '.join(sorted(map(str, devices)))}); a "
            "plan is for one: move the model, or plan the part on each"
        )
    if where.type == "meta" and device is None:
        raise OptionError(f"{type(model).__name__} is on the meta device: say what to plan for, as in device='h100'")
    return where, find_device(device, where)


def _measured(where: torch.device, target: Device, costs: Any) -> dict[str, Any]:
    """Where ops can be run for measurements, and where times come from; raises OptionError."""
    here = where.type in ("cpu", "cuda") and target == find_device(None, where)
    if costs not in (None, "roofline", "measured") or (costs == "measured" and not here):
        raise OptionError(
            f"costs={costs!r} must be 'roofline', or 'measured' with the model on the device that is planned for "
            f"(it is on {where}, planned for {target.name}), or None to choose"
        )
    return {
        "measure_on": where if here else None,
        "costs": costs or ("measured" if here and where.type == "cuda" else "roofline"),
    }


def _checked_dynamic(given: Any) -> Dynamic:
    """`dynamic` of `plan()`; raises OptionError where it is not understood."""
    if isinstance(given, bool) or (
        isinstance(given, Mapping)
        and all(isinstance(name, (str, int)) and isinstance(at, Mapping) for name, at in given.items())
        and all(_whole(n) for at in given.values() for size in at.items() for n in size)
    ):
        return given
    raise OptionError(
        f"dynamic={given!r} must be True (any size may be smaller than in the batch), False, or largest sizes by "
        "argument and dimension, as in {'input_ids': {0: 8, 1: 2048}}, with positions for names in a positional batch"
    )


def named_maxima(dynamic: Dynamic) -> Maxima:
    """The largest sizes that `dynamic` names, whatever the batch is."""
    named = {} if isinstance(dynamic, bool) else dynamic
    return Maxima({path_of(name): {d: n for d, n in at.items() if n > 1} for name, at in named.items()})


def maxima_of(dynamic: Dynamic, args: Any, kwargs: Mapping[str, Any]) -> Maxima | None:
    """The largest sizes that `dynamic` means for a batch; None where all are those of the batch.

    Raises:
        OptionError: it names what the batch does not have, or a size below that of the batch.
    """
    if isinstance(dynamic, bool):
        return sizes_in(args, kwargs) if dynamic else None
    shapes = {path: tuple(t.shape) for path, t in tensors_of(args, kwargs)}
    for name, at in dynamic.items():
        shape = shapes.get(path_of(name))
        if shape is None:
            known = ", ".join(repr(n) for n in (*range(len(args)), *kwargs) if path_of(n) in shapes)
            raise OptionError(f"dynamic names {name!r}, which is no tensor of the batch; these are: {known}")
        for d, n in at.items():
            if d >= len(shape) or n < shape[d]:
                raise OptionError(
                    f"dynamic={{{name!r}: {{{d}: {n}}}}} does not suit the batch, where {name!r} is of shape {shape}; "
                    "give the largest size of each of its dimensions that may be smaller"
                )
    return named_maxima(dynamic)


def path_of(name: str | int) -> str:
    """The path of an argument in `(args, kwargs)`, as `capture.shapes` has it."""
    return f"[0][{name}]" if isinstance(name, int) else f"[1][{name!r}]"


def _whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def check_mode(mode: Any, in_flight: int) -> None:
    """Raise OptionError where it is none, or one that cannot count so many microbatches in flight."""
    if mode not in MODES:
        raise OptionError(f"mode={mode!r} is not known; give one of {', '.join(MODES)}")
    if mode == "eager" and in_flight > 1:
        raise OptionError(
            f"in_flight={in_flight!r} is for compiled plans; leave mode='eager' out, or count what waits as in "
            "account_gb={'earlier forward passes': GB}"
        )


def check_loss_fn(loss_fn: Any) -> None:
    """Raise OptionError where it is none."""
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(f"loss_fn={loss_fn!r} must be callable: the model's output -> the scalar loss")


def refuse_wrapped(model: Any) -> None:
    """Raise ModelError where a model is wrapped for several devices already."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise ModelError(
            f"this {type(model.module).__name__} is wrapped in {type(model).__name__} already. Put the plan on the "
            "model itself, before it is wrapped: plan(model, ...).apply(), then wrap the model"
        )
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(hasattr(m, "_is_fsdp_managed_module") for m in modules) and not any(
        isinstance(m, FSDPModule) for m in modules
    ):
        raise ModelError(
            f"this {type(model).__name__} is in FullyShardedDataParallel, which plans cannot be made for, or a part of "
            "what fully_shard() was called on: plan that model. accelerate calls it with fsdp_version=2"
        )


def _real(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(float(x))


def _positive(x: Any) -> bool:
    return _real(x) and float(x) > 0


def _free_bytes(where: torch.device, own: list[Any]) -> int:
    """What nobody holds on a GPU, what this process's allocator has cached, and what the plan's own tensors have."""
    cached = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
    counted = storages([t for t in tree_leaves(own) if isinstance(t, torch.Tensor) and t.is_cuda])
    return torch.cuda.mem_get_info(where)[0] + cached + sum(counted.values())


def _budget(request: Request) -> float:
    """A budget in GB, from a number, a share of the device's memory as "80%", or None: what is free, or all of it."""
    given, device = request.given["budget_gb"], request.device
    if given is None and request.where.type == "cuda":
        model, optimizer = request.model, request.optimizer
        gradients = [p.grad for p in model.parameters() if request.accumulate]
        state = list(optimizer.state.values()) if isinstance(optimizer, torch.optim.Optimizer) else []
        own = [*model.parameters(), *model.buffers(), *gradients, request.args, request.kwargs, state]
        return (_free_bytes(request.where, own) + device.context) / GB
    if given is None and device.type == "cuda":
        return device.memory / GB
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", given) if isinstance(given, str) else None
    if share is not None and 0 < float(share[1]) <= 100:
        return device.memory / GB * float(share[1]) / 100
    if not _positive(given):
        raise BudgetError(
            f"budget_gb={given!r} must be a positive, finite number of GB (1 GB = 2**30 bytes), a share of the "
            "device's memory as '80%', or, for a GPU, None for what is free"
        )
    if float(given) * GB > device.memory:
        warnings.warn(
            f"budget_gb={given!r} is more than the {gb(device.memory)} of {device.name}; the plan may not fit there",
            PlanWarning,
            stacklevel=5,
        )
    return float(given)


def arguments(
    model: nn.Module, batch: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """How the model is called on a batch: positional arguments (None: no batch is known) and keyword arguments.

    Raises:
        BatchError: the batch is neither a tensor, a tuple, a list nor a mapping.
    """
    extra = dict(kwargs or {})
    if batch is LATER:
        return None, extra
    if batch is None and not extra:
        for convention in ("dummy_inputs", "example_input_array"):
            batch = getattr(model, convention, None)
            if batch is not None:
                break
        else:
            return None, extra
    if batch is None:
        return (), extra
    if isinstance(batch, torch.Tensor):
        return (batch,), extra
    if isinstance(batch, Mapping):
        if any(not isinstance(k, str) for k in batch):
            raise BatchError(
                f"a mapping batch is called as model(**batch), so its keys must be strings; got {list(batch)!r}"
            )
        return (), {**batch, **extra}
    if isinstance(batch, (tuple, list)):
        return tuple(batch), extra
    raise BatchError(
        f"batch of type {type(batch).__name__} is not understood; give a tensor (model(batch)), a tuple or list "
        "(model(*batch)) or a mapping (model(**batch))"
    )
