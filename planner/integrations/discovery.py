"""Finds the model that a script trains, when it trains it: a module that is called, and that an optimizer has."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn, optim

from planner.compat.dynamo import inner_module
from planner.core.frames import variables_of
from planner.errors import BatchError, InfeasibleBudgetError, OptionError, PlannerError
from planner.runtime.interception import attached
from planner.runtime.modes import redirected

DOES_NOT_FIT, BAD_INPUT = 1, 2  # exit statuses

_Module: Any = nn.Module  # whose call, and
_Optimizer: Any = optim.Optimizer  # whose constructor is watched

Found = Callable[["Search", nn.Module, list[optim.Optimizer]], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """A module that is trained, and the script's variable that holds it; "" where none was found."""

    module: nn.Module
    name: str

    @property
    def names(self) -> set[str]:
        """What it may be called on the command line."""
        return {self.name, self.name.rpartition(".")[2], type(self.module).__name__} - {""}

    def __str__(self) -> str:
        size = sum(p.numel() for p in self.module.parameters())
        return f"{self.name or 'one'} (of class {type(self.module).__name__}, {size:,} parameters)"


class Search:
    """Waits for the first training step of each model of a script.

    Args:
        wanted: the variable or the class of the only one to find; None for all that are trained one after another.
        found: called with this object, a model and its optimizers, before the call of the model runs. A PlannerError
            of it ends the script, with its message.
    """

    def __init__(self, wanted: str | None, found: Found) -> None:
        self.wanted = wanted
        self.found = found
        self.optimizers: list[weakref.ref[optim.Optimizer]] = []  # of what was not found yet
        self.choice: nn.Module | None = None
        self.over = False
        self.statuses: list[int] = []  # with which the script was to end, as its model could not be planned

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch optimizers that are made, and calls of modules while there are some whose model was not found."""
        init, self.call = _Optimizer.__init__, _Module.__call__

        @wraps(init)
        def watched_init(optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            if not self.over:
                self.optimizers.append(weakref.ref(optimizer))
                _Module.__call__ = watched_call

        def see(module: nn.Module) -> None:
            with exits(self.statuses):
                self._see(module)

        watched_call = watched(self.call, see)
        _Optimizer.__init__ = watched_init
        try:
            yield
        finally:
            _Optimizer.__init__ = init
            _Module.__call__ = self.call

    @contextmanager
    def paused(self) -> Iterator[None]:
        """See no optimizers for a while: what plans makes some."""
        over, self.over = self.over, True
        try:
            yield
        finally:
            self.over = over

    def _see(self, called: nn.Module) -> None:
        optimizers = [o for ref in self.optimizers if (o := ref()) is not None]
        trained, own = parameters(optimizers), ids(called)
        model = unwrapped(called)
        if not trained & own or redirected(model):
            return
        if attached(model) is None:
            if self.wanted is not None or trained - own:
                self.choice = self.choice or _choose(model, trained, self.wanted)
            if self.choice is not None and model not in self.choice.modules():
                return
            model = self.choice or model
            _Module.__call__ = self.call  # what plans calls modules, and makes optimizers
            with self.paused():
                self.found(self, model, [o for o in optimizers if parameters([o]) & own])
            self.over = self.wanted is not None
        _Module.__call__ = self.call
        self.optimizers.clear()
        self.choice = None


def watched(call: Callable[..., Any], see: Callable[[nn.Module], None]) -> Any:
    """Modules' call, where each that trains is seen before it runs."""

    @wraps(call)
    def watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and module.training and not torch.compiler.is_compiling():
            see(module)
        return call(module, *args, **kwargs)

    return watched_call


@contextmanager
def exits(statuses: list[int] | None = None, *, let_pass: tuple[type[PlannerError], ...] = ()) -> Iterator[None]:
    """A PlannerError ends the process; its exit status is entered, as a script may catch SystemExit and go on.

    The model's own error for a batch is raised as it is: the script may leave that batch out. So are errors of the
    kinds to `let_pass`.
    """
    try:
        yield
    except PlannerError as e:
        if isinstance(e, let_pass) or (isinstance(e, BatchError) and e.of_model is not None):
            raise
        print(f"planner: {type(e).__name__}: {e}", file=sys.stderr)
        status = DOES_NOT_FIT if isinstance(e, InfeasibleBudgetError) else BAD_INPUT
        if statuses is not None:
            statuses.append(status)
        raise SystemExit(status) from None


def unwrapped(module: nn.Module) -> nn.Module:
    """A model without torch.compile, DistributedDataParallel or DataParallel around it."""
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif (inner := inner_module(module)) is not None:
            module = inner
        else:
            return module


def ids(module: nn.Module) -> set[int]:
    """A module's parameters."""
    return {id(p) for p in module.parameters()}


def parameters(optimizers: Sequence[optim.Optimizer]) -> set[int]:
    """Those that optimizers train."""
    return {id(p) for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad}


def _choose(called: nn.Module, trained: set[int], wanted: str | None) -> nn.Module:
    """Which of several trained modules to plan; OptionError where that is not said, or not understood."""
    outermost = _outermost(trained)
    if wanted is None and len(outermost) == 1 and trained <= ids(outermost[0]):
        return outermost[0]  # a method of it calls its parts
    candidates = [Trained(m, _variable(m)) for m in _separate(called, outermost, trained)]
    if wanted is None and len(candidates) == 1:
        return called
    fitting = [c.module for c in candidates if wanted in c.names]
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(map(str, candidates))
    if wanted is not None:
        raise OptionError(
            f"--model {wanted} is {'more than one' if fitting else 'none'} of what the script trains: {listed}"
        )
    raise OptionError(
        f"the script trains several modules: {listed}. A plan is for one. Name it, by its variable or its class, as in "
        f"--model {candidates[0].name or type(called).__name__}; the others train as before, and take room beside it"
    )


def _outermost(trained: set[int]) -> list[nn.Module]:
    """The outermost modules that are trained."""
    # isinstance() asks objects for their class, and some raise
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module) and ids(m) & trained]
    inner = {id(child) for m in modules for child in m.modules() if child is not m}
    return list({id(m): m for m in map(unwrapped, (m for m in modules if id(m) not in inner))}.values())


def _separate(called: nn.Module, outermost: Iterable[nn.Module], trained: set[int]) -> list[nn.Module]:
    """The outermost modules that are trained; of one whose part was called by itself, its parts."""
    found = [called]
    for m in outermost:
        found += [part for part in apart(m, called) if ids(part) & trained]
    return found


def apart(module: nn.Module, called: nn.Module) -> list[nn.Module]:
    """The outermost modules in a module, itself perhaps, of which one that was called is no part."""
    if called is module:
        return []
    if called not in set(module.modules()):
        return [module]
    return [part for child in module.children() for part in apart(child, called)]


def _variable(module: nn.Module) -> str:
    """The script's variable that holds a module, or an object's attribute, as in "trainer.model"; "" if none does."""

    def path(name: str, value: Any) -> str:
        if not issubclass(type(value), nn.Module):
            return ""
        inner = [at for at, m in unwrapped(value).named_modules() if m is module]
        return ".".join(filter(None, [name, *inner])) if inner else ""

    frame: Any = inspect.currentframe()
    scopes = [vars(sys.modules["__main__"])]
    while frame is not None:
        if frame.f_globals["__name__"] not in (__name__, "torch.nn.modules.module"):
            scopes.insert(1, variables_of(frame))  # the outermost first
        frame = frame.f_back
    held = [(name, value) for scope in scopes for name, value in list(scope.items())]
    attributes = [(f"{name}.{at}", v) for name, value in held for at, v in getattr(value, "__dict__", {}).items()]
    return next(filter(None, (path(name, value) for name, value in [*held, *attributes])), "")
