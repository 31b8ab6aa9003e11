"""Values that Python code decides by, and sizes that depend on values: learnt from a real call of the model."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from planner.capture.provenance import line_at, user_place
from planner.capture.trace.state_guard import untouched
from planner.compat import pytree
from planner.compat.autograd import in_backward
from planner.compat.fake import FakeTensor
from planner.compat.modules import own_calls
from planner.compat.tensors import TorchDispatchMode
from planner.core.call import TensorSpec, tensors_in
from planner.errors import users_frame

Place = tuple[str, int]  # file and line
Position = tuple[Counter[Place], Counter[tuple[Place, str]]]  # how often each line has asked, and each op has run
INDEX = torch.ops.aten.index.Tensor
PUTS = (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
DRAWN = "random numbers of Python's random, or of NumPy"
# what a random number between 0 and 1 is taken for: its median says what a model does most often (a layer that is
# dropped now and then is not); one that drops most of its layers keeps them by a high number, or by a low one
CHANCES = (0.5, 1 - 2**-24, 0.0)


class Answers:
    """The values that one call of the model asked for, and the tensors that it made, by the line that did, in order.

    Attributes:
        doubted: whether sizes that depend on the batch's values are as unknown as others: another batch has other ones.
        more: how many more rows the tensors have whose sizes depend on values, than in the real call.
        sized: paths of the modules whose `forward` made tensors whose sizes depend on values.
        chance: what a single random number between 0 and 1 is taken for; None for what the real call draws.
        asked: the lines that asked outside every compiled graph since `begin()`, and how often.
        told: the lines that made something whose size the batch's values told since then.
        drew: whether Python code between the graphs drew random numbers of Python's or NumPy's since then.
        guessed: whether a single random number of torch's was taken for `chance`.
        packed: whether sequences were packed, which are taken for as long as they may be; None: their sizes are as
            unknown as others.
        shared_loss: whether outputs beside the model's own loss get gradients, too.
    """

    def __init__(self, chance: float | None = CHANCES[0]) -> None:
        self.chance = chance
        self.asked: Counter[Place] = Counter()
        self.told: set[Place] = set()
        self.drew = self.guessed = self.shared_loss = False
        self.packed: bool | None = None
        self.doubted = True
        self.more = 0
        self.sized: set[str] = set()
        self._given: dict[Place, list[Any]] = {}
        self._made: dict[tuple[Place, str], list[Any]] = {}
        self._ran: Counter[tuple[Place, str]] = Counter()

    @property
    def by_chance(self) -> bool:
        """Whether Python code drew numbers, which may decide what runs."""
        return self.drew or self.guessed

    def learn(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Run the model for real, without gradients, unless it is no real model; it is as before afterwards."""
        tensors = [*tensors_in((tuple(args), dict(kwargs))), *model.parameters(), *model.buffers()]
        if any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
            return False
        listener = _Listener()
        with own_calls(model), untouched(model, args, kwargs) as (own_args, own_kwargs), listener:
            model(*own_args, **own_kwargs)
        self._given, self._made = dict(listener.given), dict(listener.made)
        return True

    def begin(self) -> None:
        """A call of the model begins."""
        self.asked.clear()
        self.told.clear()
        self._ran.clear()
        self.drew = False

    def position(self) -> Position:
        """How far the call has come."""
        return self.asked.copy(), self._ran.copy()

    @contextmanager
    def again_from(self, position: Position) -> Iterator[None]:
        """What runs here is told what it was told in its first run, which began at a position."""
        now = self.asked, self._ran
        self.asked, self._ran = position[0].copy(), position[1].copy()
        try:
            yield
        finally:
            self.asked, self._ran = now

    def answer(self) -> Any:
        """The real call's next value at the line that asks now, then the last one again; None where it had none.

        It has no backward pass: what hooks ask for there, as the norm of a gradient that they log, is taken for 1.
        """
        place = self._place_of(inspect.currentframe())
        given = self._given.get(place)
        if given is None and in_backward():
            return 1
        self.asked[place] += 1
        return given[min(self.asked[place], len(given)) - 1] if given else None

    def _place_of(self, frame: FrameType | None) -> Place:
        """The line that asks now, by its number in the real call: in code that torch.compile writes, an `if` may have
        the number of a line that comes after it.
        """
        place, own = user_place(frame), users_frame(frame)
        if place in self._given or own is None:
            return place
        begins = own.f_code.co_firstlineno
        above = [known for known in self._given if known[0] == place[0] and begins <= known[1] < place[1]]
        return max(above, default=place)

    def specs(self, func: Any) -> Any:
        """What the real call's next such op at the line that runs now made, as specs; None where there was none.

        For one that writes by a mask: how many rows it wrote.

        It is called for every op outside the graphs, as it counts them.
        """
        if not self._made:
            return None
        key = user_place(inspect.currentframe()), str(func)
        made = self._made.get(key)
        self._ran[key] += 1
        return made[min(self._ran[key], len(made)) - 1] if made else None

    def enlarged(self, func: Any, args: Any, spec: TensorSpec) -> tuple[int, ...]:
        """The shape of such a tensor, with so many more rows."""
        at = first_index(args[1]) if func is INDEX else 0
        return (*spec.shape[:at], spec.shape[at] + self.more, *spec.shape[at + 1 :]) if self.more else spec.shape

    def forget_sizes(self) -> None:
        """Know values only: an op whose size depends on values raises again, unless the batch tells its size."""
        self.doubted = False
        self.sized.clear()
        self._made.clear()

    def lines(self) -> tuple[str, ...]:
        """What asked: lines as "file:line: code", and generators of random numbers."""
        places = dict.fromkeys([*self.asked, *self.told])
        return (*(line_at(*place) for place in places), *([DRAWN] if self.drew else []))

    def size_told(self) -> None:
        """The batch's values tell the size of what the line that runs now makes."""
        self.told.add(user_place(inspect.currentframe()))


class _Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the values that ops hand to Python, and the shapes of what ops make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: dict[Place, list[Any]] = defaultdict(list)
        self.made: dict[tuple[Place, str], list[Any]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        place = user_place(inspect.currentframe())
        if asks(func):
            self.given[place].append(result)
        else:
            mask = mask_of(func, args)
            made = pytree.tree_map_only(torch.Tensor, _spec, result) if mask is None else int(mask.count_nonzero())
            self.made[place, str(func)].append(made)
        return result


def _spec(t: torch.Tensor) -> TensorSpec | None:
    return TensorSpec(tuple(t.shape), tuple(t.stride()), t.dtype) if t.layout == torch.strided else None


def is_mask(index: Any) -> bool:
    """Whether an index is one of booleans."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def mask_of(func: Any, args: Any) -> torch.Tensor | None:
    """The mask by which an op writes, if it does so by one."""
    masks = [x for x in args[1] if is_mask(x)] if func in PUTS else []
    return masks[0] if len(masks) == 1 else None


def first_index(indices: Sequence[Any]) -> int:
    """The first dimension that `aten.index` indexes."""
    return next((i for i, x in enumerate(indices) if x is not None), 0)


def counted_as_here(paths: Iterable[str]) -> str:
    """A note about modules in which sizes depend on values."""
    names = ", ".join(path or "the model's own forward()" for path in paths)
    return (
        f"Sizes in {names} depend on values, and are counted as they are for this batch: a step in which they are "
        "larger may take more."
    )


def told(asked: Sequence[str], otherwise: str) -> str:
    """A note about the lines that asked, and about a step in which they are answered otherwise."""
    return (
        "The model's Python code decides by values that each step has anew, and this plan is for what they are here "
        f"({'; '.join(asked)}): a step that goes another way {otherwise}."
    )


def asks(func: Any) -> bool:
    """Whether an op hands a value to Python."""
    return torch.Tag.data_dependent_output in getattr(func, "tags", ())
