"""`max_batch()`: the largest batch that fits the budget, and the one of the best predicted throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from torch import nn

from planner.api.plan import Plan
from planner.core.account import BATCH
from planner.core.options import OptionArguments
from planner.errors import BatchError, CaptureError, InfeasibleBudgetError, OptionError, gb
from planner.planning.pipeline import make_plan
from planner.requests.batch import Batch, arguments, maxima_of
from planner.requests.check import check
from planner.requests.request import Request
from solvers.progress import bar, clock

GROWTH = 8  # times the largest n that fits, at most, while peaks say that there is much room
ENDLESS = 2**40  # an n that says that memory does not depend on n
CLOSE = 0.1  # of the fastest n: neighbours so near are not told apart further
PROBES = 4  # plans for the fastest n alone


@dataclass(frozen=True, slots=True)
class Trial:
    """What planning for one n came to.

    Attributes:
        n: what `make_batch` was given.
        peak_bytes: predicted peak of the plan; where none fits, that of the leanest plan found, a budget that would do.
        baseline_peak_bytes: the peak with nothing recomputed; None where no plan fits, as are the next two.
        overhead: estimated time of what is recomputed, over the time of the step that keeps everything.
        step_seconds: estimated time of the planned step.
    """

    n: int
    peak_bytes: int
    baseline_peak_bytes: int | None = None
    overhead: float | None = None
    step_seconds: float | None = None

    @property
    def feasible(self) -> bool:
        """Whether a plan fits the budget."""
        return self.step_seconds is not None

    @property
    def per_second(self) -> float:
        """Predicted throughput: n over the seconds of a step; 0 where no plan fits."""
        return self.n / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True, eq=False)
class MaxBatch:
    """The n that fit a budget.

    Attributes:
        largest: the largest n that fits.
        plan: the plan for it.
        fastest: the n of the best predicted throughput among the trials; of several, the smallest.
        fastest_plan: the plan for it.
        trials: every n that was planned for, ascending.
    """

    largest: int
    plan: Plan = field(repr=False)
    fastest: int
    fastest_plan: Plan = field(repr=False)
    trials: tuple[Trial, ...] = field(repr=False)

    def __str__(self) -> str:
        title = f"Largest n {self.largest}, fastest n {self.fastest}, within {gb(self.plan.budget_bytes)}:"
        head = f"{'n':>10} {'peak':>12} {'overhead':>10} {'step seconds':>13} {'n per second':>13}"
        return "\n".join([title, head, *map(_row, self.trials)])


def _row(trial: Trial) -> str:
    start = f"{trial.n:>10} {gb(trial.peak_bytes):>12}"
    if trial.overhead is None or trial.step_seconds is None:
        return f"{start}  does not fit"
    return f"{start} {trial.overhead:>10.1%} {trial.step_seconds:>13.3g} {trial.per_second:>13.4g}"


def max_batch(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    *,
    budget_gb: float | str | None = None,
    solver: str = "auto",
    most: int | None = None,
    **options: Unpack[OptionArguments],
) -> MaxBatch:
    """The largest batch whose training step fits the budget, with recomputation, and the one that trains fastest.

    n is what `make_batch` makes of it: samples, a sequence length, multiples of either (`lambda n: tokens(8 * n)`).
    Each n tried costs what `plan()` costs; about ten are tried. Peaks are nearly affine in n, so secants of the peaks
    that plans report say what to try next, and bisection where they mislead. Every answer is that of a real plan.

    `largest` fits, and `largest + 1` was tried and does not (or is more than `most`). Where the solver's search is not
    monotonic in n, a larger one still may fit. `fastest` is the best of all n tried; the largest that needs no
    recomputation, as predicted from smaller ones, is among them where it is below `largest`. Where throughput rises
    up to one n and falls beyond it, that n lies between the trials next to `fastest`.

    Args:
        model: as for `plan()`.
        make_batch: n -> the batch, as `plan()` takes it, for every n from 1 on. The batches of `plan` and
            `fastest_plan` are kept with them.
        budget_gb: as for `plan()`; what is free on a GPU is read once.
        solver: as for `plan()`.
        most: the largest n to look at, such as the longest sequence that the model knows; None for no limit.
        options: as for `plan()`; `time_limit` is that of each plan.

    Returns:
        Both n with their plans, each of which can be applied, and all trials.

    Raises:
        ModelError, BudgetError, BatchError, OptionError, CaptureError: as `plan()`; BatchError also where `make_batch`
            raises, or its batches do not need more memory with larger n.
        InfeasibleBudgetError: not even n = 1 fits; it carries the smallest budget that does.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        >>> found = max_batch(model, lambda n: torch.zeros(n, 64), budget_gb=1e-3, loss_fn=torch.Tensor.mean)
        >>> found.fastest <= found.largest, found.plan.peak_bytes <= found.plan.budget_bytes
        (True, True)
    """
    if not callable(make_batch):
        raise OptionError(f"make_batch of type {type(make_batch).__name__} must be callable: n -> a batch for plan()")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise OptionError(f"most={most!r} must be the largest n to look at: 1, 2, ..., or None for no limit")
    if options.get("on_failure", "raise") != "raise":
        raise OptionError("on_failure='warn' is for one plan: leave it out, or call plan() for each batch")
    request = check(model, (), None, budget_gb=budget_gb, solver=solver, **options)
    trials: dict[int, Trial] = {}
    plans: dict[int, Plan] = {}
    with bar("max_batch", request.options.progress, unit=" plans") as shown, clock(shown):

        def attempt(n: int) -> None:
            shown.set_description_str(f"max_batch: n = {n}", refresh=False)
            trials[n], made = _planned(request, make_batch, n)
            if made is not None:
                plans[n] = made
            for other in plans.keys() - {_largest(trials.values()), _fastest(trials.values())}:
                del plans[other]  # and the batch that it holds
            shown.update()

        attempt(1)
        fixed = plans[1].resident_bytes - plans[1].account[BATCH]
        while (n := _larger(trials.values(), request.budget_bytes, fixed, most)) is not None:
            attempt(n)
        for _ in range(PROBES):
            if (n := _faster(trials.values())) is None:
                break
            attempt(n)
    largest, fastest = _largest(trials.values()), _fastest(trials.values())
    in_order = tuple(trials[n] for n in sorted(trials))
    return MaxBatch(largest, plans[largest], fastest, plans[fastest], in_order)


def _planned(request: Request, make_batch: Callable[[int], Any], n: int) -> tuple[Trial, Plan | None]:
    """Plan for one n as `plan()` does."""
    try:
        batch = make_batch(n)
    except Exception as e:
        raise BatchError(
            f"make_batch({n}) raised {type(e).__name__}: {e}; it must make a batch for every n from 1 on, or up to most"
        ) from e
    if batch is None:
        raise BatchError(f"make_batch({n}) returned None; it must return a batch for plan()")
    try:
        args, kwargs = arguments(request.model, batch, None)
        maxima = maxima_of(request.options.dynamic, args or (), kwargs)
        made = Plan(make_plan(replace(request, batch=Batch(args or (), kwargs), maxima=maxima)))
    except InfeasibleBudgetError as e:
        if n == 1:
            raise
        return Trial(n, e.minimum_bytes), None
    except (BatchError, CaptureError) as e:
        raise type(e)(f"with the batch of make_batch({n}): {e}") from e
    return Trial(n, made.peak_bytes, made.baseline_peak_bytes, made.overhead, made.step_seconds), made


def _largest(trials: Iterable[Trial]) -> int:
    return max((t.n for t in trials if t.feasible), default=0)


def _fastest(trials: Iterable[Trial]) -> int:
    """The n of the best throughput; of several, the smallest."""
    return max(trials, key=lambda t: (t.per_second, -t.n)).n


def _larger(trials: Iterable[Trial], budget: int, fixed: int, most: int | None) -> int | None:
    """The n to try next in search of the largest that fits; None where it is found.

    Args:
        trials: at least that of n = 1, which fits.
        budget: bytes.
        fixed: bytes that are held whatever n is.
        most: no n beyond it.
    """
    every = sorted(trials, key=lambda t: t.n)
    fits = _largest(every)
    failed = [(t.n, t.peak_bytes) for t in every if not t.feasible]
    if fits + 1 in (failed[0][0] if failed else None, most and most + 1):
        return None
    if failed:
        return _within(fits, failed, budget, fixed)
    if fits >= ENDLESS:
        raise BatchError(
            f"a step with make_batch({fits}) still fits {gb(budget)}; make_batch must make larger batches of larger n, "
            "or give the largest n to look at, as in most=1024"
        )
    # first as far as nothing is recomputed
    kept = [(0, fixed), *((t.n, t.baseline_peak_bytes or 0) for t in every)]
    full = _crossing(kept[-2], kept[-1], budget) if kept[-1][1] <= budget else fits
    n = GROWTH * fits if full is None else full if full > fits else 2 * fits
    return min(n, GROWTH * fits, most or ENDLESS)


def _within(fits: int, failed: list[tuple[int, int]], budget: int, fixed: int) -> int:
    """An n between one that fits and the smallest of those that did not, each with the lowest peak found for it."""
    fails = failed[0][0]
    n = _crossing(failed[0], failed[1] if len(failed) > 1 else (0, fixed), budget)
    if n is None or n < fits:
        return (fits + fails) // 2  # the line misleads
    if len(failed) > 2 and (further := fails - 2 * (failed[1][0] - fails)) > fits:
        n = min(n, further)  # the last step down was too short
    return min(max(n, fits + 1), fails - 1)


def _crossing(one: tuple[int, int], other: tuple[int, int], budget: int) -> int | None:
    """The largest n at which the line through two peaks is within the budget; None where it does not rise."""
    (n, peak), (m, higher) = sorted((one, other))
    return n + (budget - peak) * (m - n) // (higher - peak) if higher > peak else None


def _faster(trials: Iterable[Trial]) -> int | None:
    """The n to try next in search of the fastest: halfway to the farther of its neighbours; None where both are near.

    For a throughput of one maximum, the best n is between them.
    """
    every = sorted(t.n for t in trials)
    fastest = _fastest(trials)
    at = every.index(fastest)
    neighbours = every[max(0, at - 1) : at + 2]
    far = max(neighbours, key=lambda n: abs(n - fastest))
    return (fastest + far) // 2 if abs(far - fastest) > max(1, CLOSE * fastest) else None
