"""Everything this project refuses, in one small hierarchy: what was given, what was expected, what to do."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch

# torch, this package and generated code are not the user's; "<stdin>" and the like may be
_FOLDERS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}")
NOT_THE_USERS = (*_FOLDERS, "<frozen", "<eval")


def gb(nbytes: float, *, at_least: bool = False) -> str:
    """Bytes in words: `1 GB = 2**30 bytes`, as CUDA's own tools print it; rounded up, or to the nearest."""
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("kB", 2**10)):
        if abs(nbytes) >= size:
            return f"{math.ceil(100 * nbytes / size) / 100 if at_least else nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} bytes"


class PlanWarning(UserWarning):
    """Something that a plan's promise does not cover, or that a real step showed of it."""


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from this one on outwards, that is neither torch's nor this package's; None without one."""
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        frame = frame.f_back
    return frame


def warn(text: str) -> None:
    """Give a PlanWarning at the line of the user's code that runs."""
    frame = users_frame(inspect.currentframe())
    if frame is None:  # a thread of ours
        warnings.warn(text, PlanWarning, stacklevel=2)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, PlanWarning, *place, frame.f_globals.get("__name__"), registry)


class PlannerError(Exception):
    """Base of every error that `planner` raises on purpose."""


class BudgetError(PlannerError, ValueError):
    """A budget that is not a positive, finite number of GB."""


LOWER = "pieces='auto', offload= and step_in_backward=True reach lower."


LATE = "gradients of the step before, if they are cleared after the forward pass"  # a line of what takes the room


class InfeasibleBudgetError(BudgetError):
    """No plan found fits the budget.

    Attributes:
        budget_gb: what was asked for.
        minimum_gb: the smallest budget that was found to work, with `late`, rounded up to four digits; planning with it
            succeeds, whatever the time limit. Where no batch is known yet, only a lower bound, and the message says so.
        minimum_bytes: the same in bytes, not rounded, and without `late`.
        takes: what takes the room at the leanest plan's peak: name -> bytes, largest first.
        lower: a sentence on the options that reach lower.
        leanest: the schedule that needs `minimum_bytes`, where one is known.
        late: bytes that it needs beside where a loop clears gradients after the forward pass, while that is not known.
    """

    def __init__(
        self,
        budget_gb: float,
        minimum_bytes: int,
        takes: dict[str, int],
        *,
        whole: bool = True,
        lower: str = LOWER,
        note: str = "",
        leanest: Any = None,
        late: int = 0,
    ) -> None:
        """Args other than the attributes: `whole`, whether the step is known, or only what is held beside it; `note`,
        what is added to the error; `late`, bytes that `minimum_gb` leaves room for beside `minimum_bytes`.
        """
        self.budget_gb = budget_gb
        self.minimum_bytes = minimum_bytes
        self.minimum_gb = rounded_up((minimum_bytes + late) / 2**30)
        takes = dict(sorted({**takes, **({LATE: late} if late else {})}.items(), key=lambda line: -line[1]))
        self.takes, self.lower, self.leanest, self.late = takes, lower, leanest, late
        room = ", ".join(f"{name} {gb(size)}" for name, size in takes.items() if size)
        asked = f"budget_gb={budget_gb!r} ({gb(budget_gb * 2**30)}) is too small: "
        if whole:
            needs = "the leanest plan found needs "
            advice = (
                "Give that much, a few percent more for a step that recomputes less, or make the batch or the model "
                f"smaller. {lower}"
            ).rstrip()
        else:
            needs = "before a batch is known, what a step that trains all parameters holds is at least "
            advice = (
                "Activations come on top: plan(model, batch, ...) tells how much. Where parameters will be frozen, "
                "converted or sharded before training, or get no gradient in it, freeze, convert or shard them first."
            )
        needs = f"{needs}minimum_gb={self.minimum_gb!r} ({gb(minimum_bytes + late, at_least=True)})"
        super().__init__(f"{asked}{needs}. What takes the room: {room}. {advice}")
        if note:
            self.add_note(note)


def rounded_up(x: float) -> float:
    """The least number of four digits that is not below a positive number."""
    digits = 3 - math.floor(math.log10(x))
    rounded = float(f"{x:.3e}")
    return rounded if rounded >= x else round(rounded + 10.0**-digits, digits)


class ModelError(PlannerError, TypeError):
    """Something that cannot be planned as a model: not a module, or nothing in it needs a gradient."""


class BatchError(PlannerError, ValueError):
    """A batch that the model does not accept, or none where one is needed.

    Attributes:
        of_model: the model's own error, where it raised one for the batch.
    """

    def __init__(self, message: str, of_model: Exception | None = None) -> None:
        super().__init__(message)
        self.of_model = of_model


class TorchError(PlannerError, ImportError):
    """The torch that is installed is too old, or lacks private parts that the planner needs; the message names both."""


class CaptureError(PlannerError):
    """The training step could not be captured as a graph; the message names the place and what to try."""


class ApplyError(PlannerError, RuntimeError):
    """A plan applied twice, to another model, or not applied when it should be."""


class PlanFileError(PlannerError, ValueError):
    """A plan file that cannot be written or read; the message names the file, the place in it, what was expected."""


class RankError(PlannerError, RuntimeError):
    """Processes that train one model have no plan in common; the message names the rank, and what it said."""


class VerificationError(PlannerError, RuntimeError):
    """A real step takes more than the budget and planning again did not help, or its peak could not be measured."""


class OffloadError(PlannerError, RuntimeError):
    """Values cannot be moved where `offload=` says; the message names the place, the bytes, and what to do."""


class OptionError(PlannerError, ValueError):
    """An option that is not known, has a value that is none of its own, or does not go with another one."""


class DeviceError(OptionError, RuntimeError):
    """A device that is not there, cannot be used by this torch and driver, or is out of order."""


# what `plan(on_failure="warn")` warns of: nothing is wrong with the arguments, and there is no plan for this model
UNPLANNABLE = (CaptureError, InfeasibleBudgetError, RankError)
