"""Records of what other decisions would cost than those of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The step with some values kept, or recomputed, and everything else as the plan has it.

    Attributes:
        peak_bytes: predicted peak of that step, everything that the budget counts.
        step_seconds: its estimated time.
        peak_at: what runs at that peak: the phase, and the module with its op.
    """

    peak_bytes: int
    step_seconds: float
    peak_at: str


@dataclass(frozen=True, slots=True)
class Cost:
    """One decision's value, as the problem has it.

    Attributes:
        value: its number.
        seconds: of one more run of the op that makes it; values that one op makes share it by their bytes.
        held_at_peak: whether it is held while the peak is reached.
        bound_by: why it is held until its last use whatever a solver decides; empty where that is a choice.
    """

    value: int
    seconds: float
    held_at_peak: bool
    bound_by: str = ""
