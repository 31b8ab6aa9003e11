"""`compare()`: the changes from one plan to another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isclose, prod

from planner.core.identity import identity
from planner.core.plan import Action, Decision, Plan
from planner.errors import ApplyError, OptionError, PlannerError
from planner.report.comparison import Comparison, Fact, ModuleChange
from planner.report.names import folded

_PLAIN = {ord(c): None for c in "[]'"}


def compare(a: Plan, b: Plan) -> Comparison:
    """The changes from one plan to another: what was asked for, budget, peak, time, and decisions per module.

    Values are matched by module, kind of op and order.

    Args:
        a: the plan to start from.
        b: the other plan; of any model, mode or device.

    Returns:
        The changes; printing them says it in words.

    Raises:
        OptionError: one of the two is no plan, or waits for its first training step.

    Examples:
        >>> import torch
        >>> from planner import plan
        >>> model, batch = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.zeros(4, 8)
        >>> p = plan(model, batch, budget_gb=1, loss_fn=torch.Tensor.mean)
        >>> print(str(compare(p, p)).splitlines()[0])
        The plans decide the same for all 1 values.
    """
    for p in (a, b):
        _check(p)
    lines = {n: (a.account.get(n, 0), b.account.get(n, 0)) for n in dict.fromkeys([*a.account, *b.account])}
    facts = (
        Fact("budget", a.budget_bytes, b.budget_bytes),
        Fact("peak", a.peak_bytes, b.peak_bytes),
        Fact("everything kept", a.baseline_peak_bytes, b.baseline_peak_bytes),
        Fact("step", a.step_seconds, b.step_seconds),
        Fact("least time proven", a.bound, b.bound),
        Fact("overhead", a.overhead, b.overhead),
        Fact("gap", a.gap, b.gap),
    )
    modules, unchanged = _changes(a.decisions, b.decisions)
    account = {name: pair for name, pair in lines.items() if pair[0] != pair[1]}
    return Comparison(differences(_circumstances(a), _circumstances(b)), facts, account, modules, unchanged)


def _check(p: object) -> None:
    if not isinstance(p, Plan):
        raise OptionError(f"compare() needs two plans; it was given {p!r:.200} of type {type(p).__name__}")
    try:
        p.peak_bytes  # noqa: B018 - a plan that waits for its first step raises ApplyError
    except ApplyError as e:
        raise OptionError(f"compare() needs plans that are made: {e}") from None


def differences(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The options with different values; an empty text stands for a value that is not known.

    Examples:
        >>> differences({"device": "cpu", "batch": ""}, {"device": "h100", "batch": "2x8"})
        {'device': ('cpu', 'h100')}
    """
    return {name: (a[name], b[name]) for name in a if a[name] and b.get(name) and a[name] != b[name]}


def _circumstances(plan: Plan) -> dict[str, str]:
    """The model, the batch and the options of a plan, in words; empty where they are not known."""
    request = plan.request
    model = getattr(request, "identity", None)  # a plan from a file has one
    with suppress(PlannerError):  # the model may be gone
        model = model or identity(request.model)
    size = sum(prod(p.shape) for p in model.parameters) if model else 0
    mode = "" if model is None or model.modules[0].training else ", in evaluation mode"
    kinds = request.batch_kinds or ()
    optimizer = request.optimizer
    name = optimizer if isinstance(optimizer, str) else "none" if optimizer is None else type(optimizer).__name__
    return {
        "model": f"{model.name} of {size:,} parameters{mode}" if model else "",
        "batch": ", ".join(f"{k.name.removeprefix('batch').translate(_PLAIN)} {_by(k.shape)} {k.dtype}" for k in kinds),
        "device": plan.device,
        "mode": request.mode,
        "optimizer": name.partition("(")[0],  # the name in a file ends in the optimizer's options
        "times": request.given["costs"] or "",
        "gradients accumulate": "yes" if request.accumulate else "no",
        "microbatches in flight": str(request.in_flight),
        "devices that share the parameters": str(request.shard),
        "smaller batches too": "yes" if request.maxima is not None else "no",
        "solver": plan.solver,
    }


def _by(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _changes(a: Iterable[Decision], b: Iterable[Decision]) -> tuple[tuple[ModuleChange, ...], int]:
    ours, theirs = _numbered(a), _numbered(b)
    moved: dict[str, list[tuple[str, Decision | None, Decision | None]]] = defaultdict(list)
    unchanged = 0
    for key in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(key), theirs.get(key)
        if one is not None and other is not None and one.action == other.action and isclose(_time(one), _time(other)):
            unchanged += 1
        else:
            moved[folded(key[0])].append((key[0], one, other))
    rows = []
    for name, changes in moved.items():
        modules = {module for module, _, _ in changes}
        rows.append(
            ModuleChange(
                name=name if len(modules) > 1 else changes[0][0],
                count=len(modules),
                now_kept=_moved_to(changes, "keep"),
                now_recomputed=_moved_to(changes, "recompute"),
                only_a=sum(one.nbytes for _, one, other in changes if one is not None and other is None),
                only_b=sum(other.nbytes for _, one, other in changes if one is None and other is not None),
                seconds=sum(_time(other) - _time(one) for _, one, other in changes),
            )
        )
    return tuple(
        sorted(rows, key=lambda r: (-(r.now_kept + r.now_recomputed + r.only_a + r.only_b), r.name))
    ), unchanged


def _moved_to(changes: Iterable[tuple[str, Decision | None, Decision | None]], action: Action) -> int:
    return sum(b.nbytes for _, a, b in changes if a is not None and b is not None and a.action != b.action == action)


def _time(d: Decision | None) -> float:
    return 0.0 if d is None else d.recompute_seconds


def _numbered(decisions: Iterable[Decision]) -> dict[tuple[str, str, int], Decision]:
    """Decisions by module, kind of op, and how many ops of that kind came before in the module."""
    counted: dict[tuple[str, str], int] = defaultdict(int)
    numbered = {}
    for d in decisions:
        place = d.module, d.op
        numbered[*place, counted[place]] = d
        counted[place] += 1
    return numbered
