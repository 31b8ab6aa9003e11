"""Problems as JSON: the project's own format, and the published instances."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from solvers.errors import ProblemError
from solvers.link import Link
from solvers.problem import Op, Problem, Waiting

FORMAT = "rematerialization-problem/1"


def to_json(problem: Problem) -> dict[str, Any]:
    """The problem as plain JSON data; `from_json` is its inverse."""
    return {
        "format": FORMAT,
        "name": problem.name,
        "budget": problem.budget,
        "resident": problem.resident,
        "boundary": problem.boundary,
        "sizes": list(problem.sizes),
        "pinned": sorted(problem.pinned),
        "ops": [asdict(op) | {"reads": list(op.reads), "writes": list(op.writes)} for op in problem.ops],
        **({} if problem.waiting is None else {"waiting": asdict(problem.waiting)}),
        **({} if problem.link is None else {"link": asdict(problem.link), "movable": sorted(problem.movable)}),
    }


def from_json(data: Any, path: str | Path | None = None) -> Problem:
    """Read a problem: this project's own format, or a published instance.

    A published instance (`{"budget_bytes", "last_forward_op", "ops": [{"inputs", "bytes", "cost"}]}`) has one value per
    op with the op's own number. Both formats list ops in a valid order of execution. Bytes may be written as 10.0.

    Args:
        data: what `json.load` returns.
        path: the file it is from, for messages.

    Raises:
        ProblemError: naming what is missing or wrong.
    """
    try:
        if isinstance(data, dict) and "last_forward_op" in data:
            return _published(data)
        if isinstance(data, dict) and data.get("format") == FORMAT:
            return _own(data)
        raise ProblemError(f'neither a published instance (with "last_forward_op") nor one with "format": "{FORMAT}"')
    except ProblemError as e:
        raise e if path is None else ProblemError(f"{path}: {e}") from e


def _published(data: dict[str, Any]) -> Problem:
    ops, last = _get(data, "ops", list), _get(data, "last_forward_op")
    if not (type(last) is int and 0 <= last < len(ops)):
        raise ProblemError(f"last_forward_op {last!r:.60} is not one of the {len(ops)} ops, numbered from 0")
    return Problem(
        tuple(Op(f"op{i}", tuple(_get(o, "inputs", list, i)), (i,), _get(o, "cost", op=i)) for i, o in enumerate(ops)),
        sizes=tuple(_bytes(_get(o, "bytes", op=i)) for i, o in enumerate(ops)),
        boundary=last + 1,
        budget=_bytes(_get(data, "budget_bytes", (int, float))),
        name=data.get("name", ""),
    )


def _own(data: dict[str, Any]) -> Problem:
    ops = []
    for i, o in enumerate(_get(data, "ops", list)):
        reads, writes = (tuple(_get(o, key, list, i)) for key in ("reads", "writes"))
        more = {key: o[key] for key in ("recomputable", "region") if key in o}
        ops.append(Op(o.get("name", ""), reads, writes, _get(o, "cost", op=i), _bytes(o.get("workspace", 0)), **more))
    return Problem(
        ops=tuple(ops),
        sizes=tuple(map(_bytes, _get(data, "sizes", list))),
        boundary=_get(data, "boundary"),
        pinned=_set(data, "pinned"),
        resident=_bytes(data.get("resident", 0)),
        budget=_bytes(data.get("budget")),
        name=data.get("name", ""),
        waiting=_waiting(data.get("waiting")),
        link=_link(data.get("link")),
        movable=_set(data, "movable"),
    )


def _set(data: dict[str, Any], key: str) -> frozenset[int]:
    values = _get({key: [], **data}, key, list)
    if not all(type(v) is int and v >= 0 for v in values):  # a list in it would not go into a set
        raise ProblemError(f"{key} {values!r:.60} is not a list of value numbers")
    return frozenset(values)


def _link(data: Any) -> Link | None:
    if data is None:
        return None
    more = {key: _bytes(data[key]) for key in ("host", "least") if key in _get({"": data}, "", dict)}
    more |= {key: data[key] for key in ("both", "latency") if key in data}
    return Link(_get(data, "out"), _get(data, "back"), **more)


def _waiting(data: Any) -> Waiting | None:
    if data is None:
        return None
    lists = [_get(data, key, (list, tuple)) for key in ("forward", "backward")]
    pairs = [
        tuple(tuple(map(_bytes, pair)) if isinstance(pair, (list, tuple)) else pair for pair in each) for each in lists
    ]
    return Waiting(pairs[0], pairs[1], _get(data, "until"), _bytes(data.get("again")))


def _get(data: Any, key: str, kind: type | tuple[type, ...] = object, op: int | None = None) -> Any:
    where = "the problem" if op is None else f"op {op}"
    if not isinstance(data, dict):
        raise ProblemError(f"{where} is {data!r:.60}, not an object")
    if key not in data:
        raise ProblemError(f"{where} has no {key!r}")
    if not isinstance(data[key], kind):
        raise ProblemError(f"{where} has {key} {data[key]!r:.60}, not a {'list' if kind is list else 'number'}")
    return data[key]


def _bytes(x: Any) -> Any:
    return int(x) if isinstance(x, float) and x.is_integer() else x


def read(path: str | Path) -> Any:
    """The data in a JSON file; raises ProblemError, naming the file, where there is none."""
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise ProblemError(f"{path}: {getattr(e, 'strerror', None) or f'not JSON: {e}'}") from e


def load(path: str | Path) -> Problem:
    """Read a problem from a JSON file; raises ProblemError, naming the file, for anything that is not one."""
    return from_json(read(path), path)
