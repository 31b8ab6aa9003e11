"""Values that Python code decides by: of tensors, learnt from a real call of the model, and of random numbers."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from planner.capture.provenance import line_at, user_place
from planner.capture.trace.state_guard import untouched
from planner.compat.fake import FakeTensor
from planner.compat.tensors import TorchDispatchMode
from planner.core.call import tensors_in

Place = tuple[str, int]  # file and line
DRAWN = "random numbers of Python's random, or of NumPy"
# what a random number between 0 and 1 is taken for: its median says what a model does most often (a layer that is
# dropped now and then is not); one that drops most of its layers keeps them by a high number, or by a low one
CHANCES = (0.5, 1 - 2**-24, 0.0)


class Answers:
    """The values that one call of the model asked for, by the line that did, in order.

    Attributes:
        chance: what a single random number between 0 and 1 is taken for; None for what the real call draws.
        asked: the lines that asked outside every compiled graph since `begin()`, and how often.
        drew: whether Python code between the graphs drew random numbers of Python's or NumPy's since then.
        guessed: whether a single random number of torch's was taken for `chance`.
    """

    def __init__(self, chance: float | None = CHANCES[0]) -> None:
        self.chance = chance
        self.asked: Counter[Place] = Counter()
        self.drew = self.guessed = False
        self._given: dict[Place, list[Any]] = {}

    def learn(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Run the model for real, without gradients, unless it is no real model; it is as before afterwards."""
        tensors = [*tensors_in((tuple(args), dict(kwargs))), *model.parameters(), *model.buffers()]
        if any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
            return False
        listener = _Listener()
        with untouched(model, args, kwargs) as (own_args, own_kwargs), listener:
            model(*own_args, **own_kwargs)
        self._given = dict(listener.given)
        return True

    def begin(self) -> None:
        """A call of the model begins."""
        self.asked.clear()
        self.drew = False

    def answer(self) -> Any:
        """The real call's next value at the line that asks now, then the last one again; None where it had none."""
        place = user_place(inspect.currentframe())
        given = self._given.get(place)
        self.asked[place] += 1
        return given[min(self.asked[place], len(given)) - 1] if given else None

    def lines(self) -> tuple[str, ...]:
        """What asked: lines as "file:line: code", and generators of random numbers."""
        return (*(line_at(*place) for place in self.asked), *([DRAWN] if self.drew else []))


class _Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the values that ops hand to Python."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: dict[Place, list[Any]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if asks(func):
            self.given[user_place(inspect.currentframe())].append(result)
        return result


def told(asked: Sequence[str], otherwise: str) -> str:
    """A note about the lines that asked, and about a step in which they are answered otherwise."""
    return (
        "The model's Python code decides by values that each step has anew, and this plan is for what they are here "
        f"({'; '.join(asked)}): a step that goes another way {otherwise}."
    )


def asks(func: Any) -> bool:
    """Whether an op hands a value to Python."""
    return torch.Tag.data_dependent_output in getattr(func, "tags", ())
