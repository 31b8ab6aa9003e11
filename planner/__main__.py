"""The command line: `python -m planner demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .errors import PlannerError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m planner", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="plan a small GPT-2 at half of its peak, and train it with and without the plan"
    )
    demo.add_argument(
        "--budget", type=float, default=0.5, help="budget as a fraction of the peak that keeps everything"
    )
    demo.add_argument("--steps", type=int, default=5, help="training steps with and without the plan")
    demo.add_argument("--solver", default="auto", help="auto, chen or ilp")
    demo.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args(argv)
    try:
        from .demo import run

        return run(options.budget, options.steps, options.solver, False if options.quiet else None)
    except PlannerError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
