"""A process of `benchmarks.first_step`: one way to a model's first training step, timed from the process's start."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

STAGES = (  # what `plan()` and a planned step call, where it is looked up, and what it is called here
    ("planner.planning.pipeline", "graph_of", "capture"),
    ("planner.planning.pipeline", "eager_step", "trace of the eager step"),
    ("planner.planning.pipeline", "lower", "lowering"),
    ("planner.planning.pipeline", "estimate", "costs of ops"),
    ("planner.planning.pipeline", "solve_with_margin", "solving"),
    ("planner.planning.pipeline", "write", "writing the plan"),
    ("planner.runtime.regions", "emit_planned", "emitting graphs"),
)


class Stopwatch:
    """Wall and processor seconds by stage; those of a stage inside another one count for the inner one alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._open: list[list[float]] = []  # of the stages that are open, the seconds of those inside them

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a block."""
        begin = now()
        self._open.append([0.0, 0.0])
        try:
            yield
        finally:
            whole = [after - before for after, before in zip(now(), begin, strict=True)]
            inside = self._open.pop()
            spent = self.seconds.setdefault(name, [0.0, 0.0])
            for i, seconds in enumerate(whole):
                spent[i] += seconds - inside[i]
                if self._open:
                    self._open[-1][i] += seconds

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose calls are a stage."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return function(*args, **kwargs)

        return call


def now() -> tuple[float, float]:
    """Wall and processor time, in seconds."""
    return time.perf_counter(), time.process_time()


def _watch(watch: Stopwatch) -> None:
    """Time the stages of planning, and what AOTAutograd takes of the capture and of the first step."""
    for place, name, stage in STAGES:
        module = importlib.import_module(place)
        setattr(module, name, watch.timed(stage, getattr(module, name)))
    dynamo: Any = importlib.import_module("planner.capture.trace.dynamo")
    original = dynamo.aot_autograd
    dynamo.aot_autograd = lambda **options: watch.timed("AOTAutograd", original(**options))


def main(way: str, pickled: str, budget_gb: float, plan_file: str) -> dict[str, list[float]]:
    """Run a model's first step one way; seconds by stage.

    Args:
        way: "eager"; "torch.compile", by its backend "aot_eager"; "at the first step", at a budget; "plan", before it,
            kept in a file; "known plan", from that file.
        pickled: a file with a `tests.real_models.Case`.
        budget_gb: what to plan for.
        plan_file: where the plan is kept.
    """
    watch = Stopwatch()
    with watch.stage("import torch"):
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
    with watch.stage("(the model)"):
        case = torch.load(pickled, weights_only=False)
    model = case.model
    if way == "torch.compile":
        with watch.stage("torch.compile()"):
            model = torch.compile(case.model, backend="aot_eager")
    elif way != "eager":
        with watch.stage("import planner"):
            planner = importlib.import_module("planner")
        with watch.stage("(stopwatch)"):
            _watch(watch)
        with watch.stage("rest of planning"):
            if way == "known plan":
                planner.Plan.load(plan_file, loss_fn=case.loss_fn).apply(model)
            elif way == "at the first step":
                planner.plan(model, budget_gb=budget_gb, progress=False).apply()
            else:
                made = planner.plan(model, case.batch, budget_gb=budget_gb, loss_fn=case.loss_fn, progress=False)
                made.apply()
    with watch.stage("first forward pass"):
        loss = case.loss(model(**case.batch))
    with watch.stage("first backward pass"):
        loss.backward()
    if way == "plan":
        made.save(plan_file)
    return watch.seconds


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), str(Path(sys.argv[4])))))
