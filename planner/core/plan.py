"""What was decided, as frozen records: everything that a plan file has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from torch import fx

from planner.core.identity import Identity, TensorKind
from planner.core.loop import Loop
from planner.core.maxima import Maxima
from planner.core.occupancy import Occupancy
from planner.core.options import Costs, Options
from planner.core.recipe import Choice, Recipe
from planner.core.verification import Verification
from planner.devices.specs import Device
from solvers import Problem, Schedule

Action = Literal["keep", "recompute", "offload"]
Phase = Literal["forward", "loss", "backward", "optimizer"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one forward value that the backward pass needs.

    Attributes:
        name: the op that makes it, as in the emitted graphs.
        action: kept from the forward pass on, recomputed when needed, or offloaded between its uses.
        nbytes: its size.
        recompute_seconds: estimated time of running its op again, as often as the plan does (0 when kept).
        module: path of the module that made it, as in `named_modules()`.
        source: the user's own line: "file:line: code".
        reason: why it has to be kept, where it has to; how a random value that is recomputed stays the same.
        op: kind of op, as "gelu".
        leaves, returns: where it is offloaded, the moments of the timeline before which it first leaves the device, and
            is last begun to be copied back.
    """

    name: str
    action: Action
    nbytes: int
    recompute_seconds: float
    module: str
    source: str
    reason: str = ""
    op: str = ""
    leaves: int | None = None
    returns: int | None = None


EARLIER = "gradients of earlier microbatches"  # a line of the account
VARIABLES = "variables"  # no op: until here, variables of the model's functions hold values


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
class InPieces:
    """A set of ops that runs in pieces, in one pass of the step.

    Attributes:
        name: of the one op that they are in the emitted graphs.
        phase: the pass.
        pieces: how many.
        parts: size of what is cut, as a number of tokens or of samples.
        workspace: bytes that are held inside a piece, at most.
        seconds: of all pieces.
        module: path of the module that the largest of the ops belongs to.
        source: its line: "file:line: code".
    """

    name: str
    phase: Phase
    pieces: int
    parts: int
    workspace: int
    seconds: float
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class GraphModules:
    """The emitted graphs of one region."""

    forward: fx.GraphModule
    backward: fx.GraphModule


@dataclass(frozen=True)
class PlannedStep:
    """The training step that a plan is for, beside the model: what the options came to here, and the batch.

    Attributes:
        card: the device that times and memory are predicted for.
        where: the torch device where the model was.
        batch: the tensors of the batch, at the largest sizes; None where no batch is known.
        maxima: the largest sizes, where those of the batch may be smaller; else None.
        costs: what times were taken from.
        occupancy: microbatches in flight, where a pipeline says more of them than `Options.in_flight`.
        gradients_copied: whether gradients go where others are there already, and are freed.
        optimizer_state: bytes of the optimizer's state.
        optimizer_step: bytes of the temporaries of its step; None for no optimizer.
        has_loss_fn: whether there was a loss function.
        ranks: how many processes there were.
        torch_version: of the torch that the step was captured with.
        loop: what the training loop was seen to do.
    """

    card: Device
    where: str
    batch: tuple[TensorKind, ...] | None
    maxima: Maxima | None
    costs: Costs
    occupancy: Occupancy | None
    gradients_copied: bool
    optimizer_state: int
    optimizer_step: int | None
    has_loss_fn: bool
    ranks: int
    torch_version: str
    loop: Loop = Loop()


@dataclass(frozen=True, eq=False)
class PlanRecord:
    """What was decided for one model, one batch shape (or, with `dynamic`, the largest) and one budget.

    All of it is data: sizes are in bytes, times in seconds, and a plan file has every field.

    Attributes:
        budget_bytes: the most that the step may take, everything counted (1 GB = 2**30 bytes).
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
        recipe: the ops that each region runs, or the modules that are checkpointed, as the runtime reads it.
        problem, schedule: the step and the order of its ops, as solvers see them; None in eager mode.
        options: the options that were asked for.
        step: the step that the plan is for.
        identity: the model that the plan is for.
        known_curve: the trade-off curve that the plan is from, where `pareto()` made it.
        verification: the last measurement of `verify()`.
        eager_peak_bytes: predicted peak of the step in eager mode, without a plan; None where it is not known.
        stall_seconds: of `step_seconds`, what the step waits for values that leave or come back.
        moved_bytes: copied out of the device and back in one step.
        host_peak_bytes: room that one step takes where values go that leave the device.
        pieces: sets of ops that run in pieces; all other figures, those with nothing recomputed too, are with them so.
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
    step_seconds: float
    account: Mapping[str, int] = field(repr=False)
    note: str
    device: str
    recipe: Recipe | Choice = field(repr=False)
    problem: Problem | None = field(repr=False)
    schedule: Schedule | None = field(repr=False)
    options: Options = field(repr=False)
    step: PlannedStep = field(repr=False)
    identity: Identity = field(repr=False)
    known_curve: Curve | None = field(default=None, repr=False)
    verification: Verification | None = field(default=None, repr=False)
    eager_peak_bytes: int | None = None
    stall_seconds: float = 0.0
    moved_bytes: int = 0
    host_peak_bytes: int = 0
    pieces: tuple[InPieces, ...] = field(default=(), repr=False)

    @cached_property
    def kept_bytes(self) -> int:
        """What waits for the backward pass when the forward pass has ended, beside what stays allocated."""
        if (last := self._forward_ends) is None:
            return 0
        return last.held_bytes - last.held.passing - last.held.workspace - self.resident_bytes

    @cached_property
    def saved_bytes(self) -> int:
        """The same of this call alone, where others wait beside it."""
        return self.kept_bytes - (0 if self._forward_ends is None else self._forward_ends.held.waiting)

    @cached_property
    def _forward_ends(self) -> Moment | None:
        """The last op of the forward pass; None where all layers were dropped at random."""
        return next((m for m in reversed(self.timeline) if m.phase == "forward"), None)

    @property
    def passes_peak_bytes(self) -> int:
        """The peak up to the end of the backward pass, without the optimizer's step."""
        return max((m.held_bytes for m in self.timeline if m.phase != "optimizer"), default=self.resident_bytes)

    def taken_bytes(self, graded: int, phases: Collection[str] = ("forward", "loss", "backward")) -> int:
        """The most that its passes take beside what stays allocated, without what other planned models take.

        Args:
            graded: bytes of the parameters' gradients, which are not among it.
            phases: of the step, that count.
        """
        loss = self.step.loop.loss
        others = {} if loss is None else {"loss": loss.others, "backward": loss.others_wait}
        passes = (m for m in self.timeline if m.phase in phases)
        taken = (m.held_bytes - min(m.held.gradients, graded) - others.get(m.phase, 0) for m in passes)
        most = max(taken, default=self.resident_bytes)
        return most + min(self.account.get(EARLIER, 0), graded) - self.resident_bytes

    @property
    def phase_peaks(self) -> dict[str, int]:
        """The most bytes allocated in each phase of the step: forward, loss, backward, optimizer (where counted)."""
        peaks: dict[str, int] = {}
        for moment in self.timeline:
            peaks[moment.phase] = max(peaks.get(moment.phase, 0), moment.held_bytes)
        return peaks
