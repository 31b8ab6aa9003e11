"""What leaves the device in a plan, in words and over the step."""

from __future__ import annotations

from itertools import accumulate

from planner.core.plan import PlanRecord
from planner.errors import gb
from planner.report.words import duration
from solvers import simulate

PLACES = {"cpu": "host memory", "disk": "the disk"}


def in_words(plan: PlanRecord) -> str:
    """How much leaves, how long the step waits for it, and how busy the link is; empty where nothing leaves."""
    if plan.problem is None or plan.schedule is None or not (plan.schedule.moves and plan.step_seconds):
        return ""
    leaving = sum(d.action == "offload" for d in plan.decisions)
    values = {move.value for move in plan.schedule.moves}
    beside = f"{len(values) - leaving} gradients of activations or temporaries" if len(values) > leaving else ""
    copies = simulate(plan.problem, plan.schedule).copies
    busy = {kind: sum(c.end - c.begin for c in copies if c.kind == kind) for kind in ("send", "fetch")}
    out, back = (f"{100 * busy[kind] / plan.step_seconds:.0f} %" for kind in ("send", "fetch"))
    waits = f"waits {duration(plan.stall_seconds)} for them" if plan.stall_seconds else "waits for none of them"
    return (
        f"{leaving}{' and ' * bool(beside)}{beside} are offloaded to "
        f"{PLACES.get(plan.options.offload or '', 'elsewhere')} ({gb(sum(plan.problem.sizes[v] for v in values))}; "
        f"{gb(plan.host_peak_bytes)} of room there): {gb(plan.moved_bytes)} are "
        f"moved in a step, which {waits}; the link is busy {out} of it one way, {back} the other."
    )


def away(plan: PlanRecord) -> list[int]:
    """For each moment of the timeline, the bytes of values that are away from the device."""
    changes = [0] * len(plan.timeline)
    if plan.problem is not None and plan.schedule is not None:
        for move in plan.schedule.moves:
            size = plan.problem.sizes[move.value]
            changes[move.at] += {"send": 0, "free": size, "fetch": -size}[move.kind]
    return list(accumulate(changes))
