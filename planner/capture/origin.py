"""Where a node of a graph comes from, in the user's words: kind of op, module, line of code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import fx


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


def origins(nodes: Iterable[fx.Node], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Path of the module that made each node ("" for the model itself), and the user's line; O(nodes + names).

    Args:
        nodes: of joint graphs.
        names: the paths of the model's modules, as in `named_modules()`.
    """
    known = {_parts(name): name for name in names}
    modules: dict[str, str] = {}
    lines: dict[str, str] = {}
    for node in nodes:
        path, trace = _innermost(node), node.meta.get("stack_trace") or ""
        if path not in modules:
            parts = _parts(path)
            # Dynamo's own name for it, as L['model']._modules['h']._modules['0']: the user's is the longest end of it
            modules[path] = next((known[parts[i:]] for i in range(len(parts)) if parts[i:] in known), "")
        if trace not in lines:
            lines[trace] = source_line(node)
        yield modules[path], lines[trace]


def _parts(path: str) -> tuple[str, ...]:
    return tuple(p for p in re.split(r"[\[\].'\"\\]+", path) if p and p != "_modules")


def _innermost(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else ""


def source_line(node: fx.Node) -> str:
    """The innermost line outside torch that made a node: "file:line: code"; "" where none is known."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or "")
    own = [f for f in frames if "/torch/" not in f[0]]
    if not own:
        return ""
    path, line, code = own[-1]
    return f"{path}:{line}: {code.strip()}"
