"""The loss of a step: where it comes from, and the bytes that computing it outside the model allocates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd.graph import get_gradient_edge

from planner.compat import pytree
from planner.compat.tensors import TorchDispatchMode, is_traceable_wrapper_subclass, storage_key
from planner.core.call import Call, describe_call, here, storages, tensors_in
from planner.core.gradient_sums import as_without_modes, last_references
from planner.core.objects import leaves, named_leaves
from planner.errors import BatchError

LossFn = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class OutsideLoss:
    """The loss of a step, as far as it is computed outside the model.

    Attributes:
        name: of the output that it was taken to be; empty for none.
        source: "model" (its own output), "loss_fn", "received" (there is none here), or "unknown".
        workspace: bytes held at most while the loss and its gradients are computed, beside the gradients of the model's
            outputs.
        held: bytes held from the loss to the end of the backward pass: the loss, its own gradient, and gradients of
            parameters that the model returns.
        waiting: bytes that the loss, once it is computed, holds until its own backward pass.
        calls: the ops of the loss.
        loss: bytes of the loss itself, where a `loss_fn` makes it.
        sums: bytes held at most while gradients of outputs that are views of one result are added up.
    """

    source: Literal["model", "loss_fn", "received", "unknown"] = "unknown"
    workspace: int = 0
    held: int = 0
    calls: tuple[Call, ...] = ()
    waiting: int = 0
    name: str = ""
    loss: int = 0
    sums: int = 0


def find_loss(output: Any) -> torch.Tensor | None:
    """The loss of an output where there is no doubt: its `loss`, as attribute or key, itself, or its first element."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if found is None:
        found = output
    return found if _may_be_loss(found) else None


def probable_loss(output: Any) -> tuple[int, str, torch.Tensor] | None:
    """What is taken for the loss in a model's output: as `find_loss`, or the only scalar; None for nothing.

    Returns:
        Its position among the leaves, its name in words, and itself.
    """
    scalars = [(at, f"output{name}", t) for at, (name, t) in enumerate(named_leaves(output)) if _may_be_loss(t)]
    certain = find_loss(output)
    found = scalars if certain is None else [each for each in scalars if each[2] is certain]
    return found[0] if len(found) == 1 else None


def trains_less(loss: torch.Tensor, output: Any) -> bool:
    """Whether a loss among the outputs is not all that is trained: others get a gradient, too. O(nodes).

    Such reach parameters that the loss does not, as a reconstruction beside a penalty of its code, and logits beside a
    loss that balances experts; or they are scalars that it is not computed from, as a second loss.
    """
    seen: set[Any] = set()
    _leaves_from([loss], seen)
    others = [t for t in leaves(output) if differentiable(t)]
    apart = any(_may_be_loss(t) and get_gradient_edge(t).node not in seen for t in others)
    return apart or bool(_leaves_from(others, seen))


def shares_loss(loss_fn: LossFn | None, output: Any) -> bool:
    """Whether the loss is among the outputs, and not all that is trained; raises BatchError where `loss_fn` fails."""
    if (loss_fn := that_applies(loss_fn, output)) is not None:
        checked_loss(loss_fn, output)
        return False
    return (loss := find_loss(output)) is not None and trains_less(loss, output)


def _leaves_from(ends: Sequence[torch.Tensor], seen: set[Any]) -> list[Any]:
    """The nodes of leaves that autograd comes to from some tensors, but for those that it has come to before."""
    left, found = [get_gradient_edge(t).node for t in ends], []
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        inner = [after for after, _ in node.next_functions if after is not None]
        if not inner and hasattr(node, "variable"):
            found.append(node)
        left += inner
    return found


def taken_loss(output: Any) -> torch.Tensor:
    """As a `loss_fn`: what is taken for the loss, where no other output gets a gradient."""
    found = probable_loss(output)
    assert found is not None
    return found[2]


def that_applies(loss_fn: LossFn | None, output: Any) -> LossFn | None:
    """`loss_fn`, or None where that is `taken_loss`, and nothing of this output may be taken for the loss."""
    return None if loss_fn is taken_loss and probable_loss(output) is None else loss_fn


def _may_be_loss(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.dim() == 0 and t.requires_grad


def checked_loss(loss_fn: LossFn, output: Any) -> torch.Tensor:
    """`loss_fn(output)`; raises BatchError where it fails or is not a differentiable scalar."""
    name = getattr(loss_fn, "__name__", repr(loss_fn))
    try:
        loss = loss_fn(output)
    except Exception as e:
        kind = "Tensor" if isinstance(output, torch.Tensor) else type(output).__name__
        why = str(e).replace("FakeTensor", "Tensor")  # the user's is none
        raise BatchError(f"loss_fn {name} does not accept the model's output ({kind}): {why}") from e
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise BatchError(f"loss_fn {name} must return a scalar tensor that needs a gradient; it returned {shape}")
    if loss.is_complex():
        raise BatchError(f"loss_fn {name} must return a real scalar, as backward() needs it; it returned {loss.dtype}")
    return loss


def gradients_received(output: Any) -> torch.Tensor:
    """As a `loss_fn`: every output that may has a gradient, which comes from elsewhere, as to a stage of a pipeline.

    Called, it is a loss that gives all of them one.
    """
    return torch.stack([t.float().mean() for t in leaves(output) if differentiable(t)]).sum()


def differentiable(t: Any) -> bool:
    """Whether something is a tensor that needs a gradient."""
    return isinstance(t, torch.Tensor) and t.requires_grad


def trace_loss(
    output: Any,
    loss_fn: LossFn | None,
    results: Sequence[torch.Tensor],
    unreached: Collection[int] = (),
    *,
    certain: bool = True,
) -> tuple[OutsideLoss, torch.Tensor | None]:
    """Compute the loss and its gradients on fake tensors, and count the bytes that this allocates.

    Args:
        output: the model's output.
        loss_fn: as in `plan()`.
        results: the differentiable tensors that the model's last region returned.
        unreached: positions of leaves of the output that a loss which is not known is not computed from.
        certain: whether what `find_loss` gives, if anything, is all of it.

    Returns:
        The allocations, and the loss with its autograd graph; None for a loss that is not known.
    """
    probable = probable_loss(output)
    if loss_fn in (None, taken_loss) and probable is not None:
        _, name, loss = probable
        # else other outputs may get a gradient, too
        certain = loss_fn is taken_loss or (certain and find_loss(output) is not None)
        return OutsideLoss("model", name=name), loss if certain else None
    if loss_fn is gradients_received:
        return OutsideLoss("received"), None
    if loss_fn is None:
        # every other output may get a gradient; a loss may hold as much, and need as much again for a moment
        used = [t for at, t in enumerate(leaves(output)) if differentiable(t) and at not in unreached]
        size = sum(storages(used).values())
        return OutsideLoss("unknown", size, size + 16, waiting=size), None
    meter = LiveBytes()
    # parameters that the model returns get their gradients from the loss
    own = list({id(t): t for t in leaves(output) if differentiable(t) and t.is_leaf}.values())
    if any(map(is_traceable_wrapper_subclass, results)):
        # the first time, DTensors try each op on tensors of the whole size
        torch.autograd.grad(checked_loss(loss_fn, output), results, allow_unused=True, retain_graph=True)
    with meter:
        loss = checked_loss(loss_fn, output)
        waiting = meter.live
        gradients = torch.autograd.grad(loss, [*results, *own], allow_unused=True, retain_graph=True)
    # outputs of one storage have one gradient: the terms that are added up to it are temporaries
    found = zip([*results, *own], gradients, strict=True)
    distinct = {storage_key(here(t)): g for t, g in found if g is not None}
    workspace = max(0, meter.peak - sum(storages(list(distinct.values())).values()))
    size = loss.element_size()
    held = 2 * size + sum(storages([g for g in gradients[len(results) :] if g is not None]).values())
    return OutsideLoss("loss_fn", workspace, held, tuple(meter.calls), waiting, loss=size), loss


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that are allocated and freed while it is on.

    Attributes:
        live: bytes allocated and not freed.
        peak: the most bytes live at once.
        calls: every op called.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        last_references()  # no mode is called yet
        self.live = self.peak = 0
        self.calls: list[Call] = []
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, func = kwargs or {}, as_without_modes(func, args)
        if any(map(is_traceable_wrapper_subclass, tensors_in((args, kwargs)))):
            return NotImplemented  # the wrapper's own ops on the tensors inside it come here
        inputs = storages((args, kwargs))
        result = func(*args, **kwargs)
        self.calls.append(describe_call(func, args, kwargs, result))
        for t in pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage, key = t.untyped_storage(), storage_key(t)
                size = storage.nbytes()
                if key not in inputs and key not in self._known:
                    self.live += size
                    self.peak = max(self.peak, self.live)
                    self._known[key] = weakref.finalize(storage, self._freed, key, size)
        return result

    def _freed(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size
