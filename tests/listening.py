"""A dispatch mode that lists the ops which run under it."""

from typing import Any

from planner.compat.dispatch import LastingMode


class Listening(LastingMode):
    """Under it, torch.compile compiles, and what it compiles runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))
