"""Lightning's Trainer under a plan: same losses, checkpoints that go both ways, lower peaks, what is refused."""

import json
import pickle
import sys
from types import SimpleNamespace

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from planner import ApplyError, BudgetError, OptionError, PlanWarning, applied_plan
from planner.integrations.discovery import Search
from planner.integrations.lightning import OUTSIDE, PlanCallback
from planner.runtime.interception import attached

from .forked import python
from .test_launch import of_processes, script, traced_peak
from .variants import more

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(num_workers|logging interval|not empty|treespec|does not have many)"),
    pytest.mark.usefixtures("short_searches"),
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
callback = PlanCallback(0.00072, solver="chen", progress=False, plan_file=None)
off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
options = {"max_epochs": 1, "callbacks": [callback], **dict.fromkeys(off, False)}
trainer = lightning.pytorch.Trainer(strategy="ddp", accelerator="cpu", devices=2, **options)
net = Net()
data = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))
trainer.fit(net, torch.utils.data.DataLoader(data, 256))
torch.save(net.state_dict(), f"{sys.argv[1]}{trainer.global_rank}")
trainer.strategy.barrier()  # the first process, which the test waits for, ends after the other has written its file
"""


class Module:
    """What a test trains; mixed into either package's LightningModule."""

    def __init__(self, call="net", dropout=0.1):
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(dropout))]
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


@pytest.mark.parametrize(
    ("net", "package", "given", "arguments"),
    [
        *more((Net, lightning.pytorch, {}, {"precision": "bf16-mixed"})),
        (OtherNet, pytorch_lightning, {"call": "self"}, {"accumulate_grad_batches": 2}),
    ],
    ids=["bf16-mixed", "accumulation"],
)
def test_losses_are_those_without_a_plan(tmp_path, net, package, given, arguments):
    usual, validated, _ = fit(tmp_path, net(**given), package=package, **arguments)
    planned = callback(0.0011 if "precision" in arguments else 0.0014)
    module = net(**given)
    assert fit(tmp_path, module, [planned], package, **arguments)[:2] == (usual, validated)
    assert recomputes(planned.plan)
    assert planned.plan.options.accumulate == ("accumulate_grad_batches" in arguments)
    assert attached(module.net) is None
    assert recomputes(applied_plan(module if given else module.net))
    assert "training_step" not in vars(module)


def test_checkpoints_go_both_ways_and_a_resumed_run_takes_the_plan_file(tmp_path):
    def saves(name, epochs, callbacks=(), resume=None):
        keep = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / name, save_last=True)
        losses, validated, _ = fit(
            tmp_path / name,
            Net(),
            [keep, *callbacks],
            resume=resume and tmp_path / resume / "last.ckpt",
            max_epochs=epochs,
            enable_checkpointing=True,
        )
        return losses, validated

    assert saves("ours", 2, [callback(plan_file="plan.json")]) == saves("usual", 2)
    resumed = callback(plan_file=str(tmp_path / "ours" / "plan.json"))
    assert saves("usual", 3, [resumed], resume="usual") == saves("ours", 3, resume="ours")
    assert "plan.json" in resumed.plan.note  # whose schedule was taken


class Traced(lightning.pytorch.Callback):
    """The most that the third training batch, with the optimizer's step, holds above what was held before it."""

    def __init__(self, file):
        self.file = file

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 3:
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True).__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 3:
            self.profiler.__exit__(None, None, None)
            self.profiler.export_chrome_trace(str(self.file))
            self.peak = traced_peak(self.file)


@pytest.mark.parametrize("microbatches", [*more(1), 2])
def test_the_peak_of_a_step_is_lower_and_as_predicted(tmp_path, microbatches):
    usual, traced, planned = Traced(tmp_path / "trace.json"), Traced(tmp_path / "trace.json"), callback(0.0014)
    for callbacks in ([usual], [planned, traced]):
        fit(tmp_path, Net(), callbacks, max_epochs=1, accumulate_grad_batches=microbatches)
    p = planned.plan
    seen = traced.peak + p.resident_bytes
    assert seen <= p.peak_bytes <= p.budget_bytes
    assert p.peak_bytes == pytest.approx(seen, rel=0.01)
    assert traced.peak < 0.7 * usual.peak


@pytest.mark.thorough
def test_two_processes_train_by_a_plan(tmp_path):
    script(tmp_path, DDP)
    ran = python(tmp_path / "train.py", "parameters", folder=tmp_path, **of_processes())
    assert ran.returncode == 0, ran.stderr
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    batches = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1)).view(-1, 2, 64)
    for i in range(2):
        rows = [batches[256 * i : 256 * (i + 1), rank] for rank in (0, 1)]
        (sum(net(x).square().mean() for x in rows) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in (0, 1):
        for name, found in torch.load(tmp_path / f"parameters{rank}").items():
            torch.testing.assert_close(found, net.state_dict()[name.removeprefix("layers.")])


def test_the_launcher_finds_what_is_called_through_ddp():
    found, net = [], Net("self")
    with Search(None, lambda _, model, *__: found.append(model)).watching():
        optimizer = net.configure_optimizers()
        _ForwardRedirection()(nn.DataParallel(net), net, "training_step", [torch.ones(2, 64)], 0)
    assert optimizer.param_groups
    assert found == [net]
    assert len(net.losses) == 1


class Two(Net):
    """Calls two parts of itself, or one of them, or goes past the call."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.head = kind, nn.Linear(64, 2)

    def training_step(self, batch, batch_idx):
        if self.kind == "both":
            return self.head(self.net(batch[0])).square().mean()
        return (self.net.forward(batch[0]) if self.kind == "past" else self.net(batch[0])).square().mean()


def test_modules_that_a_step_calls_one_after_the_other_are_planned_together(tmp_path):
    usual, module = Two("both"), Two("both")
    traced, planned = Traced(tmp_path / "trace.json"), callback(0.0016)
    fit(tmp_path, usual, max_epochs=1)
    fit(tmp_path, module, [planned, traced], max_epochs=1)
    assert planned.planned is None
    assert recomputes(planned.plan)
    seen = traced.peak + planned.plan.resident_bytes
    assert seen <= planned.plan.peak_bytes <= planned.plan.budget_bytes
    assert planned.plan.peak_bytes == pytest.approx(seen, rel=0.01)
    assert all(map(torch.equal, usual.parameters(), module.parameters()))
    assert attached(module) is None


@pytest.mark.compat
def test_one_of_several_modules_is_named(tmp_path):
    module, planned = Two("both"), callback(module="net")
    fit(tmp_path, module, [planned], max_epochs=1)
    assert planned.plan.account[OUTSIDE] == 2 * 4 * (64 * 2 + 2)  # and its gradients
    with pytest.raises(OptionError, match=r"module='nett' is no module of this Two, which has net, head"):
        fit(tmp_path, Two("both"), [callback(module="nett")])


def test_what_was_not_planned_is_an_error_and_leaves_the_module_alone(tmp_path):
    module = Two("past")
    with pytest.raises(ApplyError, match=r"training_step did not call 'net'.*not as self\.net\.forward\(x\)"):
        fit(tmp_path, module, [callback(module="net")])
    assert "training_step" not in vars(module)
    assert attached(module.net) is None
    with pytest.raises(BudgetError, match="budget_gb=-1"):
        fit(tmp_path, module, [callback(-1)])
    with pytest.raises(BudgetError, match="is too small: the leanest plan"):
        fit(tmp_path, Net(), [callback(1e-4)])


def test_a_training_step_of_ones_own_is_there_again_afterwards(tmp_path):
    module, steps = Net(), []

    def training_step(batch, batch_idx):
        steps.append(batch_idx)
        return Net.training_step(module, batch, batch_idx)

    module.training_step = training_step
    fit(tmp_path, module, [callback()], max_epochs=1)
    assert steps == [0, 1, 2, 3]
    assert module.training_step is training_step


def test_a_hook_that_wants_gradients_gets_them_and_they_are_counted(tmp_path):
    class Watches(lightning.pytorch.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            seen.append(next(module.parameters()).grad is not None)

    seen, planned = [], callback()
    fit(tmp_path, Net(), [planned, Watches()], max_epochs=1)
    assert seen == [False, True, True, True]
    assert planned.plan.options.accumulate


def test_a_damaged_plan_file_is_planned_anew(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    with pytest.warns(PlanWarning, match=r"plan\.json.*planned anew"):
        fit(tmp_path, Net(), [callback(plan_file="plan.json")], max_epochs=1)
    assert json.loads((tmp_path / "plan.json").read_text())


def test_what_would_double_up_is_refused(tmp_path):
    strategies = [
        (FSDPStrategy(activation_checkpointing_policy={nn.Linear}), "FSDPStrategy's activation checkpointing is set"),
        (FSDPStrategy(), "FSDPStrategy is set: .*ModelParallelStrategy"),
        (object.__new__(DeepSpeedStrategy), "deepspeed is set: its engine"),
    ]
    for strategy, said in strategies:
        with pytest.raises(OptionError, match=said):
            callback().on_fit_start(SimpleNamespace(strategy=strategy), Net())
    for module in (torch.compile(Net(), backend="eager"), Net()):
        if module.__class__ is Net:
            module.net = torch.compile(module.net, backend="eager")
        with pytest.raises(OptionError, match=r"torch\.compile is set: a plan compiles the model in its own way"):
            fit(tmp_path, module, [callback()])
    module = Net()
    module.net.gradient_checkpointing = True
    with pytest.raises(OptionError, match=r"gradient_checkpointing_enable\(\) is set: a plan decides itself"):
        fit(tmp_path, module, [callback()])
    module = Net()
    module.net = nn.DataParallel(module.net)
    with pytest.raises(OptionError, match=r"DataParallel is set: leave it out"):
        fit(tmp_path, module, [callback()])


def test_the_callback_goes_to_other_processes_and_says_what_to_install(monkeypatch):
    copied = pickle.loads(pickle.dumps(callback(3, module="net")))
    assert isinstance(copied, lightning.pytorch.Callback)
    assert isinstance(copied, PlanCallback)
    assert (copied.budget_gb, copied.module, copied.options["solver"]) == (3, "net", "chen")
    for package in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OptionError, match="pip install lightning"):
        callback()
