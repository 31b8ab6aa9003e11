"""The kernels as machine code: compiled by numba at their first use, or loaded from its cache on disk.

Importing numba takes most of a second, and compiling several: a search that is settled without annealing does neither.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from inspect import getsource, isfunction
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from solvers.search import arrays, joint, kernels, layout, walk, wires


class Kernels(NamedTuple):
    """The kernels that Python calls, see `kernels` and `walk`."""

    link_all: Callable[..., None]
    unroll: Callable[..., tuple[int, float]]
    peak_of: Callable[..., int]
    anneal: Callable[..., float]


INTERPRETED = Kernels(kernels.link_all, kernels.unroll, kernels.peak_of, walk.anneal)


class MoveKernels(NamedTuple):
    """The kernels that Python calls where there is a link, see `layout` and `joint`."""

    judge_moves: Callable[..., tuple[int, float]]
    anneal_moves: Callable[..., float]


@cache
def machine_code() -> Kernels:
    """The kernels as functions that run without the interpreter's lock."""
    found = _compiled(kernels) | _compiled(walk)
    return Kernels(*(found[name] for name in Kernels._fields))


@cache
def move_code() -> MoveKernels:
    """The kernels for moves, likewise."""
    return MoveKernels(_compiled(layout)["judge_moves"], _compiled(joint)["anneal_moves"])


@cache
def _compiled(module: ModuleType) -> dict[str, Any]:
    """What a module of kernels names, its own functions and those of other such modules compiled."""
    import numba

    njit: Any = numba.njit  # its annotations lack some options

    def compiled(function: FunctionType, **options: Any) -> Any:
        # kernels that only kernels call need no way in from Python, which takes as long to compile as they do
        inside = function.__name__ not in Kernels._fields + MoveKernels._fields
        own = FunctionType(function.__code__, namespace, function.__name__)  # calls what is compiled
        if options:
            own.__qualname__ = f"{function.__name__}_{_sources()}"
        return njit(nogil=True, no_cpython_wrapper=inside, no_cfunc_wrapper=True, **options)(own)

    namespace = dict(vars(module))
    for name, value in vars(module).items():
        if not isfunction(value):
            continue
        if value.__module__ != module.__name__:
            namespace[name] = _compiled(sys.modules[value.__module__])[name]
            continue
        try:
            namespace[name] = compiled(value, cache=True)
        except (RuntimeError, OSError):  # nowhere to write a cache, or no sources: numba compiles in each process
            namespace[name] = compiled(value)
    return namespace


@cache
def _sources() -> str:
    """A digest of all kernels: numba's cache on disk looks at a function's own file, not at those of what it calls."""
    text = "".join(getsource(module) for module in (arrays, joint, kernels, layout, walk, wires))
    return sha256(text.encode()).hexdigest()[:8]
