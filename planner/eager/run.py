"""Runs a model with some of its modules checkpointed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..runtime.run import Applied
from .wrap import Choice, checkpointed


class EagerRuntime(Applied):
    """Checkpoints the chosen modules while the model is called; between calls they are as they were."""

    def run(self, recipe: Choice, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with checkpointed(self.model, recipe):
            return self.call_eagerly(*args, **kwargs)  # type: ignore[no-untyped-call]
