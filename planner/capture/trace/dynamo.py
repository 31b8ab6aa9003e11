"""Capture through `torch.compile`: a copy of the model on fake tensors, and the backend that a planned model runs on.

No memory and no compute is spent: the model is copied onto fake tensors, called once, and every joint graph that
AOTAutograd makes on the way is read. Guards, graph breaks, buffer mutation and autocast are torch's own.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from planner.capture.passes.attention_masks import drop_known_masks
from planner.capture.passes.masks_of_ones import serve_by_ones
from planner.capture.passes.rewrite import rewrite
from planner.capture.passes.tangents import mark_whole
from planner.capture.regions.region import Region, analyse
from planner.capture.shapes import at_hints, symbolic_again
from planner.capture.trace.arrival import Arrivals, refuse_second_order
from planner.capture.trace.closures import rebind_functions
from planner.capture.trace.constant_propagation import ConstantPropagation
from planner.capture.trace.data_dependent import Answers
from planner.capture.trace.generators import torch_generators
from planner.capture.trace.layers import capturable_layers, rnns_traced
from planner.capture.trace.out_of_sight import out_of_sight
from planner.capture.trace.quiet import collector_paused, quietly
from planner.capture.trace.recording import Recording
from planner.capture.trace.sequential import trace_sequential_checkpoints
from planner.compat import pytree
from planner.compat.autograd import like_eager
from planner.compat.dynamo import aot_autograd, dynamo_config, functorch_config
from planner.compat.fake import FakeCopyMode, FakeTensorMode, keep_in_copies
from planner.compat.fx import boxed, draws_kept
from planner.compat.joint_trace import Traces, shared
from planner.compat.modules import buffers_of, parameters_of, replace_call
from planner.compat.tensors import is_traceable_wrapper_subclass
from planner.core.objects import with_tensors
from planner.core.options import Checkpoints
from planner.errors import CaptureError, PlannerError
from planner.parallel.group import world_size
from planner.parallel.meshes import refuse_swapped
from planner.parallel.sharded import as_defined

Partition = Callable[[Region], tuple[fx.GraphModule, fx.GraphModule]]
GraphCompiler = Callable[[fx.GraphModule, Sequence[Any], Partition, Arrivals], Callable[..., Any]]
CompileRegion = Callable[[Partition, Sequence[Any], Arrivals, GraphCompiler | None], Callable[..., Any]]
Serve = Callable[[fx.GraphModule, CompileRegion, Sequence[Any]], Callable[..., Any]]

# what a model may hold and `copy` cannot copy, for `copyreg`: an object that reduces to a string stays the same one
_SHARED: dict[type, Callable[[Any], str]] = dict.fromkeys(
    (ModuleType, type(threading.Lock()), type(threading.RLock()), torch.library.Library), lambda _: "itself"
)


@contextlib.contextmanager
def dynamo_settings() -> Iterator[None]:
    """The settings under which a planned model compiles and runs.

    torch.compile silently runs a model unplanned after `recompile_limit` shapes, and breaks the graph at every logging
    call: neither may happen here. Nor may a hook that comes after the first step be overlooked, nor NumPy's random
    numbers be drawn from another generator than without a plan, nor DistributedDataParallel cut graphs at its buckets.
    """
    trace_sequential_checkpoints()
    words = ("debug", "info", "warn", "error", "exception", "critical", "log")
    methods = {f for name, f in vars(logging.Logger).items() if name.startswith(words)}
    with (
        capturable_layers(),
        collector_paused(),
        quietly("torch._dynamo.metrics_context"),  # 2.11 fails to write these settings to its log, with a traceback
        dynamo_config.patch(
            recompile_limit=1_000_000,
            accumulated_recompile_limit=1_000_000,
            fail_on_recompile_limit_hit=True,
            suppress_errors=False,
            skip_nnmodule_hook_guards=False,
            allow_rnn=True,
            use_numpy_random_stream=True,
            optimize_ddp=False,
            run_gc_after_compile=False,  # the collector is paused, and comes once a planned call is over
            ignore_logger_methods=frozenset(dynamo_config.ignore_logger_methods | methods),  # 2.11 would sort a set
        ),
    ):
        try:
            yield
        except Exception as e:  # torch.compile wraps the errors of our backend
            inner = getattr(e, "inner_exception", None)
            if isinstance(inner, PlannerError):
                raise inner from None
            raise


def op_by_op(
    checkpoints: Checkpoints = "replace", *, step_in_backward: bool = False, traces: Traces | None = None
) -> GraphCompiler:
    """A compiler of Dynamo graphs whose partitioned graphs run op by op.

    Args:
        checkpoints: whether calls that the model itself checkpoints stay as they are.
        step_in_backward: whether an optimizer steps each parameter as soon as its gradient is whole.
        traces: of the same model, by which graphs that were traced before are not traced again.
    """

    def compiler(graph: fx.GraphModule, _inputs: Any) -> Callable[[list[Any]], Any]:
        return boxed(graph)

    def compile_graph(
        graph: fx.GraphModule, examples: Sequence[Any], partition: Partition, arrivals: Arrivals
    ) -> Callable[..., Any]:
        trained = [at for at, t in enumerate(examples) if isinstance(t, nn.Parameter) and t.requires_grad]

        def split(
            joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            arrivals.read(joint.graph)
            symbolic = at_hints(joint)
            if not symbolic:
                arrivals.lay_out(joint.graph)
            order = rewrite(joint, num_fwd_outputs, checkpoints, trained if step_in_backward else ())
            region = analyse(joint, num_fwd_outputs, order)
            forward, backward = partition(replace(region, rnns_in_parts=rnns_traced() == "in parts"))
            if symbolic:
                forward, backward = symbolic_again(forward), symbolic_again(backward)
            arrivals.write(forward, backward)
            return forward, backward

        def backward_compiler(backward: fx.GraphModule, _inputs: Any) -> Callable[[list[Any]], Any]:
            return out_of_sight(arrivals.compile(backward))

        aot = aot_autograd(fw_compiler=compiler, bw_compiler=backward_compiler, partition_fn=split)
        with shared(traces, graph, rnns_traced()), draws_kept():
            compiled: Callable[..., Any] = aot(graph, examples)
        return compiled

    return compile_graph


OP_BY_OP = op_by_op()


@contextlib.contextmanager
def traced_alike() -> Iterator[None]:
    """While it is on, AOTAutograd traces a Dynamo graph as it does for every plan.

    Training loops leave autocast before the backward pass; torch.compile would trace that under it, too.
    """
    with capturable_layers(), functorch_config.patch(backward_pass_autocast="off"):
        yield


def make_backend(
    serve: Serve, compiler: GraphCompiler = OP_BY_OP, asks: Callable[[], bool] = lambda: False
) -> Callable[..., Any]:
    """A `torch.compile` backend that leaves every decision to `serve`.

    Args:
        serve: a Dynamo graph, a function that compiles it, and its first inputs -> the callable that Dynamo calls
            in its place. The function takes a partition: region -> its forward and backward graphs; inputs;
            what is to become of gradients that arrive, or do not; and a compiler, or None for the one here.
        compiler: a Dynamo graph, example inputs, a partition and gradients that arrive -> its compiled call.
        asks: called where what the inputs of a graph hold may tell which graph runs; whether it does.
    """

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # the tensors are the user's: their batch and results of earlier regions
        sizes = [None if isinstance(x, torch.Tensor) else x for x in inputs]

        def may_tell() -> bool:
            return world_size() == 1 and asks()  # several processes run the same graphs

        def served(graph: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
            return serve(graph, _compiling(graph, sizes, compiler), given)

        drop_known_masks(graph)
        _without_history(graph)
        return serve_by_ones(graph, inputs, served, may_tell)

    return backend


def _compiling(graph: fx.GraphModule, sizes: Sequence[Any], compiler: GraphCompiler) -> CompileRegion:
    """The function that compiles a Dynamo graph, as in `make_backend()`; `sizes` are its inputs but for tensors."""
    marked = False

    def compile_region(
        partition: Partition, given: Sequence[Any], arrivals: Arrivals, by: GraphCompiler | None = None
    ) -> Callable[..., Any]:
        nonlocal marked
        if not marked:
            mark_whole(graph)
            marked = True

        examples = [x if kept is None else kept for x, kept in zip(given, sizes, strict=True)]
        with traced_alike():
            compiled = (by or compiler)(graph, examples, partition, arrivals)

        def run(*inputs: Any) -> Any:
            handing = arrivals.handing()
            results = arrivals.watched(compiled(*(inputs if handing is None else handing.entered(inputs))))
            like_eager(results, refuse_second_order, as_they_come=arrivals.as_they_come)
            if handing is not None:
                handing.belongs_to(results)
            return results

        return run

    return compile_region


def _without_history(graph: fx.GraphModule) -> None:
    """Detach the fake results that Dynamo has noted: their autograd graph would hold the real numbers of its ops
    (the 1.0 of `x / 1.0`, 8 bytes each) as long as the model runs.
    """
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if (value := node.meta.get("example_value")) is not None:
                node.meta["example_value"] = pytree.tree_map_only(torch.Tensor, _alone, value)


def _alone(t: torch.Tensor) -> torch.Tensor:
    return t if t.grad_fn is None else t.detach().requires_grad_()


def lone_loss(graph: fx.GraphModule) -> tuple[int, ...]:
    """Positions of differentiable outputs beside the one scalar among them, which is probably the loss."""
    scalar: list[int] = []
    others: list[int] = []
    for at, node in enumerate(graph.graph.output_node().args[0]):  # type: ignore[arg-type]
        t = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad:
            (others if t.dim() else scalar).append(at)
    return tuple(others) if len(scalar) == 1 else ()


def to_fake(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], answers: Answers
) -> tuple[Recording, nn.Module, Any, Any]:
    """The model and its inputs on fake tensors; the originals are not touched. Tensors on `meta` come to the CPU."""
    refuse_swapped(model)
    mode = keep_in_copies(FakeTensorMode(allow_non_fake_inputs=True))

    def whole(shard: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
        with mode:
            return nn.Parameter(torch.empty(shard.shape, dtype=dtype, device=shard.device), shard.requires_grad)

    try:
        with as_defined(model, whole) as memo:
            # a generator is no tensor, and cannot be unpickled in a fake mode
            memo |= {id(g): g.clone_state() for g in torch_generators(model)}
            with FakeCopyMode(mode), mock.patch.dict(copyreg.dispatch_table, _SHARED):
                fake_model = copy.deepcopy(model, memo)
        rebind_functions(model, fake_model, memo)
        for module in fake_model.modules():
            replace_call(module, None)  # a copy runs under the plan of its original
    except Exception as e:
        raise CaptureError(f"{type(model).__name__} cannot be copied for planning: {type(e).__name__}: {e}") from e

    landed: dict[int, Any] = {}  # tied parameters stay tied
    for module in fake_model.modules():
        for table in (parameters_of(module), buffers_of(module)):
            for name, t in table.items():
                if t is not None and t.device.type == "meta":
                    table[name] = landed.setdefault(id(t), _landed(t, mode))
    paths = {id(module): name for name, module in fake_model.named_modules()}
    fake_args, fake_kwargs = ConstantPropagation(mode, answers, paths).fake(args, kwargs)
    fake_args, fake_kwargs = with_tensors(fake_args, fake_kwargs, lambda _, t: _landed(t, mode))
    return Recording(mode, paths), fake_model, fake_args, fake_kwargs


def _landed(t: torch.Tensor, mode: FakeTensorMode) -> Any:
    """A fake tensor on the CPU in the place of one on `meta`, on which autograd and autocast differ."""
    if t.device.type != "meta":
        return t
    if is_traceable_wrapper_subclass(t):
        names, context = t.__tensor_flatten__()
        parts = {name: getattr(t, name) for name in names}
        inside = {n: _landed(part, mode) if isinstance(part, torch.Tensor) else part for n, part in parts.items()}
        landed = type(t).__tensor_unflatten__(inside, context, t.shape, t.stride())
        return nn.Parameter(landed, t.requires_grad) if isinstance(t, nn.Parameter) else landed
    with mode:
        landed = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu", requires_grad=t.requires_grad)
    return nn.Parameter(landed, t.requires_grad) if isinstance(t, nn.Parameter) else landed
