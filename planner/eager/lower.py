"""Lowers a traced step to a `Step` whose ops, each run once, hold exactly the bytes that the trace did.

Every op of the trace is an op of the problem, re-runs of checkpointed modules included, and every storage that the step
allocates is a value. Autograd and variables of Python free many storages later than the last op that uses them: the op
before whose end a storage is not freed reads it, too, and `Step.holds` lists this read. Storages that outlive the step
are pinned. So the peak and the timeline are exact for the step that was traced. They say nothing exact of another
choice of checkpoints, under which autograd and Python free storages at other times: that choice is traced for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from planner.capture.provenance import kind_of
from planner.core.step import OpOrigin, Row, Step
from planner.eager.costs import OpCost
from planner.eager.trace import Trace
from planner.lowering.build import OPTIMIZER, own_row, round_up
from solvers import Op, Problem


def lower(
    trace: Trace,
    costs: Sequence[OpCost],
    account: Mapping[str, int],
    *,
    optimizer_step: int | None,
    granularity: int = 1,
    unseen: int = 0,
) -> Step:
    """Write a trace as a step, without a margin for fragmentation. O(ops + reads).

    Args:
        trace: of one training step; values have names where it says what autograd saves.
        costs: of its ops.
        account: resident lines: name -> bytes.
        optimizer_step: bytes of the temporaries of the optimizer's step; None where no optimizer is counted.
        granularity: the allocator rounds sizes up to multiples of it, in bytes.
        unseen: bytes that autograd saves and no dispatch mode sees; they count from the first op to the last one.
    """
    values = values_of(trace)
    sizes = _storage_sizes(trace, costs, granularity)
    total = len(trace.ops)
    boundary = next((i for i, op in enumerate(trace.ops) if op.phase == "backward"), total)
    reads: list[list[int]] = [
        [values[s] for s in op.reads if s in values and trace.born[s] < i] for i, op in enumerate(trace.ops)
    ]
    writes = [[values[s] for s in op.writes] for op in trace.ops]
    saved, holds = _saved_storages(trace), set[tuple[int, int]]()
    for s, v in values.items():
        last = max(min(trace.died[s], total) - 1, trace.born[s])
        if last > trace.born[s] and v not in reads[last] and (trace.died[s] <= total or s in saved):
            reads[last].append(v)
            holds.add((last, v))
    if unseen:
        unnamed = len(values)
        writes[0].append(unnamed)
        if total > 1:
            reads[-1].append(unnamed)
        holds |= {(0, unnamed), (total - 1, unnamed)}
    rows = [_row(trace, i, costs[i], reads[i], writes[i]) for i in range(total)]
    if optimizer_step is not None:
        rows.append(own_row(OPTIMIZER, "optimizer step", "optimizer", workspace=optimizer_step))
    ops, origins = zip(*rows, strict=True)
    names = _op_names(trace)
    lasting = [s for s in values if trace.died[s] > total]
    made_backward = (s for s in lasting if (op := trace.ops[trace.born[s]]).phase == "backward" and not op.again)
    return Step(
        problem=Problem(
            ops,
            (*(sizes[s] for s in values), *([unseen] if unseen else [])),
            boundary,
            frozenset(values[s] for s in lasting),
            sum(account.values()),
        ),
        account=account,
        origins=origins,
        names=(*(names[trace.born[s]] if s in saved else "" for s in values), *([""] if unseen else [])),
        gradients=frozenset(values[s] for s in made_backward),
        optimizer_step=optimizer_step,
        holds=frozenset(holds),
    )


def values_of(trace: Trace) -> dict[int, int]:
    """The number of each storage that the step allocates -> the number of its value in the problem."""
    return {s: v for v, s in enumerate(s for s, born in enumerate(trace.born) if born >= 0)}


def _storage_sizes(trace: Trace, costs: Sequence[OpCost], granularity: int = 1) -> list[int]:
    """Bytes of each storage, as the allocator rounds them."""
    sizes = list(trace.sizes)
    for op, cost in zip(trace.ops, costs, strict=True):
        if op.writes:
            sizes[op.writes[0]] += cost.excess
    return [round_up(size, granularity) for size in sizes]


def _saved_storages(trace: Trace) -> frozenset[int]:
    """Storages that the forward pass makes and autograd saves."""
    return frozenset(
        saved.storage
        for saved in trace.saved
        if trace.born[saved.storage] >= 0 and trace.ops[trace.born[saved.storage]].phase == "forward"
    )


def unseen_bytes(checkpoints: int, trace: Trace) -> int:
    """Bytes that no dispatch mode sees: states of random generators, and numbers that are saved as tensors."""
    saved = [op.distinct.args for op in trace.ops if op.distinct and op.phase != "backward" and ".Tensor" in op.target]
    numbers = sum(isinstance(x, (int, float)) for args in saved for x in args)
    return torch.get_rng_state().nbytes * checkpoints + 8 * numbers


def _row(trace: Trace, i: int, cost: OpCost, reads: Sequence[int], writes: Sequence[int]) -> Row:
    op = trace.ops[i]
    once = bool(cost.keep_because) or op.phase == "backward"
    return (
        Op(op.target, tuple(dict.fromkeys(reads)), tuple(writes), cost.seconds, cost.workspace, not once),
        OpOrigin(
            kind_of(op.target),
            op.phase,
            op.module,
            op.source,
            keep_because=cost.keep_because,
            random=cost.random,
            again=op.again,
            target=op.target,
        ),
    )


def _op_names(trace: Trace) -> list[str]:
    """For each op, its name: that of what it runs, and a number from the second one on."""
    counted: Counter[str] = Counter()
    names = []
    for op in trace.ops:
        short = op.target.removeprefix("aten.").split(".")[0]
        names.append(f"{short}_{counted[short]}" if counted[short] else short)
        counted[short] += 1
    return names
