"""Records of a plan's alternatives: the cost of each decision, and the step with other decisions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The step with some values kept, or recomputed, and everything else as the plan has it.

    Attributes:
        peak_bytes: predicted peak of that step, everything that the budget counts.
        step_seconds: its estimated time.
        peak_at: the phase at that peak, and the module with its op.
    """

    peak_bytes: int
    step_seconds: float
    peak_at: str


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one decision, as the problem has it.

    Attributes:
        value: the number of its value.
        seconds: of one more run of its op; several values of one op share it by their bytes.
        held_at_peak: whether the value is live at the peak.
        bound_by: why the value stays until its last use whatever a solver decides; empty where it need not.
    """

    value: int
    seconds: float
    held_at_peak: bool
    bound_by: str = ""
