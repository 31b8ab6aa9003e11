"""A call of a model that leaves it as it was."""

from __future__ import annotations

import copy
import functools
import gc
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isgenerator
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from planner.capture.trace.named import CONTAINERS, named_containers
from planner.capture.trace.random_state import named_generators, undrawing
from planner.compat import pytree
from planner.compat.dispatch import written
from planner.compat.fake import FakeTensor
from planner.compat.modules import TABLES, buffers_of, hook_tables, modules_in, parameters_in, tables_of
from planner.compat.tensors import TorchDispatchMode, storage_key
from planner.core.call import inside, tensors_in
from planner.core.host import bytes_of, like
from planner.core.objects import dense_tensors, with_tensors
from planner.devices.accelerator import accelerator_of

_LRU_CACHE = type(functools.cache(lambda: None))
_PLAIN = {type(None), bool, int, float, str}
_TABLES = {dict, OrderedDict, set}
_SIMPLE = {*_PLAIN, tuple, *CONTAINERS}
_KEPT = (torch.Tensor, int, float, str, tuple)
_NO_STATE = (*_KEPT, nn.Module, type, ModuleType, FunctionType, torch.dtype, torch.device)
_EMPTY: dict[Any, Any] = {}


class Attributes:
    """The buffers, tensors, plain values, containers, iterators and objects that the modules of a model have by name;
    hooks, and the containers that these and the modules' code name.

    A call may replace these, and change what is in the containers and the objects, in containers inside them, too. A
    module that got parameters or modules of its own since then keeps what came with them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = modules_in(model)
        self._buffers = [dict(buffers_of(module)) for module in self._modules]
        self._values = [(_plain(module), tuple(vars(module)), _parts(module)) for module in self._modules]
        others = list(chain.from_iterable(map(_others, self._modules)))
        self._iterators = [(own, name, x, copy.deepcopy(x)) for own, name, x in others if _is_iterator(x)]
        objects = (vars(x) for _, _, x in others if not _is_iterator(x))
        named = named_containers(self._modules)
        self._contents = _contents(chain(named, objects, *(values.values() for values, *_ in self._values)))
        tables = chain.from_iterable(map(hook_tables, self._modules))
        self._hooks = {id(table): dict(table) for table in tables if table}  # most are empty

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among these."""
        return tensors_in([list(values.values()) for values, *_ in self._values])

    def restore(self) -> None:
        """Put them back, and take away those that were not there."""
        for module, buffers in zip(self._modules, self._buffers, strict=True):
            table = buffers_of(module)
            table.clear()
            table.update(buffers)
        for module, (values, names, parts) in zip(self._modules, self._values, strict=True):
            own = vars(module)
            own.update({k: v for k, v in values.items() if own.get(k, own) is not v})
            if _parts(module) == parts:
                for name in _plain(module).keys() - set(names):
                    del own[name]
        for container, before in self._contents:
            _fill(container, before)
        for own, name, iterator, before in self._iterators:
            if own.get(name) is iterator:
                own[name] = before
        for of_kind in chain.from_iterable(map(hook_tables, self._modules)):
            hooks = self._hooks.get(id(of_kind), {})
            if of_kind != hooks:  # a first call may have installed some, and noted that in a value
                of_kind.clear()
                of_kind.update(hooks)


class ParameterWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which parameters of a model its forward pass writes into, as one that averages another encoder's does.

    With `keep`, it sees the tensors among these attributes, too.

    Attributes:
        names: of these.
        before: with `keep`, each as it was before.
    """

    def __init__(self, model: nn.Module, *, keep: Attributes | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.before: list[_Saved] = []
        self._keep = keep is not None
        others = [("", t) for t in keep.tensors()] if keep is not None else []
        dense = [(name, p) for name, p in [*others, *model.named_parameters()] if p.layout == torch.strided]
        self._own = {storage_key(inner): (name, inner) for name, p in dense for inner in inside(p)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tensors_in(written(func, args, kwargs or {})):
            if t.layout == torch.strided and (own := self._own.pop(storage_key(t), None)) is not None:
                self.names.add(own[0])
                if self._keep:
                    self.before.append(_saved(own[1]))
        return func(*args, **(kwargs or {}))


class ModelSnapshot:
    """The state of a model that a call may change: buffers, attributes of modules, memory of parameters, random state.

    The copies are NumPy arrays in the host's memory, which torch's allocator does not count.

    Args:
        model: whose state is kept.
        others: tensors whose devices count beside those of its parameters.
        parameters: the names of those that its forward pass writes into.
        arguments: of a call, whose tensors and containers it may write into.

    Attributes:
        attributes: of the modules, as they were.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Iterable[torch.Tensor] = (),
        parameters: Collection[str] = (),
        arguments: tuple[Any, ...] = (),
    ) -> None:
        self.attributes = Attributes(model)
        # a call may give a parameter other memory: `p.data = p.data * m + q.data * (1 - m)`, as MoCo does
        plain = (p for p in parameters_in(modules_in(model)) if type(p.data) is torch.Tensor)
        self._memory = [(p, p.data) for p in plain if p.layout == torch.strided]
        written = [p for name, p in model.named_parameters() if name in parameters] if parameters else []
        own = chain.from_iterable(buffers_of(module).values() for module in modules_in(model))
        changing = [*{id(b): b for b in (*own, *dense_tensors(arguments)) if b is not None}.values(), *written]
        self._containers = _contents(arguments)
        self._contents = [_saved(b) for each in changing if not each.is_meta for b in inside(each)]
        devices = dict.fromkeys(t.device for t in (*parameters_in(modules_in(model)), *others))
        here = [(accelerator, d) for d in devices if (accelerator := accelerator_of(d)) is not None]
        self._generators = [(accelerator, d, accelerator.random_state(d)) for accelerator, d in here]
        self._own = [(g, g.get_state()) for g in generators_of(model)]
        self._random, self._undraw = bytes_of(torch.get_rng_state()), undrawing(model)

    def restore(self) -> None:
        """Put the state back; buffers that have not changed are not written into."""
        self.attributes.restore()
        for container, before in self._containers:
            _fill(container, before)
        for p, data in self._memory:
            if storage_key(p) != storage_key(data):
                p.data = data
        _put_back(self._contents)
        torch.set_rng_state(torch.from_numpy(self._random))
        for generator, state in self._own:
            generator.set_state(state)
        self._undraw()
        for accelerator, device, state in self._generators:
            accelerator.set_random_state(device, state)


def generators_of(model: nn.Module) -> list[torch.Generator]:
    """The random number generators that a model has as attributes, in containers too, or that its code names."""
    modules = modules_in(model)
    tables = set(map(id, tables_of(modules)))
    values = list(chain.from_iterable(vars(module).values() for module in modules))
    values = [x for x in values if type(x) not in _PLAIN and (type(x) not in _TABLES or x)]  # most are empty tables
    kinds = dict(zip(map(type, values), values, strict=True))
    leaves = {kind for kind, x in kinds.items() if pytree.tree_is_leaf(x) and not isinstance(x, torch.Generator)}
    values = [x for x in values if type(x) not in leaves and id(x) not in tables]
    found = [*pytree.tree_leaves(values), *named_generators(modules)]
    return list({id(x): x for x in found if isinstance(x, torch.Generator)}.values())


def _plain(module: nn.Module) -> dict[str, Any]:
    """None, numbers, text, containers, and tensors: a state that the next call goes on from has a graph."""
    found = {k: v for k, v in vars(module).items() if type(v) in _SIMPLE or isinstance(v, _KEPT)}
    for name in TABLES:
        found.pop(name, None)
    return found


def _others(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The iterators of Python's own classes, and the objects of others that have attributes, by the names that a module
    has for them.
    """
    own = vars(module)
    for name, x in own.items():
        kind = type(x)
        if kind in _SIMPLE or isinstance(x, _NO_STATE) or name in TABLES:
            continue
        if _is_iterator(x) or (hasattr(x, "__dict__") and not callable(x)):
            yield own, name, x


def _is_iterator(x: Any) -> bool:
    return type(x).__module__ in ("builtins", "itertools") and isinstance(x, Iterator) and not isgenerator(x)


def _contents(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The containers among these values, and inside them, that can be changed, each with a copy. O(their contents).

    Those of Python's own classes: others may refuse to be written into.
    """
    found: dict[int, tuple[Any, Any]] = {}
    seen: set[int] = set()
    left = [x for x in values if isinstance(x, tuple) or type(x) in CONTAINERS]
    while left:
        container = left.pop()
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
        left += [x for x in inner if isinstance(x, tuple) or type(x) in CONTAINERS]
    return list(found.values())


def _fill(container: Any, before: Any) -> None:
    """Give a container the contents that it had, where it has others."""
    if not before:
        same = not container
    elif isinstance(container, dict):
        same = container.keys() == before.keys() and all(container[k] is v for k, v in before.items())
    else:
        same = len(container) == len(before) and all(a is b for a, b in zip(container, before, strict=True))
    if same:
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _parts(module: nn.Module) -> tuple[str, ...]:
    return tuple([name for table in tables_of([module]) for name, own in table.items() if own is not None])


_Saved = tuple[torch.Tensor, torch.Size, Any]  # its shape, and the bytes of its elements


def _saved(t: torch.Tensor) -> _Saved:
    return t, t.shape, bytes_of(t)


def _put_back(contents: Iterable[_Saved]) -> None:
    with torch.no_grad():
        for t, shape, saved in contents:
            if t.shape != shape:  # a first call makes room in an empty buffer
                t.resize_(shape)
            if not np.array_equal(bytes_of(t), saved):
                t.copy_(like(saved, t))


@contextmanager
def untouched(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Gradients are off, and the model's state is put back afterwards; yields copies of the arguments."""
    state = ModelSnapshot(model, tensors_in((args, dict(kwargs))))
    writes = ParameterWrites(model, keep=state.attributes)
    try:
        with torch.no_grad(), writes:
            yield with_tensors(args, kwargs, lambda _, t: t.clone())
    finally:
        state.restore()
        _put_back(writes.before)


@contextmanager
def undone_on(error: type[Exception], model: nn.Module, parameters: Collection[str]) -> Iterator[None]:
    """Put the model's state back where an error of that kind is raised; the parameters are as in `ModelSnapshot`."""
    state = ModelSnapshot(model, parameters=parameters)
    try:
        yield
    except error:
        state.restore()
        raise


@contextmanager
def containers_kept(model: nn.Module) -> Iterator[None]:
    """Puts back what was in the containers outside of a model that its code and hooks name."""
    before = _contents(named_containers(modules_in(model)))
    try:
        yield
    finally:
        for container, contents in before:
            _fill(container, contents)


@contextmanager
def fakes_forgotten() -> Iterator[None]:
    """Has no fake tensor of a trace stay in a `functools.lru_cache`: real calls would be given it."""
    try:
        yield
    finally:
        forget_fakes()


def forget_fakes() -> None:
    """Clear every `functools.lru_cache` that kept a fake tensor, as it is or in containers."""
    # each refers to its type: to ask for those takes half as long as to look at the type of every object
    caches = [c for c in gc.get_referrers(_LRU_CACHE) if type(c) is _LRU_CACHE]
    if not _keep_fakes(caches):  # one look at all of them takes a tenth of the time of one at each
        return
    for cache in caches:
        if _keep_fakes([cache]):
            cache.cache_clear()


def _keep_fakes(caches: list[Any]) -> bool:
    seen: set[int] = set()
    found = gc.get_referents(*caches)
    while found:
        kinds = set(map(type, found))  # some objects do not tell isinstance() a class
        if any(issubclass(kind, FakeTensor) for kind in kinds):
            return True
        containers = {kind for kind in kinds if issubclass(kind, (dict, list, tuple))}
        inner = [each for each in found if type(each) in containers and id(each) not in seen]
        seen.update(map(id, inner))
        found = gc.get_referents(*inner)
    return False
