"""The whole training step, captured in one dry pass: every region, and what happens between the passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import BatchError, CaptureError, ModelError
from ..rewrite.emit import emit
from .dynamo import compile_call, dynamo_settings, lone_loss, make_backend, to_fake
from .private import FakeTensorMode
from .region import Region, fingerprint

LossFn = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class TrainingGraph:
    """The training step of a model on one batch.

    Attributes:
        regions: in the order in which their forward passes run.
        detached: for each Dynamo graph, by its key, the outputs that get no gradient and are cut off before capture.
        loss_workspace: bytes that the loss computed outside the model holds at most, beside the gradients of the
            model's outputs.
        loss_bytes: bytes held from the loss to the end of the backward pass: a loss made outside, its own gradient.
        loss: where the loss comes from: "model" (its output), "loss_fn" or "unknown".
    """

    regions: tuple[Region, ...]
    detached: Mapping[str, tuple[int, ...]] = field(repr=False)
    loss_workspace: int = 0
    loss_bytes: int = 0
    loss: str = "unknown"


def find_loss(output: Any) -> torch.Tensor | None:
    """The loss among a model's outputs: `output.loss`, `output["loss"]`, the output itself, or what comes first."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if found is None:
        found = output
    if isinstance(found, torch.Tensor) and found.dim() == 0 and found.requires_grad:
        return found
    return None


def capture(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss_fn: LossFn | None = None
) -> TrainingGraph:
    """Capture the training step under fake tensors: no memory, no compute, the model untouched.

    Args:
        model: in the mode (training or evaluation) in which it will run.
        args: positional arguments that it is called with.
        kwargs: keyword arguments.
        loss_fn: the model's output -> the scalar loss; None: the loss is among the outputs (`find_loss`), or unknown,
            and then every differentiable output gets a gradient.

    Raises:
        BatchError: the model does not accept the arguments, or the loss is not a differentiable scalar.
        CaptureError: the step cannot be written as graphs.
    """
    mode, fake_model, fake_args, fake_kwargs = to_fake(model, args, kwargs)
    _try_eagerly(mode, model, fake_model, fake_args, fake_kwargs, loss_fn)
    cut: dict[str, tuple[int, ...]] | None = None
    for _ in range(2):
        dry = _DryPass(mode, lone_loss if cut is None and loss_fn is None else (cut or {}))
        output = dry.run(fake_model, fake_args, fake_kwargs)
        if not dry.regions:
            raise CaptureError(
                f"{type(model).__name__}: torch.compile captured no graph with a gradient from its forward pass"
            )
        wanted, workspace, loss_bytes, source = dry.outputs_with_gradient(output, loss_fn)
        if wanted == dry.cut:
            return TrainingGraph(tuple(dry.regions), wanted, workspace, loss_bytes, source)
        cut = wanted
    raise CaptureError(f"{type(model).__name__}: which outputs get a gradient changes from one pass to the next")


def _try_eagerly(
    mode: FakeTensorMode, model: nn.Module, fake_model: nn.Module, args: Any, kwargs: Any, loss_fn: LossFn | None
) -> None:
    """Call the model once without any compiler, so that a wrong batch is told apart from a model that breaks graphs."""
    name = type(model).__name__
    try:
        with mode, torch.enable_grad():
            output = fake_model(*args, **kwargs)
    except Exception as e:
        if type(e).__module__.startswith("torch."):  # a limit of fake tensors: let the capture speak
            return
        given = [
            f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        ]
        raise BatchError(
            f"{name} does not accept the batch ({', '.join(given) or 'no tensors'}): {type(e).__name__}: {e}"
        ) from e
    if not any(map(_differentiable, _leaves(output))):
        raise ModelError(f"{name}: no output of the model depends on a parameter that needs a gradient")
    if loss_fn is not None:
        with mode:
            checked_loss(loss_fn, output)


def checked_loss(loss_fn: LossFn, output: Any) -> torch.Tensor:
    """`loss_fn(output)`; raises BatchError where it fails or is not a differentiable scalar."""
    name = getattr(loss_fn, "__name__", repr(loss_fn))
    try:
        loss = loss_fn(output)
    except Exception as e:
        raise BatchError(f"loss_fn {name} does not accept the model's output ({type(output).__name__}): {e}") from e
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise BatchError(f"loss_fn {name} must return a scalar tensor that needs a gradient; it returned {shape}")
    return loss


def _leaves(output: Any) -> list[Any]:
    """The leaves of a model's output; dataclass-like outputs are read through their fields."""
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    return list(pytree.tree_leaves(output))


class _DryPass:
    """One call of the fake model: collects regions, and remembers every region's outputs."""

    def __init__(
        self, mode: FakeTensorMode, detach: Callable[[fx.GraphModule], Collection[int]] | Mapping[str, tuple[int, ...]]
    ) -> None:
        self.mode = mode
        self.detach = detach
        self.regions: list[Region] = []
        self.cut: dict[str, tuple[int, ...]] = {}
        self.outputs: list[tuple[str, list[Any]]] = []  # of each call of a region: its key, what it returned

    def run(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        keys: list[str] = []

        def detach(graph: fx.GraphModule) -> Collection[int]:
            key = fingerprint(graph.graph)
            keys.append(key)
            self.cut[key] = tuple(self.detach.get(key, ()) if isinstance(self.detach, Mapping) else self.detach(graph))
            return self.cut[key]

        def partition(region: Region) -> tuple[fx.GraphModule, fx.GraphModule]:
            if any(r.fingerprint == region.fingerprint for r in self.regions):
                raise CaptureError(
                    "two regions of the step have the same graph; planning them apart is not supported yet"
                )
            self.regions.append(region)
            return emit(region, range(region.boundary), range(region.boundary, len(region.ops)))

        def wrap(compiled: Callable[..., Any], cut: Collection[int]) -> Callable[..., Any]:
            key = keys[-1] if torch.is_grad_enabled() and keys else ""

            def call(*inputs: Any) -> Any:
                results = list(compiled(*inputs))
                for at in cut:  # so that a gradient which does reach it is seen
                    results[at] = results[at].requires_grad_()
                self.outputs.append((key, results))
                return tuple(results)

            return call

        compiled = compile_call(model, make_backend(partition, boxed, detach, wrap))
        try:
            with self.mode, dynamo_settings(), torch.enable_grad():
                return compiled(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as e:
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: {type(e).__name__}: {str(e).strip().splitlines()[0]}. "
                "Try to plan a submodule, or move the code named here out of forward()"
            ) from e

    def outputs_with_gradient(
        self, output: Any, loss_fn: LossFn | None
    ) -> tuple[dict[str, tuple[int, ...]], int, int, str]:
        """Which outputs of the regions to cut off; then as in TrainingGraph: loss_workspace, loss_bytes, loss."""
        with self.mode, torch.enable_grad():
            meter = _LiveBytes()
            if loss_fn is not None:
                with meter:
                    loss = checked_loss(loss_fn, output)
                loss_bytes, source = 2 * loss.element_size(), "loss_fn"
            elif (found := find_loss(output)) is not None:
                loss, loss_bytes, source = found, 0, "model"
            else:  # unknown: every output may get a gradient, and a loss may need as much again
                sizes = [t.untyped_storage().nbytes() for t in _leaves(output) if _differentiable(t)]
                return dict.fromkeys(self.cut, ()), sum(sizes), 16, "unknown"
            last = [t for t in self.outputs[-1][1] if _differentiable(t)]
            with meter:  # up to the last region: what the loss outside allocates
                made = torch.autograd.grad(loss, last, allow_unused=True, retain_graph=True)
            kept = {g.untyped_storage()._cdata: g.untyped_storage().nbytes() for g in made if g is not None}
            workspace = max(0, meter.peak - sum(kept.values())) if source == "loss_fn" else 0
            everything = [t for _, results in self.outputs for t in results if _differentiable(t)]
            reached = torch.autograd.grad(loss, everything, allow_unused=True) if len(self.outputs) > 1 else made
        unused = {id(t) for t, g in zip(everything, reached, strict=True) if g is None}
        cut = {key: tuple(at for at, t in enumerate(results) if id(t) in unused) for key, results in self.outputs}
        return {key: cut.get(key, ()) for key in self.cut}, workspace, loss_bytes, source


def _differentiable(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.requires_grad


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that are made and freed while it is on; `peak` is the most at once, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in inputs and key not in self.known:
                    self.live += size
                    self.peak = max(self.peak, self.live)
                    self.known[key] = weakref.finalize(storage, self._freed, key, size)
        return result

    def _freed(self, key: int, size: int) -> None:
        del self.known[key]
        self.live -= size


def boxed(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A graph as a callable that takes one list and empties it, so that an input is freed after its last use."""
    from ..rewrite.private import BoxedCodeGen

    graph.graph.set_codegen(BoxedCodeGen())
    graph.recompile()

    def call(arguments: list[Any]) -> Any:
        return graph.forward(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
