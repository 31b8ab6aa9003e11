"""Lightning's Trainer under a plan: same losses, checkpoints that go both ways, lower peaks, what is refused."""

import json
import logging
import pickle
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from planner import ApplyError, BudgetError, OptionError, PlanWarning, applied_plan
from planner.integrations.lightning import OUTSIDE, PlanCallback
from planner.runtime.applied import attached

from .test_launch import run, script

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(num_workers|logging interval|exists and is not empty|treespec)"),
]
BUDGET = 0.0018  # GB; a plan has to recompute
DDP = """
import sys
import lightning.pytorch
import torch
from torch import nn
from planner import applied_plan
from planner.integrations.lightning import PlanCallback

class Net(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])

    def forward(self, x):
        return self.layers(x)

    def training_step(self, x, batch_idx):
        return self(x).square().mean()

    def on_train_batch_end(self, *_):
        assert callback.planned is self
        assert any(d.action == "recompute" for d in applied_plan(self).decisions)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

torch.set_num_threads(1)
torch.manual_seed(0)
callback = PlanCallback(0.00095, solver="chen", progress=False, plan_file=None)
options = dict(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = lightning.pytorch.Trainer(strategy="ddp", accelerator="cpu", devices=2, callbacks=[callback], **options)
net = Net()
data = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))
trainer.fit(net, torch.utils.data.DataLoader(data, 256))
torch.save(net.state_dict(), f"{sys.argv[1]}{trainer.global_rank}")
"""


class Module:
    """What a test trains; mixed into either package's LightningModule."""

    def __init__(self, call="net"):
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
        self.net = nn.Sequential(*layers)
        self.call, self.losses = call, []

    def forward(self, x):
        return self.net(x)

    def _loss(self, batch):
        return (self(batch[0]) if self.call == "self" else self.net(batch[0])).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validated", self._loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Net(Module, lightning.pytorch.LightningModule):
    pass


class OtherNet(Module, pytorch_lightning.LightningModule):
    pass


def fit(folder, module, callbacks=(), package=lightning.pytorch, resume=None, **more):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(1024, 64))
    given = {"max_epochs": 2, "enable_checkpointing": False, "accelerator": "cpu", **more}
    trainer = package.Trainer(
        default_root_dir=folder,
        callbacks=[*callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )
    trainer.fit(module, DataLoader(data, 256), DataLoader(data, 512), ckpt_path=resume)
    return module.losses, trainer.callback_metrics["validated"].item(), trainer


def callback(budget=BUDGET, **options):
    return PlanCallback(budget, **{"solver": "chen", "progress": False, "plan_file": None, **options})


def recomputes(plan):
    return any(d.action == "recompute" for d in plan.decisions)


@pytest.fixture(autouse=True)
def quiet():
    for package in ("lightning", "pytorch_lightning"):
        logging.getLogger(f"{package}.pytorch".replace("g.pytorch", "g")).setLevel(logging.ERROR)


@pytest.mark.parametrize(
    ("net", "package", "arguments", "budget"),
    [
        (Net, lightning.pytorch, {}, 0.0014),
        (Net, lightning.pytorch, {"precision": "bf16-mixed"}, 0.001),
        (OtherNet, pytorch_lightning, {"accumulate_grad_batches": 2}, 0.0014),
    ],
    ids=["plain", "bf16-mixed", "accumulation"],
)
def test_losses_are_those_without_a_plan(tmp_path, net, package, arguments, budget):
    usual, validated, _ = fit(tmp_path, net(), package=package, **arguments)
    planned = callback(budget)
    module = net()
    assert fit(tmp_path, module, [planned], package, **arguments)[:2] == (usual, validated)
    assert recomputes(planned.plan)
    assert planned.plan.request.accumulate == ("accumulate_grad_batches" in arguments)
    assert attached(module.net) is None
    assert "training_step" not in vars(module)
