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
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from torch import nn, optim

from .api import plan, uncounted
from .distributed.group import world_size
from .errors import gb
from .estimate.optimizer import optimizer_memory
from .files import load
from .plan import Plan
from .report.terminal import style_of
from .report.text import answer
from .request import GB, LATER
from .runtime.applied import attached, detach
from .trained import BAD_INPUT, Search, exits

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
        say("\n".join([f"{planned[-1]} is planned{' anew' if anew else ''}.", *answer(made, style_of(sys.stderr))]))
        if plan_file is not None and first and (anew or not plan_file.exists()):
            made.save(plan_file)

    def found(
        model: nn.Module,
        optimizers: list[optim.Optimizer],
        args: Any,
        kwargs: Mapping[str, Any],
        anew: Mapping[str, Any] | None = None,
    ) -> None:
        given = {**options, **(anew or {})} | ({} if first else {"progress": False})
        if given.get("optimizer") is None:
            given = given | counted(optimizers, model, given.get("account_gb") or {})
        if plan_file is not None and plan_file.exists():
            known = load(plan_file)
            given = {"accumulate": known.request.accumulate, **given, "known": known}
        if world_size() > 1:  # the ranks agree on the plan when all of them call the model
            plan(model, LATER, **given).apply()
            when_made(model, search, partial(then, anew=bool(anew)))
        else:
            made = plan(model, args, kwargs, **given)
            made.apply()
            then(made, anew=bool(anew))
        runtime = attached(model)
        assert runtime is not None
        runtime.started = bool(anew) and world_size() > 1  # each rank then plans for itself: not all of them may
        warn = runtime.warn

        def accumulates(model: nn.Module, plan: Plan, earlier: bool) -> bool:
            held = uncounted(model, plan)
            if not held:
                return warn(model, plan, earlier)
            say(f"{gb(held)} of gradients are there when the step begins, as where microbatches accumulate.")
            detach(model)
            batch = LATER if plan.request.args is None else plan.request.args
            with exits():
                found(model, optimizers, batch, plan.request.kwargs, {"accumulate": True})
            return True

        runtime.warn = accumulates

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
