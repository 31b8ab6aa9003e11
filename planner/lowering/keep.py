"""`keep=` of `plan()`: ops that must not run twice, by their names, their modules' paths, or patterns of either."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from itertools import accumulate

from planner.core.step import Step
from planner.errors import OptionError

Place = tuple[str, str]  # an op's name, as "aten.bmm.default", and the path of its module


def keep_asked(step: Step, keep: Sequence[str], repeated: Collection[tuple[int | None, int]]) -> Step:
    """The step in which no op that `keep` names runs twice. O(ops x names).

    Args:
        step: as built, with a region and an index for each op of a region.
        keep: as in `plan()`.
        repeated: ops that a checkpoint of the model's own runs again: region and index.

    Raises:
        OptionError: one of these is named.
    """
    ops, origins = list(step.problem.ops), list(step.origins)
    for i, reason in enumerate(reasons(places(step), keep)):
        if reason and (origins[i].region, origins[i].index) in repeated:
            raise OptionError(
                f"{reason} ({origins[i].target}), and checkpoints='keep' has a checkpoint of the model's own run it "
                "again: leave one of the two out"
            )
        if reason and not origins[i].keep_because:
            ops[i], origins[i] = replace(ops[i], recomputable=False), replace(origins[i], keep_because=reason)
    return replace(step, problem=replace(step.problem, ops=tuple(ops)), origins=tuple(origins))


def places(step: Step) -> list[Place]:
    """What `keep` can name of each op of a step."""
    return [(origin.target, origin.module) for origin in step.origins]


def reasons(rows: Iterable[Place], keep: Sequence[str]) -> Iterator[str]:
    """For each op, why it must not run twice, in words; empty where nothing names it."""

    @cache
    def reason(target: str, module: str) -> str:
        names = [*_names(target), *_paths(module)]
        found = (name for name in keep if target and _is_any(names, name))
        return next((f"keep={name!r} names it" for name in found), "")

    return (reason(*row) for row in rows)


def refuse_unmatched(rows: Iterable[Place], keep: Sequence[str], modules: Iterable[str]) -> None:
    """Raise OptionError, with the nearest names, where one of `keep` names neither an op nor a module of the model."""
    if not keep:
        return
    ops = sorted({name for target, _ in rows if target for name in _names(target)})
    paths = [path for path in modules if path]
    for name in keep:
        if _is_any((*ops, *paths), name):
            continue
        known = [*(op for op in ops if not op.endswith(".default")), *paths]
        same_end = [k for k in known if _dotted(name) == k.rpartition(".")[2]]
        near = same_end[:3] or get_close_matches(_dotted(name), known, n=3, cutoff=0.5)
        listed = f"the nearest are: {', '.join(map(repr, near))}" if near else "nothing is called nearly so"
        raise OptionError(f"keep={name!r} names no op of the step and no module of the model; {listed}")


def _is_any(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, _dotted(pattern)) for name in names)


def _dotted(name: str) -> str:
    return name.replace("::", ".")


def _names(target: str) -> tuple[str, ...]:
    """An op's name with its overload and without."""
    return tuple(dict.fromkeys((target, target.rpartition(".")[0] if target.count(".") > 1 else target)))


def _paths(module: str) -> tuple[str, ...]:
    """The paths of a module and of those around it, without the model's own."""
    return tuple(accumulate(module.split("."), "{}.{}".format)) if module else ()
