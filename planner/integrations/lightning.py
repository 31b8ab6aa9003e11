"""A plan for Lightning: `Trainer(callbacks=[PlanCallback(budget_gb=12)])`, of `lightning` or of `pytorch_lightning`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

from torch import nn

from planner.api.front import applied_plan, plan
from planner.api.plan import Plan
from planner.compat.dynamo import inner_module
from planner.compat.lightning import checkpoints_activations, is_compiled
from planner.core.options import GB
from planner.core.plan import PlanRecord
from planner.costs.static_memory import storage_bytes
from planner.errors import ApplyError, OptionError
from planner.integrations.discovery import ids, parameters, unwrapped, watched
from planner.integrations.trainer import COMPILES, ENGINE, LEAVE, largest_plan, plan_in
from planner.integrations.watching import counted
from planner.requests.batch import LATER
from planner.runtime.entries import LIGHTNING
from planner.runtime.interception import attached
from planner.session.attach import take_off

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
OUTSIDE = "the rest of the LightningModule"
PROCESSES = "leave it out; Trainer(devices=...) starts a process for each GPU"

_Module: Any = nn.Module  # whose call is watched in the first training step


class PlanCallback:
    """Has a LightningModule's network train by a plan in `fit()`.

    The plan is made at the first training step, for the module's own optimizers, the Trainer's gradient accumulation
    and precision, and comes off when `fit()` ends. Validation, tests, prediction and checkpoints are as without one.
    What is planned is the module that `training_step` calls, be it `self(x)` or `self.net(x)`; the rest of what the
    LightningModule holds is counted beside it. Where it calls several that are trained, as an encoder and a decoder,
    one plan is for all of them, from the second step on. With automatic optimization, gradients are cleared before the
    forward pass rather than after it, unless a hook (`on_before_zero_grad`, `optimizer_zero_grad`) wants to see them.

    Args:
        budget_gb: as in `planner.plan()`.
        module: the path of the module to plan, as "net"; "" for the LightningModule itself; None for what
            `training_step` calls.
        plan_file: its name in the Trainer's `default_root_dir`: the plan there is taken where it is for this very
            step, as in a run that is resumed, and written where it is not; None for no file.
        options: as in `plan()`. The loss is computed outside the planned module: `loss_fn` counts what it takes;
            without one, every output of the module is planned to get a gradient.

    Attributes:
        planned: the module that is planned; None before the first training step.
        plan: the plan it trains by, or has trained by; None before the first training step.

    Raises:
        OptionError: Lightning is not there; in `fit()`, the Trainer does what the plan is to do, or there is no such
            module.
        PlannerError: of `plan()`, in `fit()`, for other arguments, and where no plan fits.
    """

    def __new__(cls, *_: Any, **__: Any) -> PlanCallback:
        """A Lightning callback, of the package in use."""
        made: PlanCallback = object.__new__(type(cls.__name__, (cls, *_callbacks()), {}))
        return made

    def __init__(
        self,
        budget_gb: float | str | None = None,
        *,
        module: str | None = None,
        plan_file: str | None = "plan.json",
        **options: Any,
    ) -> None:
        self.budget_gb, self.module, self.plan_file, self.options = budget_gb, module, plan_file, options
        self.planned: nn.Module | None = None
        self.plan: Plan | None = None
        self.unwrap: Callable[[], None] | None = None  # takes `training_step` back

    def __reduce__(self) -> Any:
        """For strategies that start processes: the arguments."""
        return partial(PlanCallback, self.budget_gb, module=self.module, plan_file=self.plan_file, **self.options), ()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what cannot be planned, and have the first training step planned."""
        for what, instead in _conflicts(trainer, pl_module):
            raise OptionError(f"{what} is set: {instead}")
        self._end(pl_module)  # a run that was interrupted
        self.kept: PlanRecord | None = None
        self.ran = False
        self.clears = pl_module.automatic_optimization and not _wants_gradients(trainer, pl_module)
        if self.module is None:
            plan(pl_module, LATER, budget_gb=self.budget_gb, **self.options)  # refuses arguments now
        else:
            self._begin(trainer, pl_module, _named(pl_module, self.module))
        self._wrap(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Clear gradients."""
        if self.clears and batch_idx % trainer.accumulate_grad_batches == 0:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Keep the plan, and its file, also where it was made anew."""
        made = None if self.planned is None else largest_plan(self.planned)
        if made is None or made.record is self.kept:
            return
        self.plan, self.kept = made.without_batch(), made.record
        file = self._file(trainer)
        if file is not None and trainer.is_global_zero:
            file.parent.mkdir(parents=True, exist_ok=True)
            made.save(file)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the plan off."""
        self._end(pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the plan off."""
        self._end(pl_module)

    def _wrap(self, trainer: Any, pl_module: Any) -> None:
        """Have `training_step` run under the plan, or find what to plan."""
        own = pl_module.training_step

        def see(call: Any, called: nn.Module) -> None:
            if (trained := parameters(trainer.optimizers)) & ids(called):
                _Module.__call__ = call  # what plans calls modules
                several = trained & ids(pl_module) - ids(called)
                self._begin(trainer, pl_module, pl_module if several else unwrapped(called))

        @wraps(own)
        def step(*args: Any, **kwargs: Any) -> Any:
            if self.ran:
                return own(*args, **kwargs)
            call = _Module.__call__
            if self.planned is None:
                _Module.__call__ = watched(call, partial(see, call))
            try:
                result = own(*args, **kwargs)
            finally:
                _Module.__call__ = call
            planned = None if self.planned is None else applied_plan(self.planned)
            if planned is None and self.planned is not pl_module:  # of several modules, the second step is planned
                called = "called no module that is trained" if self.module is None else f"did not call {self.module!r}"
                raise ApplyError(
                    f"training_step {called}, so that nothing was planned. Call it as self(x) or self.net(x), not as "
                    "self.net.forward(x), or name another, as in PlanCallback(module='net')"
                )
            self.ran = True
            return result

        before = vars(pl_module).get("training_step")  # its user may have set one on the module
        pl_module.training_step = step
        self.unwrap = partial(_put_back, pl_module, before)

    def _begin(self, trainer: Any, pl_module: Any, model: nn.Module) -> None:
        """Have a module planned at its first call in training."""
        options = self.options if trainer.is_global_zero else {**self.options, "progress": False}
        own = ids(model)
        outside = [p for p in pl_module.parameters() if id(p) not in own]
        rest = storage_bytes([*outside, *set(pl_module.buffers()) - set(model.buffers())])
        gradients = storage_bytes(p for p in outside if p.requires_grad)
        lines = {OUTSIDE: (rest + gradients) / GB} if rest else {}
        lines |= options.get("account_gb") or {}
        microbatches = [trainer.accumulate_grad_batches, *(n for c in trainer.callbacks for n in _scheduled(c))]
        asked: dict[str, Any] = {
            "accumulate": max(microbatches) > 1 or (pl_module.automatic_optimization and not self.clears),
            "known": self.plan or plan_in(self._file(trainer)),
            **options,
            "account_gb": lines,
        }
        if options.get("optimizer") is None:
            asked |= counted(trainer.optimizers, model, lines)
        plan(model, LATER, budget_gb=self.budget_gb, **asked).apply()
        self.planned = model

    def _end(self, pl_module: Any) -> None:
        """Leave the LightningModule as it was."""
        if self.unwrap is not None:
            self.unwrap()
            self.unwrap = None
        if self.planned is not None and attached(self.planned) is not None:
            take_off(self.planned)
        self.planned = None

    def _file(self, trainer: Any) -> Path | None:
        root = str(trainer.default_root_dir)
        if self.plan_file is None or trainer.fast_dev_run or "://" in root:
            return None
        return Path(root) / self.plan_file


def _put_back(pl_module: Any, before: Any) -> None:
    if before is None:
        vars(pl_module).pop("training_step", None)
    else:
        pl_module.training_step = before


def _callbacks() -> list[Any]:
    """Lightning's `Callback`: of each package that is imported already, or of the one that is there."""
    for packages in ([name for name in PACKAGES if name in sys.modules], *([name] for name in PACKAGES)):
        with suppress(ModuleNotFoundError):
            if found := [importlib.import_module(name).Callback for name in packages]:
                return found
    raise OptionError("PlanCallback needs Lightning: pip install lightning")


def _conflicts(trainer: Any, pl_module: Any) -> list[tuple[str, str]]:
    """What a Trainer or a LightningModule has set that does what a plan is to do, or keeps it from it; what to do."""
    strategies = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    sharded = "FSDPStrategy" in strategies
    modules = list(pl_module.modules())
    compiled = is_compiled(pl_module) or any(inner_module(m) is not None for m in modules)
    checkpointing = sharded and checkpoints_activations(trainer.strategy)
    shards = "it wraps modules in ones that a plan cannot be made for; ModelParallelStrategy shards them as they are"
    checks = [
        (checkpointing, "FSDPStrategy's activation checkpointing", LEAVE),
        (sharded, "FSDPStrategy", shards),
        ("DeepSpeedStrategy" in strategies, "deepspeed", ENGINE),
        (any(getattr(m, "gradient_checkpointing", False) for m in modules), "gradient_checkpointing_enable()", LEAVE),
        (compiled, "torch.compile", COMPILES),
        (any(isinstance(m, nn.DataParallel) for m in modules), "DataParallel", PROCESSES),
    ]
    return [(what, instead) for found, what, instead in checks if found]


def _wants_gradients(trainer: Any, pl_module: Any) -> bool:
    """Whether a hook of the user's may look at gradients between the forward and the backward pass."""
    hooks = [getattr(type(pl_module), "optimizer_zero_grad", None)]
    hooks += [getattr(owner, "on_before_zero_grad", None) for owner in (pl_module, *trainer.callbacks)]
    return any(hook is not None and hook.__module__.partition(".")[0] not in LIGHTNING for hook in hooks)


def _scheduled(callback: Any) -> list[int]:
    """Microbatches of a step that a callback has set for some epochs."""
    return list(getattr(callback, "scheduling", {}).values())


def _named(pl_module: Any, path: str) -> nn.Module:
    """The module at a path; OptionError where there is none."""
    modules = dict(pl_module.named_modules())
    if path not in modules:
        children = ", ".join(name for name, _ in pl_module.named_children())
        raise OptionError(f"module={path!r} is no module of this {type(pl_module).__name__}, which has {children}")
    return unwrapped(modules[path])
