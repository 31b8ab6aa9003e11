"""One more line in a training loop of one's own: `plan(...).apply()`.

    python examples/plain_loop.py --budget-gb 0.02

The plan is made at the first step. Leave `--budget-gb` out to train without one: the losses are the same.
"""

import argparse
import logging

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from planner import PlannerError, plan


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the shape of x."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    """Learn to tell the sign of a sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-gb", type=float, help="GB of 2**30 bytes that a step may take")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", help="where to write the parameters")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("planner").setLevel(logging.INFO)  # one line after the first step

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    points = torch.randn(512, 64)
    loader = DataLoader(TensorDataset(points, (points.sum(1) > 0).long()), batch_size=256, shuffle=True)
    model = nn.Sequential(*[Block(64) for _ in range(6)], nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options.budget_gb is not None:
        plan(model, budget_gb=options.budget_gb, optimizer=optimizer).apply()  # the one line
    model.to(device)

    for epoch in range(options.epochs):
        for x, y in loader:
            with torch.autocast(device, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.6f}")
    if options.save:
        torch.save(model.state_dict(), options.save)  # loads with or without a plan


if __name__ == "__main__":
    try:
        main()
    except PlannerError as e:
        raise SystemExit(f"{type(e).__name__}: {e}") from None
