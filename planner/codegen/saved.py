"""What the forward graph saves for the backward graph."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from torch import fx

from planner.capture.shapes import is_size


def save_no_unread(forward: fx.Graph, backward: fx.Graph, given: Sequence[fx.Node], results: int) -> None:
    """Take out what is saved, and read no more: generated code holds an input that it does not read to its end.

    Args:
        forward: the graph of the forward pass: its results, and then what is saved.
        backward: that of the backward pass.
        given: its input for each of what is saved.
        results: how many results the forward pass has.
    """
    output = forward.output_node()
    read = [True] * results + [bool(n.users) or is_size(n) for n in given]
    output.args = (tuple(compress(output.args[0], read)),)  # type: ignore[arg-type]
    output.meta["desc"] = list(compress(output.meta["desc"], read))
    for node in compress(given, (not r for r in read[results:])):
        backward.erase_node(node)
