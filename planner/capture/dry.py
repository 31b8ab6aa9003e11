"""The dry pass: one call of the fake model through `torch.compile`, and what is refused because no plan would hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from ..errors import CaptureError, PlannerError, gb
from .call import storages
from .calls import RegionCall, version
from .dynamo import CompileRegion, Partition, compile_call, detach_outputs, dynamo_settings, make_backend
from .outside import LossFn, OutsideLoss, differentiable, leaves, trace_loss
from .private import FakeTensorMode
from .region import Region, fingerprint

Detach = Callable[[fx.GraphModule], Collection[int]] | Mapping[str, tuple[int, ...]]
# Eager autograd between the regions may hold this share of what the regions hold before a plan is refused.
EAGER_SHARE = 0.01


class DryPass:
    """One call of the fake model.

    Attributes:
        calls: of compiled graphs, in order; one graph may serve several.
        cut: for each Dynamo graph, by its key, the outputs that were cut off.
    """

    def __init__(self, mode: FakeTensorMode, split: Partition, detach: Detach) -> None:
        self.mode = mode
        self.split = split
        self.detach = detach
        self.calls: list[RegionCall] = []
        self.cut: dict[str, tuple[int, ...]] = {}

    def run(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the model; returns its output. Raises CaptureError."""
        name = type(model).__name__
        compiled = compile_call(model, make_backend(self._serve))
        try:
            with self.mode, dynamo_settings(), torch.enable_grad():
                output = compiled(*args, **kwargs)
        except PlannerError:
            raise
        except Exception as e:
            raise CaptureError(_uncapturable(name, e)) from e
        if all(call.region is None for call in self.calls):
            raise CaptureError(
                f"{name}: torch.compile captured nothing of its forward pass that needs a gradient (it leaves alone "
                "recurrent layers and what is under torch.compiler.disable). Plan a submodule that it can capture"
            )
        with self.mode:
            self._refuse_eager_parts(name, output)
        return output

    def _serve(self, graph: fx.GraphModule, compile_region: CompileRegion) -> Callable[..., Any]:
        key = fingerprint(graph.graph)
        cut = self.detach.get(key, ()) if isinstance(self.detach, Mapping) else self.detach(graph)
        self.cut[key] = tuple(cut)
        detach_outputs(graph, cut)
        captured: list[Region] = []

        def partition(region: Region) -> tuple[fx.GraphModule, fx.GraphModule]:
            captured.append(region)
            return self.split(region)

        compiled = compile_region(partition)

        def call(*inputs: Any) -> Any:
            results = tuple(compiled(*inputs))
            for at in cut:  # so that a gradient which does reach it is seen
                results[at].requires_grad_()
            region = captured[0] if captured else None
            self.calls.append(RegionCall(key, region, inputs, tuple(map(version, inputs)), results))
            return results

        return call

    def gradients(self, output: Any, loss_fn: LossFn | None) -> tuple[dict[str, tuple[int, ...]], OutsideLoss]:
        """For each Dynamo graph, the outputs that no gradient reaches; and what the loss outside the model takes."""
        results = [t for call in self.calls for t in call.results if differentiable(t)]
        last = [t for t in self.calls[-1].results if differentiable(t)]
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
        cut: dict[str, tuple[int, ...]] = {}
        for call in self.calls:
            here = tuple(at for at, t in enumerate(call.results) if id(t) in unused)
            cut[call.key] = tuple(at for at in cut.get(call.key, here) if at in here)
        return {key: cut.get(key, ()) for key in self.cut}, outside

    def _refuse_eager_parts(self, name: str, output: Any) -> None:
        """Raise where eager autograd, outside every region, holds more than a sliver: no plan accounts for it."""
        ours = storages([(call.inputs, call.results) for call in self.calls])
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
        regions = sum(v.nbytes for call in self.calls if call.region for v in call.region.values)
        if sum(held.values()) > EAGER_SHARE * regions:
            raise CaptureError(
                f"{name}: {gb(sum(held.values()))} of what its backward pass needs is held by ops that torch.compile "
                f"left out of every graph ({', '.join(sorted(set(eager))[:4])}), so no plan could hold its word. "
                "Plan a submodule, or remove what keeps them out (backward hooks, torch.compiler.disable)"
            )


def _uncapturable(name: str, error: Exception) -> str:
    """The error in words, with the innermost line of the user's code that torch.compile names."""
    lines = str(error).strip().splitlines()
    where = [line.strip() for line in lines if line.strip().startswith("File ") and "/torch/" not in line]
    place = f" at {where[-1]}" if where else ""
    return (
        f"{name} cannot be captured{place}: {type(error).__name__}: {lines[0] if lines else ''}. "
        "Move what is named here out of forward(), or plan a submodule"
    )
