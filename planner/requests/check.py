"""Checks the arguments of `plan()`, and finds out what they come to on this machine."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import fields, replace
from os import PathLike, fspath
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from planner.compat.modules import managed_by_fsdp
from planner.compat.self_check import check_torch
from planner.core.maxima import Maxima
from planner.core.options import OLD_MODES, Options, check_values
from planner.core.surroundings import surroundings_of
from planner.devices.accelerator import present
from planner.devices.find import check_working, find_device
from planner.devices.specs import Device
from planner.errors import ModelError, OptionError, warn
from planner.parallel.meshes import on_mesh
from planner.requests.batch import Batch, arguments, maxima_of
from planner.requests.budget import budget_of
from planner.requests.cautions import warn_on_gpu
from planner.requests.compiled import options_as_compiled, without_compile
from planner.requests.inductor import not_yet, refuse_inductor
from planner.requests.offload import refuse_offload
from planner.requests.optimizers import check_optimizer, optimizers_of, weakly
from planner.requests.request import Request
from planner.requests.step_in_backward import refuse_step_in_backward


def check(
    model: Any, batch: Any, kwargs: Any, *, loss_fn: Any = None, kind: type[Options] = Options, **given: Any
) -> Request:
    """The request that arguments of `plan()` make, or the first thing that is wrong with them.

    Args:
        model: as for `plan()`.
        batch: as for `plan()`.
        kwargs: as for `plan()`.
        loss_fn: as for `plan()`.
        kind: the record of options.
        given: options by name; those left out have their defaults.

    Raises:
        ModelError, BudgetError, BatchError, OptionError: an argument that cannot be used, named with its value.
        TorchError: the torch that is installed lacks private parts that are needed.
    """
    check_torch()
    given_model, model = model, without_compile(model)
    _check_model(model)
    any_mode = given.get("mode") is None
    given, settings = options_as_compiled(given_model, given)
    target = find_target(model, given.get("device"))
    options = options_of(kind, given)
    check_values(options)
    fused_by_user = any_mode and options.mode == "inductor"
    instead = _not_fused(options, model, target[1]) if fused_by_user else ""
    if instead:
        warn(instead)
        options = replace(options, mode="aten")
    check_together(options, model)
    refuse_inductor(options, model, target[1])
    refuse_offload(options, target[1].type)
    check_optimizer(given.get("optimizer"), model)
    refuse_step_in_backward(options, given.get("optimizer"), model)
    check_loss_fn(loss_fn)
    warn_on_gpu(model, target[0], options)
    args, extra = arguments(model, batch, kwargs)
    request = Request(
        options=options,
        model_ref=weakref.ref(model),
        batch=None if args is None else Batch(args, extra),
        optimizer=given.get("optimizer"),
        loss_fn=loss_fn,
        budget_gb=0.0,
        maxima=None if args is None else maxima_of(options.dynamic, args, extra),
        found=() if given.get("optimizer") is not None else weakly(optimizers_of(model)),
        surroundings=None if args is None else surroundings_of(model),
        settings=settings,
        any_mode=any_mode,
        instead=instead,
        **_resolved(*target, options.costs),
    )
    return replace(request, budget_gb=budget_of(request))


def options_of(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """The record of the options that were given; OptionError for one that does not exist."""
    names = {f.name for f in fields(kind)}
    if unknown := given.keys() - names:
        raise OptionError(f"{', '.join(sorted(unknown))} is no option of plan(); these are: {', '.join(sorted(names))}")
    data = dict(given)
    if isinstance(optimizer := data.get("optimizer"), torch.optim.Optimizer):
        data["optimizer"] = described(optimizer)
    if data.get("device") is not None:
        data["device"] = str(data["device"])
    if isinstance(folder := data.get("offload_dir"), PathLike):
        data["offload_dir"] = fspath(folder)
    if data.get("account_gb", {}) is None:
        del data["account_gb"]
    if isinstance(mode := data.get("mode"), str):
        data["mode"] = OLD_MODES.get(mode, mode)
    if isinstance(data.get("keep"), list):
        data["keep"] = tuple(data["keep"])
    return kind(**data)


def _not_fused(options: Options, model: nn.Module, device: Device) -> str:
    """Why the plan for a model that torch.compile was given is one of mode "aten"; empty where it need not be."""
    unable = not_yet(options, model, device)
    if options.pieces:
        unable.append(f"with pieces={options.pieces!r}")
    if on_mesh(model):
        unable.append("with parameters that several devices share")
    if device.type == "cuda" and not unable:  # no plan of the mode has run on a card yet: who asks for it gets it
        unable.append(f"for a {device.type} device")
    if not unable:
        return ""
    return (
        f"this {type(model).__name__} was given to torch.compile(), whose fused kernels are not planned "
        f"{', '.join(unable)} yet: it is planned with mode='aten', which runs op by op"
    )


def described(optimizer: torch.optim.Optimizer) -> str:
    """An optimizer as text: its class and options."""
    options = {k: v for k, v in optimizer.defaults.items() if isinstance(v, (int, float, str, bool, tuple))}
    return f"{type(optimizer).__name__}({', '.join(f'{k}={v!r}' for k, v in options.items())})"


def check_together(options: Options, model: nn.Module) -> None:
    """Raise OptionError for options that exclude each other, or that do not suit the model."""
    mode, shard = options.mode, options.shard
    check_mode(mode, options.in_flight)
    if mode == "eager" and options.dynamic:
        raise OptionError(
            f"dynamic={options.dynamic!r} is for compiled plans; with mode='eager', leave it out: each new shape is "
            "checked against the budget, and planned anew where it does not fit"
        )
    if options.pieces and mode != "aten":
        raise OptionError(f"pieces={options.pieces!r} is for graphs that run op by op: plan with mode='aten'")
    if options.pieces and options.keep:
        raise OptionError(
            f"pieces={options.pieces!r} lets the backward pass run ops of the forward pass again inside its pieces, "
            f"and keep={list(options.keep)!r} says that some must not: leave one of them out"
        )
    if on_mesh(model) and (mode != "aten" or shard > 1):
        what = f"mode={mode!r}" if mode != "aten" else f"shard={shard}"
        raise OptionError(
            f"{what} is for models on one device, and the parameters of this {type(model).__name__} are shared by "
            "several already (fully_shard, parallelize_module): leave it out"
        )


def check_mode(mode: str, in_flight: int) -> None:
    """Raise OptionError where a mode does not count so many microbatches in flight."""
    if mode == "eager" and in_flight > 1:
        raise OptionError(
            f"in_flight={in_flight!r} is for compiled plans; leave mode='eager' out, or count what waits as in "
            "account_gb={'earlier forward passes': GB}"
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"plan() needs a torch.nn.Module; it was given {model!r} of type {type(model).__name__}")
    refuse_wrapped(model)
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        what = f"has a part, {scripted[0]!r}, that" if scripted[0] else "is what"
        raise ModelError(
            f"{type(model).__name__} {what} torch.jit has compiled, and no plan can be made of its ops. Plan with the "
            "module that was given to torch.jit.trace or torch.jit.script in its place"
        )
    if inspect.isgeneratorfunction(model.forward):
        raise ModelError(
            f"{type(model).__name__}.forward() is a generator: it runs when the loop asks for its results, and no plan "
            "can be made of that. Return a list or a tuple of them"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(f"{type(model).__name__}: no parameter needs a gradient, so there is no training step to plan")
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise ModelError(
            f"{type(model).__name__} has lazy parameters without a shape; run it once on a batch, then plan"
        )


def with_batch(
    request: Request, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], maxima: Maxima | None = None
) -> Request:
    """The same request for another model or batch; for the device where the model is now, unless one was given.

    Raises:
        ModelError, OptionError, BudgetError: the model has moved to where the request cannot be met.
    """
    refuse_wrapped(model)
    moved = replace(request, model_ref=weakref.ref(model), batch=Batch(args, kwargs), maxima=maxima)
    target = find_target(model, request.options.device)
    if target[0] == request.model_device:
        return moved
    moved = replace(moved, **_resolved(*target, request.options.costs))
    return replace(moved, budget_gb=budget_of(moved))


def find_target(model: nn.Module, device: Any) -> tuple[torch.device, Device]:
    """Where a model is, and what to plan for."""
    where = next(model.parameters()).device
    if len(devices := {p.device for p in model.parameters()}) > 1:
        raise ModelError(
            f"{type(model).__name__} has parameters on several devices ({', '.join(sorted(map(str, devices)))}); a "
            "plan is for one: move the model, or plan the part on each"
        )
    if where.type == "meta" and device is None:
        raise OptionError(f"{type(model).__name__} is on the meta device: say what to plan for, as in device='h100'")
    check_working(where)
    return where, find_device(device, where)


def _resolved(where: torch.device, target: Device, costs: Any) -> dict[str, Any]:
    """Where ops can be run for measurements, and where times come from; raises OptionError."""
    accelerator = present(where)
    here = (where.type == "cpu" or accelerator is not None) and target == find_device(None, where)
    if costs not in (None, "roofline", "measured") or (costs == "measured" and not here):
        raise OptionError(
            f"costs={costs!r} must be 'roofline', or 'measured' with the model on the device that is planned for "
            f"(it is on {where}, planned for {target.name}), or None to choose"
        )
    if here and accelerator is not None and target.caches:
        target = replace(target, blas=accelerator.workspaces(where))
    return {
        "device": target,
        "model_device": where,
        "measure_on": where if here else None,
        "costs": costs or ("measured" if here and where.type != "cpu" else "roofline"),
    }


def check_loss_fn(loss_fn: Any) -> None:
    """Raise OptionError where it is none, or takes more than the model's output."""
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(f"loss_fn={loss_fn!r} must be callable: the model's output -> the scalar loss")
    if isinstance(loss_fn, type):
        raise OptionError(
            f"loss_fn={loss_fn.__name__} is a class, and calling it makes an object of it, no loss; give a function: "
            f"loss_fn=lambda output: {loss_fn.__name__}()(output, target)"
        )
    try:
        parameters = inspect.signature(getattr(loss_fn, "forward", loss_fn)).parameters.values()
    except (TypeError, ValueError):  # None, or written in C
        return
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) > 1:
        name = getattr(loss_fn, "__name__", f"{type(loss_fn).__name__}()")
        raise OptionError(
            f"loss_fn={name} takes {len(needed)} arguments ({', '.join(needed)}), and is called with one, the model's "
            f"output. Give it the others yourself: loss_fn=lambda output: {name}(output, {', '.join(needed[1:])}), "
            "with tensors of the shapes and dtypes of a training step (their values do not count)"
        )


def refuse_wrapped(model: Any) -> None:
    """Raise ModelError where a model is wrapped for several devices already."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise ModelError(
            f"this {type(model.module).__name__} is wrapped in {type(model).__name__} already. Put the plan on the "
            "model itself, before it is wrapped: plan(model, ...).apply(), then wrap the model"
        )
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(managed_by_fsdp(m) for m in modules) and not any(isinstance(m, FSDPModule) for m in modules):
        raise ModelError(
            f"this {type(model).__name__} is in FullyShardedDataParallel, which plans cannot be made for, or a part of "
            "what fully_shard() was called on: plan that model. accelerate calls it with fsdp_version=2"
        )
