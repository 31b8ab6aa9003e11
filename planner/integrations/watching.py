"""Plans for the models of a launched script: told of, kept in a file, made anew where gradients accumulate."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from planner.api.front import plan
from planner.api.plan import Plan
from planner.compat.dynamo import wrappers_of
from planner.compat.tensors import version_of
from planner.core.loop import Loop
from planner.core.occupancy import CLEARED_LATE
from planner.core.options import GB
from planner.core.plan import PlanRecord
from planner.costs.optimizer import optimizer_memory
from planner.errors import BatchError, ModelError, OptionError, PlannerError, gb
from planner.integrations.discovery import Search, exits
from planner.parallel.group import world_size
from planner.planfile.files import save
from planner.report.terminal import style_of
from planner.report.text import lead
from planner.requests.batch import LATER
from planner.requests.planned import Pending, Planned
from planner.runtime.events import Call, Caller, PlanProvider
from planner.runtime.interception import detach
from planner.runtime.signature import Role
from planner.session.apply import apply
from planner.session.uncounted import uncounted

WHY = {  # gradients are there, by whether an optimizer has used them
    False: "as where microbatches accumulate",
    True: "as where they are cleared between the forward and the backward pass",
}


@dataclass
class Launched:
    """A script that runs, and the models in it that have a plan.

    Attributes:
        options: of `plan()`, as the user gave them.
        plan_file: absolute; a plan that is taken where it is for the step that comes, written where there is none.
        first: whether this is the process of rank 0, which writes the file.
        say: tells the user.
        names: classes of the models that were planned.
        without: whether one trains without a plan, as a warning said.
    """

    options: Mapping[str, Any]
    plan_file: Path | None
    first: bool
    say: Callable[[str], None]
    names: list[str] = field(default_factory=list)
    without: bool = False

    def plan_model(self, search: Search, model: nn.Module, optimizers: list[optim.Optimizer]) -> None:
        """Have a model planned at the training step that is about to run."""
        self.put_on(search, model, optimizers, Gradients(model, optimizers), {})

    def put_on(
        self,
        search: Search,
        model: nn.Module,
        optimizers: list[optim.Optimizer],
        gradients: Gradients,
        anew: Mapping[str, Any],
    ) -> None:
        """Put a plan that is to be made on a model; `anew` has what the plan before did not count."""
        given = {"occupancy": None, **self.options, **anew} | ({} if self.first else {"progress": False})
        if given.get("optimizer") is None:
            given = given | counted(optimizers, model, given.get("account_gb") or {})
        if self.plan_file is not None and self.plan_file.exists():
            known = Plan.load(os.path.relpath(self.plan_file))  # as it is named in words
            if known.step.occupancy == CLEARED_LATE and not anew:
                given["occupancy"] = CLEARED_LATE
            given = {"accumulate": known.options.accumulate, **given, "known": known}
        occupancy = given.pop("occupancy")
        pending = self._pending(model, given)
        pending = replace(pending, request=replace(pending.request, occupancy=occupancy))

        def around(own: PlanProvider) -> PlanProvider:
            return Watching(own, self, search, optimizers, gradients, bool(anew))

        # ranks agree on the plan when all of them call the model; on one that is made anew, not all of them may
        apply(pending, model, around=around, alone=bool(anew) and world_size() > 1)

    def _pending(self, model: nn.Module, given: Mapping[str, Any]) -> Pending:
        """A plan that is to be made, of what torch.compile() made of the model where that can be planned."""
        for wrapper in wrappers_of(model):
            try:
                return _lazily(wrapper, given)
            except OptionError as e:
                self.say(f"planned without the fused kernels of torch.compile(): {e}")
        return _lazily(model, given)

    def tell(self, planned: Planned, *, anew: bool) -> None:
        """Tell of a plan, and write it where there is no file yet or the plan before was another."""
        self.names.append(type(planned.request.model).__name__)
        answers = lead(planned.record, style_of(sys.stderr))
        self.say("\n".join([f"{self.names[-1]} is planned{' anew' if anew else ''}.", *answers]))
        if self.plan_file is not None and self.first and (anew or not self.plan_file.exists()):
            save(planned.record, self.plan_file)


def _lazily(model: nn.Module, given: Mapping[str, Any]) -> Pending:
    source = plan(model, LATER, **given).source
    assert isinstance(source, Pending)
    return source


class Watching:
    """A provider of plans that tells of the first one, and plans anew for gradients which no plan counted.

    Args:
        own: makes the plans.
        launched: the script.
        search: what waits for models of the script.
        optimizers: of the model.
        gradients: of the model.
        anew: whether the model had a plan before.
    """

    def __init__(
        self,
        own: PlanProvider,
        launched: Launched,
        search: Search,
        optimizers: list[optim.Optimizer],
        gradients: Gradients,
        anew: bool,
    ) -> None:
        self.own, self.launched, self.search = own, launched, search
        self.optimizers, self.gradients, self.anew = optimizers, gradients, anew
        self.told = False

    @property
    def loop(self) -> Loop:
        """See `PlanProvider`."""
        return self.own.loop

    @property
    def budget_bytes(self) -> int:
        """See `PlanProvider`."""
        return self.own.budget_bytes

    def on_loop_seen(
        self, seen: Loop, stepped: Sequence[optim.Optimizer], role: Role = (), spare: int = 0, ended: bool = False
    ) -> bool:
        """See `PlanProvider`; the plan that is made anew is told of."""
        learnt = self.own.on_loop_seen(seen, stepped, role, spare, ended)
        if learnt:
            self.told, self.anew = False, True
        return learnt

    def on_missing_plan(self, caller: Caller, call: Call) -> Planned:
        """See `PlanProvider`; where there is no first plan, the script ends."""
        if self.told:
            return self.own.on_missing_plan(caller, call)
        self.told = True
        try:
            with self._ends(caller), self.search.paused():
                planned = self.own.on_missing_plan(caller, call)
                self.launched.tell(planned, anew=self.anew)
        except (BatchError, ModelError):  # the script may leave the batch out, or train nothing by this call
            self.told = False
            raise
        return planned

    def _ends(self, caller: Caller) -> AbstractContextManager[object]:
        """Ends the script where there is no plan, unless it is to train without one."""
        if self.launched.options.get("on_failure", "raise") != "raise":
            return nullcontext()
        return exits(self.search.statuses, let_pass=(ModelError,) if caller.trains_at_times else ())

    def on_no_plan(self, model: nn.Module, error: PlannerError) -> bool:
        """See `PlanProvider`."""
        goes_on = self.own.on_no_plan(model, error)
        self.launched.without |= goes_on
        return goes_on

    def on_step_begin(self, model: nn.Module, record: PlanRecord, waits: bool) -> bool:
        """See `PlanProvider`; puts another plan on the model for gradients that are there."""
        used = self.gradients.used()
        held = uncounted(model, record, False) or (0 if used else uncounted(model, record, True))
        if not held:
            return self.own.on_step_begin(model, record, waits)
        self.launched.say(f"{gb(held)} of gradients are there when the step begins, {WHY[used]}.")
        only_forward = used and record.options.mode != "eager" and record.options.in_flight == 1
        counts = {"occupancy": CLEARED_LATE} if only_forward else {"accumulate": True, "occupancy": None}
        detach(model)
        with exits(self.search.statuses):
            self.launched.put_on(self.search, model, self.optimizers, self.gradients, counts)
        return True

    def on_backward_begin(self, model: nn.Module, record: PlanRecord) -> bool:
        """See `PlanProvider`; the next step is planned with gradients that are still there."""
        self.gradients.stay |= bool(uncounted(model, record, True))
        return False


class Gradients:
    """Tells gradients that an optimizer has used, and that nothing has changed since, from those of microbatches.

    Such gradients are expected to be cleared before the next backward pass begins.

    Attributes:
        stay: whether they were there in a backward pass all the same.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[optim.Optimizer]) -> None:
        self.model = model
        self.versions: dict[torch.Tensor, int] = {}  # of the gradients, when an optimizer had used them
        self.stay = False
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, optimizer: optim.Optimizer, *_: Any) -> None:
        own = (p for group in optimizer.param_groups for p in group["params"])
        self.versions |= {p: version_of(p.grad) for p in own if p.grad is not None}

    def used(self) -> bool:
        """Whether all gradients that are there are such."""
        there = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        if not there:
            self.versions.clear()  # those that come are others
        return not self.stay and all(self.versions.get(p) == version_of(gradient) for p, gradient in there)


def counted(optimizers: Sequence[optim.Optimizer], model: nn.Module, account_gb: Mapping[str, float]) -> dict[str, Any]:
    """The options of `plan()` that count a model's optimizers, of which there may be several."""
    if len(optimizers) == 1:
        return {"optimizer": optimizers[0]}
    cuda = next(model.parameters()).device.type in ("cuda", "xpu")
    takes = [optimizer_memory((), optimizer, cuda=cuda) for optimizer in optimizers]
    lines = {
        "optimizer state": sum(memory.state for memory in takes) / GB,
        "optimizer step": max(memory.step for memory in takes) / GB,
    }
    return {"account_gb": {**lines, **account_gb}}
