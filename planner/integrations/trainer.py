"""A plan for `transformers.Trainer`: `plan_trainer(Trainer(...), budget_gb=12).train()`."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.api.front import applied_plans, plan
from planner.api.plan import Plan
from planner.core.plan import PlanRecord
from planner.errors import OptionError, PlanFileError, warn
from planner.requests.batch import LATER
from planner.runtime.interception import attached, detach
from planner.session.attach import take_off

LEAVE = "a plan decides itself what is recomputed; leave it out, or train without a plan"
COMPILES = "a plan compiles the model in its own way; leave it out"
ENGINE = "its engine runs the model in its own way; train without a plan"


def plan_trainer(
    trainer: Any, *, budget_gb: float | str | None = None, plan_file: str | None = "plan.json", **options: Any
) -> Any:
    """Have a Trainer's model train by a plan.

    The plan is made at the first step of `train()`, for the Trainer's own optimizer, gradient accumulation, precision
    and loss, and comes off when training ends. Evaluation, prediction and what is saved are as without one.

    Args:
        trainer: whose model is planned; nothing in its arguments may checkpoint or compile the model itself.
        budget_gb: as in `plan()`.
        plan_file: its name in `args.output_dir`: the plan there is taken where it is for this very step, as in a run
            that is resumed, and written where it is not; None for no file.
        options: as in `plan()`: `dynamic` for batches whose sizes vary, `progress`, ...

    Returns:
        The same Trainer.

    Raises:
        OptionError: it is no Trainer, or one whose arguments do what the plan is to do.
        PlannerError: of `plan()`, for other arguments; and in `train()`, where no plan fits.
    """
    try:
        import transformers
    except ImportError as e:
        raise OptionError("plan_trainer() needs transformers: pip install transformers accelerate") from e
    if not issubclass(type(trainer), transformers.Trainer):
        raise OptionError(f"plan_trainer() needs a transformers.Trainer; it was given a {type(trainer).__name__}")
    for what, instead in _conflicts(trainer):
        raise OptionError(f"{what} is set: {instead}")

    plan(trainer.model, LATER, budget_gb=budget_gb, **options)  # refuses arguments now
    file = None if plan_file is None else Path(trainer.args.output_dir) / plan_file

    class Planner(transformers.TrainerCallback):
        """Puts the plan on when training begins, takes it off when it ends, and keeps its file."""

        def __init__(self) -> None:
            self.known: Plan | None = None
            self.kept: PlanRecord | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            model = trainer.model
            if attached(model) is not None:  # a run with another batch size, as of auto_find_batch_size
                detach(model)
            asked: dict[str, Any] = {
                "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
                "accumulate": args.gradient_accumulation_steps > 1,
                "loss_fn": loss,
                "known": self.known or plan_in(file),
            }
            plan(model, LATER, budget_gb=budget_gb, **{**asked, **options}).apply()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            made = largest_plan(trainer.model)
            if made is None or made.record is self.kept:
                return
            self.known, self.kept = made.without_batch(), made.record
            if file is not None and state.is_world_process_zero:
                file.parent.mkdir(parents=True, exist_ok=True)
                made.save(file)

    own_train = trainer.train

    @wraps(own_train)
    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            return own_train(*args, **kwargs)
        finally:  # no callback is told of an exception
            if attached(trainer.model) is not None:
                take_off(trainer.model)

    trainer.train = train
    loss: _Loss | None = None
    own = type(trainer).compute_loss is not transformers.Trainer.compute_loss
    if own or trainer.label_smoother is not None or trainer.compute_loss_func is not None:
        loss = _Loss(trainer)
        trainer.compute_loss = loss.watched
    trainer.add_callback(Planner())
    return trainer


def largest_plan(model: nn.Module) -> Plan | None:
    """The plan of a model's largest step so far; None before there is one."""
    found = applied_plans(model)
    return found[0] if found else None


def plan_in(file: Path | None) -> Plan | None:
    """The plan in a file; None, with a warning, where it cannot be read, and where there is none."""
    if file is not None and file.exists():
        try:
            return Plan.load(file)
        except PlanFileError as e:
            warn(f"{e}: planned anew, and written again")
    return None


def _conflicts(trainer: Any) -> list[tuple[str, str]]:
    """Arguments of a Trainer that do what a plan is to do, or keep it from it; and what to do instead."""
    args, modules = trainer.args, trainer.model.modules()
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    second = "fsdp_version=2 shards the model's own modules, which a plan can be made for"
    checks = [
        (getattr(args, "activation_checkpointing", False), "activation_checkpointing=True", LEAVE),
        (args.gradient_checkpointing, "gradient_checkpointing=True", LEAVE),
        (any(getattr(m, "gradient_checkpointing", False) for m in modules), "gradient_checkpointing_enable()", LEAVE),
        (fsdp is not None and fsdp.activation_checkpointing, "FSDP's activation_checkpointing", LEAVE),
        (fsdp is not None and getattr(fsdp, "fsdp_version", 1) == 1, "fsdp_version=1", second),
        (args.torch_compile, "torch_compile=True", COMPILES),
        (trainer.is_deepspeed_enabled, "deepspeed", ENGINE),
        (args.n_gpu > 1, "DataParallel", "start one process for each GPU with torchrun, or make one GPU visible"),
    ]
    return [(what, instead) for found, what, instead in checks if found]


class _Loss:
    """A Trainer's loss from an output of its model: its own `compute_loss`, with a model that has answered already.

    Attributes:
        inputs, kwargs: of the latest call of `compute_loss`.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.compute = trainer.compute_loss
        self.inputs: dict[str, Any] = {}
        self.kwargs: dict[str, Any] = {}

    def watched(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """`compute_loss`, which takes labels out of its inputs."""
        self.inputs, self.kwargs = dict(inputs), kwargs
        return self.compute(model, inputs, return_outputs, **kwargs)

    def __call__(self, output: Any) -> torch.Tensor:
        loss: torch.Tensor = self.compute(_Answered(self.trainer.model, output), dict(self.inputs), **self.kwargs)
        return loss


class _Answered:
    """A model that returns what it has returned."""

    def __init__(self, model: Any, output: Any) -> None:
        self.model, self.output = model, output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
