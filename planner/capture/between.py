"""What autograd records outside the compiled graphs of a call: a call that goes another way there is told by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

_OURS = ("CompiledFunction", "_NoGradient", "torch::autograd::AccumulateGrad")


class Between:
    """Counts the nodes of a call, by name and shapes.

    Attributes:
        counted: how often each was found.
    """

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self._seen: set[Any] = set()

    def begin(self) -> None:
        """A call begins, or has ended: nothing is held."""
        self.counted = Counter()
        self._seen.clear()

    def look(self, tensors: Iterable[Any]) -> None:
        """Count the nodes behind tensors, back to compiled graphs and to what was counted. O(nodes)."""
        todo = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        while todo:
            node = todo.pop()
            if node in self._seen or node.name().startswith(_OURS):
                continue
            self._seen.add(node)
            self.counted[f"{node.name()} {[tuple(m.shape) for m in node._input_metadata]}"] += 1
            todo.extend(before for before, _ in node.next_functions if before is not None)
