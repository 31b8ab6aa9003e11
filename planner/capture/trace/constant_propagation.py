"""Constant propagation: small fake tensors that depend only on the batch and on constants have known values.

Models ask for such values in Python (is this mask causal, is nothing padded), where a tensor without data has no
answer. Fake tensors propagate constants of one element (`torch._subclasses.fake_tensor`); here they may be larger.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from planner.capture.provenance import running_forward
from planner.capture.trace.data_dependent import INDEX, Answers, asks, first_index, is_mask, mask_of
from planner.compat import pytree
from planner.compat.dispatch import written
from planner.compat.dynamo import is_tracing
from planner.compat.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    allow_constants,
    copy_constants,
    fake_of_constant,
    replace_dispatch,
    set_constant,
)
from planner.compat.ops import OpOverload, schema_of
from planner.compat.tensors import no_dispatch, storage_key
from planner.core.call import TensorSpec, tensors_in
from planner.core.objects import with_tensors

_ATEN = torch.ops.aten
_RAND = (_ATEN.rand.default, _ATEN.rand.generator)
MOST_ELEMENTS = 2**22  # of a tensor that is known: a mask of 2048 by 2048 tokens


class ConstantPropagation:
    """Lets a fake mode know the values of small tensors that depend on no parameter and no random draw.

    Args:
        mode: the fake mode.
        answers: the values that Python code asks for where they are not known, and sizes that depend on values.
        paths: of the model's modules, by their identities.
    """

    def __init__(self, mode: FakeTensorMode, answers: Answers, paths: Mapping[int, str]) -> None:
        self.mode = mode
        self.answers = answers
        self._borrowed: set[int] = set()  # storages of tensors that were given
        self._inside = 0  # how many ops run, one in another, whose results are not known
        self.paths = paths
        self._dispatch = replace_dispatch(mode, self.dispatch)
        allow_constants(mode, MOST_ELEMENTS)

    def fake(self, args: Any, kwargs: Any) -> Any:
        """A call with fake tensors for its tensors, known where they are small; writing into them changes nothing."""
        memo: dict[int, Any] = {}  # what is there twice stays one

        def fake(_: str, t: torch.Tensor) -> Any:
            if type(t) is not torch.Tensor or t.requires_grad or t.is_meta or t.numel() > MOST_ELEMENTS:
                return self.mode.from_tensor(t)
            if id(t) not in memo:
                if plain := t.layout is torch.strided and not (t.is_conj() or t.is_neg()):
                    self._borrowed.add(storage_key(t))
                    same = t.new_empty(0).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
                known: Any = fake_of_constant(self.mode, same if plain else copy.deepcopy(t, memo))
                known.planner_given = True
                memo[id(t)] = known
            return memo[id(t)]

        return with_tensors(args, kwargs, fake)

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op on fake tensors; where only values tell the size of its result, that is as in the real call."""
        specs = None if is_tracing() else self.answers.specs(func)
        if (mask := mask_of(func, args)) is not None:
            rows = specs + self.answers.more if isinstance(specs, int) else _rows_written(args, mask)
            if rows is not None:
                _rows_of(mask)[_place(mask)] = rows
        if func is _PACK and self.answers.packed is not None:
            self.answers.packed = True
            return _packed(*args)
        try:
            return self._propagate(func, types, args, kwargs or {})
        except DynamicOutputShapeException:
            leaves = pytree.tree_leaves(specs)
            if not leaves or not all(isinstance(spec, TensorSpec) for spec in leaves):
                if (again := self._indexed_again(func, types, args)) is not None:
                    return again
                raise
            self.answers.sized.add(running_forward(inspect.currentframe(), self.paths))
            device = next(t.device for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))

            def made(spec: TensorSpec) -> torch.Tensor:
                shape = self.answers.enlarged(func, args, spec)
                if shape != spec.shape:
                    return torch.empty(shape, dtype=spec.dtype, device=device)
                return torch.empty_strided(shape, spec.stride, dtype=spec.dtype, device=device)

            with self.mode:
                result = pytree.tree_map_only(TensorSpec, made, specs)
            masks = [x for x in args[1] if is_mask(x)] if func is INDEX else []
            if len(masks) == 1:
                _rows_of(masks[0])[_place(masks[0])] = result.shape[first_index(args[1])]
            return result

    def _indexed_again(self, func: Any, types: Sequence[type], args: Sequence[Any]) -> Any:
        """What an index makes by masks by which the forward pass has indexed or written, as the backward pass of
        writing by them does; None for others.
        """
        indices: list[Any] = []
        for x in args[1] if func is INDEX else ():
            if is_mask(x) and (known := _rows_of(x).get(_place(x))) is not None:
                with self.mode:
                    rows = torch.empty(known, dtype=torch.long, device=x.device)
                indices += [rows] * x.dim()
            elif is_mask(x):
                return None
            else:
                indices.append(x)
        return self._dispatch(func, types, (args[0], indices), {}) if indices else None

    def _propagate(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op on fake tensors, and for real where all its inputs are known and the result is small."""
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = [t for t in inputs if isinstance(t, FakeTensor) and t.constant is not None]
        result: Any
        if asks(func) and not is_tracing():
            return self._answer(func, types, args, kwargs)
        if func in _CTC and (result := _ctc_loss(*args, **kwargs)) is not None:
            return result
        given = any(getattr(t, "planner_given", False) for t in known)
        if _uninitialised(func) or (given and self._is_size_doubted(func)):
            return self._unknowing(known, func, types, args, kwargs)
        if known and len(known) == len(inputs):  # else what is written into is known no more
            for t in pytree.tree_leaves(written(func, tuple(args), dict(kwargs))):
                copy_constants(t, self._borrowed)
        if len(known) < len(inputs) or not _repeatable(func):
            self._inside += 1
            try:
                result = self._dispatch(func, types, args, kwargs)
            finally:
                self._inside -= 1
            if func in _RAND and result.numel() == 1 and self.answers.chance is not None:
                self.answers.guessed = True
                self._learn([result], [torch.full(result.shape, self.answers.chance, dtype=result.dtype)])
            elif func is _ATEN.rand.default:
                result.planner_drawn = True
            elif func is _ATEN.lt.Scalar and getattr(args[0], "planner_drawn", False) and args[1] <= 0:
                # layers are dropped at a rate of 0
                self._learn([result], [torch.zeros(result.shape, dtype=torch.bool)])
            return result
        result = self._unknowing(known, func, types, args, kwargs)  # the result may be large
        results: list[Any] = [t for t in pytree.tree_leaves(result) if isinstance(t, FakeTensor)]
        small = all(t.numel() <= MOST_ELEMENTS and t.device.type != "meta" for t in results)
        # what an op is taken apart into asks for no floats, and may make many: the weights of an interpolation
        if results and small and not (self._inside and any(t.is_floating_point() for t in results)):
            real_args, real_kwargs = pytree.tree_map_only(FakeTensor, lambda t: t.constant, (tuple(args), dict(kwargs)))
            with no_dispatch():
                real = func(*real_args, **real_kwargs)
            self._learn(results, tensors_in(real))
            for each in results:
                each.planner_given = given
        return result

    def _is_size_doubted(self, func: Any) -> bool:
        """Whether another batch is expected to have other values, by which what an op makes has another size."""
        if torch.Tag.dynamic_output_shape not in func.tags:
            return False
        if not self.answers.doubted and not is_tracing():
            self.answers.size_told()
        return self.answers.doubted

    def _answer(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The value that Python code asks for outside every graph."""
        answer = self.answers.answer()
        try:
            return self._dispatch(func, types, args, kwargs)
        except DataDependentOutputException:
            if answer is None:
                raise
            return answer

    def _unknowing(self, known: Sequence[Any], func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on fake tensors as if none of them were known."""
        values = [t.constant for t in known]
        for t in known:
            t.constant = None
        try:
            return self._dispatch(func, types, args, kwargs)
        finally:
            for t, value in zip(known, values, strict=True):
                t.constant = value

    def _learn(self, fakes: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        for t, value in zip(fakes, values, strict=True):
            set_constant(t, value)


def _repeatable(func: Any) -> bool:
    """Whether an op's values depend on its inputs' values alone, and its size on their sizes."""
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return (
        isinstance(func, OpOverload)
        and func.namespace == "aten"
        and not schema_of(func).is_mutable
        and not any(tag in func.tags for tag in tags)
    )


def _rows_of(mask: torch.Tensor) -> dict[Any, int]:
    """How many rows masks take, by their place in this one's storage: what autograd saves is another tensor there."""
    found: dict[Any, int] = vars(mask.untyped_storage()).setdefault("planner_rows", {})
    return found


def _rows_written(args: Sequence[Any], mask: torch.Tensor) -> int | None:
    """How many rows are written by a mask, where as many are given."""
    rows = args[2].shape[first_index(args[1])] if args[2].dim() == args[0].dim() - mask.dim() + 1 else 1
    return int(rows) if isinstance(rows, int) and rows > 1 else None  # one row may be written to many


def _place(t: torch.Tensor) -> tuple[Any, ...]:
    return t.storage_offset(), t.shape, t.stride()


def _uninitialised(func: Any) -> bool:
    """Whether an op returns uninitialised memory."""
    return "empty" in str(func)


_PACK = _ATEN._pack_padded_sequence.default
_CTC = (_ATEN._ctc_loss.default, _ATEN._ctc_loss.Tensor)


def _ctc_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any) -> Any:
    """The results of a CTC loss, whose size depends on the longest target; None where that is not known."""
    lengths = target_lengths.constant if isinstance(target_lengths, FakeTensor) else torch.as_tensor(target_lengths)
    if lengths is None or log_probs.dim() != 3:
        return None
    with no_dispatch():
        longest = int(lengths.max())
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, 2 * longest + 1))


def _packed(sequences: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences packed, and how many go on at each time, as if all but one were as long as they are padded to: the most
    that lengths which differ may tell; all, where they do not. Recurrent layers read the numbers in C++, so that they
    are real, and run other kernels where all are equal.
    """
    rows, time = sequences.shape[:2] if batch_first else sequences.shape[1::-1]
    known = lengths.constant if isinstance(lengths, FakeTensor) else lengths
    with no_dispatch():
        sizes = torch.full((time,), rows, dtype=torch.long)
        sizes[-1] -= int(known is not None and bool(known.min() < known.max()))
        packed = int(sizes.sum())
    return sequences.new_empty((packed, *sequences.shape[2:])), sizes
