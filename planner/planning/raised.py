"""Figures of a plan whose loop is seen, once steps run by it, to take more between its steps than it counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType

from planner.core.plan import BaselineMoment, Moment, PlanRecord
from planner.lowering.between import BETWEEN, other_bytes, row_at
from planner.planning.decisions import ACTIVATIONS, AT_PEAK, GRADIENTS


def with_between(record: PlanRecord, nbytes: int) -> PlanRecord:
    """The plan with an op at the end of the step at which all tensors take so many bytes; as it is if it takes more.

    See `add_between`, which puts that op into steps that are still to be planned. O(steps).
    """
    lines = dict(takewhile(lambda line: line[0] != ACTIVATIONS, record.account.items()))
    peak = nbytes + other_bytes(lines)
    if peak <= record.peak_bytes:
        return record
    before = record.timeline[:-1] if record.timeline[-1].op == BETWEEN else record.timeline
    held = before[-1].held._replace(kept=0, passing=0, recomputed=0, backward=0, waiting=0, workspace=0)
    held = held._replace(workspace=peak - sum(held))
    gradients = peak - held.workspace - record.resident_bytes
    at_peak = {ACTIVATIONS: 0, GRADIENTS: gradients, AT_PEAK.format(BETWEEN): held.workspace}
    moment = BaselineMoment(BETWEEN, "optimizer", peak, 0.0, "", "", nbytes=0, runs=1, action=None, reads=())
    problem, schedule, number = record.problem, record.schedule, len(before)
    if problem is not None and schedule is not None:
        op, _ = row_at(problem, peak)
        ops = problem.ops[: -1 if problem.ops[-1].name == BETWEEN else None]
        problem = replace(problem, ops=(*ops, op))
        schedule = replace(schedule, steps=(*schedule.steps[:number], len(ops)))
    return replace(
        record,
        peak_bytes=peak,
        baseline_peak_bytes=max(peak, record.baseline_peak_bytes),
        eager_peak_bytes=record.eager_peak_bytes and max(peak, record.eager_peak_bytes),
        timeline=(*before, Moment(BETWEEN, "optimizer", False, held)),
        baseline_timeline=(*(m for m in record.baseline_timeline if m.op != BETWEEN), moment),
        account=MappingProxyType({**lines, **at_peak}),
        problem=problem,
        schedule=schedule,
        step=replace(record.step, loop=replace(record.step.loop, between_steps=nbytes)),
    )
