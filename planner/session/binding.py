"""Plans that were made elsewhere, put on a model that is here: refused, tried, or planned anew, and never silently."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner.core.identity import difference, identity
from planner.core.plan import PendingPlan, Plan
from planner.costs.account import OPTIMIZER_STEP
from planner.devices.specs import DEVICES
from planner.errors import ApplyError, OptionError, PlanWarning, gb
from planner.planfile.files import FromFile, load
from planner.planning.pipeline import make_plan
from planner.requests.request import GB, Request, check
from planner.runtime.compiled import Recipe
from planner.runtime.interception import Signature, call_signature, without_batch


def known_plan(given: Any) -> Plan | None:
    """A plan, of what was given for a known one; raises OptionError, or PlanFileError."""
    if isinstance(given, (str, os.PathLike)):
        return load(given)
    if given is None:
        return None
    if isinstance(given, PendingPlan):
        given = given.made
    if isinstance(given, Plan):
        found: Plan = without_batch(replace(given, request=replace(given.request, known=None)))
        return found
    raise OptionError(f"known={given!r} must be a plan, or the path of a plan file")


def bound(plan: Plan, model: Any) -> Plan:
    """A plan from a file, as that of a model; raises ApplyError, which names what differs, where it was for another.

    What its optimizer takes is in bytes from then on.
    """
    request = plan.request
    assert isinstance(request, FromFile)
    asked, made_for = request.asked, request.identity
    assert asked is not None
    assert made_for is not None
    if model is None:
        model = request.model  # raises
    if not isinstance(model, nn.Module):
        raise ApplyError(f"apply() needs a torch.nn.Module; it was given {model!r} of type {type(model).__name__}")
    here = identity(model)
    if found := difference(here, made_for):
        raise ApplyError(f"{request.path} was made for {made_for}; this is {here}: {found}")
    if found := request.other_world(model):
        raise ApplyError(
            f"{request.path} does not match the world size: {found}. Plan anew with plan(model, ...), or start as many "
            "processes, and call init_process_group() before apply()"
        )
    optimizer = {"optimizer state": asked.optimizer_state / GB}
    if asked.optimizer_step is not None:
        optimizer[OPTIMIZER_STEP] = asked.optimizer_step / GB
    fresh = check(
        model,
        (),
        None,
        budget_gb=request.budget_gb,
        solver=asked.solver,
        loss_fn=request.loss_fn,
        device=asked.device if asked.device in DEVICES else None,
        accumulate=asked.accumulate,
        shard=asked.shard,
        checkpoints=asked.checkpoints,
        costs=asked.costs if asked.costs == "roofline" else None,
        account_gb={**optimizer, **asked.account_gb},
        time_limit=asked.time_limit,
        dynamic=asked.dynamic,
        mode=asked.mode,
        in_flight=asked.in_flight,
    )
    if fresh.device.name != plan.device:
        warnings.warn(
            f"{request.path} was made for {plan.device}; on {fresh.device.name}, ops may take other times, and "
            "workspaces of other sizes: verify=True measures a step",
            PlanWarning,
            stacklevel=4,
        )
    return replace(
        plan, request=replace(fresh, args=None, maxima=asked.maxima, batch=asked.batch, flight=asked.flight, known=plan)
    )


class Awaited:
    """A plan whose batch is known by its shapes alone: it serves the first call with such a batch.

    Args:
        plan: of a model that is here, and a batch that is not.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tried: Signature | None = None  # of the call that ran by it, or was to
        self.warned = False
        known = plan.request.known
        self.file = known.request if known is not None and isinstance(known.request, FromFile) else None
        asked = self.file.asked if self.file else None
        self.lossless = asked is not None and asked.has_loss_fn and plan.request.loss_fn is None

    def take(self, request: Request) -> Plan | None:
        """The plan for a call, if this is the one; None to plan anew, with a warning that says why."""
        signature = call_signature(request.model, request.args, request.kwargs)
        if signature == self.tried:  # it comes again where its graphs were others
            if not (isinstance(self.plan.recipe, Recipe) and self.plan.recipe.asks):  # they depend on values
                self._warn(self._changed("the graphs of this model are not those that were planned"))
            return None
        wanted, given = self.plan.request.batch, request.batch_kinds
        if self.tried is not None or (given, request.maxima) != (wanted, self.plan.request.maxima):
            if self.tried is None or self.lossless:
                words = [", ".join(f"{t.name} {t}" for t in kinds or ()) or "no tensors" for kinds in (wanted, given)]
                self._warn(f"planned for {words[0]}; this step has {words[1]}")
            return None
        self.tried = signature
        recipe = self.plan.recipe
        if isinstance(recipe, Recipe) and recipe.maxima is None and sum(map(len, recipe.calls.values())) == 1:
            return replace(self.plan, request=request)  # its only graph is compared before it runs
        made = make_plan(request, [self.plan])
        if made.recipe != recipe:
            self._warn(self._changed("the step of this model is not the one that was planned"))
        return made

    def _changed(self, what: str) -> str:
        """What differs, and what may be behind it."""
        there = self.file.torch_version if self.file else torch.__version__
        other = "" if there == torch.__version__ else f", or torch ({there} there, {torch.__version__} here)"
        return f"{what}; its code or settings have changed{other}"

    def _warn(self, why: str) -> None:
        if self.warned:
            return
        self.warned = True
        source = self.file.path if self.file else "the plan"
        uncounted = (
            f". The loss_fn that it was made with is in no file, and not counted: Plan.load({source!r}, loss_fn=...)"
            if self.lossless
            else ""
        )
        warnings.warn(
            f"{source} does not serve this step ({why}): it is planned anew, within the same "
            f"{gb(self.plan.budget_bytes)}{uncounted}",
            PlanWarning,
            stacklevel=6,
        )
