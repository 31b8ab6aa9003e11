"""Everything this project refuses, in one small hierarchy: what was given, what was expected, what to do."""

from __future__ import annotations


def gb(nbytes: float) -> str:
    """Bytes in words: `1 GB = 2**30 bytes`, as CUDA's own tools print it."""
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} bytes"


class PlanWarning(UserWarning):
    """Something that a plan's promise does not cover, or that a real step showed of it."""


class PlannerError(Exception):
    """Base of every error that `planner` raises on purpose."""


class BudgetError(PlannerError, ValueError):
    """A budget that is not a positive, finite number of GB."""


class InfeasibleBudgetError(BudgetError):
    """No plan found fits the budget.

    Attributes:
        budget_gb: what was asked for.
        minimum_gb: the smallest budget that was found to work; planning with it succeeds.
        takes: what takes the room at the leanest plan's peak: name -> bytes, largest first.
    """

    def __init__(self, budget_gb: float, minimum_bytes: int, takes: dict[str, int]) -> None:
        self.budget_gb = budget_gb
        self.minimum_gb = minimum_bytes / 2**30
        self.takes = takes
        room = ", ".join(f"{name} {gb(size)}" for name, size in takes.items() if size)
        super().__init__(
            f"budget_gb={budget_gb!r} ({gb(budget_gb * 2**30)}) is too small: the leanest plan found needs "
            f"minimum_gb={self.minimum_gb!r} ({gb(minimum_bytes)}). What takes the room: {room}. "
            "Give that much, or make the batch or the model smaller."
        )


class ModelError(PlannerError, TypeError):
    """Something that cannot be planned as a model: not a module, or nothing in it needs a gradient."""


class BatchError(PlannerError, ValueError):
    """A batch that the model does not accept, or none where one is needed."""


class CaptureError(PlannerError):
    """The training step could not be captured as a graph; the message names the place and what to try."""


class ApplyError(PlannerError, RuntimeError):
    """A plan applied twice, to another model, or not applied when it should be."""


class PlanFileError(PlannerError, ValueError):
    """A plan file that cannot be written or read; the message names the file, the place in it, what was expected."""


class RankError(PlannerError, RuntimeError):
    """Processes that train one model have no plan in common; the message names the rank, and what it said."""


class VerificationError(PlannerError, RuntimeError):
    """A real step takes more than the budget, and planning again with what it showed did not help."""


class OptionError(PlannerError, ValueError):
    """An option (solver, device, optimizer, time limit) that is not known; the message lists the known ones."""
