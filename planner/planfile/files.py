"""Plans as files: versioned JSON, without code or pickles; `docs/plan-1.schema.json` describes it.

A file has the plan's own fields, what was asked for as far as it is data, and what the model was. The emitted graphs
are not in it: they are written anew for the model that the plan is applied to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn, get_type_hints

import torch
from torch import nn

from planner.capture.passes.checkpoints import Checkpoints
from planner.capture.shapes import Maxima
from planner.core.files import path_of
from planner.core.identity import Identity, TensorKind, identity
from planner.core.plan import Plan
from planner.costs.account import account_of
from planner.devices.specs import Device
from planner.eager.checkpointing import Choice
from planner.errors import ApplyError, PlanFileError
from planner.lowering.microbatches import Flight
from planner.parallel.group import other_world, world_size
from planner.planfile.consistency import check
from planner.planfile.jsonfile import read, write
from planner.planfile.schema import Unexpected, decode, decode_members, encode, required, schema
from planner.requests.request import GB, Costs, Dynamic, Mode, Request, check_loss_fn
from planner.runtime.compiled import Recipe
from planner.runtime.verify import Verification
from solvers import Problem, Schedule

FORMAT, VERSION = "checkpoint-planner plan", 1


@dataclass(frozen=True)
class Asked:
    """What was asked for, as far as it is data; the attributes of `Request`.

    Attributes beside them:
        optimizer: its name, or its class and options.
        optimizer_state, optimizer_step: bytes of its state, and of the temporaries of its step; None for no optimizer.
        has_loss_fn: whether there was a loss function, which is not in the file.
        card: what `device` stands for.
        where: the torch device where the model was.
        batch: the tensors of the batch, at the largest sizes; None where no batch is known.
        ranks: how many processes there were.
    """

    budget_gb: float | str | None
    solver: str
    optimizer: str | None
    optimizer_state: int
    optimizer_step: int | None
    has_loss_fn: bool
    device: str | None
    card: Device
    accumulate: bool
    shard: int
    checkpoints: Checkpoints
    costs: Costs | None
    account_gb: Mapping[str, float]
    time_limit: float | None
    dynamic: Dynamic
    maxima: Maxima | None
    mode: Mode
    where: str
    batch: tuple[TensorKind, ...] | None
    in_flight: int = 1
    flight: Flight | None = None
    ranks: int = 1


@dataclass(frozen=True, eq=False)
class FromFile(Request):
    """The request of a plan that was read from a file: there is no model yet.

    Attributes:
        path: the file.
        asked: what was asked for.
        identity: what the model was.
        torch_version: of the torch that the plan was made with.
    """

    path: str = ""
    asked: Asked | None = None
    identity: Identity | None = None
    torch_version: str = ""

    @property
    def source(self) -> str:
        return self.path

    def other_world(self, model: nn.Module) -> str:
        """In words, where the model is shared by another number of processes than that which is asked for; else ""."""
        return "" if self.asked is None else other_world(self.asked.ranks, self.asked.shard, model)

    @property
    def model(self) -> nn.Module:
        """There is none; raises ApplyError, which says what to do."""
        raise ApplyError(
            f"the plan of {self.path} has no model: give it the {self.identity} that it was made for, as in "
            "plan.apply(model); applied_plan(model) is then a plan that can be verified and repaired"
        )


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan; see `Plan.save`."""
    target = path_of(path)
    write(target, data_of(plan))


def data_of(plan: Plan) -> dict[str, Any]:
    """A plan as what its file has, in JSON."""
    request = plan.request
    if isinstance(request, FromFile):
        asked, model, torch_version = request.asked, request.identity, request.torch_version
    else:
        asked, model, torch_version = _asked(request), identity(request.model), torch.__version__
    return {
        "format": FORMAT,
        "version": VERSION,
        "planner": _own_version(),
        "torch": torch_version,
        "plan": {name: encode(getattr(plan, name), kind) for name, kind in _plan_kinds().items()},
        "asked": encode(asked, Asked),
        "model": encode(model, Identity),
    }


def load(path: str | os.PathLike[str], loss_fn: Callable[[Any], torch.Tensor] | None = None) -> Plan:
    """Read a plan; see `Plan.load`."""
    check_loss_fn(loss_fn)
    source = path_of(path)
    return plan_of(read(source), str(source), loss_fn)


def plan_of(data: Any, source: str, loss_fn: Callable[[Any], torch.Tensor] | None = None) -> Plan:
    """The plan that JSON data stands for; raises PlanFileError, which names where it is from."""

    def wrong(why: object) -> NoReturn:
        raise PlanFileError(f"{source}: {why}") from (why if isinstance(why, Exception) else None)

    if not isinstance(data, dict) or data.get("format") != FORMAT:
        wrong(f'not a plan file, which is an object with "format": "{FORMAT}"')
    number = data.get("version")
    if type(number) is not int or number < 1:
        wrong(Unexpected("version", "a whole number from 1 on", number))
    if number > VERSION:
        wrong(
            f"made by a newer version of the planner ({str(data.get('planner'))[:40]!r}; format {number}, here up to "
            f"{VERSION}): upgrade checkpoint-planner"
        )
    try:
        for name in _SECTIONS:
            if name not in data:
                raise Unexpected("", f"{name!r} in it", f"none among {', '.join(data)}")
        plan = decode_members(data["plan"], _plan_kinds(), _REQUIRED, "plan")
        model = decode(data["model"], Identity, "model")
        torch_version = decode(data["torch"], str, "torch")
        asked = decode(data["asked"], Asked, "asked")
        request = _request(asked, plan["budget_bytes"], source, model, torch_version)
        found = Plan(**plan, graph_modules=(), request=replace(request, loss_fn=loss_fn))
        check(found)
    except Unexpected as e:
        wrong(e)
    return found


def plan_file_schema() -> dict[str, Any]:
    """What a plan file may be, in JSON Schema (2020-12)."""
    known: dict[str, Any] = {}
    members = {name: schema(kind, known) for name, kind in _plan_kinds().items()}
    sections: dict[str, Any] = {
        "format": {"const": FORMAT},
        "version": {"const": VERSION},
        "planner": {"type": "string"},
        "torch": {"type": "string"},
        "plan": {"type": "object", "properties": members, "required": _REQUIRED, "additionalProperties": False},
        "asked": schema(Asked, known),
        "model": schema(Identity, known),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{FORMAT}, version {VERSION}; bytes and seconds",
        "type": "object",
        "properties": sections,
        "required": ["format", "version", *_SECTIONS],
        "$defs": known,
    }


_SECTIONS = ("plan", "asked", "model", "torch")
_WITHOUT = ("graph_modules", "request")
_REQUIRED = [name for name in required(Plan) if name not in _WITHOUT]


@cache
def _plan_kinds() -> dict[str, Any]:
    """The fields of a plan that are in its file."""
    imported = (Problem, Schedule, Choice, Recipe, Request, Verification)
    names = {kind.__name__: kind for kind in imported}
    hints = get_type_hints(Plan, localns=names)  # which it imports for type checkers alone
    return {name: kind for name, kind in hints.items() if name not in _WITHOUT}


def _asked(request: Request) -> Asked:
    optimizer, given = request.optimizer, request.given
    lines, step = account_of(request)
    if isinstance(optimizer, torch.optim.Optimizer):
        options = {k: v for k, v in optimizer.defaults.items() if isinstance(v, (int, float, str, bool, tuple))}
        optimizer = f"{type(optimizer).__name__}({', '.join(f'{k}={v!r}' for k, v in options.items())})"
    budget = given["budget_gb"]
    return Asked(
        budget_gb=budget if budget is None or isinstance(budget, str) else float(budget),
        solver=request.solver,
        optimizer=optimizer,
        optimizer_state=lines["optimizer state"],
        optimizer_step=step,
        has_loss_fn=request.loss_fn is not None,
        device=None if given["device"] is None else str(given["device"]),
        card=request.device,
        accumulate=request.accumulate,
        shard=request.shard,
        checkpoints=request.checkpoints,
        costs=given["costs"],
        account_gb=request.account_gb,
        time_limit=request.time_limit,
        dynamic=request.dynamic,
        maxima=request.maxima,
        mode=request.mode,
        where=str(request.where),
        batch=request.batch_kinds,
        in_flight=request.in_flight,
        flight=request.flight,
        ranks=world_size(),
    )


def _request(asked: Asked, budget: int, path: str, model: Identity, torch_version: str) -> FromFile:
    try:
        where = torch.device(asked.where)
    except RuntimeError:
        raise Unexpected("asked.where", "a torch device", asked.where) from None
    return FromFile(
        model_ref=lambda: None,  # type: ignore[arg-type]
        args=None,
        kwargs={},
        budget_gb=budget / GB,
        solver=asked.solver,
        optimizer=asked.optimizer,
        loss_fn=None,
        device=asked.card,
        measure_on=None,
        accumulate=asked.accumulate,
        shard=asked.shard,
        checkpoints=asked.checkpoints,
        costs=asked.costs or "roofline",
        account_gb=asked.account_gb,
        time_limit=asked.time_limit,
        progress=None,
        where=where,
        given={"device": asked.device, "budget_gb": asked.budget_gb, "costs": asked.costs},
        dynamic=asked.dynamic,
        maxima=asked.maxima,
        mode=asked.mode,
        batch=asked.batch,
        in_flight=asked.in_flight,
        flight=asked.flight,
        path=path,
        asked=asked,
        identity=model,
        torch_version=torch_version,
    )


def _own_version() -> str:
    try:
        return version("checkpoint-planner")
    except PackageNotFoundError:
        return "unknown"
