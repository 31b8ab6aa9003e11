"""Numbers that a model's code does not read: that of a batch or of a step, which a loop gives to every call."""

from __future__ import annotations

import dis
from collections.abc import Callable, Collection
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from planner.compat import pytree
from planner.compat.modules import GLOBAL_HOOKS
from planner.core.maxima import Maxima
from planner.runtime.signature import NUMBERS, ModelState, Signature, call_signature

_READS_ALL = {"locals", "vars", "eval", "exec", "_getframe", "currentframe", "stack"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def unread(module: nn.Module, function: Callable[..., Any] | None, args: Any, kwargs: Any) -> frozenset[int]:
    """Of the leaves of a call's arguments, the positions of numbers that nothing reads.

    Args:
        module: that is called.
        function: a method of its class; None for its call.
        args: positional arguments, without the module.
        kwargs: keyword arguments.
    """
    if not any(type(x) in NUMBERS for x in (*args, *kwargs.values())):
        return frozenset()
    bound = True
    if function is None:
        function = module.forward
        bound = isinstance(function, MethodType)
        if any(GLOBAL_HOOKS) or any(getattr(module, name) for name in _HOOKS):  # which are given the arguments, too
            return frozenset()
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or not (names := _never_loaded(function.__code__)):
        return frozenset()
    own = function.__code__.co_varnames[bound : function.__code__.co_argcount]
    given = [*zip(own, args, strict=False), *((None, x) for x in args[len(own) :]), *kwargs.items()]
    places, at = set(), 0
    for name, x in given:
        if type(x) in NUMBERS:
            places |= {at} if name in names else set()
            at += 1
        else:
            at += len(pytree.tree_leaves(x))
    return frozenset(places)


def signature_of(
    model: nn.Module, args: Any, kwargs: Any, maxima: Maxima | None = None, state: ModelState | None = None
) -> Signature:
    """As `call_signature`, but equal for calls that differ in numbers alone that the model's code never reads."""
    return without(call_signature(model, args, kwargs, maxima, state), unread(model, None, args, kwargs))


def without(signature: Signature, positions: Collection[int]) -> Signature:
    """The same for all calls that differ at most in numbers at these positions."""
    if not positions:
        return signature
    described, *others = signature
    return (tuple(type(x) if at in positions else x for at, x in enumerate(described)), *others)


@lru_cache(maxsize=1024)
def _never_loaded(code: CodeType) -> frozenset[str]:
    """The parameters that the code of a function never loads."""
    if _READS_ALL & {*code.co_names}:
        return frozenset()
    loaded = set(code.co_cellvars)
    for each in dis.get_instructions(code):
        if "LOAD" in each.opname:  # some load two at once
            loaded.update(each.argval if isinstance(each.argval, tuple) else (each.argval,))
    return frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - loaded
