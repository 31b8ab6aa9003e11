"""JSON files: hostile and damaged ones are refused in words; an interrupted write leaves the old file as it was."""

from __future__ import annotations

import gzip
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any, NoReturn

from planner.core.files import write_atomically
from planner.errors import PlanFileError, gb

MOST = 2**26  # bytes of JSON, unpacked; the plan of a model of 80 layers takes about a twentieth of it
DIGITS = 20  # of an integer
KEYS = 100_000  # of an object, each of which may be an error to describe
GZIP = b"\x1f\x8b"


def read(path: Path) -> Any:
    """The data of a JSON file, which may be compressed by gzip.

    Raises:
        PlanFileError: the file cannot be read, has more than `MOST` bytes, or is not JSON (RFC 8259, without NaN and
            duplicate keys; numbers of at most `DIGITS` digits, objects of at most `KEYS` keys).
    """
    try:
        content = _content(path)
        return json.loads(
            content.decode("utf-8-sig"),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_constant=_constant,
        )
    except PlanFileError:
        raise
    except OSError as e:
        raise PlanFileError(f"{path}: cannot be read: {e.strerror or e}") from e
    except (EOFError, zlib.error) as e:
        raise PlanFileError(f"{path}: damaged or cut short: {e}") from e
    except UnicodeDecodeError as e:
        raise PlanFileError(f"{path}: not a plan file: byte {e.start} is not UTF-8 text") from e
    except RecursionError as e:
        raise PlanFileError(f"{path}: not a plan file: lists or objects within each other too often") from e
    except json.JSONDecodeError as e:
        raise PlanFileError(
            f"{path}: line {e.lineno}, column {e.colno}: expected JSON: {e.msg}; the file is damaged or cut short"
        ) from e
    except ValueError as e:
        raise PlanFileError(f"{path}: {e}") from e


def write(path: Path, data: Any) -> None:
    """Write a JSON file, compressed where its name ends in ".gz"; it replaces the old file once it is complete.

    Raises:
        PlanFileError: the file cannot be written, or would be too large for `read`.
    """
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    if len(content) > MOST:
        raise PlanFileError(f"{path}: the plan takes {gb(len(content))}; plan files have at most {gb(MOST)}")
    write_atomically(path, gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content)


def _content(path: Path) -> bytes:
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would wait for ever
        raise PlanFileError(f"{path}: expected a file; it is {'a directory' if path.is_dir() else 'none'}")
    with open(path, "rb") as f:
        content = f.read(MOST + 1)
    if content.startswith(GZIP):
        with gzip.open(path) as unpacked:
            content = unpacked.read(MOST + 1)
    if len(content) > MOST:
        raise PlanFileError(f"{path}: expected at most {gb(MOST)}; it has more")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > KEYS:
        raise ValueError(f"expected at most {KEYS} keys in an object, found {len(pairs)}")
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"expected each key once; {key[:40]!r} comes twice in an object")
        members[key] = value
    return members


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"expected numbers of at most {DIGITS} digits, found {digits[:DIGITS]}...")
    return int(digits)


def _constant(name: str) -> NoReturn:
    raise ValueError(f"expected finite numbers, found {name}")
