"""Other ways to save memory, and this project's solvers at the peaks they reach, on real models: tables, JSON, a plot.

Each alternative has a process of its own, beside an eager copy of the model from the same seed. Peaks, FLOPs, times and
gradients are measured by `benchmarks.measure`. "Roofline" is the estimated time of what runs again over that of the
step, both by the planner's costs of its captured ops: for plans `plan.overhead`; for checkpointed blocks every forward
op of theirs, once (their FLOPs add up to what is measured); for torch.compile the forward ops that stand in its
backward graph.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from tqdm import tqdm

from planner import InfeasibleBudgetError, plan
from planner.capture.trace.step import capture
from planner.codegen.emit import keep_everything
from planner.costs.ops import node_flops
from planner.planning.pipeline import lower
from planner.requests.check import check
from tests.real_models import CASES, Case, tokens

from . import measure
from .blocks import NotApplicableError, checkpoint_blocks, checkpoint_groups
from .peers_report import draw, summary, table

Row = dict[str, Any]
Spent = Callable[[], Row]  # called after a step
SETTINGS = tuple(i / 10 for i in range(11))
SAME = 1.005  # peaks this close are planned for once, at the lower one


def t5() -> Case:
    """An encoder and a decoder of 4 layers, dropout 0.1."""
    config = transformers.T5Config(  # type: ignore[call-arg]
        vocab_size=500, d_model=128, d_kv=32, d_ff=512, num_layers=4, num_decoder_layers=4, num_heads=4,
        dropout_rate=0.1, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return Case(transformers.T5ForConditionalGeneration(config).train(), tokens(500, 4, 128))


def vit() -> Case:
    """A vision transformer of 4 layers, 145 patches."""
    config = transformers.ViTConfig(  # type: ignore[call-arg]
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, image_size=96,
        patch_size=8, num_labels=10,
    )  # fmt: skip
    pixels = torch.randn(4, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    model = transformers.ViTForImageClassification(config).train()
    return Case(model, {"pixel_values": pixels, "labels": torch.arange(4) % 10})


def qwen3() -> Case:
    """4 layers with normalised queries and keys, grouped-query attention."""
    config = transformers.Qwen3Config(
        num_hidden_layers=4, hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=500, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return Case(transformers.Qwen3ForCausalLM(config).train(), tokens(500, 4, 128))


MODELS: dict[str, Callable[[], Case]] = {**CASES, "t5": t5, "vit": vit, "qwen3": qwen3}


def make(name: str) -> Case:
    """A model of `MODELS`, always with the same weights."""
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    return MODELS[name]()


def forward_costs(name: str) -> Row:
    """Of the captured step: its seconds and FLOPs, and (op, module, seconds, FLOPs) of every forward op."""
    case = make(name)
    request = check(case.model, case.batch, None, budget_gb="100%", loss_fn=case.loss_fn, progress=False)
    graph = capture(case.model, request.args or (), request.kwargs, keep_everything, case.loss_fn)
    step = lower(request, graph)
    ops = []
    for op, origin in zip(step.problem.ops, step.origins, strict=True):
        source = None if origin.region is None else graph.regions[origin.region].ops[origin.index]
        counted = node_flops(source.node) if source is not None and source.kind == "call" else 0
        ops.append((op.name, origin.module, op.cost, counted))
    total = step.problem.total_cost, sum(op[3] for op in ops)
    return {"seconds": total[0], "flops": total[1], "forward": ops[: step.problem.boundary]}


def _rerun(costs: Row, runs: Callable[[str, str], bool]) -> Row:
    """What running the forward ops that are chosen by name and module once more takes, as shares of the step."""
    again = [op for op in costs["forward"] if runs(op[0], op[1])]
    return {
        "roofline": sum(op[2] for op in again) / costs["seconds"],
        "graph_flops": sum(op[3] for op in again) / costs["flops"],
    }


def _within(blocks: Sequence[str]) -> Callable[[str, str], bool]:
    return lambda _, module: any(module == b or module.startswith(f"{b}.") for b in blocks)


def put_torch(model: nn.Module, setting: float, costs: Row) -> Spent:
    """torch.compile's budget with the `aot_eager` backend: without Inductor, so that only recomputation differs."""
    import torch._functorch.config as config

    config.activation_memory_budget = setting
    backward: set[str] = set()

    def compile_backward(graph: fx.GraphModule, inputs: Any) -> Any:
        backward.update(n.name for n in graph.graph.nodes if n.op == "call_function")
        return boxed_nop(graph, inputs)

    model.compile(
        backend=aot_autograd(
            fw_compiler=boxed_nop,
            bw_compiler=compile_backward,
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
    )
    return lambda: _rerun(costs, lambda name, _: name in backward)


def put_plan(case: Case, solver: str, budget: int, limit: float | None) -> Spent:
    """A plan for a budget in bytes, resident ones included; 0 for the lowest that is feasible."""
    start = time.perf_counter()
    make_plan = partial(plan, case.model, case.batch, loss_fn=case.loss_fn, solver=solver, time_limit=limit)
    try:
        p = make_plan(budget_gb=max(budget, 1) / 2**30, progress=False)
    except InfeasibleBudgetError as e:
        if budget:
            raise NotApplicableError(f"infeasible: the least is {e.minimum_gb * 1024:.2f} MB") from None
        p = make_plan(budget_gb=e.minimum_gb, progress=False)
    seconds = time.perf_counter() - start
    p.apply()
    found = {"budget": p.budget_bytes, "planned_peak": p.peak_bytes, "planning_seconds": seconds}
    return lambda: {**found, "roofline": p.overhead, "gap": p.gap, "note": p.note}


def put(case: Case, way: str, costs: Row, limit: float) -> Spent:
    """Put an alternative, as "kind" or "kind number", on a model."""
    kind, _, number = way.partition(" ")
    if kind == "eager":
        return lambda: {"roofline": 0.0}
    if kind == "torch":
        return put_torch(case.model, float(number), costs)
    if kind == "block":
        blocks = checkpoint_blocks(case.model)
        return lambda: _rerun(costs, _within(blocks))
    if kind == "groups":
        other = copy.deepcopy(case.model)
        blocks = checkpoint_blocks(other)
        other(**case.batch)  # which blocks there are is known then
        again = checkpoint_groups(case.model, blocks, lambda: case.model(**case.batch))
        return lambda: _rerun(costs, _within(again))
    return put_plan(case, kind, int(number), limit if kind == "ilp" else None)


def measure_way(name: str, way: str, costs: Row, pairs: int, limit: float) -> Row:
    """One alternative on one model; where it cannot be, a row that says why."""
    case = make(name)
    plain = copy.deepcopy(case.model)

    def step(model: nn.Module) -> None:
        output = model(**case.batch)  # held to the end of the step
        case.loss(output).backward()  # type: ignore[no-untyped-call]

    try:
        spent = put(case, way, costs, limit)
    except NotApplicableError as e:
        return {"why_not": str(e)}
    # seconds of this process, on one thread: other processes' load does not count
    ratio = measure.time_ratio(step, case.model, plain, pairs, time.process_time)
    peak, resident = measure.step_peak(step, case.model), measure.held_bytes(case.model, case.batch)
    return {
        "step_peak": peak,
        "total_peak": resident + peak,
        "flops": measure.flops(step, case.model) / measure.flops(step, plain) - 1,
        "time": ratio - 1,
        "gradient_error": measure.gradient_error(step, case.model, plain),
        **spent(),
    }


def compare(name: str, settings: Sequence[float], pairs: int, limit: float, bar: Any) -> list[Row]:
    """Every alternative on one model."""
    rows: list[Row] = []
    costs = measure.in_own_process(forward_costs, name)

    def add(label: str, way: str) -> Row:
        bar.set_postfix_str(f"{name}: {label}")
        kind = way.partition(" ")[0]
        try:
            found = measure.in_own_process(measure_way, name, way, costs, pairs, limit)
        except RuntimeError as e:
            found = {"why_not": str(e)[:200]}
        rows.append({"name": label, "kind": kind, "way": way, **found})
        return rows[-1]

    add("eager", "eager")
    block = add("every block", "block")
    if "why_not" in block:
        raise RuntimeError(f"{name}: every block: {block['why_not']}")
    add("checkpoint_sequential", "groups")
    resident = block["total_peak"] - block["step_peak"]
    torchs = [add(f"torch {s:g}", f"torch {s}") for s in settings]
    at = block["total_peak"]
    add("chen at block's peak", f"chen {at}")
    if limit:
        add("ilp at block's peak", f"ilp {at}")
    add("auto at block's peak", f"auto {at}")
    add("auto at 1.25x", f"auto {resident + block['step_peak'] * 5 // 4}")
    add("auto, lowest", "auto 0")
    free: Row | None = None
    last: Row | None = None
    for other in sorted((r for r in torchs if "total_peak" in r), key=lambda r: r["total_peak"]):
        if free is None and (last is None or other["total_peak"] > last["at"] * SAME):
            last = add(f"auto at {other['name']}'s peak", f"auto {other['total_peak']}") | {"at": other["total_peak"]}
            if last.get("roofline") == 0.0:  # nothing is recomputed, and more room changes nothing
                free = last
        other["auto"] = (last or {}).get("name")
    return rows


def main() -> None:
    """Compare, and print a Markdown table for each model and a summary."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--models", nargs="*", metavar="NAME", choices=MODELS, help=f"of {', '.join(MODELS)}")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--plot", type=Path, help="write the plot as SVG")
    parser.add_argument("--fast", action="store_true", help="the tests' models, no torch.compile, no ilp, fewer steps")
    parser.add_argument("--settings", nargs="*", type=float, default=SETTINGS, help="of torch.compile's budget")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of steps that are timed")
    parser.add_argument("--ilp-seconds", type=float, default=60.0, help="ilp's time limit; 0 leaves it out")
    options = parser.parse_args()
    names = options.models or list(CASES if options.fast else MODELS)
    settings = () if options.fast else options.settings
    pairs, limit = (2, 0.0) if options.fast else (options.pairs, options.ilp_seconds)
    models: dict[str, list[Row]] = {}
    start = time.perf_counter()
    with tqdm(names, unit="model") as bar:
        for name in bar:
            models[name] = compare(name, settings, pairs, limit, bar)
            if options.output:  # after every model: a run that is stopped keeps what it has
                _write(options.output, models, pairs, time.perf_counter() - start)
    for name, rows in models.items():
        print(f"\n### {name}\n\n{table(rows)}")
    print(f"\n### Summary\n\n{summary(models)}")
    if options.plot:
        options.plot.write_text(draw(models))


def _write(path: Path, models: Mapping[str, Sequence[Row]], pairs: int, seconds: float) -> None:
    device = f"CPU, 1 thread, {platform.machine()}"
    report = {"device": device, "torch": torch.__version__, "pairs": pairs, "seconds": seconds, "models": models}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
