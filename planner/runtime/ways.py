"""The plans of calls that their signature does not tell apart: those go different ways through the model's code."""

from __future__ import annotations

from collections.abc import Collection

from planner.core.plan import PlanRecord
from planner.errors import warn
from planner.runtime.families import recipe_of
from planner.runtime.signature import Signature, has_strings

WARN_PLANS = 3  # for calls that differ in numbers alone, or in what they are compiled to
STRINGS = "strings in its batch"
WARN_WAYS, MOST_WAYS = 2, 32  # when to warn, and how many plans to keep
FEW_WAYS = 3  # how many to keep of those that nothing in a call tells apart


def has_ways(signature: Signature, plan: PlanRecord) -> bool:
    """Whether calls with this signature may have other graphs than those of a plan for it."""
    return bool(recipe_of(plan).asks) or has_strings(signature)


class Ways:
    """The plans of the ways that calls took.

    Args:
        model: the name of its class, for warnings.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._plans: dict[Signature, list[PlanRecord]] = {}  # of all ways that a kind of call took, the latest first
        self._came: dict[object, list[object]] = {}  # of a kind of call, the first ways in which it was planned

    def __contains__(self, signature: Signature) -> bool:
        return signature in self._plans

    def keep(self, signatures: Collection[Signature]) -> None:
        """Forget the plans of other kinds of calls."""
        self._plans = {signature: plans for signature, plans in self._plans.items() if signature in signatures}

    def comes(self, kind: object, way: object, why: str) -> None:
        """A call of a kind came in such a way, and was planned: warn where new ones do not end."""
        came = self._came.setdefault(kind, [])
        if way not in came and len(came) < WARN_PLANS:
            came.append(way)
            if len(came) == WARN_PLANS:
                warn(
                    f"this {self._model} {why} for the {WARN_PLANS}rd time: each time it is planned and "
                    "compiled anew. Give it a tensor, as torch.tensor(0.5), for a number that changes from step to step"
                )

    def others(self, signature: Signature, tried: PlanRecord) -> list[PlanRecord] | None:
        """The plans of other ways that such a call has taken; the one that was tried becomes the latest of all.

        A few are remembered where values do not tell: what a model keeps may come back, as a BatchNorm's momentum.
        Returns None where these were too many, so that what was compiled for them is of no use any more.
        """
        told, recipe = has_ways(signature, tried), recipe_of(tried)
        if recipe.maxima is not None or (len(recipe.calls) > 1 and not told):
            return []
        others = self._without(signature, tried)
        if len(others) == (MOST_WAYS if told else FEW_WAYS):
            self._plans[signature] = [tried]
            return None
        self._plans[signature] = [tried, *others]
        if told and len(others) == WARN_WAYS:
            warn(
                f"the model took {WARN_WAYS + 1} ways through its code, by values that each step has anew "
                f"({'; '.join(recipe.asks or [STRINGS])}): each is planned and compiled for itself, and a "
                "step that goes a new one may take more than the budget. Where they do not end, take the question out "
                "of forward(), or plan a submodule without it"
            )
        return others

    def beginning(self, signature: Signature, latest: PlanRecord, key: str) -> PlanRecord | None:
        """Another plan for such calls, which has a graph with this key; the latest one is the first tried after it."""
        others = self._without(signature, latest)
        found = next((plan for plan in others if key in recipe_of(plan).calls), None)
        if found is not None:
            self._plans[signature] = [latest, *others]
        return found

    def _without(self, signature: Signature, plan: PlanRecord) -> list[PlanRecord]:
        return [each for each in self._plans.get(signature, ()) if each.recipe is not plan.recipe]
