"""One call of an op as plain data, from which it can run again on other tensors of the same shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from planner.compat import pytree
from planner.compat.ops import OpOverload
from planner.compat.tensors import dense_parts, is_traceable_wrapper_subclass, storage_key
from planner.core.layout import elements_spanned

_ATEN = torch.ops.aten
# their kernels copy the whole storage behind the tensor that they write into (`at::clone_preserve_strides`), where fake
# tensors count no more than the view spans
_COPIES_ALL_BEHIND = {
    _ATEN.copy.default,
    _ATEN.select_scatter.default,
    _ATEN.slice_scatter.default,
    _ATEN.diagonal_scatter.default,
    _ATEN.as_strided_scatter.default,
}
# of what `torch.tensor()` has made of Python's numbers, and of what `copy.deepcopy()` has copied
_TAKE_OVER = {_ATEN.lift_fresh.default, _ATEN.set_.source_Storage, _ATEN.set_.source_Storage_storage_offset}
PLAIN = {int, float, str, bool, type(None)}  # of what has no tensors inside, what is the most frequent


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its contents."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """Elements from its first to its last."""
        return elements_spanned(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class ViewSpec(TensorSpec):
    """A view that is copied with the whole storage behind it.

    Attributes:
        behind: elements of its storage.
        offset: where in it the view begins.
    """

    behind: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of an op, with a `TensorSpec` in the place of every tensor.

    Attributes:
        target: the op.
        args: its positional arguments.
        kwargs: its keyword arguments.
        made_bytes: size of the storages that it allocates, by fake tensors.
    """

    target: OpOverload
    args: Any
    kwargs: Any
    made_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it is given and of those that it makes."""
        given = (x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, TensorSpec))
        return self.made_bytes + sum(t.span * t.dtype.itemsize for t in given)

    @property
    def key(self) -> str:
        """Equal for two calls that allocate alike."""
        return f"{self.target}{self.args}{self.kwargs}"


def describe_call(target: OpOverload, args: Any, kwargs: Any, result: Any) -> Call:
    """The data of a call, the same for real and for fake tensors.

    It holds none of the call's tensors, and no generator either: to run it again draws nothing from the caller's.
    """

    def spec(t: torch.Tensor | torch.Generator) -> TensorSpec | None:
        if isinstance(t, torch.Generator):
            return None
        shape, stride = tuple(t.shape), tuple(t.stride())
        behind = t.untyped_storage().nbytes() // t.element_size()
        if target in _COPIES_ALL_BEHIND and behind > t.numel():
            return ViewSpec(shape, stride, t.dtype, behind, int(t.storage_offset()))
        return TensorSpec(shape, stride, t.dtype)

    allocated = storages(result)
    used: dict[int, int] = {}
    for t in filter(lambda t: type(t) is torch.Tensor, parts_in(result)):
        used[storage_key(t)] = max(_bytes_to_last(t), used.get(storage_key(t), 0))
    allocated |= {storage: min(nbytes, allocated[storage]) for storage, nbytes in used.items()}
    for storage in storages((args, kwargs)):
        allocated.pop(storage, None)
    plain_args, plain_kwargs = pytree.tree_map_only((torch.Tensor, torch.Generator), spec, (tuple(args), dict(kwargs)))
    return Call(target, plain_args, plain_kwargs, sum(allocated.values()))


def _bytes_to_last(t: torch.Tensor) -> int:
    """Bytes of a storage up to the last element of a tensor: it may have more, as that of what `mse_loss` returns."""
    spanned = elements_spanned(t.shape, t.stride())
    return int(t.storage_offset() + spanned) * t.element_size() if spanned else 0


def takes_over(func: Any, result: Any) -> bool:
    """Whether an op gives a tensor memory of torch's own that may be new, and that no op has made."""
    return func in _TAKE_OVER and result.untyped_storage().resizable()  # else it is NumPy's


def storages(tree: Any) -> dict[int, int]:
    """The storages of the tensors in a tree, of wrappers those inside them: identity -> bytes."""
    return {storage_key(t): t.untyped_storage().nbytes() for t in parts_in(tree)}


def bytes_of_elements(tree: Any) -> int:
    """Bytes of the elements of the tensors in a tree, as many for fake tensors as for real ones.

    A real tensor's storage may be larger: what `mse_loss` returns has that of what it has summed up.
    """
    distinct = {id(t): t for t in parts_in(tree)}
    return sum(t.numel() * t.element_size() for t in distinct.values())


def inside(t: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of a tensor: itself, or those in a sparse one, or in a wrapper as a `DTensor`."""
    if type(t) is torch.Tensor and t.layout is torch.strided:
        return [t]
    if not is_traceable_wrapper_subclass(t):
        return dense_parts(t)
    parts = [getattr(t, name) for name in t.__tensor_flatten__()[0]]
    return [inner for part in parts if isinstance(part, torch.Tensor) for inner in inside(part)]


def here(t: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is on this device."""
    return inside(t)[0]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The `.grad` of a parameter; one that is computed has none, and torch warns where it is asked for."""
    return parameter.grad if parameter.is_leaf else None


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def parts_in(tree: Any) -> list[torch.Tensor]:
    """The plain tensors in a tree, also those in sparse ones and in wrappers."""
    return [part for t in tensors_in(tree) for part in inside(t)]


def _collect(tree: Any, into: list[torch.Tensor]) -> None:
    """Enter the tensors in a tree; what most trees are made of is not looked up among the kinds of containers."""
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        into.append(tree)
    elif kind is tuple or kind is list:
        for inner in tree:
            _collect(inner, into)
    elif kind is dict:
        for inner in tree.values():
            _collect(inner, into)
    elif kind not in PLAIN:
        into += [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
