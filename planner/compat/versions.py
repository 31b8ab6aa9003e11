"""Versions of torch: those that were tested, and what becomes of the others."""

from __future__ import annotations

import re

import torch

from planner.errors import TorchError

# in order; `make compat` tests the oldest and the newest, each in an environment of its own
TESTED = ("2.11.0", "2.14.1", "2.15.0")


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version, as `(2, 15)` of "2.15.0+cu132"; (0, 0) for what is none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def has_group_norms_of_any_layout() -> bool:
    """Whether group norms take tensors in any layout, so that autograd copies none for their kernels (2.14, 2.15)."""
    return release(torch.__version__) >= (2, 14)


def inductor_takes_symbols() -> bool:
    """Whether one compiled graph of Inductor may serve many sizes by a plan (2.13 to 2.15): 2.11 ends the process."""
    return release(torch.__version__) >= (2, 13)


def tested_in_words() -> str:
    """The range of releases that were tested, as "2.11 to 2.15"."""
    return " to ".join("{}.{}".format(*release(version)) for version in (TESTED[0], TESTED[-1]))


def is_newer() -> bool:
    """Whether the torch that is installed is newer than any that was tested."""
    return release(torch.__version__) > release(TESTED[-1])


def refuse_older() -> None:
    """Raise TorchError where the torch that is installed is older than any that was tested."""
    if release(torch.__version__) < release(TESTED[0]):
        raise TorchError(
            f"planner works with torch {tested_in_words()}, and torch {torch.__version__} is installed: "
            "pip install --upgrade torch"
        )


def missing_in_words(missing: str) -> str:
    """What to say where private parts of torch are not as they were.

    Args:
        missing: the names.
    """
    return (
        f"planner needs private parts of torch that torch {torch.__version__} does not have: {missing}. It is known to "
        f"work with torch {tested_in_words()}: install one of these, or a newer planner"
    )


def tested(version: str) -> bool:
    """Whether a version is of a release that was tested, or between two of these.

    Examples:
        >>> tested(f"{TESTED[0]}+cu130"), tested("1.0.0")
        (True, False)
    """
    return release(TESTED[0]) <= release(version) <= release(TESTED[-1])
