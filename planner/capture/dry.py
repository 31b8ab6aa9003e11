"""The dry pass: one call of the fake model through `torch.compile`, and what is refused because no plan would hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from ..errors import CaptureError, PlannerError, gb
from .call import storages
from .dynamo import Partition, boxed, compile_call, dynamo_settings, make_backend
from .outside import LossFn, OutsideLoss, differentiable, leaves, trace_loss
from .private import FakeTensorMode
from .region import Link, Region, fingerprint

Detach = Callable[[fx.GraphModule], Collection[int]] | Mapping[str, tuple[int, ...]]
# Eager autograd between the regions may hold this share of what the regions hold before a plan is refused.
EAGER_SHARE = 0.01


class DryPass:
    """One call of the fake model.

    Attributes:
        regions: those with a gradient, in the order of their calls.
        cut: for each Dynamo graph, by its key, the outputs that were cut off.
    """

    def __init__(self, mode: FakeTensorMode, split: Partition, detach: Detach) -> None:
        self.mode = mode
        self.split = split
        self.detach = detach
        self.regions: list[Region] = []
        self.cut: dict[str, tuple[int, ...]] = {}
        self._calls: list[tuple[int | None, list[Any], list[Any]]] = []  # region, inputs, results
        self._results: list[tuple[str, list[Any]]] = []  # of each call: the graph's key, what it returned
        self._inputs: list[tuple[torch.Tensor, int]] = []  # with their versions once the call had ended

    def run(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the model; returns its output. Raises CaptureError."""
        name = type(model).__name__
        key = ""
        planned: dict[str, int] = {}

        def detach(graph: fx.GraphModule) -> Collection[int]:
            nonlocal key
            key = fingerprint(graph.graph)
            self.cut[key] = tuple(self.detach.get(key, ()) if isinstance(self.detach, Mapping) else self.detach(graph))
            return self.cut[key]

        def partition(region: Region) -> tuple[fx.GraphModule, fx.GraphModule]:
            if any(r.fingerprint == region.fingerprint for r in self.regions):
                raise CaptureError(_TWICE.format(name))
            planned[key] = len(self.regions)
            self.regions.append(region)
            return self.split(region)

        def wrap(compiled: Callable[..., Any], cut: Collection[int]) -> Callable[..., Any]:
            own = key

            def call(*inputs: Any) -> Any:
                if own in planned and any(own == k for k, _ in self._results):
                    raise CaptureError(_TWICE.format(name))
                results = list(compiled(*inputs))
                for at in cut:  # so that a gradient which does reach it is seen
                    results[at] = results[at].requires_grad_()
                self._results.append((own, results))
                self._calls.append((planned.get(own), list(inputs), results))
                self._inputs += [(t, t._version) for t in inputs if isinstance(t, torch.Tensor)]
                return tuple(results)

            return call

        compiled = compile_call(model, make_backend(partition, boxed, detach, wrap))
        try:
            with self.mode, dynamo_settings(), torch.enable_grad():
                output = compiled(*args, **kwargs)
        except PlannerError:
            raise
        except Exception as e:
            raise CaptureError(_uncapturable(name, e)) from e
        if not self.regions:
            raise CaptureError(
                f"{name}: torch.compile captured nothing of its forward pass that needs a gradient (it leaves alone "
                "recurrent layers and what is under torch.compiler.disable). Plan with mode='eager', or a submodule "
                "that it can capture"
            )
        with self.mode:
            self._refuse_eager_parts(name, output)
        if any(t._version != version for t, version in self._inputs):
            raise CaptureError(
                f"{name}: a buffer or input that one compiled region reads is overwritten outside it, so the region "
                "cannot be recomputed. Move the update into the module that reads it, or plan a submodule"
            )
        return output

    def gradients(self, output: Any, loss_fn: LossFn | None) -> tuple[dict[str, tuple[int, ...]], OutsideLoss]:
        """For each Dynamo graph, the outputs that no gradient reaches; and what the loss outside the model takes."""
        results = [t for _, outputs in self._results for t in outputs if differentiable(t)]
        last = [t for t in self._results[-1][1] if differentiable(t)]
        try:
            with self.mode, torch.enable_grad():
                outside, loss = trace_loss(output, loss_fn, last)
                if loss is None:
                    return dict.fromkeys(self.cut, ()), outside
                reached = torch.autograd.grad(loss, results, allow_unused=True)
        except PlannerError:
            raise
        except Exception as e:
            raise CaptureError(f"the backward pass cannot be captured: {type(e).__name__}: {e}") from e
        unused = {id(t) for t, g in zip(results, reached, strict=True) if g is None}
        cut = {key: tuple(at for at, t in enumerate(ts) if id(t) in unused) for key, ts in self._results}
        return {key: cut.get(key, ()) for key in self.cut}, outside

    def links(self, output: Any) -> tuple[Link, ...]:
        """What one region makes for exactly one other, and nobody else holds."""
        made: dict[int, tuple[int, int]] = {}
        uses: dict[int, list[tuple[int | None, int]]] = defaultdict(list)
        elsewhere = set(storages(leaves(output)))
        for region, inputs, results in self._calls:
            for at, t in enumerate(inputs):
                for storage in storages(t):
                    uses[storage].append((region, at))
            for at, t in enumerate(results):
                for storage in storages(t):
                    if storage in made or storage in uses or region is None:
                        elsewhere.add(storage)
                    else:
                        made[storage] = (region, at)
        found = []
        for storage, (producer, result) in made.items():
            if storage not in elsewhere and len(uses[storage]) == 1:
                ((consumer, argument),) = uses[storage]
                if consumer is not None:
                    found.append(Link(producer, result, consumer, argument))
        return tuple(found)

    def _refuse_eager_parts(self, name: str, output: Any) -> None:
        """Raise where eager autograd, outside every region, holds more than a sliver: no plan accounts for it."""
        ours = storages([[t for t, _ in self._inputs], [ts for _, ts in self._results]])
        held: dict[int, int] = {}
        eager: list[str] = []
        stack = [t.grad_fn for t in leaves(output) if differentiable(t) and t.grad_fn is not None]
        seen = set(stack)
        while stack:
            node = stack.pop()
            saved = [getattr(node, a) for a in dir(node) if a.startswith("_saved_")]
            own = {k: size for k, size in storages(saved).items() if k not in ours}
            if own and "CompiledFunction" not in node.name():
                held |= own
                eager.append(node.name())
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        regions = sum(v.nbytes for region in self.regions for v in region.values)
        if sum(held.values()) > EAGER_SHARE * regions:
            raise CaptureError(
                f"{name}: {gb(sum(held.values()))} of what its backward pass needs is held by ops that torch.compile "
                f"left out of every graph ({', '.join(sorted(set(eager))[:4])}), so no plan could hold its word. "
                "Plan with mode='eager', or a submodule, or remove what keeps them out (backward hooks, "
                "torch.compiler.disable)"
            )


_TWICE = (
    "{}: one compiled graph serves several calls in the same step, which cannot be planned apart yet. "
    "Plan the repeated submodule, or remove the graph break inside it"
)


def _uncapturable(name: str, error: Exception) -> str:
    """The error in words, with the innermost line of the user's code that torch.compile names."""
    lines = str(error).strip().splitlines()
    where = [line.strip() for line in lines if line.strip().startswith("File ") and "/torch/" not in line]
    place = f" at {where[-1]}" if where else ""
    return (
        f"{name} cannot be captured{place}: {type(error).__name__}: {lines[0] if lines else ''}. "
        "Move what is named here out of forward(), plan with mode='eager', or plan a submodule"
    )
