"""Plans from plans: for other budgets from the same capture, and with other data, as no planner makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner import InfeasibleBudgetError, Plan
from planner.planning.pipeline import make_plan


def changed(p: Plan, **fields: Any) -> Plan:
    """The same plan with some fields of its record replaced."""
    return Plan(replace(p.source, record=replace(p.record, **fields)))


def for_budget(p: Plan, budget_gb: float, **options: Any) -> Plan:
    """The plan for another budget, and other options that do not change the captured step, from the capture of a plan.

    Captures are most of what a plan takes, and equal for every budget.
    """
    asked = p.source.request
    request = replace(asked, budget_gb=budget_gb, options=replace(asked.options, budget_gb=budget_gb, **options))
    return Plan(make_plan(request, captured=p.source.captured))


def leanest(p: Plan, **options: Any) -> Plan:
    """The plan for the smallest budget that there is, from the capture of a plan; other options may change."""
    try:
        return for_budget(p, 1e-4, **options)
    except InfeasibleBudgetError as e:
        return for_budget(p, e.minimum_bytes / 2**30, **options)
