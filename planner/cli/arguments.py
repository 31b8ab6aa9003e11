"""The command line's grammar."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

from planner.core.options import Options, count, flags
from planner.planfile.files import own_version
from planner.report.words import shown

TARGET = """\
TARGET names a function without arguments, as path/to/file.py:function or
package.module:function (the current directory is importable). It returns
  the model, or (model, batch), or (model, batch, loss_fn),
  or a dict of plan()'s arguments; options of the command come before those."""
STATUS = """\
exit status: 0 the plan fits; 1 no plan fits the budget; 2 bad input;
130 interrupted."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {shown(message)}; see {self.prog} --help\n")


def parser() -> Parser:
    """`python -m planner COMMAND ...`."""
    top = Parser(
        prog="python -m planner",
        description="Plan what to keep and what to recompute, so that training fits the memory.",
        epilog=f"""examples:
  python -m planner plan train.py:make --budget-gb 12 --save plan.json
  python -m planner show plan.json --explain model.layers.3.mlp
  python -m planner run --budget-gb 12 train.py --epochs 3
  python -m planner devices
  python -m planner doctor

{STATUS}""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"checkpoint-planner {own_version()}")
    top.add_argument("--debug", action="store_true", help="show tracebacks of errors (also after the command)")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")

    def command(name: str, does: str, epilog: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=does,
            description=f"{does[0].upper()}{does[1:]}.",
            epilog=f"{epilog}\n\n{STATUS}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return added

    _plan(command)
    _run(command)
    _show(command)
    _pareto(command)
    _compare(command)
    _devices(command)
    _doctor(command)
    _demo(command)
    return top


Command = Callable[[str, str, str], argparse.ArgumentParser]


def _plan(command: Command) -> None:
    p = command(
        "plan",
        "plan the training step of a model",
        f"""{TARGET}

examples:
  python -m planner plan train.py:make --budget-gb 12 --optimizer adamw
  python -m planner plan my.models:make --budget-gb 80% --device rtx4090
  python -m planner plan train.py:make --budget-gb 12 --save plan.json --html plan.html""",
    )
    _target(p)
    _flags(p, "budget")
    p.add_argument("--known", type=Path, metavar="PLAN.json", help="a plan that is taken if it is for this very step")
    p.add_argument("--save", type=Path, metavar="PLAN.json", help="write the plan as a file")
    _views(p)


def _run(command: Command) -> None:
    p = command(
        "run",
        "run a training script with a plan on the model that it trains",
        """The model is the one that an optimizer has and that is called in training mode. It is
planned at its first step, and the script is not changed; processes of torchrun or accelerate
launch that train one model together agree on a plan. Where a step begins with gradients that
a plan did not count, as in scripts that accumulate them, it is planned anew with them
(--accumulate: at once). Options for planner come before SCRIPT.

examples:
  python -m planner run --budget-gb 12 train.py --epochs 3
  python -m planner run --budget-gb 80% --plan-file plan.json -m my.training --epochs 3
  torchrun --nproc-per-node 2 -m planner run --budget-gb 12 train.py

The exit status is the script's, unless its model cannot be planned:""",
    )
    p.add_argument("script", metavar="SCRIPT", help="its path; after -m, the name of its module")
    p.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what it is given")
    p.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    p.add_argument("--model", metavar="NAME", help="its variable or its class, where the script trains several")
    p.add_argument(
        "--plan-file", type=Path, metavar="PLAN.json", help="taken if it is for this very step; written if not there"
    )
    _flags(p, "budget")
    _options(p)


def _show(command: Command) -> None:
    p = command(
        "show",
        "show a plan file",
        """examples:
  python -m planner show plan.json
  python -m planner show plan.json --explain "model.layers.*.mlp"
  python -m planner show plan.json --html plan.html""",
    )
    p.add_argument("plan", type=Path, metavar="PLAN.json")
    _views(p)


def _pareto(command: Command) -> None:
    p = command(
        "pareto",
        "show what memory costs in time: plans for budgets from the least that is found to be enough",
        f"""{TARGET}

example:
  python -m planner pareto train.py:make --points 6 --device h100""",
    )
    _target(p)
    p.add_argument("--points", type=int, default=10, metavar="N", help="how many budgets (default: 10)")
    _json(p)


def _compare(command: Command) -> None:
    p = command(
        "compare",
        "show what changed from one plan file to another",
        """example:
  python -m planner compare before.json after.json""",
    )
    p.add_argument("a", type=Path, metavar="A.json")
    p.add_argument("b", type=Path, metavar="B.json")
    _json(p)


def _devices(command: Command) -> None:
    p = command(
        "devices",
        "list the devices that can be planned for, and what is here",
        """example:
  python -m planner devices --json""",
    )
    _json(p)


def _doctor(command: Command) -> None:
    p = command(
        "doctor",
        "say what was found here (torch, device, compiler, packages), and try a small plan",
        """The exit status is 1 where a plan cannot be made and run here.

example:
  python -m planner doctor""",
    )
    _json(p)


def _demo(command: Command) -> None:
    p = command(
        "demo",
        "plan a small GPT-2 at half of its peak, and train it with and without the plan",
        """example:
  python -m planner demo --budget 0.4 --steps 3""",
    )
    p.add_argument(
        "--budget", type=_fraction, default=0.5, help="budget as a fraction of the peak that keeps everything"
    )
    p.add_argument("--steps", type=count, default=5, help="training steps with and without the plan")
    p.add_argument("--solver", default="auto", help="auto, chen or ilp")
    p.add_argument("--quiet", action="store_true", help="no progress bars")


def _flags(p: argparse.ArgumentParser, group: Literal["budget", "step"]) -> None:
    """The options of `plan()` of a group, as flags."""
    for name, flag in flags(Options, group):
        spelt = f"--{name.replace('_', '-')}"
        if flag.kind is bool:
            p.add_argument(spelt, action="store_true", default=None, help=flag.help)
        else:
            p.add_argument(
                spelt,
                type=flag.kind or str,
                metavar=flag.metavar,
                choices=flag.choices and flag.choices(),
                help=flag.help,
            )


def _target(p: argparse.ArgumentParser) -> None:
    p.add_argument("target", metavar="TARGET", help="FILE.py:FUNCTION or MODULE:FUNCTION; see below")
    p.add_argument(
        "--batch-from",
        metavar="SOURCE",
        help="the batch: FILE.py:FUNCTION or MODULE:FUNCTION that returns it, or FILE.pt that torch.save wrote",
    )
    _options(p)


def _options(p: argparse.ArgumentParser) -> None:
    _flags(p, "step")
    p.add_argument("--quiet", action="store_true", help="no progress bars")


def _views(p: argparse.ArgumentParser) -> None:
    p.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page")
    p.add_argument(
        "--explain", metavar="PATH", help="say why it was decided so, for a module, a pattern or an activation"
    )
    _json(p)


def _json(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", action="store_true", help="machine-readable output: bytes and seconds")


def _fraction(text: str) -> float:
    """A part of a whole, above 0, of a command line."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, and 1 at most")
    return found
