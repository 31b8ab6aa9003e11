"""Plans as files: versioned JSON, without code or pickles; `docs/plan-2.schema.json` describes them.

A file has every field of a `PlanRecord`. It has no emitted graphs: the runtime emits them for the model to which the
plan is applied.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import field, make_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import torch

from planner.core.files import path_of
from planner.core.options import Options
from planner.core.plan import PlanRecord
from planner.errors import PlanFileError
from planner.planfile.consistency import check
from planner.planfile.jsonfile import read, write
from planner.planfile.schema import Unexpected, decode, encode, schema
from planner.requests.check import check_loss_fn
from planner.requests.planned import Filed

FORMAT, VERSION = "checkpoint-planner plan", 2


def save(record: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Write a plan; see `Plan.save`."""
    write(path_of(path), data_of(record))


def data_of(record: PlanRecord) -> dict[str, Any]:
    """A plan as the JSON data of its file."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "planner": own_version(),
        "plan": encode(record, _record_with(type(record.options))),  # type: ignore[arg-type]  # classes are hashable
    }


def load(
    path: str | os.PathLike[str],
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    kind: type[Options] = Options,
) -> Filed:
    """Read a plan with its options as a record of this kind; see `Plan.load`."""
    check_loss_fn(loss_fn)
    source = path_of(path)
    return plan_of(read(source), str(source), loss_fn, kind)


def plan_of(
    data: Any,
    source: str,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    kind: type[Options] = Options,
) -> Filed:
    """The plan that JSON data stand for.

    Args:
        data: as `data_of` returns them.
        source: the place that they are from, for messages.
        loss_fn: as for `Plan.load`.
        kind: the record of options.

    Raises:
        PlanFileError: the data are no plan, are of another format, or contradict each other.
    """

    def wrong(why: object) -> NoReturn:
        raise PlanFileError(f"{source}: {why}") from (why if isinstance(why, Exception) else None)

    if not isinstance(data, dict) or data.get("format") != FORMAT:
        wrong(f'not a plan file, which is an object with "format": "{FORMAT}"')
    number = data.get("version")
    if type(number) is not int or number < 1:
        wrong(Unexpected("version", "a whole number from 1 on", number))
    if number > VERSION:
        wrong(
            f"made by a newer version of the planner ({str(data.get('planner'))[:40]!r}; format {number}, here up to "
            f"{VERSION}): upgrade checkpoint-planner"
        )
    if number < VERSION:
        wrong(f"made by an older version of the planner (format {number}, here {VERSION}): plan again and save that")
    try:
        if "plan" not in data:
            raise Unexpected("", "'plan' in it", f"none among {', '.join(data)}")
        record: PlanRecord = decode(data["plan"], _record_with(kind), "plan")  # type: ignore[arg-type]
        check(record)
    except Unexpected as e:
        wrong(e)
    return Filed(record, source, loss_fn)


def plan_file_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of plan files."""
    plan = schema(PlanRecord)
    sections = {
        "format": {"const": FORMAT},
        "version": {"const": VERSION},
        "planner": {"type": "string"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{FORMAT}, version {VERSION}; bytes and seconds",
        "type": "object",
        "$defs": plan.pop("$defs"),
        "properties": sections | {"plan": plan},
        "required": ["format", "version", "plan"],
    }


@cache
def _record_with(kind: type[Options]) -> type[PlanRecord]:
    """The record of plans whose options are of a subclass of `Options`."""
    if kind is Options:
        return PlanRecord
    return make_dataclass(
        "PlanRecord", [("options", kind, field(repr=False))], bases=(PlanRecord,), frozen=True, eq=False
    )


def own_version() -> str:
    try:
        return version("checkpoint-planner")
    except PackageNotFoundError:
        return "unknown"
