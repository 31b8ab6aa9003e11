"""The command line: `python -m planner COMMAND`; `--help` says more."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from planner.cli.arguments import parser
from planner.cli.commands import COMMANDS, DOES_NOT_FIT, launched
from planner.cli.target import TargetError, told
from planner.errors import InfeasibleBudgetError, PlannerError
from planner.report.words import shown

BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 2, 130, 141  # the last two as shells have them


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0 it fits, 1 it does not, 2 bad input, 130 interrupted, 141 nobody reads what it prints; for `run`, the script's.
    """
    _open_streams()
    options = parser().parse_args(argv)
    if options.command == "run":  # what the script raises is the script's
        return launched(options)
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            status = COMMANDS[options.command](options)
            sys.stdout.flush()
            return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains as it exits
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (Exception, SystemExit) as e:  # the model or the loss may ask to exit, with a status that is not ours
        if options.debug:
            traceback.print_exc()
        else:
            print(_line(e), file=sys.stderr)
        return DOES_NOT_FIT if isinstance(e, InfeasibleBudgetError) else BAD_INPUT
    finally:
        sys.path[:] = path


def _open_streams() -> None:
    """Standard streams that the caller has closed lead nowhere: what is opened later must not take their numbers."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w"))


def _line(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, TargetError):
        text = f"error: {error}"
    elif isinstance(error, PlannerError):
        text = f"{type(error).__name__}: {error}"
    elif isinstance(error, OSError):
        text = f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}"
    else:
        text = f"error: {told(error)} (--debug shows the traceback)"
    return shown(" ".join(text.split()), sys.stderr.encoding or "utf-8")


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    print(f"{category.__name__}: {shown(' '.join(str(message).split()))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
