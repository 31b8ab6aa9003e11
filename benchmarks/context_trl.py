"""A check of the account: trl's recipe for a million tokens on eight H100, of which it reports 56.2 GB on each.

Qwen3-8B, 131,072 tokens on each card, FSDP2 and ring attention over all eight, each block checkpointed with its input
on the host, the loss in chunks of 256 tokens (examples/sft_qwen3_8b_1m_context of huggingface/trl, v1.13). The step is
traced as eager mode runs it; what several cards add, which a trace on one does not see, are lines by the code of
accelerate and torch: `python -m benchmarks.context_trl`.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.context_models import MODELS
from benchmarks.context_steps import CHUNK, blocks_in, inputs_of, moves_of
from planner.core.recipe import Choice
from planner.core.step import Step, replay, with_line
from planner.eager.pipeline import tracer_of
from planner.errors import gb
from planner.lowering.margin import CONTEXT, MARGIN
from planner.planning.decisions import peak_account
from planner.requests.check import check
from solvers import Link, every_op_once

REPORTED_GB, TOKENS, CARDS = 56.2, 131072, 8
SINGLE = 4  # bytes of what FSDP2 keeps of a parameter under mixed precision: single precision
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class ChunkedLoss(nn.Module):
    """A language model and its loss, of which so many tokens at a time have logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of the labels."""
        hidden = self.model.model(input_ids=ids).last_hidden_state[0]
        parts = zip(torch.split(hidden, CHUNK), torch.split(labels[0], CHUNK), strict=True)
        weight = self.model.lm_head.weight
        losses = [checkpoint(_loss, h, weight, wanted, use_reentrant=False) for h, wanted in parts]
        return torch.stack(losses).sum() / labels.numel()


def _loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ weight.t()).float()
    return functional.cross_entropy(logits, labels, reduction="sum")


def language_model() -> Any:
    """Qwen3-8B, whose blocks are checkpointed."""
    with torch.device("meta"):
        model = MODELS["Qwen3-8B"](TOKENS).to(torch.bfloat16).train()
    model.gradient_checkpointing_enable()
    return model


def traced(model: Any) -> Step:
    """One card's step, as eager mode runs it, but for what other cards send."""
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    whole = sum(p.numel() for p in model.parameters())
    shares = {"parameters": SINGLE * whole / CARDS / 2**30, "optimizer state": 2 * SINGLE * whole / CARDS / 2**30}
    loss = ChunkedLoss(model)
    options: dict[str, Any] = {"device": "h100", "optimizer": "adamw-fused", "progress": False, "shard": CARDS}
    request = check(loss, (ids, ids), None, mode="eager", account_gb=shares, **options)
    tracer = tracer_of(request, lambda: None)
    return tracer.trial(Choice(), {}, tracer.trace(Choice()))[0].step


def with_ring(step: Step) -> Step:
    """The step with the temporaries of ring attention, as torch.distributed's `_templated_ring_attention` has them.

    These are keys and values of all cards, and sums in single precision.
    """
    problem = step.problem
    ops = []
    for op, origin in zip(problem.ops, step.origins, strict=True):
        if ATTENTION in origin.target:
            read = sorted({problem.sizes[v] for v in op.reads if problem.sizes[v] > 2**27}, reverse=True)
            query, pair = read[0], 2 * read[-1]  # of a query, and of a key and a value
            # a card's output, and five temporaries of the sum's update; or gradients, summed and being sent
            backward = "backward" in origin.target
            own = 2 * query + 2 * pair + 2 * 2 * pair if backward else query + 5 * 2 * query
            op = replace(op, workspace=op.workspace + (CARDS + 1) * pair + own)
        ops.append(op)
    return replace(step, problem=replace(problem, ops=tuple(ops)))


def with_unreduced(step: Step, model: Any) -> Step:
    """The step with gradients as FSDP2 has them: shares in single precision, and whole until they are reduced, those of
    the head until the backward pass ends, those of a block while the next one runs.
    """
    problem = step.problem
    sizes = tuple(2 * n if v in problem.pinned else n for v, n in enumerate(problem.sizes))
    block = sum(p.nbytes for p in model.model.layers[0].parameters())
    step = with_line(
        replace(step, problem=replace(problem, sizes=sizes)), "the head's gradient", model.lm_head.weight.nbytes
    )
    return with_line(step, "gradients of a block that are being reduced", block)


def predicted() -> dict[str, int]:
    """The account at the peak, in bytes; the context and the margin for fragments are no tensors, and left out."""
    model = language_model()
    step = with_unreduced(with_ring(traced(model)), model)
    problem = step.problem
    inputs = inputs_of(problem, blocks_in(step))
    problem = replace(problem, link=Link(1e11, 1e11), movable=frozenset(inputs))
    schedule = every_op_once(problem)
    schedule = replace(schedule, moves=moves_of(problem, schedule, inputs))
    step = replace(step, problem=problem)
    lines = {**step.account, **peak_account(step, replay(problem, schedule))}
    del lines[CONTEXT]
    lines.pop(MARGIN, None)
    return {name: size for name, size in lines.items() if size}


def main() -> None:
    """Print the account, beside what was reported."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_trl", description=__doc__)
    parser.add_argument("--output", type=Path, help="write the account as JSON")
    options = parser.parse_args()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch.set_num_threads(1)
    lines = predicted()
    total = sum(lines.values())
    print("\n".join(f"| {name} | {gb(size)} |" for name, size in lines.items()))
    print(f"| together | {gb(total)}, {total / 2**30 / REPORTED_GB - 1:+.1%} beside {REPORTED_GB} GB |")
    if options.output:
        report = {"torch": torch.__version__, "reported_gb": REPORTED_GB, "account": lines}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
