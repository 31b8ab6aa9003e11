"""The real models on a GPU, with batches beside whose tensors the allocator's rounding is small; and their measures."""

import functools
import gc
import importlib.util

import pytest
import torch

from planner import InfeasibleBudgetError, plan

from ..measure import beside_the_loop, results, step
from ..real_models import Case, gpt2, llama, resnet50, unet

needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is false"),
]
ROOM_TO_SPARE = 65536.0
MAKE = {
    "gpt2": lambda: gpt2(batch=256, layers=4),
    "gpt2_dropout": lambda: gpt2(dropout=0.1, batch=256, layers=4),
    "llama": lambda: llama(batch=256, layers=4),
    "resnet50": lambda: resnet50(batch=256),
    "unet": lambda: unet(batch=256),
}
NO_DIFFUSERS = pytest.mark.skipif(
    importlib.util.find_spec("diffusers") is None, reason="the diffusers package is not installed"
)
NAMES = [pytest.param(name, marks=NO_DIFFUSERS if name == "unet" else ()) for name in MAKE]


def on_cuda(name: str) -> Case:
    torch.manual_seed(0)
    case = MAKE[name]()
    case.model.cuda()
    case.batch = {k: v.cuda() for k, v in case.batch.items()}
    return case


@functools.cache
def baseline(name: str) -> int:
    """Predicted peak with everything kept, in bytes."""
    case = on_cuda(name)
    return plan(case.model, case.batch, budget_gb=ROOM_TO_SPARE, loss_fn=case.loss_fn).baseline_peak_bytes


@functools.cache
def least(name: str) -> float:
    """The smallest feasible budget in GB."""
    case = on_cuda(name)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(case.model, case.batch, budget_gb=1e-3, loss_fn=case.loss_fn)
    return caught.value.minimum_gb


def plan_at(case: Case, peak: int, fraction: float, **options):
    """A plan at a fraction of a peak, or at the smallest budget that is feasible."""
    make = functools.partial(plan, case.model, case.batch, loss_fn=case.loss_fn, **options)
    try:
        return make(budget_gb=fraction * peak / 2**30)
    except InfeasibleBudgetError as e:
        return make(budget_gb=e.minimum_gb)


def plan_at_least(case: Case, name: str):
    """The plan at the smallest feasible budget."""
    return plan(case.model, case.batch, loss_fn=case.loss_fn, budget_gb=least(name))


def predicted(p) -> int:
    """What will have been asked of the allocator at the peak: the context and the margin lie outside of it."""
    return p.peak_bytes - p.account["CUDA context"] - p.account["fragmentation margin"]


def allow_only(p) -> None:
    """Let this process take no more of the card than a plan's budget."""
    gc.collect()
    torch.cuda.empty_cache()
    allowed = p.budget_bytes - p.account["CUDA context"]
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])


def measured(case: Case, *, keep_gradients: bool = False) -> int:
    """The most bytes that were asked of the allocator during a step that is not the first."""
    step(case)
    if not keep_gradients:
        case.model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(case)
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    case.model.zero_grad(set_to_none=True)
    return peak


def results_on_cuda(case: Case) -> dict[str, torch.Tensor]:
    """Loss, outputs, gradients, buffers, and both generators' states, after one step from a fixed seed; on the host."""
    found = results(case)
    with beside_the_loop():
        return {key: t.cpu() for key, t in found.items()} | {"cuda random state": torch.cuda.get_rng_state()}


def under(p, case: Case) -> dict[str, torch.Tensor]:
    """The results of a plan's first step, by its graphs: with everything kept, the next ones are the model's own."""
    p.apply()
    found = results_on_cuda(case)
    p.remove()
    return found


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)) if theirs.numel() else 0.0
