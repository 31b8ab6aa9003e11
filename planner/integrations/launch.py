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
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from planner.api.front import applied_plan, plan, uncounted
from planner.core.plan import PendingPlan, Plan
from planner.costs.optimizer import optimizer_memory
from planner.errors import gb
from planner.integrations.discovery import BAD_INPUT, Search, exits
from planner.lowering.microbatches import USED
from planner.parallel.group import world_size
from planner.planfile.files import load
from planner.report.terminal import style_of
from planner.report.text import lead
from planner.requests.request import GB, LATER
from planner.runtime.interception import attached, detach

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
    planned = []

    def say(text: str) -> None:
        if first and not quiet:
            print("\n".join(f"planner: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)

    def then(made: Plan, *, anew: bool) -> None:
        planned.append(type(made.request.model).__name__)
        say("\n".join([f"{planned[-1]} is planned{' anew' if anew else ''}.", *lead(made, style_of(sys.stderr))]))
        if plan_file is not None and first and (anew or not plan_file.exists()):
            made.save(plan_file)

    def found(
        model: nn.Module,
        optimizers: list[optim.Optimizer],
        anew: Mapping[str, Any] | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        given = {"flight": None, **options, **(anew or {})} | ({} if first else {"progress": False})
        if given.get("optimizer") is None:
            given = given | counted(optimizers, model, given.get("account_gb") or {})
        if plan_file is not None and plan_file.exists():
            known = load(plan_file)
            if known.request.flight == USED and not anew:
                given["flight"] = USED
            given = {"accumulate": known.request.accumulate, **given, "known": known}
        flight = given.pop("flight")
        request = replace(plan(model, LATER, **given).request, flight=flight)
        PendingPlan(request, partial(applied_plan, model)).apply()  # ranks agree on it when all of them call the model
        when_made(model, search, partial(then, anew=bool(anew)))
        runtime = attached(model)
        assert runtime is not None
        runtime.started = bool(anew) and world_size() > 1  # each rank then plans for itself: not all of them may
        warn = runtime.warn
        seen = gradients or Gradients(model, optimizers)

        def gradients_there(model: nn.Module, plan: Plan, earlier: bool, begun: bool) -> bool:
            if begun:
                if uncounted(model, plan, True):
                    seen.stay = True  # the next step is planned with them
                return False
            used = seen.used()
            held = uncounted(model, plan, False) or (0 if used else uncounted(model, plan, True))
            if not held:
                return warn(model, plan, earlier, False)
            say(f"{gb(held)} of gradients are there when the step begins, {WHY[used]}.")
            only_forward = used and plan.request.mode == "compiled" and plan.request.in_flight == 1
            counts = {"flight": USED} if only_forward else {"accumulate": True, "flight": None}
            detach(model)
            with exits():
                found(model, optimizers, anew=counts, gradients=seen)
            return True

        runtime.warn = gradients_there

    done: SystemExit | None = None
    search = Search(which, found)
    with _logged(first and not quiet), _own_frames_hidden(), search.watching():
        try:
            _execute(script, arguments, module)
        except SystemExit as e:
            if e.code:
                raise
            done = e
        if not planned:
            say("nothing was planned: no module that an optimizer trains was called in training mode")
    if done is not None:
        raise done
    return 0


def when_made(model: nn.Module, search: Search, then: Callable[[Plan], None]) -> None:
    """Call a function with the plan that a model's first step makes; where none can be made, that ends the script."""
    runtime = attached(model)
    assert runtime is not None
    make = runtime.make

    def once(*args: Any, **kwargs: Any) -> Plan:
        runtime.make = make
        with exits(), search.paused():
            made: Plan = make(*args, **kwargs)
            then(made)
        return made

    runtime.make = once


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
        self.versions |= {p: p.grad._version for p in own if p.grad is not None}

    def used(self) -> bool:
        """Whether all gradients that are there are such."""
        there = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        if not there:
            self.versions.clear()  # those that come are others
        return not self.stay and all(self.versions.get(p) == gradient._version for p, gradient in there)


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
