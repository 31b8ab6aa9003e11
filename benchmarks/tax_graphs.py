"""Host time and nodes of emitted graphs, with views as they were captured and as they are emitted, beside eager's."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
import transformers as hf

from planner import plan
from planner.codegen import emit
from planner.compat.ops import OpOverload

from .zoo import build
from .zoo.case import Case

ROUNDS = 60  # of steps that are timed, in turns
LAYERS, WIDTH, WORDS = 12, 16, 64


@dataclass(frozen=True)
class Graphs:
    """One model: seconds of eager's step, ratios of planned steps to it, and what the backward graph calls.

    Attributes:
        as_traced, emitted: processor time over eager's.
        nodes_as_traced, nodes: of the backward graphs.
        items: nodes that take an item of a tuple.
        kernels: nodes that are neither those nor views.
    """

    name: str
    eager: float
    as_traced: float
    emitted: float
    nodes_as_traced: int
    nodes: int
    items: int
    kernels: int


def _words() -> dict[str, torch.Tensor]:
    ids = torch.randint(WORDS, (2, 8))
    return {"input_ids": ids, "labels": ids.clone()}


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def gpt2() -> Case:
    """GPT-2 of 12 layers on tensors of 16 rows."""
    config = hf.GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=WIDTH, n_layer=LAYERS, n_head=2)
    return Case(hf.GPT2LMHeadModel(config).train(), _words(), _loss)


def llama() -> Case:
    """The same of Llama."""
    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    return Case(hf.LlamaForCausalLM(config).train(), _words(), _loss)


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "resnet": lambda: build("vision", "resnet"),
    "unet_2d": lambda: build("diffusion", "unet_2d"),
}


@contextlib.contextmanager
def views_as_traced() -> Iterator[None]:
    """Graphs that are emitted meanwhile have the views that were captured."""
    with contextlib.ExitStack() as stack:
        for name in ("compose_views", "keep_views", "stride_views", "fold_products", "copy_views"):
            stack.enter_context(mock.patch.object(emit, name, return_value={}))
        yield


def measure(name: str) -> Graphs:
    """Three copies of a model take steps in turns."""
    cases = {}
    for kind in ("eager", "as traced", "emitted"):
        torch.manual_seed(0)
        cases[kind] = MODELS[name]()
    nodes: dict[str, list[Any]] = {}
    for kind in ("as traced", "emitted"):
        case = cases[kind]
        with (
            warnings.catch_warnings(),
            views_as_traced() if kind == "as traced" else contextlib.nullcontext(),
        ):
            warnings.simplefilter("ignore")
            p = plan(case.model, case.batch, budget_gb=16, loss_fn=case.loss_fn, progress=False)
            graphs = p.graph_modules
            calls = [n for g in graphs for n in g.backward.graph.nodes if n.op == "call_function"]
            nodes[kind] = [n for n in calls if n.target is not torch.ops.aten.alias.default]  # marks, which do not run
            p.apply()
            for _ in range(5):  # the loop is learnt, and what it changes compiled
                _step(case)
    seconds: dict[str, list[float]] = {kind: [] for kind in cases}
    for i in range(ROUNDS):
        for kind in list(cases) if i % 2 else reversed(cases):
            begin = time.process_time()
            _step(cases[kind])
            seconds[kind].append(time.process_time() - begin)
    kernels = [n for n in nodes["emitted"] if isinstance(n.target, OpOverload) and not n.target.is_view]
    items = [n for n in nodes["emitted"] if not isinstance(n.target, OpOverload)]
    views = {torch.ops.aten.reshape.default}  # which may copy, and rarely does
    kernels = [n for n in kernels if n.target not in views]

    def ratio(kind: str) -> float:
        return median(a / b for a, b in zip(seconds[kind], seconds["eager"], strict=True))

    return Graphs(
        name, median(seconds["eager"]), ratio("as traced"), ratio("emitted"), len(nodes["as traced"]),
        len(nodes["emitted"]), len(items), len(kernels),
    )  # fmt: skip


def _step(case: Case) -> None:
    case.loss(case.call(case.model, case.batch)).backward()
    case.model.zero_grad()
