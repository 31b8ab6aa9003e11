"""The handle that users hold: a plan of a model, from a file, or one that is still to be made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self
from weakref import WeakValueDictionary, ref

import torch
from torch import nn

from planner.core.identity import Identity
from planner.core.options import Mode, Options
from planner.core.plan import (
    BaselineMoment,
    Curve,
    Decision,
    GraphModules,
    Moment,
    PlannedStep,
    PlanRecord,
)
from planner.core.recipe import Choice, Recipe
from planner.core.verification import Verification
from planner.errors import ApplyError, OptionError, gb
from planner.planfile import files
from planner.planning.curve import curve_of
from planner.planning.what_if import costs_of, what_if
from planner.report import explain, graph, html, snapshot, text
from planner.report.explanation import Explanation
from planner.report.terminal import style_of
from planner.requests.compiled import without_compile
from planner.requests.planned import Filed, Known, Pending, Planned, Unplanned
from planner.requests.request import Request
from planner.session.apply import apply, remove
from planner.session.attach import applied, note_verification
from planner.session.binding import no_model
from planner.session.repair import repaired
from planner.session.verify import verify
from solvers import Problem, Schedule

_DATA = frozenset(f.name for f in fields(PlanRecord))
_HANDLES: WeakValueDictionary[int, Plan] = WeakValueDictionary()  # by the id of the source, which the handle holds


class Plan:
    """A plan for one model, one batch shape (or, with `dynamic`, the largest) and one budget.

    Its data are those of `planner.core.plan.PlanRecord`: sizes in bytes, times in seconds. Of a plan that is made at
    the first training step, they raise ApplyError until then.

    Attributes:
        budget_bytes: the most that the step may take, everything counted (1 GB = `2**30` bytes).
        peak_bytes: predicted peak of the step, everything that the budget counts.
        baseline_peak_bytes: predicted peak with nothing recomputed.
        resident_bytes: parameters, buffers, batch and optimizer state, which stay allocated during the whole step.
        overhead: estimated time of recomputation, over the time of the step that keeps everything.
        bound: proven lower bound on the seconds of any schedule within the budget.
        gap: seconds over bound, less one.
        solver: the solver that made the schedule.
        solve_seconds: how long it took.
        timeline: bytes allocated at every op of the step.
        baseline_timeline: the same with nothing recomputed, with what the plan does with each op.
        decisions: one per forward value that the backward pass needs.
        step_seconds: estimated time of the planned step.
        account: the lines that make up the peak: name -> bytes.
        note: what the solver wants known.
        device: the device that times are estimated for.
        recipe: the ops that each region runs, or the modules that are checkpointed.
        problem, schedule: the step and the order of its ops, as solvers see them; None in eager mode.
        options: the options that were asked for.
        step: the step that the plan is for: batch, device, optimizer.
        identity: the model that the plan is for, as data.
        known_curve: the trade-off curve that the plan is from, where `pareto()` made it.
        verification: the last measurement of `verify()`.
        eager_peak_bytes: predicted peak of the step in eager mode, without a plan; None where it is not known.
        stall_seconds: of `step_seconds`, what the step waits for values that leave or come back.
        moved_bytes: copied out of the device and back in one step.
        host_peak_bytes: room that one step takes where values go that leave the device.
    """

    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    resident_bytes: int
    overhead: float
    bound: float
    gap: float
    solver: str
    solve_seconds: float
    timeline: tuple[Moment, ...]
    baseline_timeline: tuple[BaselineMoment, ...]
    decisions: tuple[Decision, ...]
    step_seconds: float
    account: Mapping[str, int]
    note: str
    device: str
    recipe: Recipe | Choice
    problem: Problem | None
    schedule: Schedule | None
    options: Options
    step: PlannedStep
    identity: Identity
    known_curve: Curve | None
    verification: Verification | None
    eager_peak_bytes: int | None
    stall_seconds: float
    moved_bytes: int
    host_peak_bytes: int

    def __init__(self, source: Planned | Filed | Pending | Unplanned, model: nn.Module | None = None) -> None:
        self._take(source)
        self._model = model  # until the plan is applied: nothing else may hold it, as in plan(Net(), ...).apply()
        self._given = None if model is None else ref(model)  # as given: what torch.compile() returned, or it
        self._drawn: tuple[PlanRecord, Curve] | None = None

    @classmethod
    def of(cls, planned: Planned) -> Plan:
        """The handle over a plan: the one that there is already, or a new one."""
        handle = _HANDLES.get(id(planned))
        return handle if handle is not None and handle.source is planned else cls(planned)

    def _take(self, source: Planned | Filed | Pending | Unplanned) -> None:
        self._source = source
        _HANDLES[id(source)] = self

    if not TYPE_CHECKING:  # type checkers read the annotations above, and find misspelt names

        def __getattr__(self, name: str) -> Any:
            if name == "budget_bytes" and isinstance(self._source, (Pending, Unplanned)):
                return self._source.request.budget_bytes
            if name not in _DATA:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self.made(name).record, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_DATA]  # which consoles complete

    @property
    def source(self) -> Planned | Filed | Pending | Unplanned:
        """The record with the request that it answers, the file that it is from, or the request alone."""
        return self._source

    @property
    def record(self) -> PlanRecord:
        """The data of the plan; raises ApplyError where it is not made yet."""
        return self.made("the plan").record

    @property
    def request(self) -> Request:
        """The request with the model and the batch; raises ApplyError for a plan from a file, which has none."""
        return self._here().request

    @property
    def pending(self) -> bool:
        """Whether the plan is still to be made, at the first training step."""
        return isinstance(self._source, Pending) and self._known() is None

    def _known(self) -> Known | None:
        source = self._source
        if isinstance(source, Pending):
            return applied(source.request.model)
        return None if isinstance(source, Unplanned) else source

    def made(self, name: str = "the plan") -> Known:
        """The plan, once there is one; raises ApplyError before, which says what is not known yet."""
        made = self._known()
        if isinstance(self._source, Unplanned):
            raise _without(self._source)
        if made is None:
            raise ApplyError(
                f"{name} is not known yet: no batch was given, so the plan is made at the first training step. "
                "Call apply(), then train; or plan(model, batch, budget_gb=...)"
            )
        return made

    def _here(self) -> Planned | Pending:
        """The plan with its model; ApplyError for one from a file."""
        source = self._known() or self._source
        if isinstance(source, Filed):
            raise no_model(source)
        if isinstance(source, Unplanned):
            raise _without(source)
        return source

    @property
    def curve(self) -> Curve:
        """The trade-off between memory and time around this plan, estimated; of a plan of `pareto()`, that curve.

        Takes about a second the first time, more for thousands of ops.
        """
        record = self.made("curve").record
        if self._drawn is None or self._drawn[0] is not record:
            self._drawn = record, curve_of(record)
        return self._drawn[1]

    @property
    def graph_modules(self) -> tuple[GraphModules, ...]:
        """The emitted graphs, one pair per region; none in eager mode, and of a file."""
        made = self.made("graph_modules")
        return made.graphs() if isinstance(made, Planned) else ()

    @property
    def phase_peaks(self) -> dict[str, int]:
        """The most bytes allocated in each phase of the step: forward, loss, backward, optimizer (where counted)."""
        return self.record.phase_peaks

    def explain(self, path: str = "") -> Explanation:
        """Why a module's values are kept or recomputed, in words and numbers; what the other decision would cost.

        Args:
            path: of a module, as `named_modules()` has it, with all that is in it; a pattern such as "layers.*.mlp"; or
                a value, as an explanation labels it ("layers.3.act: gelu"). "" for the whole model.

        Raises:
            OptionError: nothing is called so; it names the nearest.
        """
        record = self.record
        return explain.explain(record, path, costs_of(record), lambda values, kept: what_if(record, values, kept=kept))

    def apply(self, model: nn.Module | None = None, *, verify: bool = False, mode: Mode | None = None) -> nn.Module:
        """Make the model train by this plan, in place.

        Args:
            model: the planned model (the default), or another of the same class, parameters and modes.
            verify: measure a real step before the first one of each kind, and plan again where it takes more than the
                budget, as `repair()` does; `planner.applied_plan(model)` is what came of it.
            mode: "eager" to run without torch.compile, by checkpoints on the model's own modules, which can express
                less: `planner.applied_plan(model)` is the plan that is made of this one, and its `note` says what that
                costs. None for the mode that was planned for.

        Returns:
            The same object, be it a module or what `torch.compile(module)` returned; its parameters' names and its
            `state_dict` do not change.

        Raises:
            ApplyError: a plan is applied already, or the model is not the one that was planned.
        """
        applied = apply(self.source, model, verify=verify, mode=mode)
        self._model = None
        return self._as_given(model, applied)

    def remove(self, model: nn.Module | None = None) -> nn.Module:
        """Take the plan off the planned model, or the one it was applied to; ApplyError where none is on."""
        if isinstance(self._source, Unplanned):
            return self._source.request.model if model is None else model
        return self._as_given(model, remove(self.request.model if model is None else model))

    def _as_given(self, model: nn.Module | None, target: nn.Module) -> nn.Module:
        """A model in the wrapper of torch.compile in which it was given to `plan()`, or now."""
        given = self._given() if model is None and self._given is not None else model
        return given if given is not None and without_compile(given) is target else target

    def verify(self, batch: Any = None, kwargs: Mapping[str, Any] | None = None) -> Verification:
        """One real step with the plan and one without: peaks measured by torch's allocator, gradients compared.

        Parameters, gradients, buffers, the batch and the random state are as before afterwards.

        Args:
            batch: as in `plan()`; None for the batch that was planned with.
            kwargs: as in `plan()`.
        """
        source = self._here()
        seen = verify(source, batch, kwargs)
        if batch is None and kwargs is None and isinstance(source, Planned):
            noted = note_verification(source, seen)  # for reports
            if isinstance(self._source, Planned):
                self._take(noted)
        return seen

    def repair(self, batch: Any = None, kwargs: Mapping[str, Any] | None = None, *, attempts: int = 3) -> Plan:
        """Verify on a real step; where it takes more than the budget, plan again with the difference taken off.

        What was learnt is in the `note` and the `account` of the plan that is returned. The model is as before.

        Args:
            batch: as in `verify()`.
            kwargs: as in `verify()`.
            attempts: how often to plan again, at most.

        Returns:
            A plan that holds: the same one where it does, or another.

        Raises:
            VerificationError: the step takes more than the budget after as many attempts.
            InfeasibleBudgetError: nothing fits with the difference taken off.
        """
        return Plan(repaired(self._here(), batch, kwargs, attempts=attempts))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file that `Plan.load` reads, as JSON; compressed where the path ends in ".gz".

        The model is not in it, nor `loss_fn`; an optimizer is by its class, options and bytes. An interruption leaves
        the old file.

        Raises:
            PlanFileError: it cannot be written there.
            ModelError: the planned model is gone: what it was has to be in the file.
        """
        files.save(self.made("what to save").record, path)

    @staticmethod
    def load(path: str | PathLike[str], loss_fn: Callable[[Any], torch.Tensor] | None = None) -> Plan:
        """The plan in a file, which may be from anyone: nothing in it is run or imported.

        It can be looked at as it is. `apply(model)` puts it on the model that it was made for; the first step of that
        model runs by it, without a solver, if its graphs are those that were planned.

        Args:
            path: what `save` wrote.
            loss_fn: as in `plan()`, where the plan was made with one. It counts where a step is planned anew, as that
                of another batch, and is needed to compare models of several graphs and with `dynamic`.

        Raises:
            OptionError: what cannot be a path or a loss function.
            PlanFileError: there is no such file, or it is no plan; made by a newer version, damaged, or contradicting
                itself. The message names the file, the place and what was expected.
        """
        return Plan(files.load(path, loss_fn))

    def memory_snapshot(self, path: str | PathLike[str]) -> None:
        """Write the predicted timeline in the format of `torch.cuda.memory._dump_snapshot`, beside a real one.

        https://pytorch.org/memory_viz shows it, and `torch.cuda._memory_viz` reads it: every tensor with its bytes, the
        module and line that make it, and an address where the caching allocator would put it. In eager mode, blocks
        are what each op adds to or takes from a kind of memory, and which of them goes first is not known.

        Raises:
            PlanFileError: it cannot be written there.
        """
        snapshot.save(self.made("memory_snapshot()").record, path)

    def summary(self, *, colour: bool | None = None) -> str:
        """The plan as text within 80 columns.

        Args:
            colour: None for colours where standard output is a terminal that shows them (see NO_COLOR, FORCE_COLOR).
        """
        return repr(self) if self._known() is None else text.summary(self.record, style_of(colour=colour))

    def __repr__(self) -> str:
        if self.pending:
            return f"Plan(budget={gb(self.budget_bytes)}, made at the first training step)"
        if isinstance(self._source, Unplanned):
            return f"Plan(budget={gb(self.budget_bytes)}, none: the model trains as it is, because {self._source.why})"
        return repr(self.record).replace("PlanRecord", "Plan", 1)

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>" if self._known() is None else html.body(self.record, self.curve)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """The plan as a page of its own: what Jupyter shows; also written to a file where one is named.

        Raises:
            OptionError: the file cannot be written.
        """
        return html.page(self._repr_html_(), path)

    def graph(self, module: str | None = None, format: Literal["svg", "dot", "networkx"] = "svg") -> Any:
        """The step as a graph of ops, coloured by what the plan does with each.

        Args:
            module: path of a module, as in `named_modules()`, to show its ops alone; None for the whole model, folded
                into modules where it is large.
            format: "svg" or "dot" (text; in Jupyter, an SVG is drawn), or "networkx": a `networkx.DiGraph` with the
                estimates of each op as attributes, always of ops.

        Raises:
            OptionError: no such module, no op of it, or an unknown format.
        """
        return graph.graph(self.made("graph()").record, module, format)

    def without_batch(self) -> Plan:
        """The same plan, without the tensors of the batch that it was made for."""
        source = self._known()
        return Plan(source.without_batch()) if isinstance(source, Planned) else self

    def __str__(self) -> str:
        return self.summary(colour=False)

    def __copy__(self) -> Self:
        return self  # nothing in it changes

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise OptionError(
            "a plan cannot be pickled, as it is tied to its model: save(path) writes it to a file, and "
            "Plan.load(path) reads it in another process"
        )


def _without(source: Unplanned) -> ApplyError:
    """The error for what needs a plan where there is none."""
    return ApplyError(f"there is no plan, and the model trains as it is: {source.why}")
