"""Where a node of a graph comes from, in the user's words: kind of op, module, line of code."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from linecache import getline
from types import FrameType

from torch import fx

from planner.core.frames import variable_of
from planner.errors import NOT_THE_USERS, users_frame


def op_kind(node: fx.Node) -> str:
    """What a node computes, whatever it is called: `gelu`, `_softmax`."""
    return kind_of(str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", "op"))


def kind_of(target: str) -> str:
    """The kind in an op's name.

    Examples:
        >>> kind_of("aten.gelu.default"), kind_of("addmm.default"), kind_of("mul")
        ('gelu', 'addmm', 'mul')
    """
    parts = target.split(".")
    return parts[1] if len(parts) > 2 else parts[0]


def origins(nodes: Iterable[tuple[fx.Node, str]], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Path of the module ("" for the model) in whose call each node was traced, and the user's line; O(nodes + names).

    Args:
        nodes: of joint graphs, each with the module whose call the graph was made of.
        names: the paths of the model's modules, as in `named_modules()`.
    """
    known = {_parts(name): name for name in names}
    modules: dict[tuple[str, str], str] = {}
    lines: dict[str, str] = {}
    for node, within in nodes:
        path, trace = _innermost(node), node.meta.get("stack_trace") or ""
        if (path, within) not in modules:
            # Dynamo's own name for it, as L['self']._modules['h']._modules['0']: the user's is the longest end of it
            parts = _parts(path)
            ends = [start + parts[i:] for i in range(len(parts)) for start in (_parts(within), ())]
            modules[path, within] = next((known[end] for end in ends if end in known), within)
        if trace not in lines:
            lines[trace] = source_line(node)
        yield modules[path, within], lines[trace]


def running_module(frame: FrameType | None, paths: Mapping[int, str]) -> str:
    """Path of the innermost module whose method runs in a frame or one that called it, by the modules' identities."""
    while frame is not None:
        if (path := paths.get(id(variable_of(frame, "self")))) is not None:
            return path
        frame = frame.f_back
    return ""


def running_forward(frame: FrameType | None, paths: Mapping[int, str]) -> str:
    """As `running_module`, of the innermost module whose `forward` runs."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            path = paths.get(id(variable_of(frame, code.co_varnames[0])))
            if path is not None:
                return path
        frame = frame.f_back
    return ""


def _parts(path: str) -> tuple[str, ...]:
    return tuple(p for p in re.split(r"[\[\].'\"\\]+", path) if p and p != "_modules")


def _innermost(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else ""


def user_place(frame: FrameType | None) -> tuple[str, int]:
    """File and line of the innermost frame outside torch and this package; "", 0 where there is none."""
    own = users_frame(frame)
    return ("", 0) if own is None else (own.f_code.co_filename, own.f_lineno)


def line_at(path: str, number: int) -> str:
    """A line of code: "file:line: code"; "" where there is no file."""
    return f"{cell_or(path)}:{number}: {getline(path, number).strip()}" if path else ""


def source_line(node: fx.Node) -> str:
    """The innermost line outside torch that a node was traced from: "file:line: code"; "" where none is known."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or "")
    own = [f for f in frames if not f[0].startswith(NOT_THE_USERS)]
    if not own:
        return ""
    path, line, code = own[-1]
    return f"{cell_or(path)}:{line}: {code.strip()}"


def cell_or(path: str) -> str:
    """A file's path; for the temporary file that stands for a cell of a notebook, the cell's number, as "In[3]"."""
    ipython = sys.modules.get("IPython")  # there are cells only where it is imported already
    shell = ipython.get_ipython() if ipython else None
    cell = shell.compile.format_code_name(path) if shell else None  # as its tracebacks say it
    return str(cell[1]) if cell else path
