"""What the modules of a model keep by name, and containers outside of it that its code names: put back after a call."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, starmap
from operator import is_
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from planner.capture.trace.named import CONTAINERS, named_containers
from planner.compat.modules import TABLES, buffers_of, hook_tables, modules_in, tables_of
from planner.core.call import tensors_in

PLAIN = {type(None), bool, int, float, str}
_CONTAINERS = frozenset(CONTAINERS)
_SIMPLE = {*PLAIN, tuple, *CONTAINERS}
_KEPT = (torch.Tensor, np.ndarray, np.generic, int, float, complex, str, bytes, frozenset, tuple)
_NO_STATE = (*_KEPT, nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, functools.partial)
_EMPTY: dict[Any, Any] = {}
_DEEPEST = 2  # objects in objects, whose attributes a call may change


class Attributes:
    """The buffers, tensors, plain values, containers, iterators and objects that the modules of a model have by name;
    hooks, and the containers that these and the modules' code name.

    A call may replace these, and change what is in the containers and the objects, in containers inside them, too. A
    module that got parameters or modules of its own since then keeps what came with them.

    Attributes:
        modules: of the model, each once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = modules_in(model)
        self._members = self._names(), self._ids()
        self._buffers = self._own_buffers()
        kinds = _value_kinds(self.modules)
        self._values = [(_plain(m, kinds), tuple(vars(m)), _parts(m)) for m in self.modules]
        others = _others(self.modules)
        self._arrays = [(x, x.copy()) for _, _, x in others if isinstance(x, np.ndarray) and x.flags.writeable]
        self._iterators = [(own, name, x, copy_of(x)) for own, name, x in others if is_iterator(x)]
        self._named = named_containers(self.modules)
        values = [values for values, *_ in self._values]
        self._contents = contents_of(chain(self._named, *map(dict.values, values)), _DEEPEST)
        self._hooks = {id(table): dict(table) for table in self._hook_tables() if table}  # most are empty
        self._lasting: bool | None = None  # whether no tensor, array or iterator is among them
        self._empty, self._filled = list[Any](), list[tuple[Any, Any]]()  # of the containers

    def _own_buffers(self) -> list[dict[str, Any]]:
        return [dict(buffers_of(module)) for module in self.modules]

    def _hook_tables(self) -> Iterator[dict[int, Any]]:
        return chain.from_iterable(map(hook_tables, self.modules))

    def _names(self) -> list[str]:
        """All names that the modules have for something."""
        return [*chain.from_iterable(map(vars, self.modules))]

    def _ids(self) -> list[int]:
        """The identities of what they have by these."""
        return [*map(id, chain.from_iterable(map(dict.values, map(vars, self.modules))))]

    def again(self, model: nn.Module) -> bool:
        """Whether these are what the model has by now, too, which takes a fraction of the time of collecting them: no
        tensor, array or iterator is among them, and nothing else has changed. Buffers are looked at anew.
        """
        if self._lasting is None:
            held = [self.tensors(), tensors_in([before for _, before in self._contents])]
            self._lasting = not (self._arrays or self._iterators or any(held))
            self._empty = [container for container, before in self._contents if not before]  # most are
            self._filled = [each for each in self._contents if each[1]]
        if not self._lasting or modules_in(model) != self.modules or (self._names(), self._ids()) != self._members:
            return False
        if [*map(id, named_containers(self.modules))] != [*map(id, self._named)]:
            return False
        if any(self._empty) or not all(starmap(_unchanged, self._filled)):
            return False
        if any(table != self._hooks.get(id(table), _EMPTY) for table in self._hook_tables()):
            return False
        self._buffers = self._own_buffers()
        return True

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among these."""
        return tensors_in([list(values.values()) for values, *_ in self._values])

    def restore(self) -> None:
        """Put them back, and take away those that were not there."""
        for module, buffers in zip(self.modules, self._buffers, strict=True):
            table = buffers_of(module)
            table.clear()
            table.update(buffers)
        for module, (values, names, parts) in zip(self.modules, self._values, strict=True):
            own = vars(module)
            own.update({k: v for k, v in values.items() if own.get(k, own) is not v})
            if _parts(module) == parts:
                for name in _plain(module, _value_kinds([module])).keys() - set(names):
                    del own[name]
        for container, before in self._contents:
            refill(container, before)
        for array, before in self._arrays:
            np.copyto(array, before)
        for own, name, iterator, before in self._iterators:
            if own.get(name) is iterator or is_iterator(own.get(name)):  # torch.compile puts another one there
                own[name] = before
        for of_kind in self._hook_tables():
            hooks = self._hooks.get(id(of_kind), {})
            if of_kind != hooks:  # a first call may have installed some, and noted that in a value
                of_kind.clear()
                of_kind.update(hooks)


@contextmanager
def containers_kept(model: nn.Module) -> Iterator[None]:
    """Puts back what was in the containers outside of a model that its code and hooks name."""
    before = contents_of(named_containers(modules_in(model)))
    try:
        yield
    finally:
        for container, contents in before:
            refill(container, contents)


def _plain(module: nn.Module, kinds: Collection[type]) -> dict[str, Any]:
    """What a module has by name of these classes; a tensor with its graph, from which the next call may go on."""
    found = {k: v for k, v in vars(module).items() if type(v) in kinds}
    for name in ("_buffers", *TABLES):
        found.pop(name, None)
    return found


def _value_kinds(modules: Iterable[nn.Module]) -> set[type]:
    """The classes of what modules have by name and a call may replace: numbers, text, containers, tensors, objects."""
    kinds = {type(x) for own in map(vars, modules) for x in own.values()}  # few: each is asked once
    return {kind for kind in kinds if kind in _SIMPLE or issubclass(kind, _KEPT) or _has_state(kind)}


def _others(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
    """The iterators of Python's own classes, and NumPy's arrays, by the names that modules have for them."""
    owns = list(map(vars, modules))
    kinds = {type(x) for own in owns for x in own.values()}  # few: each is asked once
    found = {kind for kind in kinds if _gives_items(kind) or issubclass(kind, np.ndarray)}
    return [(own, name, x) for own in owns for name, x in own.items() if type(x) in found] if found else []


def _has_state(kind: type) -> bool:
    """Whether objects of a class have attributes that a model's call may change."""
    none = kind in _SIMPLE or issubclass(kind, _NO_STATE) or kind.__module__.startswith(("torch.", "planner."))
    return not none and kind.__dictoffset__ != 0


def copy_of(iterator: Any) -> Any:
    """One that goes on from the same place and gives the same; the iterator itself where it cannot be copied."""
    with warnings.catch_warnings():  # those of itertools are not to be copied from Python 3.14 on
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            same: dict[int, Any] = {}
            _enter_items(iterator, same)
            return copy.deepcopy(iterator, same)
        except (TypeError, copy.Error):  # as where a generator is in it
            return iterator


def _enter_items(x: Any, same: dict[int, Any]) -> None:
    """Enter what an iterator gives, as modules, into the memo of a copy, in which these are the same."""
    if isinstance(x, (tuple, list)):
        for each in x:
            _enter_items(each, same)
    elif is_iterator(x):
        _enter_items(x.__reduce__()[1:], same)
    else:
        same[id(x)] = x


def is_iterator(x: Any) -> bool:
    """Whether a value is an iterator of Python's own classes, but for generators."""
    return _gives_items(type(x))


def _gives_items(kind: type) -> bool:
    own = kind.__module__ in ("builtins", "itertools") and kind is not GeneratorType
    return own and issubclass(kind, Iterator)


def contents_of(values: Iterable[Any], deepest: int = 0) -> list[tuple[Any, Any]]:
    """The containers among these values, and inside them, that can be changed, each with a copy; with `deepest`, those
    that objects among them have as attributes, too, up to so many objects deep. O(their contents).

    Those of Python's own classes: others may refuse to be written into.
    """
    found: dict[int, tuple[Any, Any]] = {}
    seen: set[int] = set()
    left = _containers_in(values, deepest)
    while left:
        container, deeper = left.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        if not container:  # as most are, which torch has in each module
            if not isinstance(container, tuple):
                found[id(container)] = container, _EMPTY
            continue
        inner = list(container.values()) if isinstance(container, dict) else list(container)
        if not isinstance(container, tuple):
            found[id(container)] = container, dict(container) if isinstance(container, dict) else inner
        left += _containers_in(inner, deeper)
    return list(found.values())


def _containers_in(values: Iterable[Any], deeper: int) -> list[tuple[Any, int]]:
    """Those that can be changed, the attributes of objects, and tuples with anything but plain values, as a stride has
    none; each with how much deeper it may go from there.
    """
    found = []
    for x in values:
        kind = type(x)
        if kind in PLAIN:
            continue
        if kind in _CONTAINERS or (issubclass(kind, tuple) and not PLAIN.issuperset(map(type, x))):
            found.append((x, deeper))
        elif deeper and _has_state(kind):
            found.append((vars(x), deeper - 1))
    return found


def _unchanged(container: Any, before: Any) -> bool:
    """Whether a container has the contents that it had."""
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(map(is_, container, before)) and all(map(is_, container.values(), before.values()))
    return all(map(is_, container, before))


def refill(container: Any, before: Any) -> None:
    """Give a container the contents that it had, where it has others."""
    if _unchanged(container, before):
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _parts(module: nn.Module) -> tuple[str, ...]:
    return tuple([name for table in tables_of([module]) for name, own in table.items() if own is not None])
