"""`doctor`: what is installed here, and whether a small model can be planned and trained by its plan."""

from __future__ import annotations

import os
import platform
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from planner.api.front import plan
from planner.compat.versions import tested, tested_in_words
from planner.devices.accelerator import ACCELERATORS
from planner.devices.find import built_for, first_line
from planner.errors import gb
from planner.planfile.files import own_version
from planner.report.words import duration, wrapped
from solvers.search.annealing import ready

# package -> what needs it
OPTIONAL = {
    "transformers": "plan_trainer(), the demo",
    "accelerate": "plan_trainer(), accelerate launch",
    "lightning": "PlanCallback",
    "diffusers": "nothing; its models can be planned",
    "peft": "nothing; its adapters can be planned",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: its name.
        found: what was found, in words.
        works: whether the planner can be used as it is; None where that does not depend on it.
    """

    what: str
    found: str
    works: bool | None = None


def findings() -> Iterator[Finding]:
    """What was found here, one after the other; the last ones take some seconds each, for they plan a small model."""
    yield Finding("planner", f"{own_version()}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    is_tested = tested(torch.__version__)
    beside = "" if is_tested else f"; the tests ran with {tested_in_words()}"
    yield Finding("torch", f"{torch.__version__}, {'tested' if is_tested else 'not tested'}{beside}")
    yield from _packages()
    yield Finding("compiler", _compiler())
    yield _search()
    yield _device()
    yield _tried("cpu")
    yield from (_tried(f"{kind}:{i}") for kind, each in ACCELERATORS.items() for i in range(each.count()))


def _packages() -> Iterator[Finding]:
    for name, needs in OPTIONAL.items():
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, f"not installed; needed by {needs}")
    drawn = "found" if shutil.which("dot") else "not found: graph() is laid out without it"
    yield Finding("Graphviz (dot)", drawn)


def _compiler() -> str:
    """The C++ compiler that torch's Inductor would take."""
    name = os.environ.get("CXX") or next((n for n in ("g++", "clang++", "c++") if shutil.which(n)), None)
    needed = "plans do without: torch.compile captures the step, and torch's own kernels run it"
    return f"{name}; {needed}" if name else f"no C++ compiler; {needed}"


def _search() -> Finding:
    """Compile the solver's annealing, so that no plan waits for it, or load what was compiled before."""
    began = time.perf_counter()
    try:
        ready()
    except Exception as e:
        return Finding("solver", f"its annealing failed: {type(e).__name__}: {first_line(e)}", works=False)
    took = duration(time.perf_counter() - began)
    return Finding("solver", f"its annealing is compiled, which took {took} here, and kept for later", works=True)


def _device() -> Finding:
    places = [(each, torch.device(kind, i)) for kind, each in ACCELERATORS.items() for i in range(each.count())]
    if not places:
        built = torch.version.cuda or torch.version.hip
        why = "no GPU is seen" if built else "this torch is built for the CPU"
        return Finding("GPU", f"none ({why}); plans for one can be made with device=")
    try:
        cards = [each.properties(place) for each, place in places]
    except (RuntimeError, AssertionError) as e:
        return Finding("GPU", f"{places[0][1]} cannot be used{built_for('cuda')}: {first_line(e)}", works=False)
    listed = ", ".join(f"{name} with {gb(memory)}" for name, _, memory in cards)
    return Finding("GPU", f"{listed}; the planner ran on one H100 so far: check plans with verify()")


def _tried(device: str) -> Finding:
    """Plan a small model at three quarters of its peak, and run a training step by that plan and one without."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())]
    model, batch = nn.Sequential(*layers).to(device), torch.ones(512, 64, device=device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            roomy = plan(model, batch, budget_gb=4, loss_fn=torch.Tensor.mean, progress=False)
            budget = 0.75 * roomy.baseline_peak_bytes / 2**30
            p = plan(model, batch, budget_gb=budget, loss_fn=torch.Tensor.mean, progress=False)
            p.apply()
            seen = p.verify()
    except Exception as e:
        return Finding(f"a plan on {device}", f"failed: {type(e).__name__}: {' '.join(str(e).split())}", works=False)
    peak = f"peak {seen.measured} measured, {gb(seen.predicted_bytes)} predicted"
    if not seen.gradients_agree:
        return Finding(f"a plan on {device}", f"gradients differ by {seen.gradient_error}; {peak}", works=False)
    works = seen.within_budget is not False
    fits = "" if works else f", above the budget of {gb(p.budget_bytes)}"
    return Finding(f"a plan on {device}", f"made and run; {peak}{fits}; gradients agree", works=works)


def lines(finding: Finding) -> list[str]:
    """A finding as text within 80 columns."""
    mark = {None: "  ", True: "ok", False: "NO"}[finding.works]
    return wrapped(finding.found, indent=" " * 22, first=f"{mark} {finding.what:<18} ")
