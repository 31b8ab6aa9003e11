"""Why a model cannot be captured, in words: the obstacle, its module and line, and a remedy."""

from __future__ import annotations

import linecache
import os
import random
import re
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, dropwhile, filterfalse, groupby, islice, starmap, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.capture.trace.module_state import PLAIN, copy_of, is_iterator
from planner.compat.dynamo import Unsupported
from planner.compat.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from planner.core.frames import variable_of
from planner.parallel.meshes import on_mesh

Frame = tuple[str, int, Any]  # file, line, the object whose method runs there
_TORCH = str(Path(torch.__file__).parent)
_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_OUTSIDE = {str(Path(p).resolve()) for p in sys.path if p.endswith("-packages")}
_SPARSE = "SparseTensorImpl"  # in what torch says of an op that asks for a sparse tensor's storage
_LOOKS_AHEAD = 8  # at so many items of an iterator
_CALLERS = (map, filter, accumulate, dropwhile, filterfalse, groupby, starmap, takewhile)  # which run code for each
LIMITS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)  # of fake tensors
_VALUE = (  # what a line that asks for a tensor's value looks like
    (r"\.item\(", "`.item()`"),
    (r"\.tolist\(", "`.tolist()`"),
    (r"^assert\b", "`assert` on a tensor"),
    (r"^(if|elif)\b| if .+ else ", "`if` on a tensor"),
    (r"^while\b", "`while` on a tensor"),
    (r"\bnumpy\(|\bnp\.", "numpy"),
    (r"\b(float|int|bool)\(", "`float()`, `int()` or `bool()` of a tensor"),
)
_OPS = {
    "_unique2": "torch.unique()",
    "nonzero": "nonzero() or an index of booleans",
    "_pack_padded_sequence": "pack_padded_sequence()",
    "masked_select": "masked_select()",
    "repeat_interleave": "repeat_interleave()",
}


def state_mistaken(model: nn.Module) -> Callable[[], str]:
    """A function that says which of a model's attributes torch.compile would mistake, in words; empty for none.

    Those that the calls between have changed: it takes a deque for one without its `maxlen`
    (`VariableBuilder.wrap_listlike`), repeats the numbers of a `random.Random` that a module has, and what iterators
    gave when it looked.
    """
    held = [
        (f"{path}.{name}".lstrip("."), vars(module), name, _state_of(x))
        for path, module in model.named_modules()
        for name, x in vars(module).items()
        if isinstance(x, random.Random) or (type(x) is deque and x.maxlen is not None) or is_iterator(x)
    ]

    def mistaken() -> str:
        for path, own, name, before in held:
            if _state_of(x := own.get(name)) != before:
                what = "without its maxlen" if type(x) is deque else "with what it gave first"
                return (
                    f"torch.compile would take `{path}`, a {type(x).__name__} that the model changes in its forward(), "
                    f"{what}, and so compute other values. Plan with mode='eager', or a submodule without it"
                )
        return ""

    return mistaken


def _state_of(x: Any) -> Any:
    """What tells two states of such an attribute apart: of an iterator, what it gives next."""
    if isinstance(x, random.Random):
        return x.getstate()
    if isinstance(x, _CALLERS):
        return object()
    given = islice(copy_of(x), _LOOKS_AHEAD) if is_iterator(x) else x if isinstance(x, deque) else ()
    return [each if type(each) in PLAIN or _is_plain_tuple(each) else id(each) for each in given]


def _is_plain_tuple(x: Any) -> bool:
    return isinstance(x, tuple) and all(type(each) in PLAIN for each in x)


def refusal(model: nn.Module, error: BaseException, *, eagerly: bool) -> str:
    """The message for a user whose model raised while it was called on fake tensors.

    Args:
        model: the model on fake tensors, as it was called.
        error: what it raised.
        eagerly: whether it was raised without torch.compile, which is then not to blame.
    """
    ran = traceback.walk_tb(error.__traceback__)
    traced: list[Frame] = [(f.filename, f.lineno or 0, None) for f in getattr(error, "real_stack", None) or ()]
    frames: list[Frame] = [(f.f_code.co_filename, line, variable_of(f, "self")) for f, line in ran]
    frames = [f for f in (*frames, *traced) if not (f[0].startswith(_OURS) or _of_python(f[0]))]
    at, asking = _user_frame(frames), _asking_frame(frames)
    path, sparse = _module(model, frames, traced), _SPARSE in str(error)
    if path is None and sparse:  # its backward pass fails, in which no module runs
        path = next((name for name, module in model.named_modules() if getattr(module, "sparse", False) is True), None)
    owner = "" if path is None else f"in {path or 'its own forward()'} ({type(model.get_submodule(path)).__name__})"
    lines = list(dict.fromkeys(_line(f) for f in (at, asking) if f is not None))
    place = ", ".join(filter(None, [owner, *(f"{file}:{number}: `{code}`" for file, number, code in lines)]))
    words, cure = _reason(error, [code for *_, code in lines])
    trials = [] if eagerly or sparse or on_mesh(model) else ['mode="eager", which does not compile']
    if (other := _submodule(model, path)) is not None:
        trials.append(f"a submodule without it, such as {other!r}")
    tried = f" or plan {' or '.join(trials)}" if trials else ""
    return f"{type(model).__name__} cannot be captured: {', '.join(filter(None, [words, place]))}. {cure}{tried}"


def in_backward(error: BaseException) -> str:
    """The message for a backward pass that raised on fake tensors."""
    if not isinstance(error, LIMITS):
        return f"the backward pass cannot be captured: {type(error).__name__}: {error}"
    words, cure = _reason(error, [])
    return f"the backward pass cannot be captured: {words}. {cure.rstrip(',')}"


def _reason(error: BaseException, code: Sequence[str]) -> tuple[str, str]:
    """The obstacle, and what to change in the model."""
    op = str(getattr(error, "func", "")).removeprefix("aten.").split(".")[0]
    if isinstance(error, DataDependentOutputException) or "data-dependent" in str(error).partition("\n")[0]:
        words = (word for line in reversed(code) for pattern, word in _VALUE if re.search(pattern, line))
        return (
            f"{next(words, 'Python code')} asks for a tensor's value, and a plan is made from shapes",
            "Decide it by shapes or by an argument that is no tensor,",
        )
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"the size of what {_OPS.get(op, op)} makes depends on a tensor's values, and a plan needs every size",
            "Use a form of one size (a mask, padding),",
        )
    if isinstance(error, UnsupportedOperatorException):
        return f"{op} does not run on fake tensors, from which a plan is made", "Replace it,"
    error = getattr(error, "inner_exception", None) or error  # what torch.compile wraps
    lines = str(error).strip().splitlines() or [""]
    if _SPARSE in lines[0]:
        return "a gradient is sparse (nn.Embedding(sparse=True)), which cannot be planned", "Make it dense,"
    if "set_ on a graph input" in lines[0]:
        return "its forward() gives a parameter or an input another storage (`.data =`, `set_`)", "Do that elsewhere,"
    if "self.shape_env must not be None" in lines[0]:
        return "a nested tensor has a size that no tensor without contents has", "Pad it,"
    if isinstance(error, Unsupported):
        given = re.search(r"Explanation: (.+)", str(error))
        why = (given[1] if given else lines[0]).rstrip(".")
        return (
            f"torch.compile cannot go past a line ({why}), and takes no layers of torch.nn one by one where a loop or "
            "a `with` around that line calls them",
            "Move the line out of the loop or block, or call the layers in a module of your own,",
        )
    inner = re.search(r"got (\w+\(.*\))", str(error))  # torch.compile's report of what a traced op raised
    return f"{type(error).__name__}: {inner[1] if inner else lines[0]}", "Move it out of forward(),"


def _of_python(file: str) -> bool:
    """Whether a file is of the standard library, such as `functools`, which calls what is cached."""
    return file.startswith(sysconfig.get_path("stdlib")) and "-packages" not in file


def _user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost line of the user's own code, else of a library other than torch."""
    other = [f for f in frames if not f[0].startswith((_TORCH, "<"))]
    own = [f for f in other if not any(f[0].startswith(p) for p in _OUTSIDE)]
    return next(reversed(own or other), None)


def _asking_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost line of a model's code, torch.nn and libraries included."""
    own = (f"{_TORCH}/nn/modules/module.py", "<")
    asking = [f for f in frames if not f[0].startswith(own) and f[0].startswith((f"{_TORCH}/nn/", *_OUTSIDE))]
    return next((f for f in reversed(asking) if "/torch/" not in f[0] or "/torch/nn/" in f[0]), None)


def _line(frame: Frame) -> tuple[str, int, str]:
    """File, number and code; in what torch.compile writes, an `if` may have the number of an empty line after it."""
    file, number, _ = frame
    while not (code := linecache.getline(file, number).strip()) and 1 < number <= len(linecache.getlines(file)):
        number -= 1
    return file, number, code


def _module(model: nn.Module, frames: Sequence[Frame], traced: Sequence[Frame]) -> str | None:
    """Path of the innermost module that was running; None where that is not known."""
    names = {id(module): name for name, module in model.named_modules()}
    for file, line, _ in reversed(traced):  # torch.compile tells no objects: the first module with that code
        for name, module in model.named_modules():
            code: Any = getattr(getattr(type(module), "forward", None), "__code__", None)
            if code is None:  # a scripted module
                continue
            ends = max((at for *_, at in code.co_lines() if at), default=0)
            if code.co_filename == file and code.co_firstlineno <= line <= ends:
                return str(name)
    return next((names[id(own)] for *_, own in reversed(frames) if id(own) in names), None)


def _submodule(model: nn.Module, path: str | None) -> str | None:
    """The submodule with most trainable parameters that does not overlap with the one that fails, nor has its like."""
    alike = type(model.get_submodule(path)) if path else type(model)
    sizes = {
        name: sum(p.numel() for p in module.parameters() if p.requires_grad)
        for name, module in model.named_modules()
        if name
        and not f"{path}.".startswith(f"{name}.")
        and not (path and f"{name}.".startswith(f"{path}."))
        and getattr(type(module), "forward", nn.Module.forward) is not nn.Module.forward
        and alike not in map(type, module.modules())
    }
    best = max(sizes, key=lambda name: sizes[name], default=None)
    return best if best is not None and sizes[best] else None
