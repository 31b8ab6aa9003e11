"""`Plan.explain`: why a plan keeps some values and recomputes others, from its data and a simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from planner.core.plan import Action, Decision, PlanRecord
from planner.core.recipe import Choice
from planner.core.what_if import Cost, WhatIf
from planner.errors import OptionError, gb
from planner.report.explanation import Explanation, Group
from planner.report.names import folded, modules_of, title
from planner.report.table import in_pieces
from planner.report.words import duration, rate, shown

Try = Callable[[Collection[int], bool], WhatIf | None]


def explain(plan: PlanRecord, path: str, costs: Sequence[Cost], otherwise: Try) -> Explanation:
    """See `Plan.explain`.

    Args:
        plan: of any mode.
        path: of a module, a pattern of paths, or a value as its label in an explanation names it.
        costs: one per decision, as `planner.planning.what_if.costs_of` has them; none where they are not known.
        otherwise: simulates the step with some values, by their numbers in `costs`, kept (True) or recomputed.

    Raises:
        OptionError: no module or value has this name.
    """
    modules, chosen = _named(plan, path)
    told = _Words(plan, costs, otherwise)
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for at in chosen:
        d = plan.decisions[at]
        groups[folded(d.module), d.op, d.action, told.reason(at), told.checkpointed(at)].append(at)
    return Explanation(
        path=path,
        modules=modules,
        kept_bytes=sum(plan.decisions[at].nbytes for at in chosen if plan.decisions[at].action == "keep"),
        recomputed_bytes=sum(plan.decisions[at].nbytes for at in chosen if plan.decisions[at].action == "recompute"),
        offloaded_bytes=sum(plan.decisions[at].nbytes for at in chosen if plan.decisions[at].action == "offload"),
        seconds=sum(plan.decisions[at].recompute_seconds for at in chosen),
        budget_bytes=plan.budget_bytes,
        peak_bytes=plan.peak_bytes,
        step_seconds=plan.step_seconds,
        groups=tuple(sorted(map(told.group, groups.values()), key=lambda g: (-g.nbytes, g.label))),
        all_kept=told.instead(chosen, "recompute"),
        all_recomputed=told.instead(chosen, "keep"),
        pieces=tuple(in_pieces(row for row in plan.pieces if _within(row.module, modules))),
    )


def _within(module: str, modules: Collection[str]) -> bool:
    return any(module == name or not name or module.startswith(f"{name}.") for name in modules)


def _named(plan: PlanRecord, path: str) -> tuple[tuple[str, ...], list[int]]:
    """The modules that a path names, and the positions of their decisions; of a value, no modules and its positions."""
    if not isinstance(path, str):
        raise OptionError(f"explain({path!r}) needs the path of a module as a string, as in explain('layers.3.mlp')")
    known = _modules(plan)
    asked = "" if path == "(the model)" else path
    pattern = asked.split(".")
    named = tuple(name for name in known if name == asked or _matches(name, pattern))
    if named:
        inside = [f"{name}." if name else "" for name in named]
        of = [d.module for d in plan.decisions]
        return named, [at for at, m in enumerate(of) if m in named or any(map(m.startswith, inside))]
    values = [at for at, d in enumerate(plan.decisions) if asked in _labels(d)]
    if not values:
        labels = [title(d.module, d.op, d.source) for d in plan.decisions]
        near = get_close_matches(asked[:200], dict.fromkeys([*known, *map(folded, known), *labels]), n=3, cutoff=0.5)
        names = ", ".join(repr(shown(n)) for n in near or known[1:4])
        beside = f"{'the nearest are' if near else 'these are'}: {names}" if names else "the plan knows of no modules"
        raise OptionError(f"{shown(path)!r:.200} is no module of the model, nor an activation of the plan; {beside}")
    return (), values


def _labels(d: Decision) -> set[str]:
    """The labels of a value: with its own module or with asterisks for numbers, with its source line or without."""
    full = [title(path, d.op, d.source) for path in (d.module, folded(d.module))]
    return {*full, *(label.rpartition(" (")[0] for label in full), title(folded(d.module), d.op, "")}


def _modules(plan: PlanRecord) -> list[str]:
    """Paths of the model's modules where they are known, and of all modules that the plan names."""
    names = dict.fromkeys(["", *modules_of(plan)])
    for d in plan.decisions:
        parts = d.module.split(".")
        names.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts))))
    return list(names)


def _matches(name: str, pattern: Sequence[str]) -> bool:
    parts = name.split(".")
    return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))


class _Words:
    """Explains groups of a plan's values, given by their positions in `plan.decisions`."""

    def __init__(self, plan: PlanRecord, costs: Sequence[Cost], otherwise: Try) -> None:
        self.plan, self.costs, self.otherwise = plan, costs, otherwise
        self.units = sorted(getattr(plan.recipe, "kept", ()), key=len, reverse=True)
        every = range(len(costs))
        self.recomputed = [at for at in every if plan.decisions[at].action == "recompute"]
        self.optional = [at for at in every if plan.decisions[at].action == "keep" and not self.reason(at)]

    def reason(self, at: int) -> str:
        """Why a value has to be kept, or how a random one stays the same; empty where neither applies."""
        return self.plan.decisions[at].reason or (self.costs[at].bound_by if self.costs else "")

    def checkpointed(self, at: int) -> str:
        """In eager mode, the checkpointed module that computes a value, its numbers as asterisks."""
        module = self.plan.decisions[at].module
        return next((folded(u) for u in self.units if module == u or module.startswith(f"{u}.")), "")

    def instead(self, values: Iterable[int], action: Action) -> WhatIf | None:
        """The simulated step with the other decision, for those of the values for which `action` is decided now."""
        changed = [at for at in values if self.plan.decisions[at].action == action]
        if action == "keep":
            changed = [at for at in changed if not self.reason(at)]
        if not self.costs or not changed:
            return None
        return self.otherwise([self.costs[at].value for at in changed], action != "keep")

    def group(self, ats: Sequence[int]) -> Group:
        ds = [self.plan.decisions[at] for at in ats]
        first = ds[0]
        one = len({d.module for d in ds}) == 1
        source = first.source if len({d.source for d in ds}) == 1 else ""
        again = sum(self.costs[at].seconds for at in ats) if self.costs else None
        if again is None and first.action == "recompute":
            again = sum(d.recompute_seconds for d in ds)
        changed = self.instead(ats, first.action)
        return Group(
            label=title(first.module if one else folded(first.module), first.op, source),
            action=first.action,
            count=len(ats),
            nbytes=sum(d.nbytes for d in ds),
            seconds=sum(d.recompute_seconds for d in ds),
            again_seconds=again,
            reason=self.reason(ats[0]),
            otherwise=changed,
            why="".join(self._why(ats, ds, again, changed)),
        )

    def _why(
        self, ats: Sequence[int], ds: Sequence[Decision], again: float | None, changed: WhatIf | None
    ) -> Iterable[str]:
        plan, first, reason = self.plan, ds[0], self.reason(ats[0])
        nbytes = sum(d.nbytes for d in ds)
        if not self.costs and not isinstance(plan.recipe, Choice):
            yield _fused(first, nbytes, again or 0.0)
        elif not self.costs:
            yield self._eager(ats[0], first, nbytes, again)
        elif first.action == "keep" and reason:
            yield f"Kept, as {reason}."
        elif first.action == "offload":
            yield from self._offloaded(ds, nbytes, changed)
        elif first.action == "keep" and not self.recomputed and plan.moved_bytes:
            yield "Kept: the step fits with it, and with what is offloaded away."
        elif first.action == "keep" and not self.recomputed:
            yield f"Kept: the step fits with everything kept ({gb(plan.peak_bytes)}), so that nothing has to run again."
        elif changed is not None and again is not None:
            what = "it" if len(ats) == 1 else "them"
            if first.action == "keep":
                yield from self._kept(what, again, nbytes, changed, any(self.costs[at].held_at_peak for at in ats))
            else:
                often = ", some of it several times" if sum(d.recompute_seconds for d in ds) > 1.001 * again else ""
                yield from self._recomputed(what, again, nbytes, changed, often)
                if reason:
                    yield f" {'It is' if len(ats) == 1 else 'They are'} {reason}."

    def _kept(self, what: str, again: float, nbytes: int, changed: WhatIf, at_peak: bool) -> Iterable[str]:
        more = changed.step_seconds - self.plan.step_seconds
        lower = changed.peak_bytes < self.plan.peak_bytes
        if not lower and not at_peak:
            yield f"Kept: not held at the peak, so that dropping {what} would save nothing, and take {duration(more)}."
            return
        beside = f", {duration(more - again)} of it for what that reads and is not held" if more > 1.001 * again else ""
        yield f"Kept: making {what} again would take {duration(more)} for {gb(nbytes)} ({rate(more, nbytes)}){beside}; "
        yield f"{self._elsewhere(more, nbytes)}. Recomputed too, the step would peak at {gb(changed.peak_bytes)}"
        over = changed.peak_bytes - self.plan.budget_bytes
        instead = f"{gb(over)} more than the budget" if over > 0 else "no lower than now"
        yield f", {gb(self.plan.peak_bytes - changed.peak_bytes)} lower." if lower else f", {instead}."

    def _offloaded(self, ds: Sequence[Decision], nbytes: int, changed: WhatIf | None) -> Iterable[str]:
        timeline, d = self.plan.timeline, ds[0]
        places = [timeline[at] for at in (d.leaves, d.returns) if at is not None]
        left, back = (f"{title(m.module, m.op, '')} ({m.phase})" for m in places)
        yield f"Offloaded: {gb(nbytes)} leave before {left}, and their way back begins before {back}"
        yield "" if len(ds) == 1 else ", for the first of them"
        if changed is None:
            yield "."
            return
        more = changed.peak_bytes - self.plan.budget_bytes
        beyond = f", {gb(more)} more than the budget" if more > 0 else ""
        yield f". Kept, the step would peak at {gb(changed.peak_bytes)} ({changed.peak_at}){beyond}."

    def _elsewhere(self, seconds: float, nbytes: int) -> str:
        most = max(self.recomputed, key=self._rate)
        if seconds / max(nbytes, 1) > self._rate(most):
            return f"what is recomputed instead takes at most {self._average([most])}"
        return f"what is recomputed takes {self._average(self.recomputed)} on average"

    def _recomputed(self, what: str, again: float, nbytes: int, changed: WhatIf, often: str) -> Iterable[str]:
        least = min(self.optional, key=self._rate, default=None)
        beside = ""
        if least is not None and again / max(nbytes, 1) < self._rate(least):
            beside = f"; what is kept by choice would take at least {self._average([least])}"
        elif least is not None:
            beside = f"; what is kept by choice would take {self._average(self.optional)} on average"
        yield f"Recomputed: running {what} again takes {duration(again)} ({rate(again, nbytes)}){often}{beside}. "
        saved = self.plan.step_seconds - changed.step_seconds
        more = changed.peak_bytes - self.plan.budget_bytes
        if more > 0:
            yield f"Kept, the step would peak at {gb(changed.peak_bytes)} ({changed.peak_at}), "
            yield f"{gb(more)} more than the budget."
        else:
            yield (
                f"Kept, the step would peak at {gb(changed.peak_bytes)}, still within the budget, and be "
                f"{duration(saved)} faster: solver {self.plan.solver} left that."
            )

    def _eager(self, at: int, d: Decision, nbytes: int, again: float | None) -> str:
        unit = self.checkpointed(at)
        if d.action == "recompute":
            return (
                f"Recomputed: {unit or 'its module'} is checkpointed, and runs again as a whole; this takes "
                f"{duration(again or 0.0)} of it ({rate(again or 0.0, nbytes)})."
            )
        if d.reason:
            return f"Kept, as {d.reason}." if unit else f"Kept: its module cannot be checkpointed: {d.reason}."
        if not self.units:
            return f"Kept: the step fits with everything kept ({gb(self.plan.peak_bytes)}), so that nothing runs again."
        where = f"{unit} is checkpointed, but for this" if unit else "it is made in no module that is checkpointed"
        return f"Kept: {where}."

    def _rate(self, at: int) -> float:
        return self.costs[at].seconds / max(self.plan.decisions[at].nbytes, 1)

    def _average(self, ats: Sequence[int]) -> str:
        return rate(sum(self.costs[at].seconds for at in ats), sum(self.plan.decisions[at].nbytes for at in ats))


def _fused(d: Decision, nbytes: int, again: float) -> str:
    """Why a value is kept, or made again, that fused kernels make."""
    if d.action == "recompute":
        return f"Recomputed by fused kernels, which takes {duration(again)} ({rate(again, nbytes)})."
    return f"Kept, as {d.reason}." if d.reason else "Kept."
