"""A plan for each rank of a model that `fully_shard` shards block by block.

    torchrun --nproc-per-node 2 examples/fsdp2.py --budget-gb 0.004

Rank 0 plans at the first step, and all ranks train by that. Leave `--budget-gb` out to train without a plan: the losses
are the same.
"""

import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

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
    parser.add_argument("--budget-gb", type=float, help="GB of 2**30 bytes that a step may take on each rank")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("planner").setLevel(logging.INFO if rank == 0 else logging.ERROR)

    torch.manual_seed(0)
    model = nn.Sequential(*[Block(64) for _ in range(6)], nn.Linear(64, 2)).to(device)
    for block in model[:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options.budget_gb is not None:
        plan(model, budget_gb=options.budget_gb, optimizer=optimizer).apply()

    torch.manual_seed(rank)  # each rank has its own data
    for step in range(options.steps):
        x = torch.randn(512, 64, device=device)
        loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except PlannerError as e:
        raise SystemExit(f"{type(e).__name__}: {e}") from None
