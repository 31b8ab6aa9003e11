"""Runs a training script with a plan on the model that it trains, without a change to the script."""

from __future__ import annotations

import builtins
import io
import logging
import os
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from planner.api.front import plan
from planner.api.plan import Plan
from planner.compat.tensors import version_of
from planner.core.occupancy import CLEARED_LATE
from planner.core.options import GB
from planner.core.plan import PlanRecord
from planner.costs.optimizer import optimizer_memory
from planner.errors import gb
from planner.integrations.discovery import BAD_INPUT, Search, exits
from planner.parallel.group import world_size
from planner.planfile.files import save
from planner.report.terminal import style_of
from planner.report.text import lead
from planner.requests.batch import LATER
from planner.requests.planned import Pending, Planned
from planner.runtime.events import Call, Caller, PlanProvider
from planner.runtime.interception import detach
from planner.session.apply import apply
from planner.session.provider import uncounted

WHY = {  # gradients are there, by whether an optimizer has used them
    False: "as where microbatches accumulate",
    True: "as where they are cleared between the forward and the backward pass",
}
_OURS = (os.path.dirname(__file__) + os.sep, "<frozen runpy>")  # whose frames are not the script's


def launch(
    script: str,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    which: str | None = None,
    plan_file: Path | None = None,
    quiet: bool = False,
    **options: Any,
) -> int:
    """Run a script as Python does, with a plan on the model that it trains, from its first training step on.

    A model that is trained after it gets a plan, too. What was planned is said on stderr, by the process of rank 0.

    Args:
        script: its path, or with `module` its name, as for `python -m`.
        arguments: what it is given.
        module: see above.
        which: the variable or the class of the model, where the script trains several at once.
        plan_file: a plan that is taken where it is for this very step; written where there is none.
        quiet: say nothing.
        options: of `plan()`; without `optimizer`, the script's own are counted.

    Returns:
        0, where the script does not exit by itself.

    Raises:
        SystemExit: that of the script; or no plan fits (1), or none can be made (2), and a message says why.
        Exception: whatever the script raises.
    """
    if not module and not Path(script).is_file():
        print(f"error: there is no script {script!r}", file=sys.stderr)
        raise SystemExit(BAD_INPUT)
    first = os.environ.get("RANK", "0") == "0"
    names: list[str] = []

    def say(text: str) -> None:
        if first and not quiet:
            print("\n".join(f"planner: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)

    def then(planned: Planned, *, anew: bool) -> None:
        names.append(type(planned.request.model).__name__)
        answers = lead(planned.record, style_of(sys.stderr))
        say("\n".join([f"{names[-1]} is planned{' anew' if anew else ''}.", *answers]))
        if plan_file is not None and first and (anew or not plan_file.exists()):
            save(planned.record, plan_file)

    def found(
        model: nn.Module,
        optimizers: list[optim.Optimizer],
        anew: Mapping[str, Any] | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        given = {"occupancy": None, **options, **(anew or {})} | ({} if first else {"progress": False})
        if given.get("optimizer") is None:
            given = given | counted(optimizers, model, given.get("account_gb") or {})
        if plan_file is not None and plan_file.exists():
            known = Plan.load(plan_file)
            if known.step.occupancy == CLEARED_LATE and not anew:
                given["occupancy"] = CLEARED_LATE
            given = {"accumulate": known.options.accumulate, **given, "known": known}
        occupancy = given.pop("occupancy")
        pending = plan(model, LATER, **given).source
        assert isinstance(pending, Pending)
        pending = replace(pending, request=replace(pending.request, occupancy=occupancy))
        seen = gradients or Gradients(model, optimizers)

        def first_plan(make: Callable[[], Planned]) -> Planned:
            with exits(), search.paused():
                planned = make()
                then(planned, anew=bool(anew))
            return planned

        def gradients_there(record: PlanRecord) -> bool:
            used = seen.used()
            held = uncounted(model, record, False) or (0 if used else uncounted(model, record, True))
            if not held:
                return False
            say(f"{gb(held)} of gradients are there when the step begins, {WHY[used]}.")
            only_forward = used and record.options.mode == "compiled" and record.options.in_flight == 1
            counts = {"occupancy": CLEARED_LATE} if only_forward else {"accumulate": True, "occupancy": None}
            detach(model)
            with exits():
                found(model, optimizers, anew=counts, gradients=seen)
            return True

        # ranks agree on the plan when all of them call the model; on one that is made anew, not all of them may
        alone = bool(anew) and world_size() > 1
        apply(pending, model, around=lambda own: Watching(own, first_plan, gradients_there, seen), alone=alone)

    done: SystemExit | None = None
    search = Search(which, found)
    with _logged(first and not quiet), _own_frames_hidden(), search.watching():
        try:
            _execute(script, arguments, module)
        except SystemExit as e:
            if e.code:
                raise
            done = e
        if not names:
            say("nothing was planned: no module that an optimizer trains was called in training mode")
    if done is not None:
        raise done
    return 0


class Watching:
    """A provider of plans that tells of the first plan, and that plans anew for gradients which no plan counted.

    Args:
        own: makes the plans.
        first_plan: makes the first one, by calling what it is given.
        gradients_there: whether gradients made it put another plan on the model.
        gradients: of the model.
    """

    def __init__(
        self,
        own: PlanProvider,
        first_plan: Callable[[Callable[[], Planned]], Planned],
        gradients_there: Callable[[PlanRecord], bool],
        gradients: Gradients,
    ) -> None:
        self.own, self.first_plan = own, first_plan
        self.gradients_there, self.gradients = gradients_there, gradients
        self.told = False

    def on_missing_plan(self, caller: Caller, call: Call) -> Planned:
        """See `PlanProvider`."""
        if self.told:
            return self.own.on_missing_plan(caller, call)
        self.told = True
        return self.first_plan(lambda: self.own.on_missing_plan(caller, call))

    def on_step_begin(self, model: nn.Module, record: PlanRecord, waits: bool) -> bool:
        """See `PlanProvider`."""
        return self.gradients_there(record) or self.own.on_step_begin(model, record, waits)

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
    cuda = next(model.parameters()).is_cuda
    takes = [optimizer_memory((), optimizer, cuda=cuda) for optimizer in optimizers]
    lines = {
        "optimizer state": sum(memory.state for memory in takes) / GB,
        "optimizer step": max(memory.step for memory in takes) / GB,
    }
    return {"account_gb": {**lines, **account_gb}}


def _execute(script: str, arguments: Sequence[str], module: bool) -> None:
    """Run a script in a `__main__` of its own, which stays."""
    sys.argv = [script, *arguments]
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(script)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(path)
    main = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None, __annotations__={})
    with io.open_code(path) as file:
        source = file.read()
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))


@contextmanager
def _own_frames_hidden() -> Iterator[None]:
    """Tracebacks begin with the script's own frames, as without us; stays in place where something was raised."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, tb: types.TracebackType | None) -> None:
        own = tb
        while own is not None and own.tb_frame.f_code.co_filename.startswith(_OURS):
            own = own.tb_next
        if own is not None or issubclass(kind, SyntaxError):
            error, tb = error.with_traceback(own), own
        shown(kind, error, tb)

    sys.excepthook = hook
    yield
    sys.excepthook = shown


@contextmanager
def _logged(wanted: bool) -> Iterator[None]:
    """The planner's log lines on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("planner: %(message)s"))
    log = logging.getLogger("planner")
    before = log.level, log.propagate
    if wanted:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before
