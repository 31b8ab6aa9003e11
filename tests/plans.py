"""Plans with other data, as no planner makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner import Plan


def changed(p: Plan, **fields: Any) -> Plan:
    """The same plan with some fields of its record replaced."""
    return Plan(replace(p.source, record=replace(p.record, **fields)))
