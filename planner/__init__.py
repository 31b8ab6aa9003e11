"""Automatic checkpoint placement for PyTorch: say how much memory there is, train within it.

>>> from planner import plan
"""

from .api import plan
from .errors import (
    ApplyError,
    BatchError,
    BudgetError,
    CaptureError,
    InfeasibleBudgetError,
    ModelError,
    OptionError,
    PlannerError,
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
    "PlannerError",
    "pareto",
    "plan",
]
