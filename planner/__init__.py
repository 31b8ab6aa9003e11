"""Automatic checkpoint placement for PyTorch: say how much memory there is, train within it.

>>> from planner import plan
"""

from .api import applied_plan, plan
from .errors import (
    ApplyError,
    BatchError,
    BudgetError,
    CaptureError,
    InfeasibleBudgetError,
    ModelError,
    OptionError,
    PlannerError,
    PlanWarning,
    VerificationError,
)
from .pareto import pareto
from .plan import Plan

__all__ = [
    "ApplyError",
    "BatchError",
    "BudgetError",
    "CaptureError",
    "InfeasibleBudgetError",
    "ModelError",
    "OptionError",
    "Plan",
    "PlanWarning",
    "PlannerError",
    "VerificationError",
    "applied_plan",
    "pareto",
    "plan",
]
