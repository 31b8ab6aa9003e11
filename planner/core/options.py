"""The options of `plan()`: one frozen record, from which checks, flags, plan files and comparisons derive.

To add an option, declare it here (in `Options`, with its check and its words, and in `OptionArguments` for type
checkers), and name it in the signature of `plan()`.
"""

from __future__ import annotations

import numbers
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from os import PathLike
from typing import Any, Literal, TypedDict, get_args

import torch

from planner.errors import OptionError
from solvers import SOLVERS

Checkpoints = Literal["replace", "keep"]
Costs = Literal["roofline", "measured"]
Dynamic = bool | Mapping[str | int, Mapping[int, int]] | None
Mode = Literal["aten", "inductor", "eager"]
MODES = get_args(Mode)
Offload = Literal["cpu", "disk"]
OLD_MODES: dict[str, Mode] = {"compiled": "aten"}  # what they were called before
OnFailure = Literal["raise", "warn"]
Pieces = Literal["auto", False]

GB = 2**30
LARGEST = sys.float_info.max
PLANNED_LINES = ("activations", "gradients")  # lines of the account that the schedule decides


@dataclass(frozen=True, slots=True)
class Flag:
    """How the command line spells an option.

    Attributes:
        help: one line.
        metavar: what stands for the value.
        kind: text -> value, raising ArgumentTypeError; `bool` for a switch; None for text.
        choices: allowed values, looked up when the command line is read.
        group: "budget" for options of one plan, "step" for those that every command takes.
    """

    help: str
    metavar: str | None = None
    kind: Callable[[str], Any] | type[bool] | None = None
    choices: Callable[[], tuple[str, ...]] | None = None
    group: Literal["budget", "step"] = "step"


@dataclass(frozen=True, slots=True)
class About:
    """What is known of an option besides its type and default.

    Attributes:
        check: None where a value is fine, else what is wrong with it, in words that follow "name=value ".
        flag: on the command line; None for none.
        label: in comparisons of plans; "" where a difference is shown elsewhere, or does not matter.
        shown: a value in such a comparison.
    """

    check: Callable[[Any], str | None] = lambda value: None
    flag: Flag | None = None
    label: str = ""
    shown: Callable[[Any], str] = str


def option(default: Any, about: About) -> Any:
    """A field of `Options`."""
    if isinstance(default, Mapping):
        return field(default_factory=dict, metadata={"about": about})
    return field(default=default, metadata={"about": about})


def about(of: Field[Any]) -> About:
    """What is known of an option."""
    known: About = of.metadata.get("about", About())
    return known


def is_whole(x: Any) -> bool:
    """Whether a value is a whole number from 0 on."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def is_real(x: Any) -> bool:
    """Whether a value is a finite number, in floating point too."""
    number: Any = float(x) if isinstance(x, numbers.Real) and not isinstance(x, numbers.Rational) else x  # NumPy's
    return isinstance(number, numbers.Real) and not isinstance(x, bool) and bool(-LARGEST < number < LARGEST)  # type: ignore[operator]


def is_positive(x: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return is_real(x) and float(x) > 0


def count(text: str) -> int:
    """A whole number from 1 on, of a command line."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} must be a whole number from 1 on")
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """Names of a command line, with commas between."""
    return tuple(name.strip() for name in text.split(","))


def gigabytes(text: str) -> float | str:
    """A budget of a command line: a number of GB, or text that `plan()` reads, as "80%" or "500MB"."""
    try:
        return float(text)
    except ValueError:
        return text


def one_of(values: tuple[Any, ...], template: str) -> Callable[[Any], str | None]:
    """A check that allows nothing but these values."""

    def check(value: Any) -> str | None:
        return None if value in values else template.format(", ".join(map(repr, values)))

    return check


def _unless(right: Callable[[Any], bool], words: str) -> Callable[[Any], str | None]:
    return lambda value: None if right(value) else words


def _is_account(given: Any) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(name, str) and name not in PLANNED_LINES and is_real(size) and 0 <= size * GB < LARGEST
        for name, size in given.items()
    )


def _are_names(given: Any) -> bool:
    return isinstance(given, tuple) and all(isinstance(name, str) and name for name in given)


def _is_dynamic(given: Any) -> bool:
    return (
        given is None
        or isinstance(given, bool)
        or (
            isinstance(given, Mapping)
            and all(isinstance(name, (str, int)) and isinstance(at, Mapping) for name, at in given.items())
            and all(is_whole(n) for at in given.values() for size in at.items() for n in size)
        )
    )


def _yes(value: Any) -> str:
    return "yes" if value else "no"


@dataclass(frozen=True)
class Options:
    """What was asked of `plan()`, as far as it is data; see there for what each option means.

    An optimizer and a device are in here by their names: the objects are in the request.
    """

    budget_gb: float | str | None = option(
        None,
        About(
            flag=Flag(
                'GB of 2**30 bytes, an amount as "500MB", or a share of the device, "80%%"',
                "GB",
                gigabytes,
                group="budget",
            )
        ),
    )
    solver: str = option(
        "auto",
        About(
            lambda name: None if name in tuple(SOLVERS) else f"is not known; give one of {', '.join(SOLVERS)}",
            Flag("default: auto", choices=lambda: tuple(SOLVERS), group="budget"),
        ),
    )
    optimizer: str | None = option(
        None,
        About(
            flag=Flag("adamw, adamw-fused, momentum, ...: count its state and its step"),
            label="optimizer",
            shown=lambda name: "none" if name is None else name.partition("(")[0],
        ),
    )
    device: str | None = option(None, About(flag=Flag("what to plan for; see `devices` (default: where the model is)")))
    accumulate: bool = option(
        False,
        About(
            _unless(lambda x: isinstance(x, bool), "must be True where gradients are there already, or False"),
            Flag("gradients of earlier microbatches are there", kind=bool),
            "gradients accumulate",
            _yes,
        ),
    )
    shard: int = option(
        1,
        About(
            _unless(
                lambda x: is_whole(x) and x >= 1, "must be a number of devices that share the parameters: 1, 2, ..."
            ),
            Flag("devices that share the parameters, as with FSDP", "N", int),
            "devices that share the parameters",
        ),
    )
    checkpoints: Checkpoints = option(
        "replace",
        About(
            one_of(get_args(Checkpoints), "must be one of {}"),
            Flag("what becomes of the model's own checkpoints", choices=lambda: get_args(Checkpoints)),
        ),
    )
    costs: Costs | None = option(
        None,
        About(
            flag=Flag("what times are taken from", choices=lambda: get_args(Costs)),
            label="times",
            shown=lambda value: value or "",
        ),
    )
    account_gb: Mapping[str, float] = option(
        {},
        About(
            _unless(
                _is_account,
                "must be a mapping from names of lines to GB, as p.account has them; what the plan decides "
                f"({', '.join(PLANNED_LINES)}) cannot be set",
            )
        ),
    )
    time_limit: float | None = option(
        None,
        About(
            _unless(lambda x: x is None or is_positive(x), "must be a positive number of seconds, or None"),
            Flag("for the solver", "SECONDS", float),
        ),
    )
    progress: bool | None = option(None, About(one_of((True, False, None), "must be one of {}")))
    dynamic: Dynamic = option(
        None,
        About(
            _unless(
                _is_dynamic,
                "must be True (any size may be smaller than in the batch), None (sizes that turn out to change may), "
                "False, or largest sizes by argument and dimension, as in {'input_ids': {0: 8, 1: 2048}}, with "
                "positions for names in a positional batch",
            ),
            Flag("smaller batches come too", kind=bool),
            "smaller batches too",
            _yes,
        ),
    )
    keep: tuple[str, ...] = option(
        (),
        About(
            _unless(
                _are_names,
                "must be a list of names of ops ('aten.bmm', 'mylib::op'), paths of modules ('blocks.3.attn') or "
                "patterns of either ('blocks.*.attn')",
            ),
            Flag("ops and modules, or patterns of them, with commas between: what must not run twice", "NAMES", names),
            "kept by name",
            lambda given: ", ".join(given) or "nothing",
        ),
    )
    mode: Mode = option(
        "aten",
        About(
            lambda mode: None if mode in MODES else f"is not known; give one of {', '.join(MODES)}",
            Flag(
                "inductor: fused; eager: checkpoints on modules, without torch.compile",
                choices=lambda: MODES,
                group="budget",
            ),
            "mode",
        ),
    )
    pieces: Pieces = option(
        False,
        About(
            lambda given: None if given is False or given == "auto" else "must be 'auto', or False for ops as they are",
            Flag("auto: run ops in pieces where the budget needs it", choices=lambda: ("auto",)),
            "ops in pieces",
            _yes,
        ),
    )
    in_flight: int = option(
        1,
        About(
            _unless(
                lambda x: is_whole(x) and x >= 1,
                "must be how many forward passes wait for their backward pass at once, with the one that runs: "
                "1, 2, ...",
            ),
            Flag("forward passes that wait for their backward pass at once", "K", count),
            "microbatches in flight",
        ),
    )
    offload: Offload | None = option(
        None,
        About(
            one_of((None, *get_args(Offload)), "must be one of {}"),
            Flag("where activations may go for a while: host memory, or a disk", choices=lambda: get_args(Offload)),
            "offload to",
            lambda where: where or "nowhere",
        ),
    )
    host_gb: float | None = option(
        None,
        About(
            _unless(lambda x: x is None or is_positive(x), "must be a positive number of GB, or None for what is free"),
            Flag("the most that offload may take there", "GB", float),
            "GB to offload to",
        ),
    )
    offload_dir: str | None = option(
        None,
        About(
            _unless(lambda x: x is None or (isinstance(x, str) and x != ""), "must be the path of a folder"),
            Flag("the folder of offload='disk' (default: that of temporary files)", "FOLDER"),
        ),
    )
    step_in_backward: bool = option(
        False,
        About(
            _unless(
                lambda x: isinstance(x, bool),
                "must be True where the optimizer is to step in the backward pass, or False",
            ),
            Flag("the optimizer steps each parameter as soon as its gradient is whole", kind=bool),
            "steps in the backward pass",
            _yes,
        ),
    )
    on_failure: OnFailure = option(
        "raise",
        About(
            one_of(get_args(OnFailure), "must be one of {}"),
            Flag(
                "warn: a model that cannot be planned trains as it is",
                choices=lambda: get_args(OnFailure),
                group="budget",
            ),
        ),
    )


class OptionArguments(TypedDict, total=False):
    """The options of `plan()` that say nothing of a budget, for type checkers: everything which plans takes them."""

    optimizer: torch.optim.Optimizer | str | None
    loss_fn: Callable[[Any], torch.Tensor] | None
    device: str | torch.device | None
    accumulate: bool
    shard: int
    checkpoints: Checkpoints
    costs: Costs | None
    account_gb: Mapping[str, float] | None
    time_limit: float | None
    progress: bool | None
    dynamic: Dynamic
    keep: Sequence[str]
    mode: Mode | None
    pieces: Pieces
    in_flight: int
    offload: Offload | None
    host_gb: float | None
    offload_dir: str | PathLike[str] | None
    step_in_backward: bool


def check_values(options: Options) -> None:
    """Raise OptionError for the first option whose value is none of its own; what goes together is not looked at."""
    for of in fields(options):
        value = getattr(options, of.name)
        if wrong := about(of).check(value):
            raise OptionError(f"{of.name}={value!r} {wrong}")


def flags(kind: type[Options], group: Literal["budget", "step"]) -> Iterator[tuple[str, Flag]]:
    """The options of a group that the command line has, by name."""
    for of in fields(kind):
        flag = about(of).flag
        if flag is not None and flag.group == group:
            yield of.name, flag


def labelled(options: Options) -> dict[str, str]:
    """What a comparison of plans shows of the options: label -> value."""
    return {about(of).label: about(of).shown(getattr(options, of.name)) for of in fields(options) if about(of).label}
