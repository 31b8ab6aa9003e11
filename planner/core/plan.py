"""What was decided, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self

import torch
from torch import fx, nn

from planner.errors import ApplyError, OptionError, gb

if TYPE_CHECKING:
    from planner.eager.checkpointing import Choice
    from planner.report.explanation import Explanation
    from planner.requests.request import Mode, Request
    from planner.runtime.compiled import Recipe
    from planner.runtime.verify import Verification
    from solvers import Problem, Schedule

Action = Literal["keep", "recompute", "offload"]
Phase = Literal["forward", "loss", "backward", "optimizer"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one forward value that the backward pass needs.

    Attributes:
        name: the op that makes it, as in the emitted graphs.
        action: kept from the forward pass on, or recomputed when needed.
        nbytes: its size.
        recompute_seconds: estimated time of running its op again, as often as the plan does (0 when kept).
        module: path of the module that made it, as in `named_modules()`.
        source: the user's own line: "file:line: code".
        reason: why it has to be kept, where it has to; how a random value that is recomputed stays the same.
        op: kind of op, as "gelu".
    """

    name: str
    action: Action
    nbytes: int
    recompute_seconds: float
    module: str
    source: str
    reason: str = ""
    op: str = ""


class Held(NamedTuple):
    """Bytes held at one moment, by kind; their sum is all that the budget counts.

    Attributes:
        parameters, optimizer: parameters and buffers; the optimizer's state.
        other: the batch, the CUDA context, room for fragmentation, lines of `account_gb`.
        gradients: of parameters and of inputs, those of earlier microbatches included.
        kept: activations held from the forward to the backward pass, and outputs.
        passing: activations of the forward pass that are freed before the backward pass begins.
        recomputed: activations made a second time, or once more.
        backward: gradients of activations, and all else that the backward pass makes for itself.
        waiting, workspace: of other microbatches that are in flight; held only while the op runs.
    """

    parameters: int = 0
    optimizer: int = 0
    other: int = 0
    gradients: int = 0
    kept: int = 0
    passing: int = 0
    recomputed: int = 0
    backward: int = 0
    waiting: int = 0
    workspace: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of the predicted timeline: what runs, and what is held while it runs, everything counted.

    Attributes:
        op: kind of op, as "gelu".
        phase: of the training step.
        recomputed: whether it runs again what has run before.
        held: bytes, by kind.
        seconds: estimated time.
        module: path of the module that it belongs to, as in `named_modules()`.
        source: the user's own line: "file:line: code".
    """

    op: str
    phase: Phase
    recomputed: bool
    held: Held
    seconds: float = 0.0
    module: str = ""
    source: str = ""

    @property
    def held_bytes(self) -> int:
        """All of it together."""
        return sum(self.held)


@dataclass(frozen=True, slots=True)
class BaselineMoment:
    """One op of the step that keeps everything, and what the plan does with it.

    Attributes:
        op, phase, module, source: as of `Moment`.
        held_bytes: everything held while it runs, with nothing recomputed.
        seconds: estimated time of one run.
        nbytes: what it makes.
        runs: how often the plan runs it.
        action: what becomes of what it makes, where the backward pass needs that or it runs again.
        reads: positions in the baseline timeline of the ops that make what it reads.
    """

    op: str
    phase: Phase
    held_bytes: int
    seconds: float
    module: str
    source: str
    nbytes: int
    runs: int
    action: Action | None
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One way to run the step: its peak in bytes, and its time over that of keeping everything, less one."""

    peak_bytes: int
    overhead: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """What memory costs in time, for the same step; all of it estimated.

    Attributes:
        points: plans, by ascending peak; less memory never costs less time.
        bound: no schedule is below: the least overhead at a budget, proven.
        peers: other ways to place checkpoints, by name.
        about: where the points come from, for people.
    """

    points: tuple[Point, ...]
    bound: tuple[Point, ...] = ()
    peers: tuple[Point, ...] = ()
    about: str = ""


@dataclass(frozen=True, slots=True)
class GraphModules:
    """The emitted graphs of one region."""

    forward: fx.GraphModule
    backward: fx.GraphModule


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan for one model, one batch shape (or, with `dynamic`, the largest) and one budget; bytes and seconds.

    Attributes:
        budget_bytes: what the step may take, everything counted (1 GB = 2**30 bytes).
        peak_bytes: predicted peak of the step, everything that the budget counts.
        baseline_peak_bytes: the same with nothing recomputed.
        resident_bytes: held all the time: parameters, buffers, batch, optimizer state.
        overhead: estimated time of what is recomputed, over the time of the step that keeps everything.
        bound: proven lower bound on the seconds of any schedule within the budget.
        gap: seconds over bound, less one.
        solver: which solver made it.
        solve_seconds: how long it took.
        timeline: bytes held at every op of the step.
        baseline_timeline: the same with nothing recomputed, with what the plan does with each op.
        decisions: one per forward value that the backward pass needs.
        graph_modules: the emitted graphs, one pair per region; none in eager mode.
        step_seconds: estimated time of the planned step.
        account: the lines that make up the peak: name -> bytes.
        note: what the solver wants known.
        device: what times are estimated for.
        recipe: what each region runs, or which modules are checkpointed, as the runtime reads it.
        problem, schedule: the step and what runs in it, as solvers see them; None in eager mode.
        request: what was asked for; with the model that the plan is for.
        known_curve: the trade-off curve that it is from, where `pareto()` made it.
        verification: what `verify()` last measured.
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
    timeline: tuple[Moment, ...] = field(repr=False)
    baseline_timeline: tuple[BaselineMoment, ...] = field(repr=False)
    decisions: tuple[Decision, ...] = field(repr=False)
    graph_modules: tuple[GraphModules, ...] = field(repr=False)
    step_seconds: float
    account: Mapping[str, int] = field(repr=False)
    note: str
    device: str
    recipe: Recipe | Choice = field(repr=False)
    problem: Problem | None = field(repr=False)
    schedule: Schedule | None = field(repr=False)
    request: Request = field(repr=False)
    known_curve: Curve | None = field(default=None, repr=False)
    verification: Verification | None = field(default=None, repr=False)

    @cached_property
    def curve(self) -> Curve:
        """What memory costs in time around this plan, estimated; of a plan of `pareto()`, that curve.

        Takes about a second the first time, more for thousands of ops.
        """
        from planner.planning.curve import curve_of

        return curve_of(self)

    @property
    def phase_peaks(self) -> dict[str, int]:
        """The most bytes held in each phase of the step: forward, loss, backward, optimizer (where it is counted)."""
        peaks: dict[str, int] = {}
        for moment in self.timeline:
            peaks[moment.phase] = max(peaks.get(moment.phase, 0), moment.held_bytes)
        return peaks

    def explain(self, path: str = "") -> Explanation:
        """Why a module's values are kept or recomputed, in words and numbers; what the other decision would cost.

        Args:
            path: of a module, as `named_modules()` has it, with all that is in it; a pattern such as "layers.*.mlp"; or
                a value, as an explanation labels it ("layers.3.act: gelu"). "" for the whole model.

        Raises:
            OptionError: nothing is called so; it names the nearest.
        """
        from planner.planning.what_if import costs_of, what_if
        from planner.report.explain import explain

        return explain(self, path, costs_of(self), lambda values, kept: what_if(self, values, kept=kept))

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
            The same module object; its parameters' names and its `state_dict` do not change.

        Raises:
            ApplyError: a plan is applied already, or the model is not the one that was planned.
        """
        from planner.api.front import apply

        return apply(self, model, verify=verify, mode=mode)

    def remove(self, model: nn.Module | None = None) -> nn.Module:
        """Take the plan off the planned model, or the one it was applied to; ApplyError where none is on."""
        from planner.api.front import remove

        return remove(self, model)

    def verify(self, batch: Any = None, kwargs: Mapping[str, Any] | None = None) -> Verification:
        """One real step with the plan and one without: peaks measured by torch's allocator, gradients compared.

        Parameters, gradients, buffers and the random state are as before afterwards.

        Args:
            batch: as in `plan()`; None for the batch that was planned with.
            kwargs: as in `plan()`.
        """
        from planner.runtime.verify import verify

        found = verify(self, batch, kwargs)
        if batch is None and kwargs is None:
            object.__setattr__(self, "verification", found)  # for reports; nothing else changes
        return found

    def repair(self, batch: Any = None, kwargs: Mapping[str, Any] | None = None, *, attempts: int = 3) -> Plan:
        """Verify on a real step; where it takes more than the budget, plan again with the difference taken off.

        What was learnt is in the `note` and the `account` of the plan that is returned. The model is as before.

        Args:
            batch: as in `verify()`.
            kwargs: as in `verify()`.
            attempts: how often to plan again, at most.

        Returns:
            This plan, where it holds, or one that does.

        Raises:
            VerificationError: the step takes more than the budget after as many attempts.
            InfeasibleBudgetError: nothing fits with the difference taken off.
        """
        from planner.api.front import repair

        return repair(self, batch, kwargs, attempts=attempts)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file that `Plan.load` reads, as JSON; compressed where the path ends in ".gz".

        The model is not in it, nor `loss_fn`; an optimizer is by its class, options and bytes. An interruption leaves
        the old file.

        Raises:
            PlanFileError: it cannot be written there.
            ModelError: the planned model is gone: what it was has to be in the file.
        """
        from planner.planfile.files import save

        save(self, path)

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
        from planner.planfile.files import load

        return load(path, loss_fn)

    def memory_snapshot(self, path: str | PathLike[str]) -> None:
        """Write the predicted timeline in the format of `torch.cuda.memory._dump_snapshot`, beside a real one.

        https://pytorch.org/memory_viz shows it, and `torch.cuda._memory_viz` reads it: every tensor with its bytes, the
        module and line that make it, and an address where the caching allocator would put it. In eager mode, blocks
        are what each op adds to or takes from a kind of memory, and which of them goes first is not known.

        Raises:
            PlanFileError: it cannot be written there.
        """
        from planner.report.snapshot import save

        save(self, path)

    def summary(self, *, colour: bool | None = None) -> str:
        """The plan as text within 80 columns.

        Args:
            colour: None for colours where standard output is a terminal that shows them (see NO_COLOR, FORCE_COLOR).
        """
        from planner.report.terminal import style_of
        from planner.report.text import summary

        return summary(self, style_of(colour=colour))

    def _repr_html_(self) -> str:
        from planner.report.html import body

        return body(self)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """The plan as a page of its own: what Jupyter shows; also written to a file where one is named.

        Raises:
            OptionError: the file cannot be written.
        """
        from planner.report.html import page

        return page(self._repr_html_(), path)

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
        from planner.report.graph import graph

        return graph(self, module, format)

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


class PendingPlan(Plan):
    """A plan that is made at the first training step; once made, its attributes are those of the plan.

    Until then, reading one of them raises ApplyError.
    """

    _current: Callable[[], Plan | None]

    def __init__(self, request: Request, current: Callable[[], Plan | None]) -> None:
        object.__setattr__(self, "request", request)
        object.__setattr__(self, "budget_bytes", request.budget_bytes)
        object.__setattr__(self, "_current", current)

    def __getattr__(self, name: str) -> Any:
        if name not in {f.name for f in fields(Plan)}:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._made(name), name)

    @property
    def made(self) -> Plan:
        """The plan, once there is one; raises ApplyError before."""
        return self._made("the plan")

    def _made(self, what: str) -> Plan:
        made: Plan | None = self._current()
        if made is None:
            raise ApplyError(
                f"{what} is not known yet: no batch was given, so the plan is made at the first training step. "
                "Call apply(), then train; or plan(model, batch, budget_gb=...)"
            )
        return made

    def save(self, path: str | PathLike[str]) -> None:
        self._made("what to save").save(path)

    def __repr__(self) -> str:
        made = self._current()
        return repr(made) if made else f"PendingPlan(budget={gb(self.budget_bytes)}, made at the first training step)"

    def summary(self, *, colour: bool | None = None) -> str:
        made = self._current()
        return made.summary(colour=colour) if made else repr(self)

    def _repr_html_(self) -> str:
        made = self._current()
        return made._repr_html_() if made else f"<p>{escape(repr(self))}</p>"

    def graph(self, module: str | None = None, format: Literal["svg", "dot", "networkx"] = "svg") -> Any:
        return self._made("graph()").graph(module, format)

    def verify(self, batch: Any = None, kwargs: Mapping[str, Any] | None = None) -> Verification:
        made = self._current()
        return super().verify(batch, kwargs) if made is None else made.verify(batch, kwargs)

    def repair(self, batch: Any = None, kwargs: Mapping[str, Any] | None = None, *, attempts: int = 3) -> Plan:
        made = self._current()
        own = super().repair if made is None else made.repair
        return own(batch, kwargs, attempts=attempts)

    @property
    def curve(self) -> Curve:
        return self._made("curve").curve

    @property
    def known_curve(self) -> Curve | None:  # a default of the class would be found before __getattr__
        return self._made("known_curve").known_curve

    @property
    def verification(self) -> Verification | None:
        return self._made("verification").verification
