"""A call of a model that leaves it as it was."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from planner.capture.trace.generators import generators_of, of_torch
from planner.capture.trace.module_state import Attributes, contents_of, refill
from planner.capture.trace.random_state import undrawing
from planner.compat.dispatch import written
from planner.compat.fake import FakeTensor
from planner.compat.modules import buffers_of, parameters_in
from planner.compat.tensors import TorchDispatchMode, storage_key, version_of
from planner.core.call import inside, tensors_in
from planner.core.host import bytes_of, like
from planner.core.objects import dense_tensors, with_tensors
from planner.devices.accelerator import accelerator_of

FIRST = 3  # calls in which all tensors that they are given are copied
MOST_IN_VAIN = 6  # looks of which each doubles the number of calls until the next
_LRU_CACHE = type(functools.cache(lambda: None))
# how often those had served that kept no fake tensor: a trace that asks for nothing leaves none there
_LOOKED_AT: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


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
        attributes: of the modules, where they are known.

    Attributes:
        attributes: of the modules, as they were.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Iterable[torch.Tensor] = (),
        parameters: Collection[str] = (),
        arguments: tuple[Any, ...] = (),
        attributes: Attributes | None = None,
    ) -> None:
        self.attributes = Attributes(model) if attributes is None else attributes
        modules = self.attributes.modules
        trained = parameters_in(modules)
        # a call may give a parameter other memory: `p.data = p.data * m + q.data * (1 - m)`, as MoCo does
        plain = ((p, p.data) for p in trained if p.layout == torch.strided)
        self._memory = [(p, data) for p, data in plain if type(data) is torch.Tensor]
        written = [p for name, p in model.named_parameters() if name in parameters] if parameters else []
        buffers = chain.from_iterable(buffers_of(module).values() for module in modules)
        changing = [*{id(b): b for b in (*buffers, *dense_tensors(arguments)) if b is not None}.values(), *written]
        self._containers = contents_of(arguments)
        self._contents = [_saved(b) for each in changing if not each.is_meta for b in inside(each)]
        devices = dict.fromkeys(t.device for t in (*trained, *others))
        here = [(accelerator, d) for d in devices if (accelerator := accelerator_of(d)) is not None]
        self._generators = [(accelerator, d, accelerator.random_state(d)) for accelerator, d in here]
        generators = generators_of(modules)
        self._own = [(g, g.get_state()) for g in of_torch(generators)]
        self._random, self._undraw = bytes_of(torch.get_rng_state()), undrawing(found=generators)

    def restore(self) -> None:
        """Put the state back; buffers that have not changed are not written into."""
        self.attributes.restore()
        for container, before in self._containers:
            refill(container, before)
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


class Undoing:
    """Puts a model's state back where its call fails, time and again.

    What a call leaves as it was need not be collected for the next one. Where each changes something, it is looked
    whether that is so ever less often.
    """

    def __init__(self) -> None:
        self._attributes: Attributes | None = None
        self._rests = self._in_vain = 0  # calls until the next look; how many looks came to nothing in a row
        self._calls, self._written = 0, set[int]()  # and which of the tensors that they were given they wrote into

    @contextmanager
    def on(
        self, error: type[Exception], model: nn.Module, parameters: Collection[str], arguments: tuple[Any, ...] = ()
    ) -> Iterator[None]:
        """Where an error of that kind is raised; the parameters are as in `ModelSnapshot`. Of the call's arguments, the
        containers are put back, and the tensors that it writes into, if it is one of the first, or those have.
        """
        attributes, self._attributes = self._attributes, None
        if attributes is None or not attributes.again(model):
            attributes = Attributes(model)
        given = [t for t in dense_tensors(arguments) if not t.is_inference()]
        versions = [*map(version_of, given)]
        kept = [t for at, t in enumerate(given) if self._calls < FIRST or at in self._written]
        state = ModelSnapshot(model, parameters=parameters, arguments=(kept,), attributes=attributes)
        containers = contents_of(arguments)
        try:
            yield
        except error:
            state.restore()
            for container, before in containers:
                refill(container, before)
            raise
        self._calls += 1
        self._written.update(at for at, t in enumerate(given) if version_of(t) != versions[at])
        if self._rests:
            self._rests -= 1
        elif attributes.again(model):  # else it would hold what the call has replaced
            self._attributes, self._in_vain = attributes, 0
        else:
            self._in_vain = min(self._in_vain + 1, MOST_IN_VAIN)
            self._rests = 2**self._in_vain


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
    every = (c for c in gc.get_referrers(_LRU_CACHE) if type(c) is _LRU_CACHE)
    served = {c: info for c in every if (info := c.cache_info()) != _LOOKED_AT.get(c)}
    # one look at all of them takes a tenth of the time of one at each
    keeping = [c for c in served if _keep_fakes([c])] if _keep_fakes([*served]) else ()
    for cache in keeping:
        cache.cache_clear()
    _LOOKED_AT.update({cache: served[cache] for cache in served.keys() - {*keeping}})


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
