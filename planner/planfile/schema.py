"""Records as JSON: written as their annotations say, checked when they are read, and described as JSON Schema.

Records are dataclasses and named tuples. The annotations alone say which records a file is read into; the data never
do. `_form` turns an annotation into a type that pydantic reads, writes and describes: an object for a record, a table
(an object of columns) for a tuple of records. A column of few distinct values is written as these values and, for each
row, the number of its value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial, reduce
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, cast, get_args, get_origin, get_type_hints

import torch
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    Strict,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    WrapSerializer,
    with_config,
)
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

LARGEST = 2**62  # integers; sums of a few stay within 64 bits
LONGEST = 10_000  # characters of a text; longer ones are cut when they are written
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
# control characters, which a terminal obeys; marks that turn the direction of writing; halves of characters
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_EXPECTED = {  # by pydantic's error type, where its message speaks of Python
    "missing": "a value",
    "extra_forbidden": "no field of this name",
    "dict_type": "an object",
    "tuple_type": "a list",
    "frozen_set_type": "a list",
}


class Unexpected(ValueError):
    """A value in a file that does not have the expected type or size, with its place."""

    def __init__(self, at: str, expected: str, found: Any) -> None:
        super().__init__(f"{at or 'the file'}: expected {expected}, found {_shown(found)}")
        self.at, self.expected, self.found = at, expected, found


def printable(value: Any) -> Any:
    """Text with a replacement character for each character that a terminal would obey; other values as they are."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value) if isinstance(value, str) else value


_SCALARS: dict[Any, Any] = {
    NoneType: NoneType,
    bool: Annotated[bool, Strict()],
    int: Annotated[int, Strict(), Field(ge=-LARGEST, le=LARGEST), PlainSerializer(operator.index)],
    float: Annotated[float, Strict(), Field(ge=-1e300, le=1e300, allow_inf_nan=False), PlainSerializer(float)],
    str: Annotated[str, Field(max_length=LONGEST), BeforeValidator(printable), PlainSerializer(lambda s: s[:LONGEST])],
    torch.dtype: Annotated[
        Literal[tuple(DTYPES)],
        AfterValidator(DTYPES.__getitem__),
        PlainSerializer(lambda dtype: str(dtype).removeprefix("torch.")),
        WithJsonSchema({"description": "a data type of torch", "pattern": "^[a-z][a-z0-9_]*$", "type": "string"}),
    ],
}


def encode(value: Any, kind: Any) -> Any:
    """A value of an annotated type as JSON data."""
    return _adapter(kind).dump_python(value)


def decode(data: Any, kind: Any, at: str = "") -> Any:
    """The value of an annotated type that JSON data stand for.

    Args:
        data: as returned by `json.loads`.
        kind: a scalar, a Literal, a record, or a tuple, frozenset, Mapping or Union of such.
        at: the place of the data in the file, for messages.

    Raises:
        Unexpected: the data do not have this type; of several errors, the one that lies deepest.
    """
    try:
        return _adapter(kind).validate_python(data)
    except ValidationError as e:
        wrong = max(e.errors(include_url=False), key=lambda error: len(error["loc"]))
    for key in wrong["loc"]:
        if isinstance(key, int):
            at += f"[{key}]"
        elif not re.fullmatch(
            r"[\w-]+\[.*\]", key
        ):  # the member of a union, as "function-after[dict(), tuple[...]]", is no place
            at += f".{printable(key):.40}"
    cause = wrong.get("ctx", {}).get("error")
    if isinstance(cause, Unexpected):
        raise Unexpected(at + cause.at, cause.expected, cause.found)
    if cause is not None:  # the record checks itself
        raise Unexpected(at, "fields that agree", str(cause))
    expected = _EXPECTED.get(wrong["type"]) or re.sub("^.* should (be|have) ", "", wrong["msg"])
    raise Unexpected(at, expected, "none" if wrong["type"] == "missing" else wrong["input"])


def schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema (2020-12) of an annotated type."""
    return _adapter(kind).json_schema(schema_generator=_Untitled)


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_form(kind))


@cache
def _form(kind: Any) -> Any:
    """The type by which pydantic reads and writes values of an annotated type."""
    origin: Any = get_origin(kind)
    inner = get_args(kind)
    if origin is Literal or kind in _SCALARS:
        return _SCALARS.get(kind, kind)
    if _is_record(kind):
        return _object(kind, kind.__name__, _form, getattr, lambda members: kind(**members))
    if origin is tuple and inner[-1] is ...:
        return _table(inner[0]) if _is_record(inner[0]) else _list(_form(inner[0]))
    forms = tuple(map(_form, inner))
    if origin in (Union, UnionType):
        return reduce(operator.or_, forms)
    if origin is tuple:
        return origin[forms]
    if origin is Mapping and inner[0] is str:
        return Annotated[origin[forms], WrapSerializer(lambda values, write: write(dict(values)))]
    if origin is Mapping:
        pairs = WrapSerializer(lambda values, write: write(tuple(values.items())))
        return Annotated[_list(tuple.__class_getitem__(forms)), AfterValidator(dict), pairs]
    assert origin is frozenset, kind
    return Annotated[origin[forms], WrapSerializer(lambda values, write: sorted(write(values)))]


@cache
def _table(kind: Any) -> Any:
    """The type of a tuple of records, as an object of columns."""
    return _object(kind, f"Table of {kind.__name__}", _column, _values, partial(_rows, kind))


@cache
def _column(kind: Any) -> Any:
    """The type of one field of the records of a table."""
    if _is_record(kind):
        return _table(kind)
    column = _list(_form(kind))
    if not _is_plain(kind):
        return column
    values = TypeAdapter(column).json_schema()
    few = {"values": values, "rows": {"type": "array", "items": {"type": "integer", "minimum": 0}}}
    either = {
        "anyOf": [values, {"type": "object", "properties": few, "required": [*few], "additionalProperties": False}]
    }
    return Annotated[
        column,
        BeforeValidator(_spread),
        WithJsonSchema(either, mode="validation"),
        WrapSerializer(lambda values, write: _few(write(values))),
    ]


def _list(kind: Any) -> Any:
    return Annotated[tuple[kind, ...], Field(fail_fast=True)]


def _object(
    kind: Any,
    name: str,
    form: Callable[[Any], Any],
    read: Callable[[Any, str], Any],
    make: Callable[[dict[str, Any]], Any],
) -> Any:
    """An object with a member for each field of a record.

    Args:
        kind: the record. Fields with a default may be missing, so that files stay readable when records get new ones.
        name: of the object, in the JSON Schema.
        form: the type of a member, from that of the field.
        read: the member of a value, by its name.
        make: the value, from its members.
    """
    hints = get_type_hints(kind)
    if issubclass(kind, tuple):
        optional = {name: name in kind._field_defaults for name in kind._fields}
    else:
        optional = {f.name: (f.default, f.default_factory) != (MISSING, MISSING) for f in fields(kind)}
    members = {name: NotRequired[form(hints[name])] if may else form(hints[name]) for name, may in optional.items()}
    write = WrapSerializer(lambda value, write: write({name: read(value, name) for name in members}))
    return Annotated[with_config(extra="forbid")(cast(Any, TypedDict)(name, members)), AfterValidator(make), write]


def _values(rows: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for row in rows)


def _rows(kind: Any, columns: dict[str, Any]) -> tuple[Any, ...]:
    length = max(map(len, columns.values()), default=0)
    for name, column in columns.items():
        if len(column) != length:
            raise Unexpected(f".{name}", f"{length} rows, as in other columns", f"{len(column)} rows")
    return tuple(kind(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True))


def _few(column: tuple[Any, ...]) -> Any:
    """A column as its distinct values and their numbers, where that is shorter."""
    numbers = {value: i for i, value in enumerate(dict.fromkeys(column))}
    if 2 * len(numbers) > len(column):
        return column
    return {"values": list(numbers), "rows": [numbers[value] for value in column]}


def _spread(data: Any) -> Any:
    """A column of which a file may have the distinct values and, for each row, the number of its value."""
    if not isinstance(data, dict):
        return data
    values, rows = data.get("values"), data.get("rows")
    if len(data) != 2 or not isinstance(values, list) or not isinstance(rows, list):
        raise Unexpected("", "a list, or values and rows", data)
    for i, row in enumerate(rows):
        if type(row) is not int or not 0 <= row < len(values):
            raise Unexpected(f".rows[{i}]", f"a number below {len(values)}", row)
    return [values[row] for row in rows]


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))


def _is_plain(kind: Any) -> bool:
    """Whether values of a type are scalars, so that a few of them may stand for many rows."""
    if get_origin(kind) in (Union, UnionType):
        return all(map(_is_plain, get_args(kind)))
    return kind in _SCALARS or get_origin(kind) is Literal


def _shown(found: Any) -> str:
    """A value in a few words."""
    if isinstance(found, (dict, list)):
        return f"{'an object' if isinstance(found, dict) else 'a list'} of {len(found)}"
    text = found if isinstance(found, str) else repr(found)
    return str(printable(text if len(text) <= 200 else f"{text[:200]}..."))
