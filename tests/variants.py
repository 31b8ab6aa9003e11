"""Marks variants of tests that say nearly the same as others as `thorough`: `make test` leaves them out."""

from collections.abc import Iterable
from typing import Any

import pytest


def more(*values: Any) -> list[Any]:
    """Values of a parameter that `make thorough` tries, beside those of `make test`.

    A tuple gives the values of several parameters; what is `pytest.param` already keeps its other marks and its id.
    """
    return [_thorough(value) for value in values]


def keeping(*kept: Any, of: Iterable[Any]) -> list[Any]:
    """All values, in their order, of which `make test` tries those that are named."""
    values = list(of)
    assert all(value in values for value in kept), f"not among {values}"
    return [value if value in kept else _thorough(value) for value in values]


def _thorough(value: Any) -> Any:
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.thorough], id=value.id)
    return pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.thorough)
