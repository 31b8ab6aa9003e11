"""Plans as files: versioned JSON, without code or pickles; `docs/plan-2.schema.json` describes it.

A file has every field of a `PlanRecord`. The emitted graphs are not in it: they are written anew for the model that the
plan is applied to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn, get_type_hints

import torch

from planner.core.files import path_of
from planner.core.plan import PlanRecord
from planner.errors import PlanFileError
from planner.planfile.consistency import check
from planner.planfile.jsonfile import read, write
from planner.planfile.schema import Unexpected, decode_members, encode, required, schema
from planner.requests.check import check_loss_fn
from planner.requests.planned import Filed

FORMAT, VERSION = "checkpoint-planner plan", 2


def save(record: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Write a plan; see `Plan.save`."""
    target = path_of(path)
    write(target, data_of(record))


def data_of(record: PlanRecord) -> dict[str, Any]:
    """A plan as the JSON data of its file."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "planner": _own_version(),
        "plan": {name: encode(getattr(record, name), kind) for name, kind in _kinds().items()},
    }


def load(path: str | os.PathLike[str], loss_fn: Callable[[Any], torch.Tensor] | None = None) -> Filed:
    """Read a plan; see `Plan.load`."""
    check_loss_fn(loss_fn)
    source = path_of(path)
    return plan_of(read(source), str(source), loss_fn)


def plan_of(data: Any, source: str, loss_fn: Callable[[Any], torch.Tensor] | None = None) -> Filed:
    """The plan that JSON data stands for; raises PlanFileError, which names where it is from."""

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
        record = PlanRecord(**decode_members(data["plan"], _kinds(), required(PlanRecord), "plan"))
        check(record)
    except Unexpected as e:
        wrong(e)
    return Filed(record, source, loss_fn)


def plan_file_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of plan files."""
    known: dict[str, Any] = {}
    members = {name: schema(kind, known) for name, kind in _kinds().items()}
    plan = {"type": "object", "properties": members, "required": required(PlanRecord), "additionalProperties": False}
    sections: dict[str, Any] = {
        "format": {"const": FORMAT},
        "version": {"const": VERSION},
        "planner": {"type": "string"},
        "plan": plan,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{FORMAT}, version {VERSION}; bytes and seconds",
        "type": "object",
        "properties": sections,
        "required": ["format", "version", "plan"],
        "$defs": known,
    }


@cache
def _kinds() -> dict[str, Any]:
    """The fields of a plan, with their types."""
    return get_type_hints(PlanRecord)


def _own_version() -> str:
    try:
        return version("checkpoint-planner")
    except PackageNotFoundError:
        return "unknown"
