"""AOTAutograd's trace of a joint graph, taken from an earlier call where that was of the same graph on like inputs.

A planned model's graphs are traced when they are planned, when they first run, and when they run by another plan.
`torch._functorch._aot_autograd.graph_capture.aot_dispatch_autograd_graph` takes half of AOTAutograd's time for that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock, local
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch._functorch._aot_autograd import graph_compile
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor

from planner.compat import pytree
from planner.compat.tensors import storage_key

_AOT: Any = graph_compile
MOST = 20_000  # nodes of joint graphs that are kept of a model; the latest are
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Traced:
    """A joint graph before any pass, its constants, and what its trace noted in the metadata of the forward pass."""

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    meta: dict[str, Any]
    noted: dict[str, Any]


Traces = OrderedDict[Hashable, Traced]
_UNPATCHED: list[Any] = []  # what AOTAutograd calls otherwise, once for each thread in `shared`
_LOCK, _NEXT = Lock(), local()
_TORCHS = ("torch", "planner", "_operator", "operator", "math", "builtins")  # whose functions read no user's state
_TRACES: WeakKeyDictionary[nn.Module, Traces] = WeakKeyDictionary()


def traces_of(model: nn.Module) -> Traces:
    """The joint graphs that were traced for a model; they live as long as it does."""
    return _TRACES.setdefault(model, OrderedDict())


@contextmanager
def shared(traces: Traces | None, graph: fx.GraphModule, told: Hashable = None) -> Iterator[None]:
    """A while in which AOTAutograd compiles one Dynamo graph, by the joint graph of an earlier trace if there is one.

    That is of a graph with equal nodes of the same lines and modules, on inputs of equal kinds that alias each other
    alike, under equal modes. A graph with attributes of its own (constants, inner graphs) or ops of the user's, one
    with symbols, and one of sparse tensors or tensor subclasses are traced each time. `told` is what a trace depends on
    beside these.
    """
    structure = None if traces is None else _structure(graph.graph)
    if traces is None or structure is None:
        yield
        return
    modes, inputs = _modes(), sum(node.op == "placeholder" for node in graph.graph.nodes)

    def taken(trace: Callable[..., Any], flat_fn: Any, flat_args: Any, descs: Any, config: Any, metadata: Any) -> Any:
        kinds = _kinds([*flat_args, *metadata.traced_tangents])
        # else some are views of one base, and which views is not seen here
        if modes is None or kinds is None or len(flat_args) != inputs:
            return trace(flat_fn, flat_args, descs, config, fw_metadata=metadata)
        key = structure, kinds, modes, told
        with _LOCK:
            if known := traces.get(key):
                traces.move_to_end(key)
        if known:
            return _again(known, flat_args, descs, metadata)
        before = dict(vars(metadata))
        lengths = {name: len(x) for name, x in vars(metadata).items() if isinstance(x, list)}
        result = trace(flat_fn, flat_args, descs, config, fw_metadata=metadata)
        joint, _, _, subclasses = result
        appended = any(len(before[name]) != length for name, length in lengths.items())  # which is not noted
        constants = _constants(joint)
        if subclasses is None and not (metadata.tokens or appended or constants is None) and _can_be_kept(joint.graph):
            noted = {name: value for name, value in vars(metadata).items() if before.get(name) is not value}
            new = Traced(_copy(joint.graph), constants, dict(joint.meta), noted)
            with _LOCK:
                traces[key] = new
                while sum(len(each.graph.nodes) for each in traces.values()) > MOST:
                    traces.popitem(last=False)
        return result

    with _next_trace(taken):
        yield


def _again(known: Traced, flat_args: Sequence[Any], descs: Any, metadata: Any) -> Any:
    """What a trace returns, by an earlier one."""
    vars(metadata).update(known.noted)
    root = nn.Module()
    for name, constant in known.constants.items():
        root.register_buffer(name, constant)  # which is copied before it is used
    joint = fx.GraphModule(root, _copy(known.graph))
    joint.meta = dict(known.meta)
    primals, tangents = ([t.detach() for t in each] for each in (flat_args, metadata.traced_tangents))
    return joint, (primals, tangents), (descs, metadata.traced_tangents_descs), None


@contextmanager
def _next_trace(taken: Callable[..., Any]) -> Iterator[None]:
    """A while in which the next joint graph that this thread traces is what a function makes of it, and no other one.

    Other threads compile other graphs meanwhile, and so may what is called while this one is traced.
    """
    outer = getattr(_NEXT, "taken", None)
    with _LOCK:
        _UNPATCHED.append(_UNPATCHED[0] if _UNPATCHED else _AOT.aot_dispatch_autograd_graph)
        _AOT.aot_dispatch_autograd_graph = partial(_dispatch, _UNPATCHED[0])
    _NEXT.taken = taken
    try:
        yield
    finally:
        _NEXT.taken = outer
        with _LOCK:
            trace = _UNPATCHED.pop()
            if not _UNPATCHED:
                _AOT.aot_dispatch_autograd_graph = trace


def _dispatch(
    trace: Callable[..., Any], flat_fn: Any, flat_args: Any, descs: Any, config: Any, *, fw_metadata: Any
) -> Any:
    taken, _NEXT.taken = getattr(_NEXT, "taken", None), None
    if taken is None:
        return trace(flat_fn, flat_args, descs, config, fw_metadata=fw_metadata)
    return taken(trace, flat_fn, flat_args, descs, config, fw_metadata)


def _copy(graph: fx.Graph) -> fx.Graph:
    """As `copy.deepcopy`, which also copies what writes the code (`Graph._codegen`, torch 2.11 to 2.15)."""
    copied = fx.Graph()
    result, output = cast("tuple[Any, fx.Node]", copied.graph_copy(graph, {}, return_output_node=True))
    copied.output(result).meta = dict(output.meta)
    copied.set_codegen(graph._codegen)
    return copied


def _constants(joint: fx.GraphModule) -> dict[str, torch.Tensor] | None:
    """The numbers that a trace has written down as tensors, by name; None where it has others, which it was given.

    `x[mask] = 0` makes one: its graph has none, and says the number.
    """
    reads = [node for node in joint.graph.nodes if node.op in ("get_attr", "call_module")]
    found = {str(node.target): joint._buffers.get(str(node.target)) for node in reads}
    copied = all(user.target is torch.ops.aten.lift_fresh_copy.default for node in reads for user in node.users)
    numbers = {
        name: t for name, t in found.items() if type(t) is torch.Tensor and t.dim() == 0 and t.device.type == "cpu"
    }
    return numbers if copied and len(numbers) == len(found) else None


def _can_be_kept(graph: fx.Graph) -> bool:
    """Whether whoever reads a joint graph needs none of its objects, and not the fake mode that it was traced in."""
    values = pytree.tree_leaves([node.meta.get("val") for node in graph.nodes])
    tensors = [t for t in values if isinstance(t, torch.Tensor)]
    return all(t.layout is torch.strided for t in tensors) and not _symbolic(values)


def _symbolic(values: Iterable[Any]) -> bool:
    sizes = [n for t in values for n in _sizes(t)]
    return any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in sizes)


def _sizes(t: Any) -> Sequence[Any]:
    return (*t.shape, *t.stride(), t.storage_offset()) if isinstance(t, torch.Tensor) else (t,)


def _has_attributes(graph: fx.Graph) -> bool:
    return any(node.op in ("get_attr", "call_module") for node in graph.nodes)


def _origin(node: fx.Node) -> tuple[str, str, str]:
    """The module, the lines and the user's words that a node is from, which its joint graph says of what it becomes."""
    stack, words = node.meta.get("nn_module_stack") or {}, node.meta.get("custom")  # the stream, among others
    module = str(next(reversed(stack.values()))[0]) if stack else ""
    return module, node.meta.get("stack_trace") or "", repr(words) if words else ""


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

    if not all(n.op in ("placeholder", "output", "call_method") or _is_torchs(n.target) for n in graph.nodes):
        return None
    try:
        return tuple((n.op, n.target, plain(n.args), plain(n.kwargs), *_origin(n)) for n in graph.nodes)
    except TypeError:
        return None


def _is_torchs(target: Any) -> bool:
    """Whether a function is torch's or ours: it reads no state but `_modes`, and holds no objects, as a key holds it.

    The user's custom ops and functions that Dynamo takes as they are may read what they like while they are traced.
    """
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return str(target).split(".")[0] in ("aten", "prims")
    if isinstance(target, FunctionType):  # `functools.wraps` would give it the module of another one
        enclosed = [cell.cell_contents for cell in target.__closure__ or ()]  # `max_pool2d` calls one of two functions
        own = all(type(x) in _PLAIN or (isinstance(x, FunctionType) and _is_torchs(x)) for x in enclosed)
        module = target.__globals__.get("__name__") if own and not _calls_users(target) else None
    elif isinstance(target, (BuiltinFunctionType, type)):
        module = target.__module__
    else:
        module = getattr(getattr(target, "__objclass__", None), "__module__", None)
    return module is not None and module.split(".")[0] in _TORCHS


def _calls_users(function: FunctionType) -> bool:
    """Whether a function of torch's calls one that the user has put in the place of another one of torch's."""
    called = [x for n in function.__code__.co_names for x in (function.__globals__.get(n), getattr(torch, n, None))]
    modules = [str(x.__globals__.get("__name__")) for x in called if isinstance(x, FunctionType)]
    return not all(module.split(".")[0] in _TORCHS for module in modules)


def _kinds(inputs: Sequence[Any]) -> Hashable:
    """What a trace sees of its inputs, and which of them share a storage; None where some are not plain tensors."""
    if any(type(t) is not FakeTensor or t.layout is not torch.strided or t.constant is not None for t in inputs):
        return None
    if _symbolic(inputs):
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
    """The modes that a trace depends on; None where functions of the user's come in between."""
    if torch._C._len_torch_function_stack():
        return None
    kinds = {"cpu", "cuda" if (accelerator := torch.accelerator.current_accelerator()) is None else accelerator.type}
    cuda: Any = torch.backends.cuda
    cudnn, einsum = torch.backends.cudnn, torch.backends.opt_einsum
    return (
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        (einsum.enabled, einsum.strategy),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.backends.mkldnn.enabled),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        (cuda.fp16_bf16_reduction_math_sdp_allowed(), tuple(torch._C._get_sdp_priority_order())),
    )
