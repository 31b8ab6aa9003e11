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
    PlanFileError,
    PlannerError,
    PlanWarning,
    RankError,
    VerificationError,
)
from .max_batch import MaxBatch, max_batch
from .pareto import pareto
from .plan import Plan
from .report.compare import Comparison, compare
from .report.explain import Explanation

__all__ = [
    "ApplyError",
    "BatchError",
    "BudgetError",
    "CaptureError",
    "Comparison",
    "Explanation",
    "InfeasibleBudgetError",
    "MaxBatch",
    "ModelError",
    "OptionError",
    "Plan",
    "PlanFileError",
    "PlanWarning",
    "PlannerError",
    "RankError",
    "VerificationError",
    "applied_plan",
    "compare",
    "max_batch",
    "pareto",
    "plan",
]
