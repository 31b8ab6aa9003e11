"""Runs a training loop with and without a plan, and measures each of its steps from the second by torch's profiler.

What a step holds is what was live when the second one began, plus what torch's allocator reports from there on: the
profiler knows nothing of older memory, so each live storage is moved, in place, once the profiler runs. Live is each
storage of torch's own allocator that some tensor in Python or the gradient of one uses: parameters, gradients, state of
optimizers, batches, and whatever else the loop keeps; not what was there before the loop began.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.profiler import ProfilerActivity, profile, record_function

from planner import InfeasibleBudgetError, applied_plans, plan
from planner.planning import pipeline

STEPS = 6
GB = 2**30
MARK = "end of step"
ATTEMPTS = 4  # with a larger budget each, where the budget does not suffice

Put = Callable[[nn.Module], nn.Module]
Ended = Callable[[Any], None]


@dataclass(frozen=True)
class Loop:
    """A training loop, and what it may come to.

    Attributes:
        run: is given what plans a model, and what it calls at the end of each of its steps with the losses.
        plans: how many plans may be made, at most.
        tolerance: relative difference of losses that is no error; 0 for the same bits.
        refused: what the error says, where training by a plan is refused.
        off: how far the highest step may be below the prediction, as a part of it; above it, by a hundredth at most.
        share: of the peak without a plan, for the budget.
        thorough: says nearly the same as others: `make test` leaves it out.
    """

    run: Callable[[Put, Ended], Any]
    plans: int = 2
    tolerance: float = 0.0
    refused: str | None = None
    off: float = 0.01
    share: float = 0.75
    thorough: bool = False


@dataclass
class Seen:
    """What a run of a loop came to: bytes held at the peak of each step from the second, and what it trained.

    Attributes:
        measured: the peak of each step from the second, in bytes.
        predicted: the largest peak of the plans, one for each kind of call, that were there when each of these steps
            ended.
        losses: everything that the loop reported.
        state: what the loop left: parameters, buffers, gradients, random state.
        plans: how many plans were made.
        budget: what was asked for, in bytes; 0 without a plan.
        infeasible: the budgets that were refused before, in bytes.
    """

    measured: list[int]
    predicted: list[int]
    losses: list[float]
    state: dict[str, torch.Tensor | None]
    plans: int = 0
    budget: float = 0.0
    infeasible: list[float] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return max(self.measured)


class Meter:
    """What a loop calls at the end of each step."""

    def __init__(self, models: list[nn.Module]) -> None:
        self.models = models
        self.older = list(_storages().values())
        self.losses: list[float] = []
        self.predicted: list[int] = []
        self.step = 0
        self.live = 0
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __call__(self, loss: Any) -> None:
        losses = loss if isinstance(loss, (list, tuple)) else [loss]
        self.losses += [float(each) for each in losses]
        self.step += 1
        if self.step == 1:
            gc.collect()
            self.profiler.start()
            self.live = _relocate({s.data_ptr() for s in self.older})
        elif self.step <= STEPS:
            plans = [each for model in self.models for each in applied_plans(model)]
            self.predicted.append(max((p.peak_bytes for p in plans), default=0))
        if self.step <= STEPS:
            with record_function(MARK):
                pass
        if self.step == STEPS:
            self.stop()

    def stop(self) -> None:
        """End the profiler, if it runs."""
        if self.step and _is_profiling():
            self.profiler.stop()

    def measured(self) -> list[int]:
        """The most bytes held in each step from the second."""
        assert self.step >= STEPS, f"the loop ended after {self.step} steps"
        peaks, most, level = [], self.live, self.live
        events = _events(self.profiler)
        for change in events[events.index(None) + 1 :]:  # without the relocation
            level += change or 0
            most = max(most, level)
            if change is None:
                peaks.append(most)
                most = level
        return peaks


def _is_profiling() -> bool:
    return torch.autograd._profiler_enabled()


def _events(profiler: profile) -> list[int | None]:
    """Bytes of each allocation, negative for a free, in order; None at the end of a step."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    events = [e for e in events if e["name"] == "[memory]" or (e["name"] == MARK and e["ph"] == "X")]
    events.sort(key=lambda e: (e["ts"], e["args"].get("Ev Idx", -1)))
    return [None if e["name"] == MARK else e["args"]["Bytes"] for e in events]


def _storages() -> dict[int, torch.UntypedStorage]:
    """Storages of torch's CPU allocator that tensors in Python and their gradients use, by address."""
    found: dict[int, torch.UntypedStorage] = {}
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and not issubclass(type(t), FakeTensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    for t in tensors:
        with suppress(RuntimeError, NotImplementedError):  # sparse ones, wrappers
            storage = t.untyped_storage()
            if storage.device.type == "cpu" and storage.nbytes() and storage.resizable():
                found[storage.data_ptr()] = storage
    return found


def _relocate(older: set[int]) -> int:
    """Allocate each live storage anew, in place, which tells the profiler of it; the bytes of all of them."""
    storages = [s for address, s in _storages().items() if address not in older]
    for storage in storages:
        storage.resize_(storage.nbytes())
    return sum(s.nbytes() for s in storages)


@contextmanager
def _counted() -> Iterator[list[Any]]:
    """The plans that are made meanwhile, wherever in the planner."""
    made: list[Any] = []
    original = pipeline.make_plan

    def make_plan(*args: Any, **kwargs: Any) -> Any:
        planned = original(*args, **kwargs)
        made.append(planned.record)
        return planned

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("planner.") and vars(module).get("make_plan") is original:
                patch.setattr(module, "make_plan", make_plan)
        yield made


def run(loop: Loop, put: Put = lambda model: model) -> Seen:
    """One run of a loop, from the same seeds."""
    torch.compiler.reset()
    gc.collect()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    models: list[nn.Module] = []

    def putting(model: nn.Module) -> nn.Module:
        models.append(model)
        return put(model)

    meter = Meter(models)
    with _counted() as made:
        try:
            more = loop.run(putting, meter)
        finally:
            meter.stop()
    return Seen(meter.measured(), meter.predicted, [*meter.losses, *(more or [])], _state(models), len(made))


def _state(models: list[nn.Module]) -> dict[str, torch.Tensor | None]:
    state: dict[str, torch.Tensor | None] = {"random state": torch.get_rng_state()}
    for n, model in enumerate(models):
        state |= {f"{n} {name}": t.detach().clone() for name, t in model.state_dict().items()}
        state |= {f"{n} {name}.grad": p.grad for name, p in model.named_parameters()}
    return state


def _put(model: nn.Module, budget_gb: float) -> nn.Module:
    return plan(model, budget_gb=budget_gb).apply()


def run_within(loop: Loop, budget: float) -> Seen:
    """The loop under a plan for a budget in bytes; where that is refused, for the least that the refusal names."""
    refused: list[float] = []
    while True:
        try:
            seen = run(loop, partial(_put, budget_gb=budget / GB))
        except InfeasibleBudgetError as e:
            if len(refused) == ATTEMPTS:
                raise
            refused.append(budget)
            budget = e.minimum_gb * GB
            continue
        seen.budget, seen.infeasible = budget, refused
        return seen


def differences(a: Seen, b: Seen, tolerance: float = 0.0) -> list[str]:
    """What differs of losses and of what the loop left; gradients that are None in one run alone are a difference."""
    found = []
    if a.losses != (b.losses if not tolerance else pytest.approx(b.losses, rel=tolerance)):
        off = [abs(x - y) / max(abs(y), 1e-30) for x, y in zip(a.losses, b.losses, strict=False)]
        found.append(f"losses, by {max(off):.1e} at most")
    for name, ours in a.state.items():
        theirs = b.state[name]
        if (ours is None) != (theirs is None):
            found.append(f"{name} is {'' if ours is None else 'not '}None")
        elif ours is not None and theirs is not None and not _close(ours, theirs, tolerance):
            found.append(name)
    return found


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if not tolerance or not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def judged(loop: Loop) -> tuple[Seen, Seen]:
    """The loop without a plan, and under one for a share of what it then holds, or the least that is feasible."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unplanned = run(loop)
        return unplanned, run_within(loop, loop.share * unplanned.peak)
