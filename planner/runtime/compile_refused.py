"""What stands in for the `compile()` of a planned model."""

from __future__ import annotations

from types import MethodType
from typing import Any

from planner.compat.modules import replaced_call
from planner.errors import ApplyError
from planner.runtime.copied import CopiedCall, copied_in

COMPILE = "compile"


class CompileRefused:
    """Refuses what would take the plan's place.

    Args:
        runtime: that of the model, or what stands in for its copy's call.
    """

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise ApplyError(
            f"this {type(self.runtime.model).__name__} runs under a plan, which compiles it: compile() would take its "
            "place. Leave compile() out, or remove() the plan first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if (model := copied_in(memo, self.runtime)) is None:
            return self
        runtime = replaced_call(model)
        return CompileRefused(runtime) if isinstance(runtime, CopiedCall) else MethodType(type(model).compile, model)

    def __reduce__(self) -> Any:
        """In a pickle, the model's own method."""
        reduced = self.runtime.__reduce__()
        return (getattr, (self.runtime.model, COMPILE)) if reduced[0] is getattr else reduced
