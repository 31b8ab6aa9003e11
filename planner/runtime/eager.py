"""Runs a model with some of its modules checkpointed."""

from __future__ import annotations

from typing import Any

from planner.core.recipe import Choice
from planner.eager.checkpointing import checkpointed
from planner.runtime.interception import Applied
from planner.runtime.signature import Signature


class EagerRuntime(Applied):
    """Checkpoints the chosen modules while the model is called; between calls they are as they were."""

    def run(self, signature: Signature, args: Any, kwargs: Any) -> Any:
        choice = self.plans[signature].recipe
        assert isinstance(choice, Choice)
        with checkpointed(self.model, choice):
            return self.call_eagerly(*args, **kwargs)
