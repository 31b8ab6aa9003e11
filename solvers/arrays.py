"""Arrays of the search, and how its functions are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """A function that runs as machine code, without the interpreter's lock."""
    try:
        return cast(F, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # nowhere to write a cache: compiled anew in each process
        return cast(F, njit(nogil=True)(function))
