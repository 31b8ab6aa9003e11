"""Sizes that may change from step to step: a graph captured with symbolic sizes, read at the largest.

A joint graph with symbolic sizes serves every shape. It is planned at the sizes for which it was traced, the largest:
`at_hints` writes them in the place of the symbols, and `symbolic_again` puts the symbols back into the emitted graphs.
A fixed schedule takes no more bytes at smaller sizes where every storage grows with every size (`grows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import map_nodes
from planner.compat import pytree
from planner.compat.fake import FakeTensorMode
from planner.compat.symbols import dynamic_dimensions, evaluate, expression_of, hint_of
from planner.compat.tensors import storage_key
from planner.core.maxima import Maxima, layout
from planner.core.objects import tensors_of, with_tensors
from planner.errors import CaptureError

SYMBOLIC = "planner_symbolic"  # in a node's meta: its value with symbols in it
_GROWING = {
    "Add", "Max", "Min", "FloorDiv", "CleanDiv", "CeilDiv", "CeilToInt", "FloorToInt", "IntTrueDiv", "ToFloat",
    "TruncToInt",
}  # fmt: skip


def enlarged(args: Any, kwargs: Any, maxima: Maxima, mode: FakeTensorMode) -> Any:
    """Arguments with fake tensors of the largest size, dense, in the same order of dimensions."""

    def make(t: torch.Tensor, at: Mapping[int, int]) -> torch.Tensor:
        size = [at.get(d, n) for d, n in enumerate(t.shape)]
        with mode:
            larger = torch.empty_permuted(size, layout(t), dtype=t.dtype, device=t.device)
        return larger.requires_grad_(t.requires_grad)

    return _mapped(args, kwargs, maxima, make)


def densely(args: Any, kwargs: Any, maxima: Maxima) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Arguments that are dense, as planned: parts of larger tensors are copied; also each original with its copy."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make(t: torch.Tensor, _: Any) -> torch.Tensor:
        dense = torch.empty_permuted(t.shape, layout(t), device="meta").stride()
        if t.requires_grad or dense == t.stride():
            return t
        copies.append((t, torch.empty_strided(t.shape, dense, dtype=t.dtype, device=t.device).copy_(t)))
        return copies[-1][1]

    return _mapped(args, kwargs, maxima, make), copies


def _mapped(args: Any, kwargs: Any, maxima: Maxima, make: Callable[[torch.Tensor, Mapping[int, int]], Any]) -> Any:
    """Arguments with new tensors for those that may be smaller; one that comes twice stays one."""
    mapped: dict[int, Any] = {}

    def new(path: str, t: torch.Tensor) -> Any:
        if not (at := maxima.of(path)):
            return t
        if id(t) not in mapped:
            mapped[id(t)] = make(t, at)
        return mapped[id(t)]

    return with_tensors(args, kwargs, new)


@contextmanager
def marked(args: Any, kwargs: Any, maxima: Maxima | None) -> Iterator[None]:
    """While it is on, torch.compile takes the dimensions that may be smaller for symbols."""
    tensors = tensors_of(args, kwargs) if maxima else []
    with dynamic_dimensions((t, at) for path, t in tensors if maxima and (at := maxima.of(path))):
        yield


def at_hints(joint: fx.GraphModule) -> bool:
    """Write the sizes for which a joint graph was traced in the place of symbols, in place; False where it has none.

    The symbolic values stay in the nodes' meta, under `SYMBOLIC`. Sizes read off a tensor in the graph are computed
    from the graph's inputs, so that none keeps a tensor alive; of inputs that are one symbol, the first is read.

    Raises:
        CaptureError: a size is known only at run time, or a storage may be larger at smaller sizes.
    """
    graph = joint.graph
    if not any(map(_symbolic, graph.nodes)):
        return False
    _read_no_tensor(graph)
    _read_the_first(graph)
    values_at_hints(graph, _Hints(growing=True))
    joint.recompile()
    return True


def values_at_hints(graph: fx.Graph, sizes: _Hints | None = None) -> None:
    """As `at_hints`, of the nodes' values alone."""
    sizes = sizes or _Hints()
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta[SYMBOLIC] = node.meta["val"]
            node.meta["val"] = pytree.tree_map(sizes.fixed, node.meta["val"])


def fakes_at_hints(values: Any) -> tuple[FakeTensorMode, Any]:
    """Fake tensors and numbers with the sizes for which they were traced in the place of symbols, and their mode."""
    sizes = _Hints()
    return sizes.mode, pytree.tree_map(sizes.fixed, values)


def has_symbols(values: Sequence[Any]) -> bool:
    """Whether some of these are symbols, or tensors whose sizes are."""
    return any(isinstance(n, torch.SymInt) for x in values for n in (x.shape if isinstance(x, torch.Tensor) else [x]))


def has_fixed_sizes(graph: fx.Graph) -> bool:
    """Whether a size that a graph is given was a symbol, and what was compiled of it since allows one value only."""
    return any(is_size(n) and expression_of(n.meta[SYMBOLIC]).is_number for n in graph.find_nodes(op="placeholder"))


def symbolic_again(graph: fx.GraphModule) -> fx.GraphModule:
    """Put symbols back into a graph that was emitted from one that `at_hints` has changed. In place."""
    for node in graph.graph.nodes:
        if SYMBOLIC in node.meta:
            node.meta["val"] = node.meta.pop(SYMBOLIC)
    return graph


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number made of symbols."""
    return isinstance(node.meta.get(SYMBOLIC), (torch.SymInt, torch.SymFloat, torch.SymBool))


def grows(expression: Any) -> bool:
    """Whether an expression in sizes (sympy's, or torch's functions on them) never falls as one of them grows.

    Factors are taken to be at least 0, as sizes are. Says False where it cannot tell.
    """
    if expression.is_number or expression.is_symbol:
        return True
    name = type(expression).__name__
    if name in ("FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv"):
        top, bottom = expression.args
        return bool(bottom.is_number and bottom > 0 and grows(top))
    if name == "Pow":
        base, exponent = expression.args
        return bool(exponent.is_number and exponent > 0 and grows(base))
    if name == "Mul":
        return all(bool(x >= 0) if x.is_number else grows(x) for x in expression.args)
    return name in _GROWING and all(map(grows, expression.args))


class _Hints:
    """Fixes values at their hints; views of one storage stay views of one.

    Args:
        growing: whether to refuse storages that may be larger at smaller sizes, by CaptureError.
    """

    def __init__(self, *, growing: bool = False) -> None:
        self.mode, self.growing = FakeTensorMode(), growing
        self.bases: dict[int, torch.Tensor] = {}

    def fixed(self, x: Any) -> Any:
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _hint(x)
        if not isinstance(x, torch.Tensor):
            return x
        key, nbytes = storage_key(x), x.untyped_storage().nbytes()
        with self.mode:
            if key not in self.bases:
                if self.growing and isinstance(nbytes, torch.SymInt) and not grows(expression_of(nbytes)):
                    raise CaptureError(f"a tensor of {nbytes} bytes may be larger where the batch is smaller")
                self.bases[key] = torch.empty(_hint(nbytes), dtype=torch.uint8, device=x.device)
            base = self.bases[key].view(x.dtype)
            size, stride = [_hint(n) for n in x.shape], [_hint(n) for n in x.stride()]
            return base.as_strided(size, stride, _hint(x.storage_offset()))


def _hint(x: Any) -> Any:
    if not isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return x
    if (hint := hint_of(x)) is None:
        raise CaptureError(f"the size {x} is known only at run time")
    return hint


def _symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _read_no_tensor(graph: fx.Graph) -> None:
    """Compute sizes that are read off tensors from the symbols among the graph's inputs."""
    inputs = [n for n in graph.find_nodes(op="placeholder") if _symbolic(n)]
    symbols: dict[Any, Any] = {expression_of(n.meta["val"]): fx.Proxy(n) for n in inputs}
    there = list(graph.nodes)
    first = next(n for n in there if n.op != "placeholder")
    read = [n for n in there if _symbolic(n) and n.op != "placeholder" and not all(map(_symbolic, n.all_input_nodes))]
    computed: dict[Any, Any] = {}
    for node in read:
        expression = expression_of(node.meta["val"])
        if not expression.free_symbols <= symbols.keys():
            raise CaptureError(f"the size {expression} is known only at run time")
        if expression not in computed:
            with graph.inserting_before(first):
                value = evaluate(expression, symbols)
            computed[expression] = value.node if isinstance(value, fx.Proxy) else value
    known = set(there)
    for node in graph.nodes:
        if node not in known:
            target: Any = node.target
            node.meta["val"] = target(*map_nodes(node.args, lambda n: n.meta["val"]))
    for node in reversed(read):
        number = {node: computed[expression_of(node.meta["val"])]}
        for user in list(node.users):
            user.args, user.kwargs = map_nodes((user.args, user.kwargs), partial(_get, number))
        graph.erase_node(node)


def _read_the_first(graph: fx.Graph) -> None:
    """Read each symbol from the first of the inputs that are it: a trace picks any, and not always the same."""
    first: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if _symbolic(node) and (known := first.setdefault(expression_of(node.meta["val"]), node)) is not node:
            node.replace_all_uses_with(known)


def _get(table: Mapping[fx.Node, Any], node: fx.Node) -> Any:
    return table.get(node, node)
