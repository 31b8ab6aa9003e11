"""Autograd's graph and engine: tensors that nodes saved, callbacks of a backward pass. Torch 2.11 to 2.15."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import _compile
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.autograd.graph import Node, get_gradient_edge

Known = TypeVar("Known")
_CALLS_ENGINE = torch.autograd.graph._engine_run_backward.__code__
# between it and a mode: this package, and what torch puts around a mode's `__torch_dispatch__`
_OWN = (f"{Path(__file__).parents[1]}{os.sep}", _compile.__file__, eval_frame.__file__)
_REFUSES = "planner_refuses"  # on the class of a compiled graph's node: what is called for a second derivative


def saved_by(node: Node) -> list[Any]:
    """What a node saved for the backward pass (`_saved_*` and `saved_tensors`, 2.11 to 2.15).

    Raises:
        RuntimeError: the backward pass has freed it.
    """
    return [getattr(node, name) for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]


def is_custom(node: Node) -> bool:
    """Whether a node is a `torch.autograd.Function`'s, as those of compiled graphs are (2.11 to 2.15).

    Its class is asked: its own `_raw_saved_tensors` would be made for all that it saved.
    """
    return hasattr(type(node), "_raw_saved_tensors")


def holds_saved(node: Any) -> bool:
    """Whether a node of a `torch.autograd.Function` still holds tensors for its backward pass (2.11 to 2.15)."""
    try:
        return len(node._raw_saved_tensors) > 0
    except RuntimeError:  # freed by the backward pass
        return False


@contextmanager
def saving_aliases() -> Iterator[None]:
    """Meanwhile autograd saves aliases of tensors that have a graph, so that those in Python live only as long as
    Python refers to them. It saves what it always does where hooks for saved tensors are there, or are refused.

    What it saved and was changed in place is an error, as without (`torch/csrc/autograd/saved_variable.cpp`; the two
    private functions, 2.11 to 2.15).
    """
    autograd = torch._C._autograd
    if autograd._saved_tensors_hooks_get_disabled_error_message() or autograd._top_saved_tensors_default_hooks(False):
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_alias, _of_alias):
        yield


def _alias(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (t if t.grad_fn is None else t.detach()), t._version


def _of_alias(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    t, version = saved
    if t._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{t.type()} {list(t.shape)}] is at version {t._version}; expected version {version} instead"
        )
    return t


class _Anything:
    """Is equal to all that it is compared with."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class _AnyLayout:
    """A `MemoryFormatMeta` that a gradient of any layout has: none is copied into another one (2.11 to 2.15)."""

    memory_format = None
    size = stride = _Anything()


def like_eager(results: Iterable[Any], differentiated_twice: Callable[[], None], *, as_they_come: bool = False) -> None:
    """Give the backward pass of a compiled graph what autograd's own nodes have.

    It gets None where no gradient arrives, which AOTAutograd hands on as what is no tensor; it runs again on a kept
    graph, which AOTAutograd refuses where a compiler may write into saved tensors (`bw_donated_idxs`: code that does
    is given copies, see `planner.compat.inductor.saving_donated`); and a function of ours, which is to raise, is called
    where its gradients are differentiated (`_double_backward`). All in 2.11 to 2.15.

    Args:
        results: of the compiled graph.
        differentiated_twice: that function.
        as_they_come: whether gradients of plain outputs enter as they are laid out; else AOTAutograd copies those that
            are laid out otherwise than the output (`subclass_tangent_meta`).
    """
    done = set[Any]()
    for t in results:
        node: Any = t.grad_fn if isinstance(t, torch.Tensor) else None
        while node is not None and not is_custom(node):  # a view on top of it
            node = node.next_functions[0][0] if node.next_functions else None
        if node in done:
            continue
        done.add(node)
        if node is not None and "CompiledFunction" in node.name():  # else it is the user's, and what it got is returned
            node.set_materialize_grads(False)
            function = node._forward_cls
            if getattr(function, _REFUSES, None) is not differentiated_twice:  # once for all calls of the graph
                function.metadata.bw_donated_idxs = []
                if as_they_come:
                    _take_any_layout(function.metadata)
                function._double_backward = staticmethod(_double_backward(differentiated_twice))
                setattr(function, _REFUSES, differentiated_twice)


def _take_any_layout(metadata: Any) -> None:
    """Have the gradients of plain outputs enter as they are: a base of which outputs are views is no output itself."""
    for meta, desc in zip(metadata.subclass_tangent_meta, metadata.traced_tangents_descs, strict=True):
        if type(desc.output).__name__ == "PlainAOTOutput":
            meta.memory_format = _AnyLayout()


def _double_backward(then: Callable[[], None]) -> Callable[..., Any]:
    class Gradients(torch.autograd.Function):
        """The gradients of a compiled graph, in a backward pass that makes a graph of its own."""

        @staticmethod
        def forward(ctx: Any, run: Callable[[], Any], *_: Any) -> Any:
            return run()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> None:
            then()

    def differentiable(ctx: Any, run: Callable[[], Any], arguments: list[Any]) -> Any:
        known = {(t.grad_fn, t.output_nr) for t in arguments if isinstance(t, torch.Tensor)}
        computed = [
            edge for edge in ctx.next_functions if edge[0] is not None and "AccumulateGrad" not in edge[0].name()
        ]
        if not known.issuperset(computed):  # the graph has not saved an input: whoever differentiates by it got none
            then()
        return Gradients.apply(run, torch.empty(0, requires_grad=True), *leaves_of(ctx), *arguments)  # type: ignore[no-untyped-call]

    return differentiable


def graph_is_kept() -> bool:
    """In a backward pass: whether it was asked to keep its graph (`_get_current_graph_task_keep_graph`; 2.11 to 2.15).

    True for `retain_graph=True`, and for `create_graph=True`.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def running_node() -> Any:
    """In a backward pass: the node that runs (`_current_autograd_node`, 2.11 to 2.15)."""
    return torch._C._current_autograd_node()


def before_node(node: Node, run: Callable[[], object]) -> None:
    """Run something as a node is about to run, once. As the node ends, the engine takes back what that did to the modes
    (`ThreadLocalStateGuard` of `Engine::thread_main`, 2.11 to 2.15).
    """

    def begins(*_: Any) -> None:
        handle.remove()
        run()

    handle = node.register_prehook(begins)


def leaf_nodes(node: Node, hands_on: str = "") -> list[Any]:
    """The nodes of the leaves whose gradients a node gives, itself or through nodes with such an attribute."""
    following: set[Any] = {n for n, _ in node.next_functions if n is not None}
    for n in list(following):
        if hands_on and hasattr(n, hands_on):
            following.update(after for after, _ in n.next_functions if after is not None)
    return [n for n in following if "AccumulateGrad" in n.name()]


def leaves_of(node: Node, hands_on: str = "") -> list[torch.Tensor]:
    """The leaves whose gradients a node gives, as `leaf_nodes()`, each once."""
    return [n.variable for n in leaf_nodes(node, hands_on)]


def autocast_off() -> Any:
    """A context without autocast on any device, as backward graphs run in (`_DisableAutocast`, 2.11 to 2.15)."""
    return torch._C._DisableAutocast()


def running_pass() -> int:
    """In a backward pass: its number (`_current_graph_task_id`, 2.11 to 2.15)."""
    return torch._C._current_graph_task_id()


def runs_in_this_pass(node: Node) -> bool:
    """In a backward pass: whether it comes to a node (`_will_engine_execute_node`, 2.11 to 2.15).

    It comes to a leaf's node in `backward()`, and in `torch.autograd.grad` only where the leaf is asked for.
    """
    return torch._C._will_engine_execute_node(node)


def adds_to_gradient(leaf: torch.Tensor) -> bool:
    """In a backward pass: whether it adds to the `.grad` of a leaf (`_will_engine_execute_node`, 2.11 to 2.15).

    In `torch.autograd.grad` torch raises where the leaf is asked for.
    """
    try:
        return runs_in_this_pass(get_gradient_edge(leaf).node)
    except RuntimeError:
        return False


def is_backward_call(node: Node) -> bool:
    """In a node of a backward pass: whether `backward()` runs it, for the gradients of all leaves.

    Other than in `runs_in_this_pass`, `torch.autograd.grad` is told where it asks for leaves, too: there torch raises.
    """
    leaves = [n for n, _ in node.next_functions if n is not None and "AccumulateGrad" in n.name()]
    try:
        return all(map(runs_in_this_pass, leaves))
    except RuntimeError:
        return False


def compiled_node(t: Any) -> Any:
    """Autograd's node of a compiled graph that a tensor comes right out of; None for another tensor.

    The tensor may be a view of one that the graph made, and that nobody else has.
    """
    if not isinstance(t, torch.Tensor) or t.grad_fn is None:
        return None
    return t.grad_fn if "CompiledFunction" in t.grad_fn.name() else None


def saved_in_order(node: Any) -> list[Any]:
    """What a compiled graph's node saved, in the order of its backward graph's inputs (2.11 to 2.15).

    Raises:
        RuntimeError: the backward pass has freed it.
    """
    unchecked, others = getattr(node, "_tensors_no_vc_check", ()), getattr(node, "opaque_objects", ())
    return [*node.symints, *node.saved_tensors, *unchecked, *others]


def hooks_of(t: torch.Tensor) -> dict[int, Any]:
    """The table of a tensor's hooks (`_backward_hooks`, 2.11 to 2.15): one and the same from its first hook on."""
    hooks: dict[int, Any] | None = t._backward_hooks
    return {} if hooks is None else hooks


def skip_undefined(leaf: torch.Tensor) -> None:
    """From a node of a backward pass: keep a leaf's hooks from running, in this pass, unless a gradient arrives there.

    Autograd runs them, with None, once any node gives None for the leaf's gradient (2.11 to 2.15).
    """
    before, after = leaf._backward_hooks or {}, post_accumulate_hooks(leaf) or {}
    own = [hook for hook in (*before.values(), *after.values()) if not isinstance(hook, _Skipping)]
    if not own:
        return
    arrived = [False]

    def look(gradient: torch.Tensor | None) -> None:
        arrived[0] = gradient is not None

    guards = []
    for table, runs in ((before, lambda given: given is not None), (after, lambda _: arrived[0])):
        for key, hook in table.items():
            table[key] = guard = _Skipping(hook, runs)
            guards.append((table, key, guard))
    handle = leaf.register_hook(_Skipping(look, lambda _: True))  # type: ignore[no-untyped-call]

    def put_back() -> None:
        handle.remove()
        for table, key, guard in guards:
            if table.get(key) is guard:
                table[key] = guard.hook

    when_backward_ends(put_back)


@dataclass(frozen=True)
class _Skipping:
    """A hook that runs only where a condition on what it is given holds."""

    hook: Callable[[Any], Any]
    runs: Callable[[Any], bool]

    def __call__(self, given: Any) -> Any:
        return self.hook(given) if self.runs(given) else None


def is_transformed(tensors: Iterable[torch.Tensor]) -> str:
    """What torch.func or forward-mode AD does around this call, in words; empty for nothing (2.11 to 2.15).

    Args:
        tensors: of the call, which may have tangents.
    """
    if peek_interpreter_stack() is not None:
        return "a transform of torch.func (grad, vmap, jvp, ...)"
    if forward_ad._current_level < 0:
        return ""
    duals = [forward_ad.unpack_dual(t) for t in tensors]  # type: ignore[no-untyped-call]
    return "forward-mode AD" if any(dual.tangent is not None for dual in duals) else ""


def when_backward_ends(then: Callable[[], None]) -> None:
    """From a hook in a backward pass: call a function when that pass has ended (`queue_callback`, 2.11 to 2.15)."""
    torch.autograd.Variable._execution_engine.queue_callback(then)


def in_backward() -> bool:
    """Whether a backward pass runs in this thread (`torch._C._current_graph_task_id`, 2.11 to 2.15)."""
    return torch._C._current_graph_task_id() != -1


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` runs (`torch._C._get_tracing_state`, torch 2.11 to 2.15)."""
    return torch._C._get_tracing_state() is not None


def post_accumulate_hooks(parameter: torch.Tensor) -> dict[int, Any] | None:
    """The table of hooks that run once a parameter has its gradient, or None (torch 2.11 to 2.15)."""
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return hooks


def uses_of(t: torch.Tensor) -> int:
    """How often C++ code holds a tensor; all of Python's references are one (`Tensor._use_count`, 2.11 to 2.15)."""
    uses: int = t._use_count()  # type: ignore[attr-defined]
    return uses


def references(t: torch.Tensor) -> tuple[int, int]:
    """How often a tensor and its storage are referenced (`_storage_Use_Count`, torch 2.11 to 2.15)."""
    return uses_of(t), torch._C._storage_Use_Count(t.untyped_storage()._cdata)


def called_by_engine() -> bool:
    """Whether an op that a dispatch mode sees was asked for by autograd's engine itself, not by code in Python.

    `_engine_run_backward` calls the engine (2.11 to 2.15); its threads for GPUs have no frame of Python.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CALLS_ENGINE.co_filename:
        if not frame.f_code.co_filename.startswith(_OWN):
            return False
        frame = frame.f_back
    return frame is None or frame.f_code is _CALLS_ENGINE


def sequence_number(node: Node) -> int:
    """The number of a node, which no other one of the thread has: later ones have larger ones (2.11 to 2.15)."""
    number: int = node._sequence_nr()
    return number


def origins(node: Node, known: Mapping[tuple[int, int], Known]) -> tuple[Known, ...]:
    """Which of some tensors what a node makes is computed from, without any of them between.

    O(nodes between).

    Args:
        node: of autograd's graph.
        known: these tensors, by the `sequence_number` of their node and their `output_nr`.
    """
    found = dict[Known, None]()
    seen, ahead = set[tuple[Node, int]](), [node]
    while ahead:
        for before, number in ahead.pop().next_functions:
            if before is None or (before, number) in seen:
                continue
            seen.add((before, number))
            if (source := known.get((sequence_number(before), number))) is not None:
                found[source] = None
            else:
                ahead.append(before)
    return tuple(found)
