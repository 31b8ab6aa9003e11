"""Draws README's picture, the timeline of the demo's plan: `python -m benchmarks.picture`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from planner import plan
from planner.cli.demo import small_gpt2
from planner.report.timeline import timeline_svg

# an image does not take the colour of the page that it is on
COLOURS = "<style>svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


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
    head, rest = timeline_svg(p).split(">", 1)
    options.output.write_text(f"{head}>{COLOURS}{rest}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
