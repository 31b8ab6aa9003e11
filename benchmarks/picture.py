"""Draws README's picture, the timeline of the demo's plan: `python -m benchmarks.picture`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

from planner import plan
from planner.cli.demo import small_gpt2
from planner.report.answer import subject
from planner.report.svg import text
from planner.report.timeline import LEFT, timeline_svg

# an image does not take the colour of the page that it is on
COLOURS = "<style>svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
ABOVE = 24  # room for a title


def main() -> None:
    """Plan the demo's model at half of its peak, and write the drawing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent.parent / "docs" / "plan.svg")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batch = small_gpt2()
    whole = plan(model, batch, budget_gb="100%", optimizer="adamw")
    p = plan(model, batch, budget_gb=0.5 * whole.baseline_peak_bytes / 2**30, optimizer="adamw")
    options.output.write_text(f"{titled(timeline_svg(p.record), subject(p.record))}\n", encoding="utf-8")


def titled(drawing: str, words: str) -> str:
    """A drawing with its own colours, and a title above it."""
    head, rest = drawing.split(">", 1)
    width, height = map(float, re.search(r"viewBox='0 0 (\S+) (\S+)'", head).groups())
    head = re.sub(r"viewBox='[^']*'", f"viewBox='0 {-ABOVE} {width:g} {height + ABOVE:g}'", head)
    return f"{head}>{COLOURS}{text(LEFT, 16 - ABOVE, words, size=14)}{rest}"


if __name__ == "__main__":
    main()
