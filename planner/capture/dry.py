"""The dry pass: one call of the fake model through `torch.compile`, and what is refused because no plan would hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..errors import CaptureError, PlannerError
from .call import storages
from .calls import RegionCall, version
from .dynamo import CompileRegion, Partition, compile_call, detach_outputs, dynamo_settings, make_backend
from .eager_parts import as_region_calls
from .outside import LossFn, OutsideLoss, differentiable, leaves, trace_loss
from .recording import EagerCall, RecordingFakeMode
from .region import Region, fingerprint
from .watched import watch_backward

Detach = Callable[[fx.GraphModule], Collection[int]] | Mapping[str, tuple[int, ...]]
# What ops outside the regions make is left out of a plan up to this share of what the regions make.
EAGER_SHARE = 0.001


class DryPass:
    """One call of the fake model.

    Attributes:
        calls: of compiled graphs, in order; one graph may serve several. What ran between them, after `gradients()`.
        cut: for each Dynamo graph, by its key, the outputs that were cut off.
    """

    def __init__(self, mode: RecordingFakeMode, split: Partition, detach: Detach) -> None:
        self.mode = mode
        self.split = split
        self.detach = detach
        self.calls: list[RegionCall] = []
        self.cut: dict[str, tuple[int, ...]] = {}
        self._between: list[tuple[EagerCall, ...]] = []  # before each call that has a gradient, and after the last

    def run(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the model; returns its output. Raises CaptureError."""
        name = type(model).__name__
        compiled = compile_call(model, make_backend(self._serve))
        try:
            with self.mode, dynamo_settings(), torch.enable_grad():
                self.mode.resume()
                try:
                    output = compiled(*args, **kwargs)
                finally:
                    self.mode.pause()
        except PlannerError:
            raise
        except Exception as e:
            raise CaptureError(_uncapturable(name, e)) from e
        self._between.append(self.mode.taken())
        if all(call.region is None for call in self.calls):
            raise CaptureError(
                f"{name}: torch.compile captured nothing of its forward pass that needs a gradient (it leaves alone "
                "recurrent layers and what is under torch.compiler.disable). Plan a submodule that it can capture"
            )
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
            region = captured[0] if captured else None
            if region is not None:  # else its ops run as they are, and count as what runs outside
                self._between.append(self.mode.taken())
                self.mode.pause()
            results = tuple(compiled(*inputs))
            if region is not None:
                self.mode.resume()
            for at in cut:  # so that a gradient which does reach it is seen
                results[at].requires_grad_()
            self.calls.append(RegionCall(key, region, inputs, tuple(map(version, inputs)), results))
            return results

        return call

    def gradients(self, output: Any, loss_fn: LossFn | None) -> tuple[dict[str, tuple[int, ...]], OutsideLoss]:
        """For each Dynamo graph, the outputs that no gradient reaches; and what the loss outside the model takes.

        The backward pass runs for it; with what runs outside the regions then, `calls` is complete.
        """
        results = [t for call in self.calls for t in call.results if differentiable(t)]
        ends = [t for t in leaves(output) if differentiable(t)]
        eager = self._runs_outside()
        try:
            with self.mode, torch.enable_grad():
                outside, loss = trace_loss(
                    output, loss_fn, ends if eager else [t for t in self.calls[-1].results if differentiable(t)]
                )
                if loss is not None:
                    roots, arriving = [loss], None
                else:
                    roots, arriving = ends, [torch.ones_like(t) for t in ends]
                if not eager:
                    reached: Sequence[torch.Tensor | None]
                    reached = torch.autograd.grad(roots, results, arriving, allow_unused=True)
                else:
                    regions = [call for call in self.calls if call.region is not None]
                    seen = watch_backward(self.mode, regions, self._between, roots, arriving, results, ends)
                    reached = seen.reached
                    self.calls = list(as_region_calls(seen.parts, self.calls, leaves(output), seen.arrived))
        except PlannerError:
            raise
        except Exception as e:
            raise CaptureError(f"the backward pass cannot be captured: {type(e).__name__}: {e}") from e
        unused = {id(t) for t, g in zip(results, reached, strict=True) if g is None} if loss is not None else set()
        cut: dict[str, tuple[int, ...]] = {}
        for call in self.calls:
            here = tuple(at for at, t in enumerate(call.results) if id(t) in unused)
            cut[call.key] = tuple(at for at in cut.get(call.key, here) if at in here)
        return {key: cut.get(key, ()) for key in self.cut}, outside

    def _runs_outside(self) -> bool:
        """Whether ops outside the regions make more than a sliver."""
        made = sum(sum(storages([call.result for call in calls]).values()) for calls in self._between)
        return made > EAGER_SHARE * sum(v.nbytes for c in self.calls if c.region for v in c.region.values)


def _uncapturable(name: str, error: Exception) -> str:
    """The error in words, with the innermost line of the user's code that torch.compile names."""
    lines = str(error).strip().splitlines()
    where = [line.strip() for line in lines if line.strip().startswith("File ") and "/torch/" not in line]
    place = f" at {where[-1]}" if where else ""
    return (
        f"{name} cannot be captured{place}: {type(error).__name__}: {lines[0] if lines else ''}. "
        "Move what is named here out of forward(), or plan a submodule"
    )
