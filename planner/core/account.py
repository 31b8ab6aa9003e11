"""Lines of a plan's account, which add up to its peak, and the kinds of memory that they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.core.plan import EARLIER, Held

BATCH = "batch"
UNREDUCED = "gradients not reduced yet"
FROZEN_NOW = "gradients of frozen parameters"  # which an optimizer clears
ATTRIBUTES = "attributes of modules"
_PARAMETERS = ("parameters", "parameters gathered for use", "buffers", ATTRIBUTES)
_GRADIENTS = (EARLIER, UNREDUCED, FROZEN_NOW)

# the position of each kind of memory in `Held`
_PLACES = {kind: at for at, kind in enumerate(Held._fields)}
KEPT, PASSING, RECOMPUTED = _PLACES["kept"], _PLACES["passing"], _PLACES["recomputed"]
PARAMETERS, GRADIENTS, BACKWARD = _PLACES["parameters"], _PLACES["gradients"], _PLACES["backward"]


def resident(lines: Mapping[str, int]) -> Held:
    """Bytes held through the whole step, by kind; `lines` of the account: name -> bytes."""
    parameters = sum(lines.get(name, 0) for name in _PARAMETERS)
    gradients, state = sum(lines.get(name, 0) for name in _GRADIENTS), lines.get("optimizer state", 0)
    return Held(parameters, state, sum(lines.values()) - parameters - gradients - state, gradients)


@dataclass(frozen=True, slots=True)
class EagerStep:
    """The step in eager mode, without a plan.

    Attributes:
        peak_bytes: predicted peak, everything that the budget counts.
        seconds: estimated time of its ops.
    """

    peak_bytes: int
    seconds: float
