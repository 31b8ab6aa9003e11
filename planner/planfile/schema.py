"""Records as JSON: what their annotations say is written, checked when it is read, and described as JSON Schema.

Records are dataclasses and named tuples. Which of them is made of what is read is said by the annotations alone, never
by the data. A tuple of records becomes a table, column by column; a column of few distinct values is written as these
and the row numbers among them.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

LARGEST = 2**62  # whole numbers; sums of a few stay within 64 bits
LONGEST = 10_000  # characters of a text; what is written is cut there
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
# control characters, which a terminal obeys; marks that turn the direction of writing; halves of characters
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SCALARS = {
    int: "a whole number",
    float: "a finite number",
    str: f"text of at most {LONGEST} characters",
    bool: "true or false",
    NoneType: "null",
}


class Unexpected(ValueError):
    """Data that is not what a type says, with its place."""

    def __init__(self, at: str, expected: str, found: Any) -> None:
        super().__init__(f"{at or 'the file'}: expected {expected}, found {_shown(found)}")


def encode(value: Any, kind: Any) -> Any:
    """A value of a type, as JSON data."""
    origin, inner = get_origin(kind), get_args(kind)
    if _is_union(kind):
        return encode(value, next(k for k in inner if _is(value, k)))
    if _is_record(kind):
        return {name: encode(getattr(value, name), k) for name, k in fields_of(kind).items()}
    if origin is tuple and inner[-1] is ...:
        return _column(value, inner[0]) if _is_record(inner[0]) else [encode(v, inner[0]) for v in value]
    if origin is tuple:
        return [encode(v, k) for v, k in zip(value, inner, strict=True)]
    if origin is frozenset:
        return sorted(encode(v, inner[0]) for v in value)
    if origin is Mapping:
        pairs = [(encode(k, inner[0]), encode(v, inner[1])) for k, v in value.items()]
        return dict(pairs) if inner[0] is str else [[k, v] for k, v in pairs]
    if kind is torch.dtype:
        return str(value).removeprefix("torch.")
    if kind is int:
        return operator.index(value)
    if kind is str:
        return value[:LONGEST]
    return float(value) if kind is float else value


def decode(data: Any, kind: Any, at: str = "") -> Any:
    """The value that JSON data stands for; raises Unexpected where it is none of the type.

    Args:
        data: what `json.loads` returns.
        kind: a scalar, a Literal, a dataclass, or a tuple, frozenset, Mapping or Union of such.
        at: the place of the data in its file, for messages.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if _is_union(kind):
        return _one_of(data, inner, at)
    if kind in _SCALARS:
        return _scalar(data, kind, at)
    if kind is torch.dtype:
        if not isinstance(data, str) or data not in DTYPES:
            raise Unexpected(at, "the name of a dtype", data)
        return DTYPES[data]
    if origin is Literal:
        if not isinstance(data, str) or data not in inner:
            raise Unexpected(at, f"one of {', '.join(map(repr, inner))}", data)
        return data
    if _is_record(kind):
        return _made(kind, decode_members(data, fields_of(kind), required(kind), at), at)
    if origin is tuple and inner[-1] is ...:
        if _is_record(inner[0]):
            return tuple(_read_column(data, inner[0], at))
        return tuple(_each(data, inner[0], at))
    if origin is tuple:
        return tuple(
            decode(v, k, f"{at}[{i}]") for i, (v, k) in enumerate(zip(_list(data, at, len(inner)), inner, strict=True))
        )
    if origin is frozenset:
        return frozenset(_each(data, inner[0], at))
    assert origin is Mapping, kind
    if inner[0] is str:
        return {_scalar(k, str, at): decode(v, inner[1], f"{at}.{k:.40}") for k, v in _object(data, at).items()}
    return dict(_pair(pair, inner, f"{at}[{i}]") for i, pair in enumerate(_list(data, at)))


def _pair(data: Any, kinds: tuple[Any, ...], at: str) -> tuple[Any, Any]:
    key, value = _list(data, at, 2)
    return decode(key, kinds[0], at), decode(value, kinds[1], at)


def decode_members(
    data: Any,
    kinds: Mapping[str, Any],
    needed: Collection[str],
    at: str,
    read: Callable[[Any, Any, str], Any] = decode,
) -> dict[str, Any]:
    """What an object has, each member read by its type; raises Unexpected for one too many, or one that is missing."""
    for name in _object(data, at):
        if name not in kinds:
            raise Unexpected(at, f"only {', '.join(kinds)}", name)
    for name in needed:
        if name not in data:
            raise Unexpected(at, f"{name!r} in it", f"only {', '.join(data)}")
    return {name: read(data[name], kind, f"{at}.{name}") for name, kind in kinds.items() if name in data}


def printable(text: str) -> str:
    """Text without what a terminal would obey, a question mark in its place."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def schema(kind: Any, known: dict[str, Any]) -> dict[str, Any]:
    """A type in JSON Schema; dataclasses are put into `known`, by name."""
    origin, inner = get_origin(kind), get_args(kind)
    if _is_union(kind):
        return {"anyOf": [schema(k, known) for k in inner]}
    if _is_record(kind):
        if kind.__name__ not in known:
            members = {name: schema(k, known) for name, k in fields_of(kind).items()}
            known[kind.__name__] = _object_schema(members, kind)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin is tuple and inner[-1] is ...:
        return _column_schema(inner[0], known)
    if origin is tuple:
        items = [schema(k, known) for k in inner]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin is frozenset:
        return {"type": "array", "items": schema(inner[0], known)}
    if origin is Mapping and inner[0] is str:
        return {"type": "object", "additionalProperties": schema(inner[1], known)}
    if origin is Mapping:
        pair = {"type": "array", "prefixItems": [schema(k, known) for k in inner], "minItems": 2, "maxItems": 2}
        return {"type": "array", "items": pair}
    if origin is Literal:
        return {"enum": list(inner)}
    if kind is torch.dtype:
        return {"enum": sorted(DTYPES)}
    if kind is int:
        return {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST}
    if kind is str:
        return {"type": "string", "maxLength": LONGEST}
    return {"type": {float: "number", bool: "boolean", NoneType: "null"}[kind]}


@cache
def fields_of(kind: Any) -> dict[str, Any]:
    """The fields of a record with their types."""
    hints = get_type_hints(kind)
    return {name: hints[name] for name in (kind._fields if issubclass(kind, tuple) else [f.name for f in fields(kind)])}


@cache
def required(kind: Any) -> list[str]:
    """The fields that have no default: those with one may be missing, as in files of older versions."""
    if issubclass(kind, tuple):
        return [name for name in fields_of(kind) if name not in kind._field_defaults]
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _is_plain(kind: Any) -> bool:
    """Whether values of a type are numbers, text or null: few of them may then be written once for many rows."""
    if _is_union(kind):
        return all(map(_is_plain, get_args(kind)))
    return kind in _SCALARS or kind is torch.dtype or get_origin(kind) is Literal


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is meant by one of several types."""
    kind = get_origin(kind) or kind
    if kind is Literal:
        return isinstance(value, str)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, numbers.Real if kind is float else kind)


def _one_of(data: Any, kinds: tuple[Any, ...], at: str) -> Any:
    if data is None and NoneType in kinds:
        return None
    rest = [k for k in kinds if k is not NoneType]
    if isinstance(data, dict) and len(rest) > 1:
        named = [k for k in rest if _is_record(k) and data.keys() <= fields_of(k).keys()]
        rest = named or rest
    if len(rest) == 1:
        return decode(data, rest[0], at)
    for kind in rest:
        try:
            return decode(data, kind, at)
        except Unexpected:
            continue
    raise Unexpected(at, " or ".join(_SCALARS.get(k, "a list or an object") for k in rest), data)


def _scalar(data: Any, kind: Any, at: str) -> Any:
    if kind is float:
        right = type(data) in (int, float) and math.isfinite(data) and abs(data) <= 1e300
    else:
        most = {int: LARGEST, str: LONGEST}.get(kind)
        right = type(data) is kind and (most is None or (abs(data) if kind is int else len(data)) <= most)
    if not right:
        raise Unexpected(at, _SCALARS[kind], data)
    return printable(data) if kind is str else kind(data) if kind is float else data


def _column(values: Sequence[Any], kind: Any) -> Any:
    if _is_record(kind):
        return {name: _column([getattr(row, name) for row in values], k) for name, k in fields_of(kind).items()}
    column = [encode(v, kind) for v in values]
    if not _is_plain(kind):
        return column
    numbers = {v: i for i, v in enumerate(dict.fromkeys(column))}
    if 2 * len(numbers) > len(column):
        return column
    return {"values": list(numbers), "rows": [numbers[v] for v in column]}


def _read_column(data: Any, kind: Any, at: str) -> list[Any]:
    if _is_record(kind):
        columns = decode_members(data, fields_of(kind), required(kind), at, _read_column)
        length = max(map(len, columns.values()), default=0)
        for name, column in columns.items():
            if len(column) != length:
                raise Unexpected(f"{at}.{name}", f"{length} rows, as in other columns", f"{len(column)} rows")
        rows = zip(*columns.values(), strict=True)
        return [_made(kind, dict(zip(columns, row, strict=True)), at) for row in rows]
    if not (_is_plain(kind) and isinstance(data, dict)):
        return _each(data, kind, at)
    if data.keys() != {"values", "rows"}:
        raise Unexpected(at, "a list, or values and rows", data)
    values, at_rows = _each(data["values"], kind, f"{at}.values"), _each(data["rows"], int, f"{at}.rows")
    for i, row in enumerate(at_rows):
        if not 0 <= row < len(values):
            raise Unexpected(f"{at}.rows[{i}]", f"a number below {len(values)}", row)
    return [values[row] for row in at_rows]


def _each(data: Any, kind: Any, at: str) -> list[Any]:
    return [decode(v, kind, f"{at}[{i}]") for i, v in enumerate(_list(data, at))]


def _made(kind: Any, members: dict[str, Any], at: str) -> Any:
    try:
        return kind(**members)
    except ValueError as e:  # it checks itself
        raise Unexpected(at, "what holds together", str(e)) from e


def _object(data: Any, at: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise Unexpected(at, "an object", data)
    return data


def _list(data: Any, at: str, length: int | None = None) -> list[Any]:
    if not isinstance(data, list) or length not in (None, len(data)):
        raise Unexpected(at, "a list" if length is None else f"a list of {length}", data)
    return data


def _object_schema(members: dict[str, Any], kind: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": required(kind), "additionalProperties": False}


def _column_schema(kind: Any, known: dict[str, Any], inside: bool = False) -> dict[str, Any]:
    """A tuple; of records, a table, whose columns may be written as values and rows."""
    if _is_record(kind):
        columns = {name: _column_schema(k, known, True) for name, k in fields_of(kind).items()}
        return _object_schema(columns, kind) | {"description": f"a table of {kind.__name__}"}
    plain = {"type": "array", "items": schema(kind, known)}
    if not (inside and _is_plain(kind)):
        return plain
    rows = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    few = {"properties": {"values": plain, "rows": rows}, "required": ["values", "rows"]}
    return {"anyOf": [plain, {"type": "object", **few, "additionalProperties": False}]}


def _shown(found: Any) -> str:
    """What was found, in a few words."""
    if isinstance(found, (dict, list)):
        return f"{'an object' if isinstance(found, dict) else 'a list'} of {len(found)}"
    text = found if isinstance(found, str) else repr(found)
    return printable(text if len(text) <= 200 else f"{text[:200]}...")
