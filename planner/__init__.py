"""Automatic checkpoint placement for PyTorch: say how much memory there is, train within it.

>>> from planner import plan
"""

try:
    from planner.api.compare import compare
    from planner.api.front import applied_plan, applied_plans, plan
    from planner.api.max_batch import MaxBatch, max_batch
    from planner.api.pareto import pareto
    from planner.api.plan import Plan
    from planner.errors import (
        ApplyError,
        BatchError,
        BudgetError,
        CaptureError,
        DeviceError,
        InfeasibleBudgetError,
        ModelError,
        OffloadError,
        OptionError,
        PlanFileError,
        PlannerError,
        PlanWarning,
        RankError,
        TorchError,
        VerificationError,
    )
    from planner.report.comparison import Comparison
    from planner.report.explanation import Explanation
except ImportError as e:
    from planner.compat.versions import missing_in_words
    from planner.errors import TorchError

    if isinstance(e, TorchError) or not (e.name or "").startswith("torch."):
        raise
    raise TorchError(missing_in_words(str(e))) from e

__all__ = [
    "ApplyError",
    "BatchError",
    "BudgetError",
    "CaptureError",
    "Comparison",
    "DeviceError",
    "Explanation",
    "InfeasibleBudgetError",
    "MaxBatch",
    "ModelError",
    "OffloadError",
    "OptionError",
    "Plan",
    "PlanFileError",
    "PlanWarning",
    "PlannerError",
    "RankError",
    "TorchError",
    "VerificationError",
    "applied_plan",
    "applied_plans",
    "compare",
    "max_batch",
    "pareto",
    "plan",
]
