"""The main job on a real model: a small GPT-2, planned at a fraction of its peak, trained with and without the plan."""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import truediv
from statistics import median
from typing import Any

import torch
from torch import nn

from planner.api.front import plan
from planner.api.plan import Plan
from planner.compat.dispatch import lasting_modes_off
from planner.core.options import GB
from planner.errors import OptionError, VerificationError, gb
from planner.planning.pipeline import make_plan
from planner.requests.planned import Planned
from solvers.progress import bar


def small_gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A GPT-2 of 6 layers with random weights and dropout 0.1, and a batch; needs `transformers`."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as e:
        raise OptionError("the demo needs the package transformers: pip install transformers") from e
    config = GPT2Config(
        n_layer=6,
        n_embd=192,
        n_head=6,
        n_positions=128,
        vocab_size=2000,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    ids = torch.randint(0, 2000, (8, 128), generator=torch.Generator().manual_seed(0))
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # transformers 5 otherwise warns that it had to guess
    return model, {"input_ids": ids, "labels": ids}


def run(fraction: float, steps: int, solver: str, progress: bool | None) -> int:
    """Plan, show the plan, train with and without it, and print what was measured; 0 when everything held."""
    torch.manual_seed(0)
    # with several threads, a step on a shared machine can take a hundred times longer
    torch.set_num_threads(1)
    model, batch = small_gpt2()
    start = time.perf_counter()
    whole = plan(model, batch, budget_gb="100%", solver=solver, optimizer="adamw", progress=progress).made()
    assert isinstance(whole, Planned)
    budget_gb = fraction * whole.record.baseline_peak_bytes / GB
    options = replace(whole.request.options, budget_gb=budget_gb)
    within = replace(whole.request, options=options, budget_gb=budget_gb)
    p = Plan.of(make_plan(within, captured=whole.captured))
    print(
        f"Planned GPT-2 ({sum(x.numel() for x in model.parameters()):,} parameters) twice in "
        f"{time.perf_counter() - start:.1f} s: once for its baseline, once for {fraction:.0%} of that, captured once.\n"
    )
    print(p.summary(), "\n")
    plain = copy.deepcopy(model)
    p.apply()
    without, with_plan = _train(plain, model, batch, steps, progress)
    checked = p.verify()
    print(f"predicted peak   {gb(checked.predicted_bytes)}")
    unplanned = gb(checked.unplanned_bytes or 0)
    print(f"measured peak    {checked.measured} (torch.profiler; {unplanned} without a plan)")
    print(
        f"gradients agree  {'yes' if checked.gradients_agree else 'NO'} "
        f"(largest relative difference {checked.gradient_error:.1e})"
    )
    print(
        f"losses           {'equal' if with_plan.losses == without.losses else 'close'}: "
        f"{' '.join(f'{x:.4f}' for x in with_plan.losses)}"
    )
    overhead = median(map(truediv, with_plan.seconds, without.seconds)) - 1
    print(f"overhead         {overhead:+.1%} measured over {steps} steps, {p.overhead:+.1%} estimated")
    if not (checked.gradients_agree and checked.within_budget):
        raise VerificationError("the demo's plan did not hold; this is a bug: please report the lines above")
    return 0


@dataclass(frozen=True)
class _Trained:
    """Losses, and the processor's seconds that each step took, without the first two: they compile."""

    losses: list[float]
    seconds: list[float]


def _train(
    plain: nn.Module, planned: nn.Module, batch: dict[str, Any], steps: int, progress: bool | None
) -> list[_Trained]:
    """AdamW steps of two models in turn, each by the same draws, so that what else runs slows both of them down."""
    models = [plain, planned]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    trained = [_Trained([], []) for _ in models]
    for number in bar("training", progress, iterable=range(steps + 2), unit=" steps"):
        for model, optimizer, found in zip(models, optimizers, trained, strict=True):
            torch.manual_seed(number)
            start = time.process_time()
            with lasting_modes_off() if model is plain else nullcontext():  # the plan is not for what this one takes
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.losses.append(loss.item())
                del loss
            if number > 1:
                found.seconds.append(time.process_time() - start)
    return trained
