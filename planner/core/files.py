"""Files that users name: their paths, and atomic writes."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from planner.errors import OptionError, PlanFileError


def path_of(given: str | os.PathLike[str]) -> Path:
    """The path that a user gives; OptionError for a number, which `open` would take for an open file, or for none."""
    if isinstance(given, (str, os.PathLike)) and os.fspath(given):
        return Path(given)
    raise OptionError(f"path={given!r} must be the path of a file: a string, or a pathlib.Path")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file in one step: another process sees the old one or the new one."""
    try:
        target = Path(os.path.realpath(path))
        part = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
        if target.exists() and not target.is_file():
            raise PlanFileError(f"{path}: cannot be written: it is there, and no file")
        try:
            with open(part, "xb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
            if target.exists():
                shutil.copymode(target, part)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except PlanFileError:
        raise
    except (OSError, ValueError) as e:  # ValueError: a null byte in the path
        raise PlanFileError(f"{path}: cannot be written: {getattr(e, 'strerror', None) or e}") from e
