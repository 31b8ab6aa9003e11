"""Inductor: its pipeline with a partition of ours, the wrappers that it generates. Torch 2.11 to 2.15.

Nothing of `torch._inductor` is imported before the first function is called: that takes a second, and plans of other
modes need none of it.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._guards import TracingContext

from planner.compat.autograd import graph_is_kept
from planner.compat.dynamo import functorch_config
from planner.compat.fx import takes_a_list

Partitioned = tuple[fx.GraphModule, fx.GraphModule]
Partition = Callable[..., Partitioned]
Inner = Callable[..., Callable[[list[Any]], Any]]

# a setting of `torch._functorch.config`: the code of backward graphs writes into no saved tensor
NOT_DONATED = ("donated_buffer", False)

# by module: what this one reads of it
PARTS = {
    "torch._inductor.async_compile": "AsyncCompile get_compile_threads",
    "torch._inductor.choices": "InductorChoices",
    "torch._inductor.codecache": "CppPythonBindingsCodeCache",
    "torch._inductor.compile_fx": "compile_fx compile_fx_inner",
    "torch._inductor.config": (
        "cpp custom_partitioner_fn get_hash inductor_choices_class reorder_for_peak_memory cpp_wrapper fx_graph_cache "
        "joint_custom_pre_pass"
    ),
    "torch._inductor.cpp_builder": "get_cpp_compiler",
    "torch._inductor.custom_graph_pass": "CustomGraphPass CustomPartitionerFn",
    "torch._inductor.inductor_prims": "randint random",
    "torch._inductor.graph": "GraphLowering get_user_visible_output_strides",
    "torch._functorch.partitioners": "min_cut_rematerialization_partition",
    "torch._inductor.codegen.cpp": "CppScheduling TilingSelect",
    "torch._inductor.codegen.wrapper": "AllocateLine",
    "torch._inductor.pattern_matcher": "FailedMatch Match PatternExpr",
    "torch._inductor.utils": "clear_on_fresh_cache get_donated_idxs",
    "torch._inductor.virtualized": "V",
    "torch._functorch.config": "donated_buffer enable_autograd_cache force_non_lazy_backward_lowering",
}


def missing_parts() -> tuple[str, ...]:
    """The names in `PARTS` that this torch does not have; none where the mode can be used (torch 2.11 to 2.15)."""
    found: list[str] = []
    for name, parts in PARTS.items():
        try:
            module = importlib.import_module(name)
        except ImportError:
            found.append(name)
            continue
        found += [f"{name}.{part}" for part in parts.split() if not hasattr(module, part)]
    return tuple(found)


def missing_compiler(device: str) -> str:
    """What Inductor lacks to compile for a kind of device, in words with what to install; empty for nothing."""
    if device == "cuda":
        return "" if importlib.util.find_spec("triton") else "Triton, which is not installed: pip install triton"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        found = shutil.which(get_cpp_compiler())
    except (InvalidCxxCompiler, RuntimeError):
        found = None
    return "" if found else "a C++ compiler, and none is here: install g++ (apt-get install g++), or set CXX to one"


def code_generation() -> str:
    """What Inductor's code depends on beside the graph: a hash of its settings, and the C++ compiler."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler

    asked: Any = config
    return f"{asked.get_hash().hex()} {get_cpp_compiler()}"


def compile_graph(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Partition,
    inner: Callable[[Inner], Inner],
    *,
    first: Callable[[fx.Graph], None],
    near: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """A Dynamo graph by Inductor's own pipeline, with a partition of ours (`compile_fx`, torch 2.11 to 2.15).

    The graph itself is not changed. Its backward graph is compiled at once (`force_non_lazy_backward_lowering`), and
    AOTAutograd's cache is off, which would not call the partition.

    Args:
        graph: as torch.compile hands it to a backend.
        inputs: example inputs.
        partition: as `CustomPartitionerFn`: a joint graph, its inputs, `num_fwd_outputs` -> forward and backward.
        inner: Inductor's own compiler of one graph -> what compiles each graph in its place.
        first: called with the joint graph before Inductor's passes over it.
        near: how many steps (`meta[STEP]`) nodes lie apart, at most, that come together in the code; None for any.
        settings: of `torch._inductor.config`, by name, as `torch.compile(options=)` takes them; and `NOT_DONATED`.
    """
    from torch._inductor import compile_fx as module
    from torch._inductor import config

    from planner.compat.inductor_hooks import First, Near, Partitioner, chosen
    from planner.compat.inductor_kernels import compiled_together

    own = copied(graph)
    patches = dict(settings or {})
    donated = patches.pop(NOT_DONATED[0], functorch_config.donated_buffer)
    # no key of Inductor's caches tells code that writes into saved tensors from code that does not: ours does
    patches |= {"custom_partitioner_fn": Partitioner(partition, (near, donated)), "cpp_wrapper": False}
    patches["joint_custom_pre_pass"] = First(first, config.joint_custom_pre_pass)
    if near is not None:
        patches |= {"inductor_choices_class": Near, "reorder_for_peak_memory": False}
    together = nullcontext() if near is None else chosen(near)
    traced = functorch_config.patch(
        {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True, NOT_DONATED[0]: donated}
    )
    with compiled_together(), traced, together:
        compile_fx: Any = module.compile_fx
        compiled: Callable[..., Any] = compile_fx(
            own, inputs, inner_compile=inner(module.compile_fx_inner), config_patches=patches
        )
    return compiled


def saving_donated(compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A backward graph that Inductor has just compiled, which leaves saved tensors as they are where the graph is kept.

    Inductor's code writes into saved tensors that nothing else holds (`DonatedBuffer`; 2.11 to 2.15), so that a second
    backward pass would find other values: it is given copies in a pass with `retain_graph=True`, which no plan counts.
    Once a loop is seen to keep its graph, its code is made with `NOT_DONATED`.
    """
    from torch._inductor.utils import get_donated_idxs

    donated = tuple(get_donated_idxs() or ())
    if not donated:
        return compiled

    def call(arguments: list[Any]) -> Any:
        if graph_is_kept():
            for at in donated:
                saved = arguments[at]
                arguments[at] = torch.empty_strided(
                    saved.shape, saved.stride(), dtype=saved.dtype, device=saved.device
                ).copy_(saved)
            del saved
        return compiled(arguments)

    return takes_a_list(call)


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of a Dynamo graph, with the sources of its inputs.

    By these AOTAutograd tells parameters, which stay where they are, from other inputs, and Inductor's own partition
    depends on that (`_try_get_metadata_from_dynamo`, 2.11 to 2.15).
    """
    own = _copy_of(graph)
    own.meta = dict(graph.meta)
    if hasattr(graph, "_param_name_to_source"):
        own._param_name_to_source = graph._param_name_to_source
    for new, old in zip(*(g.graph.find_nodes(op="placeholder") for g in (own, graph)), strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return own


def default_partition(
    joint: fx.GraphModule,
    inputs: Sequence[Any],
    prepared: Callable[[fx.GraphModule], fx.GraphModule],
    *,
    cse: bool | None = None,
    **options: Any,
) -> Partitioned:
    """Inductor's own partition of a joint graph, which is not changed (`min_cut_rematerialization_partition`).

    Args:
        joint: the graph.
        inputs: its inputs.
        prepared: makes of a copy of it what is partitioned.
        cse: whether what is computed twice is computed once; None as torch is set.
        options: of the partition.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with functorch_config.patch({} if cse is None else {"cse": cse}):
        found: Partitioned = min_cut_rematerialization_partition(prepared(_copy_of(joint)), inputs, **options)
    return found


def _copy_of(graph: fx.GraphModule) -> fx.GraphModule:
    with warnings.catch_warnings():  # torch's own class for the leaves of arguments warns when it is copied
        warnings.filterwarnings("ignore", r".*LeafSpec", FutureWarning)
        return fx.GraphModule(graph, copy.deepcopy(graph.graph))


@dataclass(frozen=True)
class Generated:
    """What Inductor would compile one graph to.

    Attributes:
        source: of the wrapper module, whose `call(arguments)` runs the kernels.
        realised: buffers that exist in it, by name: the node of the graph that each is the result of.
        constants: tensors that the module is given, by name.
    """

    source: str
    realised: Mapping[str, fx.Node]
    constants: Mapping[str, Any]


class _Stopped(BaseException):
    """The wrapper is there, and nothing is compiled: no error, which Inductor would catch, and never seen outside."""

    def __init__(self, generated: Generated, strides: list[Any]) -> None:
        self.generated, self.strides = generated, strides


def generate(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Generated:
    """The wrapper that Inductor generates for a graph, with no kernel compiled (torch 2.11 to 2.15).

    Kernels of C++ are written without vector instructions, which take more than half of the time of writing them: the
    wrapper does not depend on these (the scalar kernel decides about buffers, `CppKernelProxy.codegen_functions`).
    AOTAutograd is told the strides of the results, as it is by a graph that is compiled.

    Args:
        graph: as `compile_fx` hands it to its inner compiler.
        inputs: example inputs.
        options: as `compile_fx` hands them on.
    """
    from torch._inductor import config
    from torch._inductor.codegen import cpp
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    from planner.compat.inductor_hooks import origin_of

    def stop(lowering: Any) -> None:
        code, _ = lowering.codegen()
        removed = lowering.removed_buffers | lowering.inplaced_to_remove
        named = ((b.get_name(), origin_of(b)) for b in lowering.buffers if b.get_name() not in removed)
        realised = {name: node for name, node in named if node is not None}
        strides = [_strides(out) for out in lowering.graph_outputs or ()]
        raise _Stopped(Generated(code.value, realised, dict(lowering.constants)), strides)

    untiled: tuple[Any, ...] = ([], [], None) if hasattr(cpp, "KernelOpStats") else ([], [])  # the latter in torch 2.11
    stopped = _Stopped(Generated("def call(args):\n    raise NotImplementedError", {}, {}), [])
    with (
        config.patch(force_disable_caches=True),
        mock.patch.object(GraphLowering, "compile_to_module", stop),
        mock.patch.object(cpp.TilingSelect, "select_tiling", return_value=untiled),
    ):
        try:
            compile_fx_inner(graph, inputs, **options)
        except _Stopped as e:
            stopped = e.with_traceback(None)  # whose frames would keep the step's batch until Python's collector comes
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        assert len(context.output_strides) == 0
        context.output_strides.extend(stopped.strides)
    return stopped.generated


def _strides(out: Any) -> tuple[int, ...] | None:
    try:
        return tuple(int(s) for s in out.get_layout().stride)
    except (AttributeError, NotImplementedError, TypeError):
        return None


_ALLOCATION = re.compile(r"^(\s+\w+) = empty_strided_([a-z]+)\w*\(", re.M)


def load(generated: Generated, kernel: Callable[[str], Any], allocate: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """A generated wrapper as a namespace with `call`, its kernels and allocations replaced (torch 2.11 to 2.15).

    Args:
        generated: the wrapper.
        kernel: the name of a kernel -> what is called in its place.
        allocate: called as (kind of device, sizes, strides, dtype) in the place of `empty_strided_*`.
    """
    import torch._inductor.async_compile as async_compile

    class Stubs:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    source = _ALLOCATION.sub(r"\1 = _allocate('\2', ", generated.source)
    namespace: dict[str, Any] = {"__name__": "planner_dry_run", **generated.constants, "_allocate": allocate}
    with mock.patch.object(async_compile, "AsyncCompile", Stubs):
        exec(compile(source, WRAPPER, "exec"), namespace)
    for name, value in list(namespace.items()):
        if value is None and f"{name} = async_compile." in source:
            namespace[name] = kernel(name)
    namespace["assert_size_stride"] = namespace["assert_alignment"] = lambda *args: None
    namespace["reinterpret_tensor"] = _reinterpret
    return namespace


WRAPPER = "<generated wrapper>"


def _reinterpret(t: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    return torch.as_strided(t, size, stride, t.storage_offset() + offset)
