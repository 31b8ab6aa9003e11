"""The calls that a training loop makes of parts of a model in one step, and a module that makes them again."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from planner.compat import pytree
from planner.compat.autograd import origins, sequence_number
from planner.compat.dynamo import own_frame
from planner.compat.modules import with_call
from planner.compat.tensors import is_traceable_wrapper_subclass, storage_key
from planner.core.objects import leaves
from planner.runtime.compile_refused import COMPILE
from planner.runtime.entries import Entry
from planner.runtime.interception import CARRIER
from planner.runtime.made import MadeStorages
from planner.runtime.signature import NUMBERS, Signature, without_numbers, without_strides
from planner.runtime.unread import without

PLAIN = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
MOST_CALLS = 256  # before a backward pass: with more, the loop goes its own way


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor that comes from outside the model; by its number among those of the step."""

    number: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A tensor that an earlier call of the step returned, or that without its graph."""

    call: int
    at: int
    detached: bool


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor that the loop computed from what earlier calls returned, and that needs a gradient.

    Attributes:
        shape, stride, dtype: its own.
        sources: what it was computed from: results, by call and position, and other such tensors, by their number.
        number: among such tensors of the step.
        beside: the strides of each source.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...] = field(compare=False)  # which follow those of the sources
    dtype: torch.dtype
    sources: tuple[tuple[int, int] | int, ...]
    number: int
    beside: tuple[tuple[int, ...], ...] = field(compare=False)

    def strides(self, sources: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Its strides where those of its sources are others than they were: a part of a tensor has that one's, and what
        is computed element by element those that torch gives a tensor that is made like it.
        """
        for then, now in zip(self.beside, sources, strict=True):
            if self.stride == then:
                return now.stride()
            if len(then) == len(self.shape) == now.dim() and self.stride == _strides_like(self.shape, then):
                return _strides_like(self.shape, now.stride())
        return self.stride


@dataclass(frozen=True, slots=True)
class Again:
    """A tensor that an earlier call was given, and that the loop computed for it; by its number among such tensors."""

    number: int


def _strides_like(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()


@dataclass(frozen=True, slots=True)
class Unread:
    """A number that the model does not read: any other of its type does as well."""

    kind: type
    value: Any = field(compare=False)


@dataclass(frozen=True, slots=True)
class EntryCall:
    """One call; two are equal where one plan serves both.

    Attributes:
        entry: of the model.
        sources: for each leaf of the arguments where it comes from, or itself where it is no tensor.
        layout: of the arguments.
        signature: of the call; strides do not count of what the model itself has made, which may lay it out otherwise
            by a plan.
    """

    entry: Entry
    sources: tuple[Any, ...]
    layout: Any
    signature: Signature


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """A tensor that a step is given, without its contents."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def stand_in(self) -> torch.Tensor:
        """A tensor of zeros like it."""
        return _zeros(self.shape, self.stride, self.dtype, self.device).requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class StepCalls:
    """The calls of a step, in order.

    Attributes:
        calls: what decides whether two are equal.
        given: the tensors from outside the model.
        outputs: of the leaves of all results, those that the loop still had when the last call had returned.
        saved: for some calls, the bytes of what the loop computed for them that autograd's graph keeps.
        stays: bytes of what the loop has made between the calls, and what stays until the next step.
        gone: of results that the loop let go of, which leaf of which call, and how many calls had begun by then.
    """

    calls: tuple[EntryCall, ...]
    given: tuple[GivenTensor, ...] = field(compare=False)
    outputs: frozenset[int] = field(compare=False)
    saved: Mapping[int, int] = field(compare=False, default_factory=dict)
    stays: int = field(compare=False, default=0)
    gone: Mapping[tuple[int, int], int] = field(compare=False, default_factory=dict)

    @property
    def but_for_numbers(self) -> tuple[object, ...]:
        """Equal for steps that differ in numbers alone that their calls are given."""
        return tuple(
            (c.entry, *(type(x) if type(x) in NUMBERS else x for x in c.sources), without_numbers(c.signature))
            for c in self.calls
        )


def _zeros(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros, which may have entries in one place, as one that was expanded has."""
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    made.as_strided((made.untyped_storage().nbytes() // made.element_size(),), (1,)).zero_()
    return made


class CallsSeen:
    """The calls of a step as they come, which keep no tensor alive.

    Attributes:
        calls: so far.
        over: whether the backward pass has begun.
        why: what no plan can be made of, in words; empty where one can.
    """

    def __init__(self) -> None:
        self.calls: list[EntryCall] = []
        self.over = False
        self.why = ""
        self._given: list[tuple[weakref.ref[torch.Tensor], GivenTensor]] = []
        # by the sequence number of autograd's node, and which of its outputs it is: the result or derived tensor
        self._nodes: dict[tuple[int, int], tuple[int, int] | int] = {}
        self._strides: dict[tuple[int, int] | int, tuple[int, ...]] = {}  # of these
        self._derived = 0
        self._saved: dict[int, tuple[MadeStorages, int]] = {}  # for a call, what was made, and its bytes then
        self._stays = 0  # bytes of what was made for calls that are given nothing derived
        self._returned: list[list[tuple[weakref.ref[torch.Tensor] | None, int]]] = []  # and its storage
        self._alive = frozenset[int]()
        self._gone = dict[tuple[int, int], int]()

    def end(self) -> None:
        """The backward pass begins."""
        self.over = True

    def describe(
        self, entry: Entry, args: Any, kwargs: Any, signature: Signature, unread: Collection[int]
    ) -> EntryCall:
        """A call that comes; `returned()` follows. Nothing reads the leaves of its arguments at some positions."""
        found, layout = pytree.tree_flatten((tuple(args), dict(kwargs)))
        sources = tuple(Unread(type(x), x) if at in unread else self._source(x) for at, x in enumerate(found))
        inner = {at for at, source in enumerate(sources) if isinstance(source, (Returned, Derived, Again))}
        call = EntryCall(entry, sources, layout, without(without_strides(signature, inner), unread))
        self.calls.append(call)
        if len(self.calls) > MOST_CALLS:
            self.why = self.why or f"it makes {MOST_CALLS} calls of the model before a backward pass"
        return call

    def made_between(self, made: MadeStorages) -> None:
        """What the loop has made for the latest call, beside what it gives.

        Where it has computed something of the results of others, autograd's graph saves what is gone by the end.
        """
        if any(isinstance(source, Derived) for source in self.calls[-1].sources):
            self._saved[len(self.calls) - 1] = made, made.live
        else:
            self._stays += made.live

    def only_latest(self) -> None:
        """The call that came begins a step: forget those before it."""
        del self.calls[:-1]
        self._saved.clear()
        self._stays = 0
        self._returned.clear()
        self._gone.clear()

    def returned(self, result: Any) -> None:
        """What the latest call returned."""
        for at, t in enumerate(leaves(result)):
            if isinstance(t, torch.Tensor) and t.grad_fn is not None:
                self._note(t, (len(self._returned), at))
        self._returned.append([self._watched(t, (len(self._returned), at)) for at, t in enumerate(leaves(result))])

    def _watched(self, t: Any, leaf: tuple[int, int]) -> tuple[weakref.ref[torch.Tensor] | None, int]:
        if not isinstance(t, torch.Tensor) or is_traceable_wrapper_subclass(t):
            return None, 0
        calls, gone = self.calls, self._gone
        return weakref.ref(t, lambda _: gone.setdefault(leaf, len(calls))), storage_key(t)

    def steps(self) -> StepCalls:
        """The calls of the step."""
        now = {call: made.live for call, (made, _) in self._saved.items()}
        saved = {call: then - now[call] for call, (_, then) in self._saved.items()}
        given, stays = tuple(given for _, given in self._given), self._stays + sum(now.values())
        return StepCalls(tuple(self.calls), given, self._alive, saved, stays, dict(self._gone))

    def batch(self) -> list[torch.Tensor]:
        """What the step was given, as far as it is alive."""
        return [t for ref, _ in self._given if (t := ref()) is not None]

    def outputs(self, planned: Collection[int] | None) -> list[torch.Tensor | None]:
        """What all calls returned, by leaf: tensors that are alive; those are what the loop may compute a loss from.

        Args:
            planned: in a step that runs by a plan, the outputs of that one: its graphs keep others, which they saved.
        """
        refs = [ref for call in self._returned for ref, _ in call]
        found = [ref() if ref and (planned is None or at in planned) else None for at, ref in enumerate(refs)]
        self._alive = frozenset(at for at, t in enumerate(found) if t is not None)
        return found

    def leave_out(self, positions: Collection[int]) -> None:
        """The loop has let go of these outputs, and used none of them but for later calls."""
        self._alive -= set(positions)

    def _source(self, x: Any) -> Any:
        if isinstance(x, PLAIN):
            return x
        if not isinstance(x, torch.Tensor):
            self.why = self.why or f"it gives the model an object of type {type(x).__name__}"
            return type(x)
        if is_traceable_wrapper_subclass(x) or x.layout != torch.strided or isinstance(x, nn.Parameter):
            self.why = self.why or f"it gives the model a {type(x).__name__}"
            return type(x)
        if (returned := self._earlier(x)) is not None:
            return returned
        if x.grad_fn is not None and isinstance(known := self._nodes.get(_node(x)), int):
            return Again(known)
        if x.grad_fn is not None and (sources := origins(x.grad_fn, self._nodes)):
            number, self._derived = self._derived, self._derived + 1
            self._note(x, number)
            beside = tuple(self._strides[source] for source in sources)
            return Derived(tuple(x.shape), x.stride(), x.dtype, sources, number, beside)
        for number, (ref, _) in enumerate(self._given):
            if ref() is x:
                return Given(number)
        kind = GivenTensor(tuple(x.shape), tuple(x.stride()), x.dtype, x.device, x.requires_grad)
        self._given.append((weakref.ref(x), kind))
        return Given(len(self._given) - 1)

    def _note(self, t: torch.Tensor, name: tuple[int, int] | int) -> None:
        self._nodes[_node(t)] = name
        self._strides[name] = t.stride() if t.layout is torch.strided and not t.is_nested else ()

    def _earlier(self, x: torch.Tensor) -> Returned | None:
        for call, returned in enumerate(self._returned):
            for at, (ref, key) in enumerate(returned):
                t = ref() if ref is not None else None
                if t is x:
                    return Returned(call, at, False)
                if t is not None and not x.requires_grad and key == storage_key(x) and t.shape == x.shape:
                    return Returned(call, at, True)
        return None


def _node(t: torch.Tensor) -> tuple[int, int]:
    """The node of autograd that has made a tensor, and which of its outputs that is."""
    assert t.grad_fn is not None
    return sequence_number(t.grad_fn), t.output_nr


def step_model(model: nn.Module, step: StepCalls) -> nn.Module:
    """A module with the parts of a model, whose call makes the calls of a step; it shares everything with the model.

    It is given the tensors that the step is given, and returns what the loop has when the last call has returned.
    """
    functions = [each.entry.of(model)[1] for each in step.calls]  # the model's own call, where that is one

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def call(self: nn.Module, *given: torch.Tensor) -> Any:
        results: list[list[Any]] = []
        derived: list[torch.Tensor] = []
        for number, (each, function) in enumerate(zip(step.calls, functions, strict=True)):
            run = own_frame(self.get_submodule(each.entry.path), function)
            args, kwargs = _arguments(each, step.saved.get(number, 0), given, results, derived)
            _let_go(results, [leaf for leaf, begun in step.gone.items() if begun == number])
            _enter(run(*args, **kwargs), results)
            del args, kwargs
        return _outputs(step, results)

    made = with_call(model, call)
    for name, value in [*vars(made).items()]:
        if name in (CARRIER, COMPILE):  # what stands in for its own call
            del vars(made)[name]
        elif isinstance(value, torch.Tensor) and value.grad_fn is not None:  # a result of the step that has shown these
            vars(made)[name] = value.detach().new_zeros(()).expand(value.shape)
    return made


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _enter(result: Any, results: list[list[Any]]) -> None:
    results.append(leaves(result))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _let_go(results: list[list[Any]], gone: Sequence[tuple[int, int]]) -> None:
    for call, at in gone:
        results[call][at] = None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outputs(step: StepCalls, results: Sequence[Sequence[Any]]) -> Any:
    found = [leaf for result in results for leaf in result]
    return tuple(leaf if at in step.outputs else None for at, leaf in enumerate(found))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _arguments(
    call: EntryCall,
    saved: int,
    given: Sequence[torch.Tensor],
    results: Sequence[Sequence[Any]],
    derived: list[torch.Tensor],
) -> Any:
    """The positional and the keyword arguments of a call; for the first derived one, so many bytes are saved."""
    first = next((s for s in call.sources if isinstance(s, Derived)), None)
    values = [_value(s, saved if s is first else 0, given, results, derived) for s in call.sources]
    return pytree.tree_unflatten(values, call.layout)


def _value(
    source: Any,
    saved: int,
    given: Sequence[torch.Tensor],
    results: Sequence[Sequence[Any]],
    derived: list[torch.Tensor],
) -> Any:
    """An argument of a call, from its source; tensors that are derived are noted."""
    if isinstance(source, (Given, Again)):
        return (given if isinstance(source, Given) else derived)[source.number]
    if isinstance(source, Returned):
        found = results[source.call][source.at]
        return found.detach() if source.detached else found
    if isinstance(source, Derived):
        sources = [derived[s] if isinstance(s, int) else results[s[0]][s[1]] for s in source.sources]
        derived.append(_Between.apply(source, saved, *sources))  # type: ignore[no-untyped-call]
        return derived[-1]
    return source.value if isinstance(source, Unread) else source


class _Between(torch.autograd.Function):
    """Stands in for what a loop computes from the results of some calls for the next one."""

    @staticmethod
    def forward(ctx: Any, kind: Derived, saved: int, *results: torch.Tensor) -> torch.Tensor:
        ctx.kinds = [(t.shape, t.dtype, t.device) for t in results]
        ctx.save_for_backward(torch.empty(saved, dtype=torch.uint8, device=results[0].device))
        return _zeros(kind.shape, kind.strides(results), kind.dtype, results[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        (saved,) = ctx.saved_tensors
        saved.zero_()  # the backward pass reads what was saved for it
        return None, None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds)
