"""A copy of a planned model, until it is trained, or somebody asks for its plan.

A runtime and its model refer to each other, so that both stay until Python's collector comes: a loop that keeps the
best model so far, as a deep copy of it, would hold many. A copy that is only kept, or evaluated, has no runtime of its
own, and goes when the loop lets go of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from planner.compat.dispatch import in_compiled_call
from planner.compat.dynamo import Through, call_past_wrappers, through
from planner.compat.modules import call_of, replace_call
from planner.errors import ApplyError
from planner.runtime.modes import trains

_COPIES: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()


def note_copy(model: nn.Module, copied: nn.Module) -> None:
    """A planned model, or a copy of it, has been copied."""
    of = next((each for each, copies in _COPIES.items() if model in copies), model)
    _COPIES.setdefault(of, weakref.WeakSet()).add(copied)


def tensors_of_copies(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a planned model's copies that are there, as for averages of its weights."""
    return [t for copied in _COPIES.get(model, ()) for t in (*copied.parameters(), *copied.buffers())]


class CopiedCall:
    """Stands in for the call of a model's copy.

    Args:
        model: the copy.
        make: puts a runtime like that of the model that was copied on a model, and returns it.
        carrier: the attribute of the model that this is.
    """

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], Any], carrier: str) -> None:
        self._model, self._make, self._carrier = weakref.ref(model), make, carrier
        self._compiled = False  # whether it was seen to be called by a copy of what torch.compile made

    @property
    def model(self) -> nn.Module:
        if (model := self._model()) is None:
            raise ApplyError(
                "this stands in for the call of a copy of a planned model, and that copy is gone: it was taken over "
                "from its attributes. Copy the model itself, with copy.deepcopy()"
            )
        return model

    def become(self) -> Any:
        """The runtime, put on the copy in the place of this."""
        replace_call(self.model, None)
        return self._make(self.model)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as a runtime's call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        by = self._called_by()
        own = call_of(self.model) if by is None else by.compiled
        call = self.become() if trains(self.model, args, kwargs) else own
        return call(*args, **kwargs)

    def _called_by(self) -> Through | None:
        """The copy of what `torch.compile(model)` made, by way of which the copy of the model is called; None else."""
        if self._compiled or not in_compiled_call():
            return through(self.model)
        self._compiled = True
        return next(iter(call_past_wrappers(self.model)), None)

    def put(self) -> CopiedCall:
        """Have the copy be called through this."""
        replace_call(self.model, self)
        vars(self.model)[self._carrier] = self
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedCall | None:
        if (model := copied_in(memo, self)) is None:
            return None
        note_copy(self.model, model)
        return CopiedCall(model, self._make, self._carrier).put()

    def __reduce__(self) -> Any:
        """In a pickle, the model's own call, as that of a runtime."""
        model = self._model()
        return (type(None), ()) if model is None else own_call(model, self._carrier)


def copied_in(memo: dict[int, Any], runtime: Any) -> nn.Module | None:
    """In a deep copy: the copy of a runtime's model; None where that is not copied, or gone."""
    # a shallow copy of a copy refers to its stand-in, too, and may be there longer
    model = runtime._model() if isinstance(runtime, CopiedCall) else runtime.model
    return None if model is None else memo.get(id(model))


def own_call(model: nn.Module, carrier: str) -> Any:
    """What a pickle has in the place of an attribute of a model that stands in for its call."""
    kind = type(model)
    if (kind.__reduce__, kind.__reduce_ex__) == (object.__reduce__, object.__reduce_ex__):
        return getattr, (model, carrier)
    return type(None), ()  # torch.fx.GraphModule, which would be pickled once more inside itself
