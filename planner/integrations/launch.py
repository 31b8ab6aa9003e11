"""Runs a training script with a plan on the model that it trains, without a change to the script."""

from __future__ import annotations

import builtins
import io
import logging
import os
import runpy
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import torch

from planner.errors import PlanFileError
from planner.integrations.discovery import BAD_INPUT, Search, exits
from planner.integrations.watching import Launched
from planner.requests.budget import read

_OURS = (f"{Path(__file__).parents[1]}{os.sep}", "<frozen runpy>")  # whose frames are not the script's


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
    with exits():  # before the script does anything
        budget, has_card = options.get("budget_gb"), torch.accelerator.is_available() or options.get("device")
        if budget is not None or not has_card:
            read(budget, 1)
        if plan_file is not None and not plan_file.parent.is_dir():
            raise PlanFileError(f"{plan_file}: there is no folder {str(plan_file.parent)!r} to write the plan into")
    plan_file = plan_file and plan_file.absolute()  # the script may go to another folder
    first = os.environ.get("RANK", "0") == "0"

    def say(text: str) -> None:
        if first and not quiet:
            print("\n".join(f"planner: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)

    launched = Launched(options, plan_file, first, say)
    search = Search(which, launched.plan_model)
    done: SystemExit | None = None
    with _logged(first and not quiet), _own_frames_hidden(), search.watching():
        try:
            _execute(script, arguments, module)
        except SystemExit as e:
            if e.code:
                raise
            done = e
        if search.statuses:
            raise SystemExit(search.statuses[0])
        if not (launched.names or launched.without):
            where = "outside of functions that torch.compile() was given"
            say(f"nothing was planned: no module that an optimizer trains was called in training mode, {where}")
    if done is not None:
        raise done
    return 0


def _execute(script: str, arguments: Sequence[str], module: bool) -> None:
    """Run a script in a `__main__` of its own, which stays."""
    sys.argv = [script, *arguments]
    if module:
        try:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        except ImportError as e:
            *_, (frame, _) = traceback.walk_tb(e.__traceback__)
            if frame.f_code.co_filename not in ("<frozen runpy>", runpy.__file__):  # of what the module imports
                raise
            print(f"error: there is no module {script!r} that can be run: {e}", file=sys.stderr)
            raise SystemExit(BAD_INPUT) from None
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
