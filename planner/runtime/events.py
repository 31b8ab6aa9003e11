"""What a planned model tells while it trains, and asks: the interface between the runtime and who provides plans."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn, optim

from planner.core.loop import Loop
from planner.core.maxima import Maxima
from planner.core.plan import PlanRecord
from planner.errors import PlannerError
from planner.requests.planned import Planned
from planner.runtime.signature import Role, Signature


@dataclass(frozen=True, eq=False)
class Call:
    """A call of the model that has no plan yet.

    Attributes:
        args, kwargs: the batch.
        maxima: the largest sizes to plan for; None for those of the batch.
        assume_median_branch: as in `Request`.
        compiled: whether the call is to be compiled; if not, the plan is one of eager mode.
        refused: what comes of compiling such calls, in words, where that was tried; empty where it was not.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    maxima: Maxima | None = None
    assume_median_branch: bool = True
    compiled: bool = True
    refused: str = ""


class Caller(Protocol):
    """The runtime that asks.

    Attributes:
        model: whose call it is: the planned one, or a copy.
        agrees: whether the plan is to be agreed on with the other processes that train the model.
        learns: whether it will tell what the loop does.
        together: the kinds of calls of which the loop makes one each before one backward pass; empty where each is
            planned by itself.
        trains_at_times: whether a call that trains nothing is no mistake.
    """

    model: nn.Module
    agrees: bool

    @property
    def trains_at_times(self) -> bool:
        """As above."""

    @property
    def learns(self) -> bool:
        """As above."""

    @property
    def together(self) -> tuple[Signature, ...]:
        """As above."""


class PlanProvider(Protocol):
    """Provides plans, and hears what happens to them."""

    @property
    def loop(self) -> Loop:
        """What the training loop does, as far as plans are made for it."""

    @property
    def budget_bytes(self) -> int:
        """The budget of its step."""

    def on_missing_plan(self, caller: Caller, call: Call) -> Planned:
        """A plan for a kind of call that comes for the first time. Raises PlannerError where there is none."""

    def on_loop_seen(
        self, seen: Loop, stepped: Sequence[optim.Optimizer], role: Role = (), spare: int = 0, ended: bool = False
    ) -> bool:
        """A training call is about to run, and this is what the loop was seen to do with calls in that role.

        `stepped` are its optimizers, `spare` the bytes that plans count and that are not there before more of the loop
        is seen, `ended` whether an optimizer of any model has stepped. True where plans for such calls are to be made
        anew.
        """

    def on_no_plan(self, model: nn.Module, error: PlannerError) -> bool:
        """There is no plan for a call, and why; True: the call runs as without a plan, False: the error is raised."""

    def on_step_begin(self, model: nn.Module, record: PlanRecord, waits: bool) -> bool:
        """The same where several processes train the model; `waits`: an earlier call waits for its backward pass.

        True ends these calls and those of `on_backward_begin`. Another plan may be put on the model before.
        """

    def on_backward_begin(self, model: nn.Module, record: PlanRecord) -> bool:
        """The backward pass of such a call begins, and gradients were there in its forward pass. True as above."""


class PlannedModel(Protocol):
    """Another model that is trained by a plan."""

    def tensors(self) -> Any:
        """Its parameters, buffers, gradients, and the state of its optimizers."""

    def trained(self) -> list[nn.Parameter]:
        """Its parameters."""

    def outputs(self) -> Collection[int]:
        """The storages of what its calls returned, as far as they are alive, by identity."""

    def waiting(self) -> int:
        """How many of its calls wait for their backward pass."""

    def waiting_bytes(self) -> int:
        """Bytes of what these have saved for it."""

    def optimizers(self) -> list[optim.Optimizer]:
        """Those that stepped its parameters."""

    def stays(self, counted: Collection[optim.Optimizer]) -> int:
        """Bytes of all of these, as its plan counts them, without the state of optimizers that are counted already."""

    def was_trained(self) -> bool:
        """Whether a backward pass has come of some call."""
