"""One model of the survey: planned, trained a few steps by the plan, and compared with eager on the same steps."""

from __future__ import annotations

import contextlib
import math
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner import InfeasibleBudgetError, Plan, PlannerError, plan
from planner.compat.dispatch import lasting_modes_off
from solvers.search import effort

from .measure import CANCELLED, step_peak, time_ratio
from .zoo import LIBRARIES, build
from .zoo.case import Case

Results = dict[str, torch.Tensor]
SHARE = 0.6  # of eager's measured peak
SHARE_OF_LIBRARIES = 0.7  # as more of it is parameters, in models that cannot be made as small
PAIRS = 5  # of steps that are timed
PLENTY = "100%"  # room to keep everything
ROUNDING = 1e-5  # relative error that single precision accounts for where eager's own is smaller or not known
SHORT = 2e6  # steps of a short search
SLACK = 4  # how many times eager's own error against float64 a planned step may have


@dataclass(frozen=True)
class Row:
    """What was found for one model; None where it was not reached. Bytes and seconds.

    Attributes:
        name, family, model: of the case; `model` is the class.
        verdict: "planned", "refused", "above budget", "wrong", "crashed".
        parameters: how many numbers the model trains or holds.
        regions: compiled graphs that were planned together.
        baseline_bytes: eager's measured peak.
        budget_bytes: what was planned for: a share of the baseline, or the least that is feasible.
        feasible: whether the share was.
        predicted_bytes, measured_bytes: peak of the planned step.
        bitwise: whether loss, outputs, gradients, buffers, parameters and random state are eager's to the last bit.
        error: else, the largest relative difference from eager.
        own_error, planned_error: else, of eager and of the planned step, the difference from eager in float64; where
            there is none to compare with, of torch.compile's aot_eager and of the planned step, from eager.
        as_kept: else, whether the planned step equals one that keeps everything, to the last bit.
        overhead, measured_overhead: estimated; median over pairs of steps of processor time, planned over eager, less
            one.
        plan_seconds: of `plan()` at the budget.
        short: whether the plan's search did a small part of its work.
        why: what was wrong, or the text of the refusal.
        trace: the last lines of a crash's traceback.
        warnings: of the planner, in the order in which they came.
    """

    name: str
    family: str
    model: str
    verdict: str
    parameters: int | None = None
    regions: int | None = None
    baseline_bytes: int | None = None
    budget_bytes: int | None = None
    feasible: bool | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    bitwise: bool | None = None
    error: float | None = None
    own_error: float | None = None
    planned_error: float | None = None
    as_kept: bool | None = None
    overhead: float | None = None
    measured_overhead: float | None = None
    plan_seconds: float | None = None
    short: bool = False
    why: str = ""
    trace: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def survey(family: str, name: str, short: bool = False) -> Row:
    """The row of one model: every error is a verdict. With `short`, searches are short in this process from here on."""
    if short:
        effort.STEPS, effort.STEPS_PER_OP = SHORT, 0.0

    def make() -> Case:
        torch.manual_seed(0)
        return build(family, name)

    case = make()
    found: dict[str, Any] = {
        "name": name,
        "family": family,
        "model": type(case.model).__name__,
        "short": short,
        "parameters": sum(p.numel() for p in case.model.parameters()),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _fill(case, make, found)
            verdict = _verdict(case, found)
        except PlannerError as e:
            verdict, found["why"] = "refused", f"{type(e).__name__}: {e}"
        except Exception as e:
            verdict, found["why"] = "crashed", f"{type(e).__name__}: {e}"
            found["trace"] = tuple(traceback.format_exc().strip().splitlines()[-12:])
    said = [f"{w.category.__name__}: {w.message}" for w in caught if "planner" in w.category.__module__]
    return Row(verdict=verdict, warnings=tuple(dict.fromkeys(said)), **found)


def _fill(case: Case, make: Callable[[], Case], found: dict[str, Any]) -> None:
    """Measure; what is known goes into `found` as soon as it is. The model is planned before it was ever called."""
    model, plain = case.model, make().model
    reference, expected = results(case, plain), evaluated(case, plain)
    found["baseline_bytes"] = peak(case, plain)
    p = _plan(case, found)
    p.apply()
    try:
        ours = [results(case, model) for _ in range(2)]
    except InfeasibleBudgetError as e:  # the loop holds more than the batch shows, as targets
        p.remove()
        p = _plan(case, found, e.minimum_gb)
        p.apply()
        ours = [results(case, model) for _ in range(2)]
    found["bitwise"] = not any(differing(r, reference) for r in ours)
    found["measured_bytes"] = peak(case, model)
    if expected is not None and differing(evaluated(case, model) or {}, expected):
        raise AssertionError("without gradients, the planned model does not return what eager does")
    with unchanged(model), unchanged(plain):
        ratio = time_ratio(lambda m: step(case, m), model, plain, PAIRS, clock=time.process_time)
    found["measured_overhead"] = ratio - 1
    p.remove()
    if not found["bitwise"]:
        _explain(case, make, ours, reference, found)


def _plan(case: Case, found: dict[str, Any], least: float = 0.0) -> Plan:
    """At the share of the baseline, or at the least feasible budget, which is known to be above `least` GB."""
    share = SHARE_OF_LIBRARIES if found["family"] in LIBRARIES else SHARE
    budget = max(least, share * found["baseline_bytes"] / 2**30)
    start = time.perf_counter()
    try:
        p = plan(case.model, case.batch, budget_gb=budget, loss_fn=case.loss_fn, progress=False)
        found["feasible"] = not least
    except InfeasibleBudgetError as e:
        p = plan(case.model, case.batch, budget_gb=e.minimum_gb, loss_fn=case.loss_fn, progress=False)
        found["feasible"] = False
    found |= {
        "plan_seconds": time.perf_counter() - start,
        "regions": len(p.graph_modules),
        "budget_bytes": p.budget_bytes,
        "predicted_bytes": p.peak_bytes,
        "overhead": p.overhead,
    }
    return p


def _explain(
    case: Case, make: Callable[[], Case], ours: list[Results], reference: Results, found: dict[str, Any]
) -> None:
    """Where a planned step is not eager's to the last bit: is it rounding, and is the graph or the plan the cause?"""
    found["error"] = max(error(r, reference) for r in ours)
    kept = plan(case.model, case.batch, budget_gb=PLENTY, loss_fn=case.loss_fn, progress=False)
    kept.apply()
    same = results(case, case.model)
    kept.remove()
    found["as_kept"] = not any(differing(r, same) for r in ours)
    found["own_error"], found["planned_error"] = _compiled_error(make(), reference), found["error"]
    other = make()
    with contextlib.suppress(RuntimeError):  # an op that has no double precision
        exact = results(Case(other.model, _double(case.batch), case.loss_fn), other.model.double())
        if _equal(exact["random state"], reference["random state"]):  # else doubles were drawn otherwise
            found["own_error"] = error(reference, exact)
            found["planned_error"] = max(error(r, exact) for r in ours)


def _compiled_error(case: Case, reference: Results) -> float:
    """How far from eager torch.compile's own order of ops is; 0 where it does not run."""
    torch._dynamo.reset()
    try:
        case.model.compile(backend="aot_eager")
        return error(results(case, case.model), reference)
    except Exception:
        return 0.0


def _verdict(case: Case, found: dict[str, Any]) -> str:
    if not found["bitwise"]:
        resolution = max(torch.finfo(p.dtype).eps for p in case.model.parameters())
        bound = max(SLACK * found["own_error"], SLACK * resolution, ROUNDING)
        if not found["as_kept"] or not found["planned_error"] <= bound:
            found["why"] = "its results are not those of eager"
            return "wrong"
    if found["measured_bytes"] > found["budget_bytes"]:
        found["why"] = f"measured {found['measured_bytes']} bytes, above the budget of {found['budget_bytes']}"
        return "above budget"
    return "planned"


def step(case: Case, model: nn.Module, batch: Any = None) -> Any:
    """One training step without the optimizer; the output is held to the end, as a training loop holds it."""
    output = case.call(model, fresh(case.batch) if batch is None else batch)
    case.loss(output).backward()
    return output


def peak(case: Case, model: nn.Module) -> int:
    """Measured peak of a step, parameters, buffers and batch included; the model's state is as before afterwards."""
    batch = fresh(case.batch)
    with unchanged(model):
        held = [*model.parameters(), *model.buffers(), *tensors(batch)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}

        def run(m: nn.Module) -> None:
            step(case, m, batch)

        return sum(storages.values()) + step_peak(run, model)


def results(case: Case, model: nn.Module) -> Results:
    """All that a step from a fixed seed computes or changes; the model's state is as before afterwards."""
    batch = fresh(case.batch)
    with unchanged(model):
        _seed()
        output = step(case, model, batch)
        found = {f"output {i}": t for i, t in enumerate(tensors(output))}
        found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        found |= {f"buffer {n}": b for n, b in model.named_buffers()}
        found |= {f"parameter {n}": p for n, p in model.named_parameters()}
        found |= {f"input {i}": t for i, t in enumerate(tensors(batch))}
        found |= {f"gradient of input {i}": t.grad for i, t in enumerate(tensors(batch)) if t.grad is not None}
        found["random state"] = torch.get_rng_state()
        with lasting_modes_off():  # a plan is not to learn that the training loop keeps them
            found = {n: t.detach().to_dense().clone() for n, t in found.items()}
        model.zero_grad(set_to_none=True)
    return found


def evaluated(case: Case, model: nn.Module) -> Results | None:
    """What the model returns in evaluation mode without gradients; None where it needs them."""
    modes = [(m, m.training) for m in model.modules()]
    with unchanged(model), torch.no_grad():
        _seed()
        try:
            output = case.call(model.eval(), fresh(case.batch))
        except RuntimeError:
            return None
        finally:
            for module, training in modes:
                module.training = training
        return {f"output {i}": t.detach().clone() for i, t in enumerate(tensors(output))}


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put parameters, buffers and plain numbers of modules (counters) back to what they were, and clear gradients."""
    with lasting_modes_off():
        values = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    buffers = [(m, dict(m._buffers)) for m in model.modules()]
    numbers = [(m, {k: v for k, v in vars(m).items() if isinstance(v, (int, float))}) for m in model.modules()]
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        for module, table in buffers:
            module._buffers.update(table)
        for module, plain in numbers:
            vars(module).update(plain)
        with torch.no_grad():
            for t, value in values:
                t.copy_(value)


def fresh(batch: Any) -> Any:
    """A copy of a batch, for a step that may write into it."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), batch)


def tensors(anything: Any) -> list[torch.Tensor]:
    """The tensors of a batch or of a model's output."""
    if hasattr(anything, "to_tuple"):
        anything = anything.to_tuple()
    return [t for t in pytree.tree_leaves(anything) if isinstance(t, torch.Tensor)]


def differing(ours: Results, theirs: Results) -> list[str]:
    """The names of what differs in a single bit, or is not there."""
    both = ours.keys() & theirs.keys()
    return sorted((ours.keys() ^ theirs.keys()) | {n for n in both if not _equal(ours[n], theirs[n])})


def error(ours: Results, theirs: Results) -> float:
    """The largest relative difference of floating-point results; infinite where others differ or are missing."""
    if ours.keys() != theirs.keys():
        return math.inf
    largest = max((_largest(t) for n, t in theirs.items() if n.startswith("gradient")), default=0.0)
    worst = 0.0
    for name, t in theirs.items():
        if t.is_floating_point() or t.is_complex():
            wide = torch.complex128 if t.is_complex() else torch.float64
            scale = max(_largest(t), CANCELLED * largest, 1e-30)
            found = float((ours[name].to(wide) - t.to(wide)).abs().nan_to_num(math.inf).max()) if t.numel() else 0.0
            worst = max(worst, found / scale)
        elif not torch.equal(ours[name], t):
            return math.inf
    return worst


def _largest(t: torch.Tensor) -> float:
    return float(t.abs().nan_to_num(0.0, 0.0, 0.0).max()) if t.numel() else 0.0


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the last bit, NaN where NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


def _double(batch: Any) -> Any:
    def wide(t: torch.Tensor) -> torch.Tensor:
        return t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t

    return pytree.tree_map_only(torch.Tensor, wide, batch)
