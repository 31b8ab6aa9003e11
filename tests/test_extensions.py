"""Trial extensions: a new option and a new accelerator are local changes; a new solver is in test_extension_solver."""

import contextlib
import shutil
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import planner
from planner import plan
from planner.devices.accelerator import ACCELERATORS

from .forked import python
from .measure import peak_in

ROOT = Path(__file__).parents[1]

# a new option: its declaration, its place in the signature, its use
OPTION = {
    "planner/core/options.py": (
        "    in_flight: int = option(",
        '    halve: bool = option(False, About(_unless(lambda x: isinstance(x, bool), "must be True or False"), '
        'Flag("plan for half of the budget", kind=bool), "budget halved", _yes))\n',
    ),
    "planner/api/front.py": ("    known: Plan | str", "    halve: bool = False,\n"),
    "planner/requests/check.py": (
        "    return replace(request, budget_gb=budget_of(request))\n\n\ndef options_of",
        "    if options.halve:\n        return replace(request, budget_gb=budget_of(request) / 2)\n",
    ),
}
USES_IT = """
import contextlib, io, os, sys, torch
for name in [name for name in sys.modules if name.partition(".")[0] in ("planner", "solvers", "tests")]:
    del sys.modules[name]  # those of the process that it is forked from
import planner
assert os.path.dirname(os.path.dirname(planner.__file__)) == os.getcwd()
from planner import OptionError, Plan, compare, plan
from planner.__main__ import main

model, batch = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.zeros(4, 8)
given = dict(budget_gb=1, loss_fn=torch.Tensor.mean, progress=False)
halved = plan(model, batch, halve=True, **given)
assert halved.budget_bytes == 2**29
halved.save("plan.json")
assert Plan.load("plan.json").options.halve
assert "budget halved" in str(compare(plan(model, batch, **given), halved))
try:
    plan(model, batch, halve=2, **given)
except OptionError as e:
    assert "halve=2 must be True or False" in str(e)
with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    main(["plan", "--help"])
assert "--halve" in shown.getvalue()
"""


def test_a_new_option_is_two_places_and_its_use(tmp_path):
    for package in ("planner", "solvers"):
        shutil.copytree(ROOT / package, tmp_path / package)  # with what is compiled
    for name, (before, line) in OPTION.items():
        text = (tmp_path / name).read_text()
        assert text.count(before) == 1
        (tmp_path / name).write_text(text.replace(before, line + before))
    done = python("-c", USES_IT, folder=tmp_path)
    assert done.returncode == 0, done.stderr


class Card:
    """An accelerator whose memory is the host's, measured by the profiler."""

    def __init__(self, folder):
        self.asked = []
        self.folder = folder
        self.profiler, self.most = None, 1000

    def synchronize(self, device):
        self.asked.append("synchronize")

    def allocated(self, device):
        return 1000

    def peak(self, device):
        if self.profiler is not None:
            self.profiler.stop()
            self.most = 1000 + peak_in(self.profiler, self.folder)
            self.profiler = None
        return self.most

    def reset_peak(self, device):
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profiler.start()

    def available(self, device):
        return 2**28

    def count(self):
        return 1

    def capturing(self):
        return False

    def reserved_peak(self, device):
        return None

    def empty_cache(self, device):
        self.asked.append("empty cache")

    def prepare(self, device):
        self.asked.append("prepare")

    def current(self, device):
        return contextlib.nullcontext()

    def random_state(self, device):
        self.asked.append("random state")
        return torch.get_rng_state()

    def set_random_state(self, device, state):
        torch.set_rng_state(state)


def test_a_new_accelerator_is_one_object(monkeypatch, tmp_path):
    """Its budget, its measured peaks and its random state are the object's; nothing else is asked of torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 1))
    without = plan(model, torch.zeros(32, 64), budget_gb=1, loss_fn=torch.Tensor.mean).verify()
    card = Card(tmp_path)
    monkeypatch.setitem(ACCELERATORS, "cpu", card)
    p = plan(model, torch.zeros(32, 64), loss_fn=torch.Tensor.mean)
    own = sum(t.nbytes for t in (*model.parameters(), torch.zeros(32, 64)))
    assert p.budget_bytes == 2**28 + own
    seen = p.verify()
    assert (seen.measured_bytes, seen.unplanned_bytes) == (without.measured_bytes, without.unplanned_bytes)
    assert seen.gradients_agree
    p.apply()
    model(torch.zeros(32, 64)).mean().backward()
    assert {"synchronize", "prepare", "random state"} <= set(card.asked)
    assert planner.applied_plan(model).peak_bytes == p.peak_bytes
