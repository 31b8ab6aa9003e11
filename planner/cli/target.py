"""What `FILE.py:FUNCTION` or `MODULE:FUNCTION` names: loaded, called, and read as arguments of `plan()`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from sysconfig import get_paths
from typing import Any

import torch
from torch import nn

from planner.api.front import plan
from planner.errors import PlannerError

FORMS = "give path/to/file.py:function or package.module:function"


class TargetError(PlannerError):
    """What a command names cannot be loaded, or does not make what is needed."""


def arguments_of(target: str) -> dict[str, Any]:
    """Arguments of `plan()` by name, from what a target's function returns.

    Args:
        target: names a function without arguments (or a model) that returns the model; or (model, batch); or
            (model, batch, loss_fn); or a dict of `plan()`'s arguments.

    Raises:
        TargetError: it cannot be loaded, it raises, or it returns something else.
    """
    made = _made(target)
    if isinstance(made, nn.Module):
        return {"model": made}
    if isinstance(made, tuple) and 1 < len(made) < 4:
        return dict(zip(("model", "batch", "loss_fn"), made, strict=False))
    if isinstance(made, Mapping):
        known = list(signature(plan).parameters)
        if "model" not in made:
            raise TargetError(
                f"{target} returned a dict without 'model'; it has {', '.join(map(repr, made)) or 'nothing'}"
            )
        for name in made:
            if name not in known:
                raise TargetError(f"{target} returned {name!r}, which is no argument of plan(): {', '.join(known)}")
        return dict(made)
    raise TargetError(
        f"{target} returned {made!r:.80} of type {type(made).__name__}; expected the model, (model, batch), "
        "(model, batch, loss_fn) or a dict of plan()'s arguments"
    )


def batch_of(source: str) -> Any:
    """A batch, from a function as a target names it, or from a file of tensors that `torch.save` wrote (no code in it).

    Raises:
        TargetError: it cannot be loaded.
    """
    if not source.endswith((".pt", ".pth")):
        return _made(source)
    try:
        return torch.load(source, weights_only=True)
    except Exception as e:
        raise TargetError(f"--batch-from {source}: {type(e).__name__}: {e}") from e


def _made(target: str) -> Any:
    """What a target's function returns."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise TargetError(f"{target!r} names no function; {FORMS}")
    load = _from_file if place.endswith(".py") else importlib.import_module
    module = _run(load, place, f"loading {place}")
    names = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
    if not hasattr(module, name):
        near = get_close_matches(name, names, n=3) or names[:5]
        raise TargetError(f"{place} has no {name!r}; it has {', '.join(near) or 'no functions'}")
    found = getattr(module, name)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise TargetError(f"{target} is {found!r:.80}, not a function that returns a model")
    return _run(lambda _: found(), target, f"calling {target}")


def _from_file(place: str) -> Any:
    path = Path(place).resolve()
    if not path.is_file():
        raise TargetError(f"{place}: no such file; {FORMS}")
    spec = importlib.util.spec_from_file_location(f"plan target {path.stem}", path)  # no installed module's name
    assert spec is not None
    assert spec.loader is not None  # the name ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as for a script
    sys.modules[spec.name] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def _run(call: Callable[[str], Any], argument: str, doing: str) -> Any:
    """What a call into the user's code returns; what it raises becomes one line that names the place."""
    try:
        return call(argument)
    except PlannerError:
        raise
    except (Exception, SystemExit) as e:
        raise TargetError(f"{doing}: {told(e)}") from e


def told(error: BaseException) -> str:
    """An exception in one line, with the innermost line of the user's own code that led to it."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__} at {error.filename}:{error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _installed(f.filename)]
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{place}{f': {text}' if text else ''}"


def _installed(file: str) -> bool:
    """Whether a file is this package's, an installed one's or the standard library's."""
    own, paths = Path(__file__).parents[2], get_paths()
    folders = [own / "planner", own / "solvers", *(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))]
    return file.startswith("<") or any(map(Path(file).is_relative_to, folders))
