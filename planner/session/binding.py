"""Plans that were made elsewhere, put on a model that is here: refused, tried, or planned anew, and never silently."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from planner.core.identity import difference, identity
from planner.core.options import GB
from planner.core.recipe import Choice, Recipe
from planner.costs.account import OPTIMIZER_STEP
from planner.devices.specs import DEVICES
from planner.errors import ApplyError, gb, warn
from planner.parallel.group import other_world
from planner.planning.pipeline import make_plan
from planner.requests.check import check
from planner.requests.planned import Filed, Planned
from planner.requests.request import Request
from planner.runtime.signature import Signature, call_signature


def bound(filed: Filed, model: Any) -> Planned:
    """A plan from a file, as that of a model; raises ApplyError, which names the difference, where it is of another.

    The bytes of its optimizer are lines of the account from then on.
    """
    record, source = filed.record, filed.source
    asked, step = record.options, record.step
    if model is None:
        raise no_model(filed)
    if not isinstance(model, nn.Module):
        raise ApplyError(f"apply() needs a torch.nn.Module; it was given {model!r} of type {type(model).__name__}")
    here = identity(model)
    if differs := difference(here, record.identity):
        raise ApplyError(f"{source} was made for {record.identity}; this is {here}: {differs}")
    if differs := other_world(step.ranks, asked.shard, model):
        raise ApplyError(
            f"{source} does not match the world size: {differs}. Plan anew with plan(model, ...), or start as many "
            "processes, and call init_process_group() before apply()"
        )
    optimizer = {"optimizer state": step.optimizer_state / GB}
    if step.optimizer_step is not None:
        optimizer[OPTIMIZER_STEP] = step.optimizer_step / GB
    options = {f.name: getattr(asked, f.name) for f in fields(asked)} | {
        "budget_gb": record.budget_bytes / GB,
        "device": asked.device if asked.device in DEVICES else None,
        "optimizer": None,
        "costs": asked.costs if asked.costs == "roofline" else None,
        "account_gb": {**optimizer, **asked.account_gb},
        "progress": None,
    }
    request = check(model, (), None, loss_fn=filed.loss_fn, kind=type(asked), **options)
    if request.device.name != record.device:
        warn(
            f"{source} was made for {record.device}; on {request.device.name}, ops may take other times, and "
            "workspaces of other sizes: verify=True measures a step"
        )
    request = replace(
        request, batch=None, maxima=step.maxima, kinds=step.batch, occupancy=step.occupancy, loop=step.loop
    )
    return Planned(record, request, known=filed)


def no_model(filed: Filed) -> ApplyError:
    """The error for what needs the model of a plan from a file."""
    return ApplyError(
        f"the plan of {filed.source} has no model: give it the {filed.record.identity} that it was made for, as in "
        "plan.apply(model); applied_plan(model) is then a plan that can be verified and repaired"
    )


class Awaited:
    """A plan whose batch is known by its shapes alone: it serves the first call with such a batch.

    Args:
        planned: for a model that is here, and a batch that is not.
        filed: the file that it is from, where it is from one.
    """

    def __init__(self, planned: Planned, filed: Filed | None) -> None:
        self.planned, self.filed = planned, filed
        self.tried: Signature | None = None  # of the call that ran by it, or was to
        self.warned = False
        self.lossless = filed is not None and filed.record.step.has_loss_fn and planned.request.loss_fn is None

    def take(self, request: Request) -> Planned | None:
        """The plan for a call, if this is the one; None to plan anew, with a warning that says why."""
        signature = call_signature(request.model, request.args or (), request.kwargs)
        recipe = self.planned.record.recipe
        if signature == self.tried:  # it comes again where its graphs were others
            if not (isinstance(recipe, Recipe) and recipe.asks):  # they depend on values
                self._warn(self._changed("the graphs of this model are not those that were planned"))
            return None
        wanted, given = self.planned.request.batch_kinds, request.batch_kinds
        if self.tried is not None or (given, request.maxima) != (wanted, self.planned.request.maxima):
            if self.tried is None or self.lossless:
                words = [", ".join(f"{t.name} {t}" for t in kinds or ()) or "no tensors" for kinds in (wanted, given)]
                self._warn(f"planned for {words[0]}; this step has {words[1]}")
            return None
        self.tried = signature
        if isinstance(recipe, Recipe) and recipe.maxima is None and sum(map(len, recipe.calls.values())) == 1:
            return replace(self.planned, request=request)  # its only graph is compared before it runs
        request = replace(request, uncompiled=isinstance(recipe, Choice))
        planned = make_plan(request, [self.planned], known=self.filed or self.planned.known)
        if planned.record.recipe != recipe:
            self._warn(self._changed("the step of this model is not the one that was planned"))
        return planned

    def _changed(self, difference: str) -> str:
        """A difference, and its likely cause."""
        there = self.planned.record.step.torch_version
        other = "" if there == torch.__version__ else f", or torch ({there} there, {torch.__version__} here)"
        return f"{difference}; its code or settings have changed{other}"

    def _warn(self, why: str) -> None:
        if self.warned:
            return
        self.warned = True
        source = self.filed.source if self.filed else "the plan"
        uncounted = (
            f". The loss_fn that it was made with is in no file, and not counted: Plan.load({source!r}, loss_fn=...)"
            if self.lossless
            else ""
        )
        warn(
            f"{source} does not serve this step ({why}): it is planned anew, within the same "
            f"{gb(self.planned.record.budget_bytes)}{uncounted}"
        )
