"""Lightning's Trainer, by a plan: one more callback, `PlanCallback(budget_gb=...)`.

    python examples/lightning_loop.py runs/points --budget-gb 0.003

Needs the extra `lightning`. The plan is in `runs/points/plan.json`; `--resume` goes on from the last checkpoint there,
with or without a plan.
"""

import argparse
import logging
from pathlib import Path

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from planner.integrations.lightning import PlanCallback


class Classifier(lightning.LightningModule):
    """Learns to tell the sign of a sum."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
        self.net = nn.Sequential(*layers, nn.Linear(64, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss."""
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        print(f"epoch {self.current_epoch}, batch {batch_idx}: loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train, and keep checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="for checkpoints and the plan")
    parser.add_argument("--budget-gb", type=float, help="GB of 2**30 bytes that a step may take")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("planner").setLevel(logging.INFO)  # one line after the first step

    torch.manual_seed(0)
    points = torch.randn(2048, 64)
    loader = DataLoader(TensorDataset(points, (points.sum(1) > 0).long()), batch_size=512)
    callbacks = [lightning.callbacks.ModelCheckpoint(options.folder, save_last=True)]
    if options.budget_gb is not None:
        callbacks.append(PlanCallback(options.budget_gb))  # the one line
    trainer = lightning.Trainer(
        default_root_dir=options.folder,
        callbacks=callbacks,
        max_epochs=options.epochs,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
    )
    last = Path(options.folder, "last.ckpt") if options.resume else None
    trainer.fit(Classifier(), loader, ckpt_path=last)


if __name__ == "__main__":
    main()
