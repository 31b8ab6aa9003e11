"""AOTAutograd's trace of a joint graph, taken from an earlier call where that was of the same graph on like inputs.

A planned model's graphs are traced when they are planned, when they first run, and when they run by another plan.
`torch._functorch._aot_autograd.graph_capture.aot_dispatch_autograd_graph` takes half of AOTAutograd's time for that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch._functorch._aot_autograd import graph_compile
from torch._subclasses.fake_tensor import FakeTensor

from planner.compat import pytree
from planner.compat.tensors import storage_key

_AOT: Any = graph_compile
MOST = 20_000  # nodes of joint graphs that are kept of a model; the latest are
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Traced:
    """A joint graph before any pass, and what its trace noted in the metadata of the forward pass."""

    graph: fx.Graph
    meta: dict[str, Any]
    noted: dict[str, Any]


Traces = OrderedDict[Hashable, Traced]
_TRACES: WeakKeyDictionary[nn.Module, Traces] = WeakKeyDictionary()


def traces_of(model: nn.Module) -> Traces:
    """The joint graphs that were traced for a model; they live as long as it does."""
    return _TRACES.setdefault(model, OrderedDict())


@contextmanager
def shared(traces: Traces | None, graph: fx.GraphModule) -> Iterator[None]:
    """A while in which AOTAutograd compiles one Dynamo graph, by the joint graph of an earlier trace if there is one.

    That is of a graph with equal nodes of the same lines and modules, on inputs of equal kinds that alias each other
    alike, under equal modes. A graph with attributes of its own (constants, inner graphs), one with symbols, and one of
    sparse tensors or tensor subclasses are traced each time.
    """
    structure = None if traces is None else _structure(graph.graph)
    if traces is None or structure is None:
        yield
        return
    trace, modes = _AOT.aot_dispatch_autograd_graph, _modes()

    def dispatch(flat_fn: Any, flat_args: Any, descs: Any, config: Any, *, fw_metadata: Any) -> Any:
        inputs = _kinds([*flat_args, *fw_metadata.traced_tangents])
        key = structure, inputs, len(flat_args), modes
        if inputs is not None and key in traces:
            traces.move_to_end(key)
            known = traces[key]
            vars(fw_metadata).update(known.noted)
            joint = fx.GraphModule(nn.Module(), _copy(known.graph))
            joint.meta = dict(known.meta)
            primals, tangents = ([t.detach() for t in each] for each in (flat_args, fw_metadata.traced_tangents))
            return joint, (primals, tangents), (descs, fw_metadata.traced_tangents_descs), None
        before = dict(vars(fw_metadata))
        result = trace(flat_fn, flat_args, descs, config, fw_metadata=fw_metadata)
        joint, _, _, subclasses = result
        if inputs is not None and subclasses is None and not fw_metadata.tokens and _can_be_kept(joint.graph):
            noted = {name: value for name, value in vars(fw_metadata).items() if before.get(name) is not value}
            traces[key] = Traced(_copy(joint.graph), dict(joint.meta), noted)
            while sum(len(each.graph.nodes) for each in traces.values()) > MOST:
                traces.popitem(last=False)
        return result

    _AOT.aot_dispatch_autograd_graph = dispatch
    try:
        yield
    finally:
        _AOT.aot_dispatch_autograd_graph = trace


def _copy(graph: fx.Graph) -> fx.Graph:
    """As `copy.deepcopy`, which also copies what writes the code (`Graph._codegen`, torch 2.11 to 2.15)."""
    copied = fx.Graph()
    result, output = cast("tuple[Any, fx.Node]", copied.graph_copy(graph, {}, return_output_node=True))
    copied.output(result).meta = dict(output.meta)
    copied.set_codegen(graph._codegen)
    return copied


def _can_be_kept(graph: fx.Graph) -> bool:
    """Whether whoever reads a joint graph needs none of its objects, and not the fake mode that it was traced in."""
    values = pytree.tree_leaves([node.meta.get("val") for node in graph.nodes])
    return not _has_attributes(graph) and all(t.layout is torch.strided for t in values if isinstance(t, torch.Tensor))


def _has_attributes(graph: fx.Graph) -> bool:
    return any(node.op in ("get_attr", "call_module") for node in graph.nodes)


def _origin(node: fx.Node) -> tuple[str, str]:
    """The module and the lines that a node is from, which its joint graph says of what it becomes."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else "", node.meta.get("stack_trace") or ""


def _structure(graph: fx.Graph) -> Hashable:
    """What a graph computes, and from which lines: targets by identity, constants by what they are.

    None where one of these cannot be compared.
    """
    if _has_attributes(graph):
        return None
    number = {node: at for at, node in enumerate(graph.nodes)}

    def plain(x: Any) -> Hashable:
        if isinstance(x, fx.Node):
            return number[x], "node"
        if isinstance(x, (tuple, list)):
            return type(x), tuple(map(plain, x))
        if isinstance(x, dict):
            return tuple((name, plain(value)) for name, value in x.items())
        if isinstance(x, slice):
            return slice, plain(x.start), plain(x.stop), plain(x.step)
        if x is ... or type(x) in _PLAIN:
            return type(x), repr(x)  # 1, True and 1.0 are equal, and a NaN is not
        raise TypeError

    # a target that holds other objects, the model maybe, would be held by the key
    if any(isinstance(n.target, (MethodType, partial)) or getattr(n.target, "__closure__", None) for n in graph.nodes):
        return None
    try:
        return tuple((n.op, n.target, plain(n.args), plain(n.kwargs), *_origin(n)) for n in graph.nodes)
    except TypeError:
        return None


def _kinds(inputs: Sequence[Any]) -> Hashable:
    """What a trace sees of its inputs, and which of them share a storage; None where some are not plain tensors."""
    if any(type(t) is not FakeTensor or t.layout is not torch.strided or t.constant is not None for t in inputs):
        return None
    if any(isinstance(n, torch.SymInt) for t in inputs for n in (*t.shape, *t.stride(), t.storage_offset())):
        return None
    first: dict[int, int] = {}
    return tuple(
        (
            tuple(t.shape),
            t.stride(),
            t.storage_offset(),
            t.untyped_storage().nbytes(),
            t.dtype,
            t.device,
            t.requires_grad,
            t.is_leaf,
            t.is_conj(),
            t.is_neg(),
            t.is_inference(),
            first.setdefault(storage_key(t), at),
        )
        for at, t in enumerate(inputs)
    )


def _modes() -> Hashable:
    """The modes that a trace depends on."""
    kinds = {"cpu", "cuda" if (accelerator := torch.accelerator.current_accelerator()) is None else accelerator.type}
    cuda: Any = torch.backends.cuda
    cudnn = torch.backends.cudnn
    return (
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.backends.mkldnn.enabled),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
    )
