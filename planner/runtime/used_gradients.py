"""Which gradients a loop has used when the next step begins: those will be cleared, others will be added to."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn, optim

from planner.compat.tensors import version_of
from planner.core.loop import Gradients
from planner.costs.static_memory import storage_bytes
from planner.requests.optimizers import trained_by
from planner.runtime.recorder import Recorder
from planner.stepping.spent import SpentGradient

LONG = 16  # calls in a row

There = Sequence[tuple[torch.Tensor, weakref.ref[torch.Tensor]]]  # parameters, each with its gradient


def gradients_there(parameters: Iterable[torch.Tensor]) -> There:
    """The gradients that are there, and stay no longer for that."""
    return [(p, weakref.ref(p.grad)) for p in parameters if p.grad is not None]


def still_there(gradients: There) -> Iterator[torch.Tensor]:
    """The parameters whose gradients these still are."""
    return (p for p, gradient in gradients if p.grad is not None and gradient() is p.grad)


def _unspent(parameters: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters whose gradients are there, and not used by a step in the backward pass; each with its gradient."""
    each = ((p, p.grad) for p in parameters)
    return [(p, g) for p, g in each if g is not None and not isinstance(g, SpentGradient)]


class UsedGradients:
    """The gradients of a model that were used: by an optimizer of torch's, or by the loop itself.

    Attributes:
        untaken: the parameters, by identity, whose gradients are there and which no optimizer takes, so that none
            clears them, while all those that optimizers take are gone or were used: those of a body that a loop has
            not frozen and does not train.
    """

    def __init__(self) -> None:
        # by identity, the parameter, held weakly, and the version of its gradient when it was used
        self._by_optimizer: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._versions: dict[int, int] = {}  # of the parameters when the latest call began, by identity
        self.untaken: frozenset[int] = frozenset()
        self._clear = 0  # calls in a row that began without gradients
        self._changed: set[int] = set()  # those that were written into between that call and the one before
        # of parameters of any model, by identity: the gradient that an optimizer has used, and its version then
        self._of_any: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def optimizer_stepped(self, trained: Iterable[torch.Tensor]) -> None:
        """An optimizer of torch's has stepped these parameters."""
        self._by_optimizer |= {id(p): (weakref.ref(p), version_of(p.grad)) for p in trained if p.grad is not None}

    def any_stepped(self, optimizer: optim.Optimizer) -> None:
        """An optimizer of torch's has stepped, of this model or another one."""
        stepped = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        alive = {at: known for at, known in self._of_any.items() if known[0]() is not None}
        self._of_any = alive | {id(p): (weakref.ref(p.grad), version_of(p.grad)) for p in stepped}

    def spent(self, parameters: Iterable[torch.Tensor]) -> list[weakref.ref[torch.Tensor]]:
        """These parameters' gradients that an optimizer has used, and nothing has changed since."""
        used = ((p.grad, *self._of_any.get(id(p), (None, None))) for p in parameters)
        return [ref for g, ref, version in used if g is not None and ref and ref() is g and version == version_of(g)]

    @property
    def never_there(self) -> bool:
        """Whether calls have long begun without gradients, so that none need be told of that optimizers have used."""
        return self._clear >= LONG

    def call_begins(
        self,
        parameters: Sequence[nn.Parameter],
        stepped: Sequence[optim.Optimizer],
        recorder: Recorder | None,
        known: Gradients,
    ) -> None:
        """A call of the model begins; where optimizers of torch's tell of their steps, no versions are looked up.

        Args:
            parameters: of the model.
            stepped: the optimizers that were seen to step some of them.
            recorder: of what ran since the call before, where the loop is looked at.
            known: what becomes of gradients, as far as that is known.
        """
        before = self._versions
        self._versions = {} if stepped else {id(p): version_of(p) for p in parameters}
        self._changed = {at for at, version in self._versions.items() if before.get(at, version) != version}
        if not stepped and recorder is not None:  # writes into `p.data` do not change the version of `p`
            self._changed |= recorder.gone_into.replaced(parameters)
        if stepped and recorder is not None:  # gradients that microbatches add to are counted, whoever takes them
            self.untaken = frozenset() if known == "accumulated" else self._untaken(parameters, stepped)

    def _untaken(self, parameters: Iterable[nn.Parameter], stepped: Iterable[optim.Optimizer]) -> frozenset[int]:
        there = _unspent(parameters)
        others = {id(p) for p, _ in there}.difference(*map(trained_by, stepped))
        taken = ((p, g) for p, g in there if id(p) not in others)
        return frozenset(others if others and all(self._was_used(p, g) for p, g in taken) else ())

    def taken(self, parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The parameters but for those whose gradients no optimizer takes."""
        return (p for p in parameters if id(p) not in self.untaken)

    def untaken_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Bytes of the gradients that no optimizer takes."""
        return storage_bytes(p.grad for p in parameters if id(p) in self.untaken and p.grad is not None)

    def fewer(self, parameters: Iterable[torch.Tensor]) -> int | None:
        """Bytes of the gradients that are there and taken; None where they are as those of all that is trained."""
        gradients = [p.grad for p in self.taken(parameters) if p.requires_grad]
        spent = any(isinstance(gradient, SpentGradient) for gradient in gradients)
        if spent or (not self.untaken and all(g is not None and g.layout is torch.strided for g in gradients)):
            return None
        return storage_bytes(gradient for gradient in gradients if gradient is not None)

    def fate(self, parameters: Sequence[nn.Parameter]) -> Gradients | None:
        """What becomes of gradients that are taken, where some are there as a forward pass begins; None for none.

        Those that an optimizer has used, and that nothing has changed since, are expected to be cleared before the
        backward pass; and those of parameters that were written into since the call before, as by an optimizer of the
        loop's own: microbatches leave parameters as they are.
        """
        there = _unspent(self.taken(parameters))
        unknown, self._clear = self.never_there, 0 if there else self._clear + 1
        if not there or unknown:  # the next call tells, and the backward pass whether it adds to them
            self._by_optimizer.clear()
            return None
        used = all(self._was_used(p, g) or id(p) in self._changed for p, g in there)
        return "cleared late" if used else "accumulated"

    def _was_used(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        ref, version = self._by_optimizer.get(id(parameter), (None, None))
        return ref is not None and ref() is parameter and version == version_of(gradient)
