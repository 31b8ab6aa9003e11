"""`python -m planner run`: scripts train by a plan, and are otherwise run as Python runs them."""

import json
import os
import runpy
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import nn

from planner import ModelError, PlanWarning, applied_plan, plan
from planner.__main__ import main
from planner.errors import gb
from planner.integrations.discovery import Search
from planner.runtime.peaks import report

from .forked import python, torchrun
from .problems import in_python_path
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")
ROOT = Path(__file__).parent.parent
TRAIN = '''
"""Trains a classifier on random points."""

import argparse

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, n, width):
        self.x = torch.randn(n, width, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.x[i].sum() > 0)


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return self.head(x)


def evaluate(model, points):
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(points, 512))
    model.train()
    return right


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--profile")
    args = parser.parse_args()

    torch.manual_seed(1)
    points = Points(2 * args.batch_size, 64)
    loader = DataLoader(
        points,
        args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        multiprocessing_context="spawn" if args.workers else None,
    )
    model = Net(64, 16)
    print(evaluate(model, points))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.CrossEntropyLoss()

    def step(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        return loss.item()

    for x, y in loader:
        print(step(x, y))
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    print(evaluate(model, points))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(x, y)
    profiler.export_chrome_trace(args.profile)


if __name__ == "__main__":
    main()
'''
AS_PYTHON = """
import sys
print(sys.argv, __name__, __file__, __spec__, sys.path[0], sorted(globals()))

class Mine(Exception):
    pass

def fails():
    raise Mine("on purpose")

def main():
    fails()

main()
"""
LOOP = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
try:
    for _ in range(2):
        loss = model(torch.randn(256, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
EVALUATES = """
import sys
import torch

model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with torch.no_grad():
    print(model(torch.ones(1, 3)).shape)
sys.exit()
"""
RANKS = """
import os
import planner.planning.solution
import torch
import torch.distributed as dist

def solve(*args, **kwargs):
    solved.append(1)
    return solves(*args, **kwargs)

solved, solves = [], planner.planning.solution.solve
planner.planning.solution.solve = solve
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for _ in range(2):
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with open(f"{os.environ['LOSSES']}{dist.get_rank()}", "w") as file:
    print(repr(loss.item()), len(solved), file=file)
dist.destroy_process_group()
"""
ACCUMULATES = """
import sys
import torch
from torch.profiler import ProfilerActivity, profile

torch.manual_seed(0)
model = torch.nn.Sequential(*[layer for _ in range(12) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())])
optimizer = torch.optim.AdamW(model.parameters())

def microbatch(i):
    loss = model(torch.randn(256, 128)).square().mean()
    loss.backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item())

for i in range(3):
    microbatch(i)
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
    microbatch(3)
profiler.export_chrome_trace(sys.argv[1])
"""
BETWEEN = (
    ACCUMULATES.replace("AdamW(model.parameters())", "SGD(model.parameters(), 0.1)")
    .replace(
        """    loss.backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
""",
        """    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    )
    .replace("    microbatch(3)", "    microbatch(3)\n    microbatch(4)")
)
ACCELERATE = """
import torch
from accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.randn(2048, 64), batch_size=256)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    with accelerator.accumulate(model):
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
plans = accelerator.unwrap_model(model)._compiled_call_impl.plans.values()
torch.save((loss.item(), [plan.options.accumulate for plan in plans]), f"rank{accelerator.process_index}")
"""
SKIPS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        if len(x) % 2:
            raise KeyError("odd")
        return self.inner(x)


model = Net()
optimizer, trained = torch.optim.SGD(model.parameters(), lr=0.1), 0
for rows in (3, 4, 4):
    try:
        model(torch.randn(rows, 8)).sum().backward()
    except KeyError as e:
        print(f"left out: {e!r}")
        continue
    optimizer.step()
    trained += 1
print(f"trained {trained}")
"""
NOTHING = (
    "nothing was planned: no module that an optimizer trains was called in training mode, "
    "outside of functions that torch.compile() was given"
)
TIGHT = ("--budget-gb", "0.0034", "--solver", "chen")


def run(folder, *arguments):
    environment = os.environ | of_processes()
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def of_processes():
    """What a new interpreter is told, also by one that is forked: where the planner is, and to use one thread."""
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": in_python_path(ROOT)}


def script(folder, text, name="train.py"):
    path = folder / name
    path.write_text(text)
    return path


def traced_peak(trace):
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    events.sort(key=lambda e: (e["ts"], e["args"]["Ev Idx"]))
    return max(accumulate(e["args"]["Bytes"] for e in events))


def test_a_script_trains_as_before_at_half_of_the_peak(tmp_path):
    script(tmp_path, TRAIN)
    usual = python("train.py", "--profile", "usual.json", folder=tmp_path)
    command = ("-m", "planner", "run", *TIGHT, "train.py", "--workers", 1)
    planned = run(tmp_path, *command, "--profile", "planned.json")
    assert usual.returncode == planned.returncode == 0, planned.stderr
    assert usual.stdout == planned.stdout
    assert traced_peak(tmp_path / "planned.json") < traced_peak(tmp_path / "usual.json") / 2
    assert "planner: Net is planned." in planned.stderr
    assert "planner: Fits: peak 3." in planned.stderr
    assert planned.stderr.count("first step: peak") == 1


def test_a_script_meets_what_python_gives_it(tmp_path):
    (tmp_path / "sub").mkdir()
    script(tmp_path / "sub", AS_PYTHON)
    usual = run(tmp_path, "sub/train.py", "--lr", 3, "-m", "x")
    ours = run(tmp_path, "-m", "planner", "run", "--budget-gb", 1, "sub/train.py", "--lr", 3, "-m", "x")
    assert usual.returncode == 1
    assert (ours.stdout, ours.stderr, ours.returncode) == (usual.stdout, usual.stderr, usual.returncode)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs the command line in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return lambda *arguments: main(["run", *map(str, arguments)])


def test_a_script_that_only_evaluates_is_left_alone(tmp_path, here, capsys):
    script(tmp_path, EVALUATES)
    with pytest.raises(SystemExit) as ended:
        here("--budget-gb", 1, "-m", "train")
    assert ended.value.code is None
    assert capsys.readouterr() == ("torch.Size([1, 3])\n", f"planner: {NOTHING}\n")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--budget-gb", "twelve"), "BudgetError: budget_gb='twelve'"),
        ((), "BudgetError: no budget_gb was given"),
        (("--budget-gb", 1, "--plan-file", "nowhere/plan.json"), "nowhere"),
    ],
)
def test_what_cannot_be_used_is_said_before_the_script_runs(given, words, tmp_path, here, capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    script(tmp_path, "print('began')\n")
    with pytest.raises(SystemExit, match="2"):
        here(*given, "train.py")
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err


@pytest.mark.parametrize(
    ("how", "words"), [*more(("", "Inductor generates")), ("mode='reduce-overhead'", "CUDA graphs hold")]
)
def test_what_torch_compile_made_of_the_model_is_planned_where_it_can_be(how, words, tmp_path, here, capsys):
    script(
        tmp_path,
        LOOP.replace("optimizer =", f"model = torch.compile(model, {how})\noptimizer =", 1) + "finally: pass\n",
    )
    here("--budget-gb", 1, "train.py")
    assert words in " ".join(capsys.readouterr().err.replace("planner: ", "").split())


def test_what_does_not_fit_ends_the_script(tmp_path, here, capsys):
    script(tmp_path, LOOP + "except Exception:\n    print('caught')\n")
    with pytest.raises(SystemExit, match="1"):
        here("--budget-gb", "0.0001", "train.py")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("planner: InfeasibleBudgetError: budget_gb=0.0001 ")
    assert NOTHING not in said.err


def test_a_script_that_trains_without_a_plan_is_not_said_to_train_nothing(tmp_path, here, capsys):
    script(tmp_path, LOOP + "finally: pass\n")
    with pytest.warns(PlanWarning, match="trains without a plan"):
        here("--budget-gb", "0.0001", "--on-failure", "warn", "train.py")
    assert NOTHING not in capsys.readouterr().err


def test_the_exit_status_is_that_of_a_plan_that_does_not_fit_where_the_script_catches_everything(
    tmp_path, here, capsys
):
    script(tmp_path, LOOP + "except BaseException:\n    print('caught')\n")
    with pytest.raises(SystemExit, match="1"):
        here("--budget-gb", "0.0001", "train.py")
    said = capsys.readouterr()
    assert said.out == "caught\n"
    assert NOTHING not in said.err


@pytest.mark.parametrize("more", [(), ("--on-failure", "warn")])
def test_a_batch_that_the_model_does_not_accept_ends_in_its_own_error_though_it_is_the_first(
    more, tmp_path, here, capsys
):
    script(tmp_path, SKIPS)
    assert here("--budget-gb", 1, *more, "train.py") == 0
    said = capsys.readouterr()
    assert said.out == "left out: KeyError('odd')\ntrained 2\n"
    assert "Net is planned" in said.err


def test_a_plan_file_is_where_it_was_asked_for_though_the_script_goes_elsewhere(tmp_path, here):
    (tmp_path / "elsewhere").mkdir()
    script(tmp_path, "import os\nos.chdir('elsewhere')\n" + LOOP + "finally: pass\n")
    assert here("--budget-gb", 1, "--plan-file", "plan.json", "train.py") == 0
    assert (tmp_path / "plan.json").is_file()


def test_a_plan_file_is_written_and_taken(tmp_path, here, capsys):
    script(tmp_path, LOOP + "finally:\n    print(loss.item())\n")
    command = ("--budget-gb", "0.0015", "--solver", "chen", "--plan-file", "plan.json", "train.py")
    assert here(*command) == 0
    first = capsys.readouterr()
    written = (tmp_path / "plan.json").read_bytes()
    assert here(*command) == 0
    second = capsys.readouterr()
    assert first.out == second.out
    assert "plan.json" not in first.err
    assert "plan.json" in second.err  # the note says whose schedule was taken
    assert (tmp_path / "plan.json").read_bytes() == written
    assert here("--quiet", *command) == 0
    assert capsys.readouterr() == (first.out, "")


def test_a_script_that_is_not_there_is_bad_input(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--budget-gb", "1", "absent.py"])
    assert "there is no script 'absent.py'" in capsys.readouterr().err
    for name in ("absent_module", "absent_module.inner"):
        with pytest.raises(SystemExit, match="2"):
            main(["run", "--budget-gb", "1", "-m", name])
        assert f"there is no module {name!r}" in capsys.readouterr().err


def test_rank_0_of_torchrun_plans_for_all(tmp_path):
    script(tmp_path, RANKS)
    launcher = ("-m", "planner", "run", "--budget-gb", "0.0012")
    ran = torchrun(2, *launcher, "train.py", folder=tmp_path, LOSSES=str(tmp_path / "loss"))
    assert [rank.returncode for rank in ran] == [0, 0], ran
    assert [rank.stderr.count("Sequential is planned") for rank in ran] == [1, 0]

    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        batches.append([torch.randn(256, 64) for _ in range(2)])
    for step in range(2):
        losses = [model(batches[rank][step]).square().mean() for rank in (0, 1)]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, solved = zip(*((tmp_path / f"loss{rank}").read_text().split() for rank in (0, 1)), strict=True)
    assert solved == ("1", "0")
    assert list(map(float, found)) == pytest.approx([loss.item() for loss in losses], rel=1e-5)


@pytest.mark.thorough
def test_every_rank_of_accelerate_plans(tmp_path):
    script(tmp_path, ACCELERATE)
    settings = ("--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no", "--multi_gpu")
    accelerate = ("-m", "accelerate.commands.launch", *settings, "--num_processes", 2)
    launcher = ("-m", "planner", "run", "--budget-gb", "0.0007")
    ran = python(*accelerate, *launcher, "train.py", folder=tmp_path, **of_processes())
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("Sequential is planned.") == ran.stderr.count("Sequential is planned anew.") == 1

    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batches in torch.randn(2048, 64).view(2, 2, 2, 256, 64):  # steps, microbatches, ranks
        losses = [[model(x).square().mean() for x in ranks] for ranks in batches]
        (sum(map(sum, losses)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in (0, 1):
        loss, accumulates = torch.load(tmp_path / f"rank{rank}")
        assert accumulates == [True]
        assert loss == pytest.approx(losses[-1][rank].item(), rel=1e-5)


@pytest.mark.thorough
def test_a_script_that_accumulates_gradients_is_planned_anew_with_them(tmp_path, here, capsys):
    path = script(tmp_path, ACCUMULATES)
    sys.argv = ["train.py", "usual.json"]
    runpy.run_path(str(path))
    usual = capsys.readouterr()
    command = ("--budget-gb", "0.0049", "--solver", "chen", "--plan-file", "plan.json", "train.py", "ours.json")
    assert here(*command) == 0
    ours = capsys.readouterr()
    assert ours.out == usual.out
    assert "planned anew, because gradients are there when a step begins" in ours.err
    assert "planner: Sequential is planned anew." in ours.err
    held = 4 * 12 * 4 * (128 * 128 + 128)  # parameters, gradients and two moments
    assert held + traced_peak(tmp_path / "ours.json") <= 0.0049 * 2**30 < held + traced_peak(tmp_path / "usual.json")
    assert here(*command) == 0
    again = capsys.readouterr()
    assert again.out == ours.out
    assert "Taken from plan.json" in again.err
    assert "anew" not in again.err
    with pytest.raises(SystemExit, match="1"):
        here("--budget-gb", "0.0045", "--solver", "chen", "train.py", "ours.json")
    assert "planner: InfeasibleBudgetError: budget_gb=0.0045 " in capsys.readouterr().err


@pytest.mark.thorough
def test_gradients_that_are_cleared_before_the_backward_pass_are_no_earlier_microbatches(tmp_path, here, capsys):
    path = script(tmp_path, BETWEEN)
    sys.argv = ["train.py", "usual.json"]
    runpy.run_path(str(path))
    usual = capsys.readouterr()
    command = ("--budget-gb", "0.0029", "--plan-file", "plan.json", "train.py", "ours.json")
    assert here(*command) == 0
    ours = capsys.readouterr()
    assert ours.out == usual.out
    assert "gradients are there when a step begins, and are cleared after the forward pass" in ours.err
    assert ours.err.count("is planned anew") == 1
    parameters = 4 * 12 * (128 * 128 + 128)
    # two steps, so that the gradients of the first are seen to be there in the second, and to go
    found, without = (parameters + traced_peak(tmp_path / name) for name in ("ours.json", "usual.json"))
    assert found <= 0.0029 * 2**30 < without
    assert here(*command) == 0
    again = capsys.readouterr()
    assert again.out == ours.out
    assert "Taken from plan.json" in again.err
    assert "anew" not in again.err


FROZEN_BY_TURNS = """
import torch

class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.maker, self.judge = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.maker(x)

torch.manual_seed(0)
pair = Pair()
makes, judges = (torch.optim.SGD(part.parameters(), 0.1) for part in (pair.maker, pair.judge))
for _ in range(3):
    pair.judge.requires_grad_(False)
    pair.judge(pair(torch.ones(2, 4))).mean().backward()
    makes.step()
    pair.judge.requires_grad_(True)
    pair.maker.requires_grad_(False)
    pair.judge(pair(torch.ones(2, 4)).detach()).mean().backward()
    judges.step()
    pair.maker.requires_grad_(True)
print(sum(p.sum().item() for p in pair.parameters()))
"""


def test_a_script_may_call_the_model_while_what_it_trains_is_frozen(tmp_path, here, capsys):
    sys.argv = ["train.py"]
    runpy.run_path(str(script(tmp_path, FROZEN_BY_TURNS)))
    usual = capsys.readouterr().out
    assert here("--budget-gb", 1, "train.py") == 0
    assert capsys.readouterr().out == usual


def searched(wanted=None):
    found = []
    return found, Search(wanted, lambda _, model, optimizers: found.append((model, optimizers)))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))


def test_two_models_are_named_and_one_is_chosen(capsys):
    def train():
        generator, critic = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1)
        both = [torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic)]
        critic(generator(torch.ones(2, 4))).mean().backward()
        return generator, critic, both

    found, search = searched()
    with search.watching(), pytest.raises(SystemExit, match="2"):
        train()
    said = capsys.readouterr().err
    assert "generator (of class Sequential, 20 parameters), critic (of class Linear, 5 parameters)" in said
    assert "--model generator" in said
    assert found == []
    for name in ("critic", "Linear"):
        found, search = searched(name)
        with search.watching():
            _, critic, both = train()
        assert found == [(critic, both[1:])]
    found, search = searched("discriminator")
    with search.watching(), pytest.raises(SystemExit, match="2"):
        train()
    assert "--model discriminator is none of what the script trains: generator (" in capsys.readouterr().err


def test_parts_that_are_called_by_themselves_are_planned_together_or_named(capsys):
    class Loop:
        def __init__(self):
            self.model = Pair()

        def train(self):
            optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
            self.model.decoder(self.model.encoder(torch.ones(2, 4))).mean().backward()
            return optimizer

    loop = Loop()
    for name, path in ((None, ""), ("decoder", "decoder")):
        found, search = searched(name)
        with search.watching():
            loop.train()
        assert [model for model, _ in found] == [loop.model.get_submodule(path)]
    found, search = searched("coder")
    with search.watching(), pytest.raises(SystemExit):
        loop.train()
    assert "model.encoder (of class Linear, 20 parameters)" in capsys.readouterr().err


def test_a_script_whose_model_is_trained_by_its_parts_is_planned_from_the_second_step_on(tmp_path):
    script(
        tmp_path,
        """
import torch
from torch import nn
from planner import applied_plan

torch.manual_seed(0)
torch.set_num_threads(1)
def wide():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())])

model = nn.ModuleDict({"encoder": wide(), "decoder": wide()})
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    x = torch.randn(512, 64)
    loss = (model["decoder"](model["encoder"](x)) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), applied_plan(model) is not None and max(d.action for d in applied_plan(model).decisions))
""",
    )
    ran = python(tmp_path / "train.py", folder=tmp_path)
    planned = python("-m", "planner", "run", "--budget-gb", "0.0018", "train.py", folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    losses, plans = zip(*(line.split() for line in planned.stdout.splitlines()), strict=True)
    assert list(losses) == [line.split()[0] for line in ran.stdout.splitlines()]
    assert plans == ("False", "recompute", "recompute", "recompute")
    assert "ModuleDict is planned." in planned.stderr


def test_one_model_after_another_is_found_and_what_is_watched_is_put_back():
    before = nn.Module.__call__, torch.optim.Optimizer.__init__
    found, search = searched()
    models = [nn.Linear(4, 4) for _ in range(3)]
    teacher = nn.Linear(4, 4)
    with search.watching():
        for model in models[:2]:
            model(torch.ones(1, 4))  # before there is an optimizer
            optimizer = torch.optim.Adam(model.parameters())
            model.eval()(torch.ones(1, 4))
            with torch.no_grad():
                model.train()(torch.ones(1, 4))
            teacher(torch.ones(1, 4))
            assert model not in [m for m, _ in found]
            nn.Sequential(model)(torch.ones(1, 4))
            assert list(found[-1][0].children()) == [model]
            assert found[-1][1] == [optimizer]
    assert len(found) == 2
    assert (nn.Module.__call__, torch.optim.Optimizer.__init__) == before


def test_a_wrapped_model_is_refused():
    wrapped = nn.DataParallel(nn.Linear(4, 4))
    p = plan(wrapped.module, torch.ones(2, 4), budget_gb=1)
    for refused in (lambda: plan(wrapped, torch.ones(2, 4), budget_gb=1), lambda: p.apply(wrapped)):
        with pytest.raises(ModelError, match=r"Linear is wrapped in DataParallel already.*then wrap the model"):
            refused()


def test_one_line_after_planning_and_one_after_the_first_step(caplog, recwarn):
    def said():
        return [record.message for record in caplog.records if record.name == "planner"]

    caplog.set_level("INFO", "planner")
    for progress in (None, False):
        model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())])
        plan(model, budget_gb=1, progress=progress).apply()
        loss = model(torch.ones(2, 8)).mean()
        assert [text.startswith("planned in") for text in said()] == ([True] if progress is None else [])
        caplog.clear()
        loss.backward()
        model.zero_grad()
        model(torch.ones(2, 8)).mean().backward()
        p = applied_plan(model)
        line = f"{gb(p.phase_peaks['backward'])} predicted, not measured"
        assert [line in text for text in said()] == ([True] if progress is None else [])
        caplog.clear()

    predicted = max(p.phase_peaks.values())
    report(p.record, round(predicted * 1.02))
    assert [w for w in recwarn if w.category is PlanWarning] == []
    for share, advice in ((1.1, r"\+10.*repair\(\)"), (0.9, "-10.*larger budget_gb")):
        with pytest.warns(PlanWarning, match=advice):
            report(p.record, round(predicted * share))
