"""Modules whose calls are checkpointed for a while, each with its own policy of what is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from planner.capture.recomputability import may_draw
from planner.capture.trace.random_state import undrawing
from planner.compat.modules import NormBase, buffers_of, parameters_of
from planner.compat.tensors import version_of
from planner.core.call import tensors_in
from planner.core.recipe import Choice, Kept
from planner.eager.at_first import attributes_of, put_back
from planner.errors import ApplyError, warn

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
Versions = Sequence[tuple[torch.Tensor, int]]  # tensors, and how often they were written into
_PLAIN = (torch.Tensor, nn.Module, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


@dataclass(slots=True)
class Given:
    """The elements of the tensors that calls of checkpointed modules were given."""

    elements: int = 0


@contextmanager
def checkpointed(model: nn.Module, choice: Choice) -> Iterator[Given]:
    """While it is on, calls of the chosen modules are checkpointed; the modules are as before afterwards."""
    given = Given()
    with ExitStack() as stack:
        for path, kept in choice.kept.items():
            module = model.get_submodule(path)
            stack.enter_context(replaced_forward(module, _wrap(path, module, kept, given)))
        yield given


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another `forward` on one instance, for a while."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        own.pop("forward")
        if before is not None:
            own["forward"] = before


def statistics_of(module: nn.Module) -> list[NormBase]:
    """The normalisations in a module that update running statistics when they are called."""
    return [m for m in module.modules() if isinstance(m, NormBase) and m.training and m.track_running_stats]


def _wrap(path: str, module: nn.Module, kept: Kept, given: Given) -> Callable[..., Any]:
    forward = module.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # what the first run changes in a cache or another object that it is given, the second must not find there
        before, named = _copied(args), _copied(kwargs)
        first: dict[str, Any] | None = kwargs
        versions: Versions = ()
        given.elements += sum(t.numel() for t in tensors_in((before, named)))

        def run(*passed: Any) -> Any:
            nonlocal first
            if first is not None:
                extra, first = first, None
                return forward(*passed, **extra)
            _refuse_written(path, versions)
            fresh = _copied(before)
            again = [g if isinstance(g, torch.Tensor) else b for g, b in zip(passed, fresh, strict=True)]
            return forward(*again, **_copied(named))

        policy = _Policy(kept)
        # weights that autocast has cast before would make the two runs differ
        torch.clear_autocast_cache()
        result = checkpoint(run, *args, use_reentrant=False, context_fn=lambda: _contexts(module, policy))
        versions = [(t, version_of(t)) for t in (*tensors_in((before, named)), *_read(module)) if not t.is_inference()]
        policy.check(path)
        return result

    return call


def _read(module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that a module may compute with beside its arguments, but for statistics that count for nothing."""
    for m in module.modules():
        left_out = _STATISTICS if isinstance(m, NormBase) and m.training else ()
        for table in (parameters_of(m), buffers_of(m), vars(m)):
            yield from (t for k, t in table.items() if isinstance(t, torch.Tensor) and k not in left_out)


def _refuse_written(path: str, versions: Versions) -> None:
    """Raise where what a module computes with is not as it was, so that it would give other values as it runs again."""
    if any(version_of(t) != version for t, version in versions):
        raise ApplyError(
            f"{path} is to run again in the backward pass, and something that it reads was written into since (an "
            "argument, a parameter, a buffer): gradients would be wrong. Write into it after the backward pass, or "
            "give the model a copy. This step's gradients are not complete; the next step works"
        )


class _Policy:
    """Keeps the chosen results of one call, and sees whether it runs the ops that were planned."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.begun = self.found = 0
        self.drawn: set[bool] = set()  # whether results of ops that may draw are kept

    def __call__(self, _context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op.is_view:
            return CheckpointPolicy.PREFER_RECOMPUTE
        keep = self.kept.get(self.begun) == str(op)
        self.begun += 1
        self.found += keep
        if may_draw(op, args, kwargs):
            self.drawn.add(keep)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def check(self, path: str) -> None:
        told = f"{path} ran other ops than those planned for (it depends on something beside its arguments)"
        if len(self.drawn) > 1:
            raise ApplyError(f"{told}, and would draw other random numbers when it runs again; remove() the plan")
        if self.found != len(self.kept):
            warn(f"{told}: its peak may differ from the plan's")


def _contexts(module: nn.Module, policy: _Policy) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What the first run and those in the backward pass happen under."""
    if not policy.kept:
        return nullcontext(), _Again(module, nullcontext())
    # what writes into a kept result is kept with it: it is there as it was in the end
    first, again = create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)  # type: ignore[no-untyped-call]
    return first, _Again(module, again)


class _Again:
    """Running a module again: with its attributes of the first run, whose running statistics stay as they are."""

    def __init__(self, module: nn.Module, inner: AbstractContextManager[Any]) -> None:
        self.module = module
        self.inner = inner
        self.stack = ExitStack()
        self.attributes = attributes_of(module)
        self.undraw = undrawing(module)  # what torch's own checkpoint does not replay: Python's and NumPy's generators

    def __enter__(self) -> None:
        torch.clear_autocast_cache()
        with ExitStack() as stack:
            stack.enter_context(put_back(self.attributes))
            for norm in statistics_of(self.module):
                stack.enter_context(_frozen(norm))
            stack.enter_context(self.inner)
            stack.callback(undrawing(self.module))
            self.undraw()
            self.stack = stack.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self.stack.close()


@contextmanager
def _frozen(norm: NormBase) -> Iterator[None]:
    """The same ops, without a trace: the new statistics count for nothing, and a copy counts the batches."""
    momentum, counted = norm.momentum, norm.num_batches_tracked
    norm.momentum = 0.0
    buffers_of(norm)["num_batches_tracked"] = None if counted is None else counted.clone()
    try:
        yield
    finally:
        norm.momentum = momentum
        buffers_of(norm)["num_batches_tracked"] = counted


class _SharedTensors(TorchFunctionMode):
    """Under it, a copy of an object shares the object's tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def _copied(x: Any) -> Any:
    """A copy of what can change: containers and objects, their tensors shared. What refuses is itself."""
    if isinstance(x, _PLAIN) or callable(x):
        return x
    if type(x) in (tuple, list):
        return type(x)(map(_copied, x))
    if type(x) is dict:
        return {key: _copied(value) for key, value in x.items()}
    try:
        with _SharedTensors():
            return copy.deepcopy(x)
    except Exception:  # locks, generators and the like
        return x
