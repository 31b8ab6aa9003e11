"""What calls of a planned model without gradients take, and what the loop makes of their results."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from threading import get_ident
from typing import Any

import torch
from torch import nn, optim

from planner.compat.autograd import is_transformed
from planner.compat.dispatch import LastingMode, may_last, switch_off, switch_on
from planner.compat.tensors import is_traceable_wrapper_subclass, storage_key
from planner.core.account import ATTRIBUTES
from planner.core.attributes import state_of
from planner.core.call import Call, gradient_of, parts_in, storages, tensors_in
from planner.core.objects import dense_tensors
from planner.core.plan import PlanRecord
from planner.costs.static_memory import storage_bytes
from planner.errors import gb, warn
from planner.runtime.cuda_graphs import captures
from planner.runtime.holders import Path, bound_anew, bound_by_call, held_in
from planner.runtime.made import MadeStorages, call_of, takes_memory
from planner.runtime.recorded import workspaces

LARGER = 1.25  # times the largest batch without gradients: such a one is looked at
MOST_OPS = 200_000  # of an evaluation: no more are looked at

log = logging.getLogger("planner")


def planned_bytes(
    model: nn.Module, plan: PlanRecord, optimizers: Iterable[optim.Optimizer], counted: Collection[optim.Optimizer]
) -> int:
    """Bytes of a model's parameters, buffers and gradients, and of its optimizers' state, as its plan counts them.

    Args:
        model: that trains by the plan.
        plan: for it.
        optimizers: that step its parameters.
        counted: optimizers whose state others count.
    """
    shared = storage_bytes(t for o in optimizers if o in counted for t in tensors_in(list(o.state.values())))
    state = max(0, plan.account.get("optimizer state", 0) - shared)
    return gradient_bytes(model) + sum(plan.account.get(n, 0) for n in ("parameters", "buffers", ATTRIBUTES)) + state


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients of a model's parameters, as all of them come; one that is frozen now may have one."""
    return storage_bytes(p for p in model.parameters() if p.requires_grad or p.grad is not None)


def tensors_of(model: nn.Module, optimizers: Sequence[optim.Optimizer]) -> Any:
    """A tree of a model's parameters, buffers, attributes, gradients, and the state of its optimizers."""
    own = [*state_of(model), *map(gradient_of, model.parameters())]
    return [own, [list(optimizer.state.values()) for optimizer in optimizers]]


class _Live(LastingMode):  # type: ignore[no-untyped-call]
    """The most bytes of tensors that were alive at once: of those that ops made, and of what was there before.

    Attributes:
        calls: the distinct ops that ran, by key, each with the most bytes that were alive beside its workspace.
    """

    def __init__(self, device: torch.device, before: _Live | None = None) -> None:
        super().__init__()
        self.device, self.process = device, os.getpid()
        self.made: MadeStorages = MadeStorages() if before is None else before.made
        self.beside: MadeStorages = MadeStorages() if before is None else before.beside
        self.most: int = 0 if before is None else before.most
        self.calls: dict[str, tuple[int, Call]] = {} if before is None else before.calls
        self._ops: int = 0 if before is None else before._ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.over or os.getpid() != self.process:
            return func(*args, **kwargs)
        if any(map(is_traceable_wrapper_subclass, tensors_in((args, kwargs)))):
            return NotImplemented  # the wrapper's own ops on the tensors inside it come here
        result = func(*args, **kwargs)
        self.enter(result, (args, kwargs))
        self._describe(func, args, kwargs, result)
        self._ops += 1
        self.over |= self._ops > MOST_OPS
        return result

    def enter(self, result: Any, given: Any) -> None:
        """An op has made these, as far as they are not what it was given."""
        try:
            before = {storage_key(t) for t in tensors_in(given)}
            for t in tensors_in(result):
                if takes_memory(t, self.device) and (key := storage_key(t)) not in before:
                    self.made.add(t.untyped_storage(), key)
            self.most = max(self.most, self.made.live + self.beside.live)
        except Exception as e:  # a tensor without a storage, or one of the loop's own kind: the loop goes on
            log.debug("an op of an evaluation was not looked at: %s: %s", type(e).__name__, e)

    def _describe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        try:
            here = any(takes_memory(t, self.device) for t in tensors_in(result))
            if here and (call := call_of(func, args, kwargs, result)) is not None:
                before, _ = self.calls.get(call.key, (0, call))
                self.calls[call.key] = max(before, self.made.live + self.beside.live), call
        except Exception as e:  # as above
            log.debug("an op of an evaluation was not described: %s: %s", type(e).__name__, e)

    def hold(self, tree: Any) -> None:
        """These are there as well."""
        for t in parts_in(tree):
            if t.device == self.device and (key := storage_key(t)) not in self.made.made:
                self.beside.add(t.untyped_storage(), key)
        self.most = max(self.most, self.made.live + self.beside.live)

    def leave(self) -> None:
        """The model is gone: there is nobody to tell."""
        self.over = True


class Evaluations:
    """The calls of a model without gradients, which no plan is for.

    Looks at the first one, with all that runs until the next training call, and at those of larger batches than before.
    A batch that is hardly larger, as at each token that a language model generates, is looked at only where the call
    would go over the budget if it took more in proportion.

    Attributes:
        live: looks at what runs now.
        warned: whether it was said that they take more than the budget.
        left: what of the latest ones was still held as the next training call began, as far as it is alive.
        made_batch: whether the batch of that call was made since the first of them, and so were its targets.
    """

    def __init__(self) -> None:
        self._largest = self._took = 0  # bytes of the batch, and of what its call took
        self._others = self._then = 0  # bytes that the loop holds beside the step, now and when that call came
        self._remains = 0  # of what was made from that call on, bytes that were there as the next training call began
        self._budget: float = inf  # in bytes
        self._planned = False  # whether a plan says what the loop holds beside
        self._workspaces: dict[str, int] = {}  # of ops, by key
        self._first = MadeStorages()  # the batch of the first call that is looked at
        self.left: list[MadeStorages] = []
        self._made = False  # whether the loop makes the batches, which are not part of its data then
        self.live: _Live | None = None
        self.warned = self.made_batch = False

    def run(
        self,
        call: Callable[..., Any],
        batch: tuple[Any, Any],
        model: nn.Module,
        others: int | None,
        budget: int,
        static: Callable[[], Any],
        may_look: Callable[[], bool],
    ) -> Any:
        """Call the model; warn, once, where that takes more than the budget.

        Args:
            call: the model's own.
            batch: arguments of the call.
            model: whose call it is.
            others: bytes that the loop holds beside its training step, as the plan has it; None before the first plan.
            budget: of that step, in bytes.
            static: gives a tree of what is held all the time.
            may_look: says whether a dispatch mode may be switched on here.
        """
        (args, kwargs), device = batch, next(model.parameters()).device
        given = tensors_in(batch)
        here = [t for t in given if t.device == device and t.layout == torch.strided]
        nbytes = sum(t.nbytes for t in here)
        if others is not None and not self._planned:  # what came before is judged anew, with all that is held
            self._planned, self._largest, self.warned = True, 0, False
        most = self._largest
        if self.live is not None and not is_transformed(given):
            self._made |= {storage_key(t) for t in here} <= self.live.made.made.keys()
        self._others = others or 0
        hardly = nbytes < LARGER * most and nbytes * (self._others + self._took) <= budget * most
        if self.warned or nbytes <= most or hardly or captures(model) or not may_look():
            self._tell()  # more of what is beside them may be known now
            return self._unseen(call, args, kwargs)
        if is_transformed([*model.parameters(), *given]):
            return call(*args, **kwargs)
        self._largest, self._budget, self._then, self._remains = nbytes, budget, self._others, 0
        alone = (self.live is None or self.live.over) and not may_last()
        live = self._look(model, device, here)
        live.hold([static(), here])
        try:
            result = call(*args, **kwargs)
        except BaseException:
            self.end()
            raise
        if alone:
            switch_off(live)
        self._judge(live)
        return result

    def _look(self, model: nn.Module, device: torch.device, batch: Sequence[torch.Tensor]) -> _Live:
        """The mode that is on, or another one in its place."""
        live = self.live
        if live is not None and not live.over:
            return live
        if live is None:
            self._first = MadeStorages()
            for t in batch:
                self._first.add(t.untyped_storage(), storage_key(t))
        self.live = _Live(device, live)
        weakref.finalize(model, self.live.leave).atexit = False
        switch_on(self.live)
        return self.live

    def _unseen(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call that is not looked at; its results are, where the mode could not stay on."""
        if self.live is not None and self.live.over:  # of a model that is not trained, maybe
            switch_off(self.live)
        result = call(*args, **kwargs)
        if self.live is not None and self.live.over:
            self.live.enter(result, (args, kwargs))
        return result

    def end(self, batch: Any = None, model: nn.Module | None = None, optimizers: Sequence[optim.Optimizer] = ()) -> int:
        """A training call begins, or the plan is taken off: what ran without gradients has ended.

        Returns the bytes of what was made there and is still held, without what the account has lines for: the batch of
        the training call, and the model's parameters, buffers, gradients and state of optimizers, as they are now.
        """
        live, self.live = self.live, None
        if live is None:
            return 0
        switch_off(live)
        self._judge(live)
        coming = storages(dense_tensors(batch))
        self.made_batch = not coming.keys().isdisjoint(live.made.made)
        for key in coming | storages([] if model is None else tensors_of(model, optimizers)):
            live.made.drop(key)
            self._first.drop(key)
        self.left = [live.made, *([self._first] if self._made else [])]
        if any(each.live for each in self.left):  # torch.compile leaves what it has compiled for in reference cycles
            gc.collect()
        self._remains = sum(each.live for each in self.left)
        return self._remains

    def renewed(self, bound: Collection[Path]) -> int:
        """Of what these left, the bytes of what only such variables hold as a step, whose first call begins, binds anew
        before its backward pass.

        Args:
            bound: the paths to them.
        """
        alive = {key: nbytes for each in self.left for key, (_, nbytes) in each.made.copy().items()}
        bound = {*bound, *bound_by_call(inspect.currentframe())}
        return sum(alive[key] for key in bound_anew(held_in(get_ident()), bound, alive))

    def _judge(self, live: _Live) -> None:
        """Find what all took at once, with the workspaces of ops where these decide."""
        self._took = live.most
        if not self.warned and self._others + live.most <= self._budget:
            new = {key: call for key, (_, call) in live.calls.items() if key not in self._workspaces}
            self._workspaces |= workspaces(new, live.device, gradients=False)
            self._took = max([live.most, *(held + self._workspaces[key] for key, (held, _) in live.calls.items())])
        self._tell()

    def _tell(self) -> None:
        """Warn, once, where that is over the budget."""
        # what is known to be beside a step since then has what remained of these calls in it
        takes = self._took + self._then + max(0, self._others - self._then - self._remains)
        if takes > self._budget and not self.warned:
            self.warned = True
            warn(
                f"calls of the model without gradients take {gb(takes)} with all that is held beside them, of "
                f"{gb(int(self._budget))}, and no plan is for such calls: give them smaller batches, and keep less of "
                "their results on the device"
            )
