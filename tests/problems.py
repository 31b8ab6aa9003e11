"""Hypothesis strategies and deterministic builders for problems."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from solvers.problem import Op, Problem

HARDLY = 5e5  # steps of a search by `hardly_search`
Changes = Mapping[str, Mapping[str, float]]  # module -> name -> value


@st.composite
def small_problems(draw: st.DrawFn, most_ops: int = 8, most_values: int = 10) -> Problem:
    """A random small problem with everything a problem can have; its budget lies around what it needs.

    Multi-output ops, ops without outputs, pinned values, workspaces, resident bytes, ops that run once, two regions,
    sizes and costs of zero.
    """
    n = draw(st.integers(1, most_ops))
    two_regions = draw(st.integers(0, 3)) == 0
    switch = draw(st.integers(0, n)) if two_regions else n
    ops: list[Op] = []
    sizes: list[int] = []
    pinned: set[int] = set()
    for i in range(n):
        reads: list[int] = []
        if sizes:
            recent = st.integers(max(0, len(sizes) - 3), len(sizes) - 1)
            anywhere = st.integers(0, len(sizes) - 1)
            reads = draw(st.lists(st.one_of(recent, anywhere), max_size=3, unique=True))
        outputs = draw(st.sampled_from((1, 1, 1, 1, 2, 0))) if len(sizes) < most_values - 1 else 1
        if len(sizes) >= most_values:
            outputs = 0
        writes = tuple(range(len(sizes), len(sizes) + outputs))
        for v in writes:
            sizes.append(draw(st.integers(0, 9)))
            if draw(st.integers(0, 9)) == 0:
                pinned.add(v)
        ops.append(
            Op(
                f"op{i}",
                tuple(reads),
                writes,
                float(draw(st.integers(0, 8))),
                draw(st.sampled_from((0, 0, 0, 1, 4))),
                draw(st.integers(0, 7)) != 0,
                int(i >= switch),
            )
        )
    resident = draw(st.sampled_from((0, 0, 3)))
    problem = Problem(tuple(ops), tuple(sizes), draw(st.integers(0, n)), frozenset(pinned), resident)
    most = resident + sum(sizes) + max(op.workspace for op in ops)
    return problem.with_budget(draw(st.integers(resident, most)))


@st.composite
def reused_problems(draw: st.DrawFn, most_ops: int = 8) -> Problem:
    """A random problem in which late ops read early values, so that tight budgets force long recomputation."""
    n = draw(st.integers(5, most_ops))
    sizes = [draw(st.integers(1, 6)) for _ in range(n)]
    ops = []
    for i in range(n):
        reads = draw(st.lists(st.integers(0, i - 1), min_size=1, max_size=2, unique=True)) if i else []
        ops.append(Op(f"op{i}", tuple(reads), (i,), float(draw(st.integers(1, 4)))))
    problem = Problem(tuple(ops), tuple(sizes), draw(st.integers(1, n)))
    tight = max(sum(sizes[v] for v in (*op.reads, *op.writes)) for op in ops)
    return problem.with_budget(tight + draw(st.integers(0, 4)))


def random_training_graph(seed: int, forward: int, skips: bool = True) -> Problem:
    """A chain (with skips: a DAG) of `forward` ops, its backward pass, and a pinned gradient for each third op."""
    rng = random.Random(seed)
    ops: list[Op] = []
    sizes: list[int] = []
    pinned: list[int] = []
    out: list[int] = []

    def add(name: str, reads: list[int], bytes_written: list[int], cost: float, **more: Any) -> list[int]:
        writes = list(range(len(sizes), len(sizes) + len(bytes_written)))
        sizes.extend(bytes_written)
        ops.append(Op(name, tuple(dict.fromkeys(reads)), tuple(writes), cost, **more))
        return writes

    sources: list[list[int]] = []
    for i in range(forward):
        reads = [out[-1]] if out else []
        if skips and len(out) > 3 and rng.random() < 0.25:
            reads.append(out[rng.randrange(len(out) - 1)])
        sources.append(reads)
        cost = rng.uniform(0.5, 5.0)
        out.append(add(f"f{i}", reads, [rng.randrange(1, 64) * 512], cost, recomputable=rng.random() > 0.05)[0])
    gradient = add("loss", [out[-1]], [512], 0.1)[0]
    boundary = len(ops)
    for i in reversed(range(forward)):
        written = [sizes[out[i]]] + ([rng.randrange(1, 8) * 512] if i % 3 == 0 else [])
        workspace = rng.choice((0, 0, 2048))
        made = add(f"b{i}", [gradient, out[i], *sources[i]], written, rng.uniform(1.0, 8.0), workspace=workspace)
        gradient = made[0]
        pinned.extend(made[1:])
    return Problem(tuple(ops), tuple(sizes), boundary, frozenset(pinned), resident=4096)


def in_regions(problem: Problem) -> Problem:
    """The problem with the ops of its middle, forward and backward, in a region of their own."""
    inner = range(problem.boundary // 2, problem.boundary + (len(problem.ops) - problem.boundary) // 2)
    return replace(problem, ops=tuple(replace(op, region=int(i in inner)) for i, op in enumerate(problem.ops)))


def with_side_outputs(problem: Problem) -> Problem:
    """The problem with a second output of every second op, as large as the first; every fourth op's is pinned."""
    first = len(problem.sizes)
    more = range(0, len(problem.ops), 2)
    sizes = tuple(sum(problem.sizes[v] for v in problem.ops[i].writes) for i in more)
    ops = list(problem.ops)
    for n, i in enumerate(more):
        ops[i] = replace(ops[i], writes=(*ops[i].writes, first + n))
    pinned = problem.pinned | frozenset(range(first, first + len(sizes), 2))
    return replace(problem, ops=tuple(ops), sizes=problem.sizes + sizes, pinned=pinned)


def transformer(layers: int) -> Problem:
    """A transformer-like chain, 14 forward and 16 backward ops a layer: small checkpoints, large inner activations."""
    ops: list[Op] = []
    sizes: list[int] = []
    pinned: list[int] = []
    unit = 1 << 20
    # name, bytes in units, cost, which earlier values of the layer it reads (0 is the layer's input)
    inner: tuple[tuple[str, int, float, tuple[int, ...]], ...] = (
        ("norm", 4, 1.0, (0,)),
        ("q", 4, 6.0, (1,)),
        ("k", 4, 6.0, (1,)),
        ("v", 4, 6.0, (1,)),
        ("scores", 16, 5.0, (2, 3)),
        ("softmax", 16, 2.0, (5,)),
        ("context", 4, 5.0, (6, 4)),
        ("project", 4, 6.0, (7,)),
        ("add", 4, 0.5, (0, 8)),
        ("norm2", 4, 1.0, (9,)),
        ("up", 16, 24.0, (10,)),
        ("gelu", 16, 1.5, (11,)),
        ("down", 4, 24.0, (12,)),
        ("add2", 4, 0.5, (9, 13)),
    )

    def add(name: str, reads: list[int], bytes_written: int, cost: float) -> int:
        sizes.append(bytes_written)
        ops.append(Op(name, tuple(dict.fromkeys(reads)), (len(sizes) - 1,), cost))
        return len(sizes) - 1

    stream = add("embed", [], 4 * unit, 1.0)
    layer_values: list[list[int]] = []
    for layer in range(layers):
        made = [stream]
        for name, size, cost, reads in inner:
            made.append(add(f"{name}.{layer}", [made[r] for r in reads], size * unit, cost))
        layer_values.append(made)
        stream = made[-1]
    gradient = add("loss", [stream], 512, 1.0)
    boundary = len(ops)
    for layer in reversed(range(layers)):
        made = layer_values[layer]
        for at in reversed(range(len(inner))):
            name, _, cost, reads = inner[at]
            inputs = [made[r] for r in reads]
            gradient = add(f"{name}.{layer}.grad", [gradient, *inputs], sizes[inputs[0]], 2 * cost)
            if name in ("up", "down"):
                pinned.append(add(f"{name}.{layer}.weight", [gradient, made[reads[0]]], unit, cost))
    return Problem(tuple(ops), tuple(sizes), boundary, frozenset(pinned))


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every search a small part of its work: by count, so that it stays repeatable."""
    _change(monkeypatch, _of(2e6))


def hardly_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every search a few steps, a few relaxations and no integer programs: it finds any schedule that fits.

    In processes that the test starts, too.
    """
    few = {"WORK": 1e4, "NODES": 0}
    changes = {**_of(HARDLY), "solvers.bounds.cost": few, "solvers.search.lp_starts": few}
    _change(monkeypatch, changes)
    monkeypatch.setenv("SHORT_SEARCHES", json.dumps(changes))
    monkeypatch.setenv("PYTHONPATH", in_python_path(Path(__file__).parent / "in_processes"))


def in_python_path(folder: Path) -> str:
    """PYTHONPATH with this folder before others."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _of(steps: float) -> Changes:
    """So many steps, with a time limit, too: as many for 2 s of it, as is usual."""
    return {"solvers.search.effort": {"STEPS": steps, "STEPS_PER_OP": 0.0, "RATE": steps / 2}}


def _change(monkeypatch: pytest.MonkeyPatch, changes: Changes) -> None:
    for module, values in changes.items():
        for name, value in values.items():
            monkeypatch.setattr(f"{module}.{name}", value)
