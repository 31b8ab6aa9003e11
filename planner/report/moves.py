"""What leaves the device in a plan, in words and over the step."""

from __future__ import annotations

from planner.core.plan import PlanRecord
from planner.errors import gb
from planner.report.words import duration
from solvers import simulate

PLACES = {"cpu": "host memory", "disk": "the disk"}


def in_words(plan: PlanRecord) -> str:
    """How much leaves, how long the step waits for it, and how busy the link is; empty where nothing leaves."""
    leaving = [d for d in plan.decisions if d.action == "offload"]
    if not (leaving and plan.step_seconds) or plan.problem is None or plan.schedule is None:
        return ""
    copies = simulate(plan.problem, plan.schedule).copies
    busy = {kind: sum(c.end - c.begin for c in copies if c.kind == kind) for kind in ("send", "fetch")}
    out, back = (f"{100 * busy[kind] / plan.step_seconds:.0f} %" for kind in ("send", "fetch"))
    waits = f"waits {duration(plan.stall_seconds)} for them" if plan.stall_seconds else "waits for none of them"
    return (
        f"{len(leaving)} are offloaded to {PLACES.get(plan.options.offload or '', 'elsewhere')} "
        f"({gb(sum(d.nbytes for d in leaving))}; {gb(plan.host_peak_bytes)} of room there): {gb(plan.moved_bytes)} are "
        f"moved in a step, which {waits}; the link is busy {out} of it one way, {back} the other."
    )


def away(plan: PlanRecord) -> list[int]:
    """For each moment of the timeline, the bytes of activations that are away from the device."""
    changes = [0] * (len(plan.timeline) + 1)
    for d in plan.decisions:
        if d.leaves is not None and d.returns is not None:
            changes[d.leaves] += d.nbytes
            changes[d.returns] -= d.nbytes
    total, found = 0, []
    for change in changes[:-1]:
        total += change
        found.append(total)
    return found
