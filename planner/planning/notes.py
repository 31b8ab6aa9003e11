"""What a plan's note says of the step that was captured."""

from __future__ import annotations

from collections.abc import Iterator

from planner.capture.trace.data_dependent import counted_as_here, told
from planner.capture.trace.step import TrainingGraph
from planner.requests.request import Request
from solvers import BRIEF, Solution


def sentence(note: str) -> str:
    """A note of a solver's as a sentence; empty for none."""
    return f"{note[:1].upper()}{note[1:]}{'' if note.endswith('.') else '.'}" if note else ""


def in_brief(solution: Solution) -> str:
    """What is said of a search that was brief; empty for others."""
    if solution.solver != BRIEF:
        return ""
    return "Searched briefly, as the training loop is not known yet; once it is, the step is planned anew."


def notes(request: Request, graph: TrainingGraph) -> Iterator[str]:
    """Remarks on how a step was captured."""
    found = sum(region.checkpointed for region in graph.regions)
    calls = "1 checkpointed call" if found == 1 else f"{found} checkpointed calls"
    if found and request.options.checkpoints == "keep":
        yield f'{calls} of the model recomputed as the model asks; that is part of "everything kept" here.'
    elif found:
        yield f"{calls} of the model planned like the rest (checkpoints='keep' leaves them as they are)."
    if graph.loss.name:
        yield f"The loss was taken to be {graph.loss.name}."
    if graph.paths.apart:
        yield f"{counted_as_here(graph.paths.apart)} What is computed there is kept."
    if graph.asked:
        yield told(graph.asked, "is planned when it comes")
    if any(region.rnns_in_parts for region in graph.regions):
        yield (
            "Recurrent layers run in parts of their sequences, for a lower peak than whole ones reach: gradients are "
            "those without a plan but for rounding."
        )
