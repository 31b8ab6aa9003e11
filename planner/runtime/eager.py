"""Runs a model with some of its modules checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.core.recipe import Choice
from planner.runtime.interception import Applied
from planner.runtime.signature import Signature
from planner.runtime.uncompiled import Uncompiled


class EagerRuntime(Applied):
    """Checkpoints the chosen modules while the model is called; between calls they are as they were."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls, self._call = Uncompiled(), 0

    def waiting_calls(self) -> frozenset[int]:
        return self._calls.waiting()

    def when_used(self, number: int, then: Callable[[], object]) -> None:
        self._calls.when_used(number, then)

    def call_number(self) -> int:
        return self._call

    def run(self, signature: Signature, args: Any, kwargs: Any) -> Any:
        choice = self.plans[signature].recipe
        assert isinstance(choice, Choice)
        self._call += 1
        return self._calls.run(self.model, choice, self._call, lambda: self.call_eagerly(*args, **kwargs))
