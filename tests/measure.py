"""What one training step does, by torch's profiler and by autograd; nothing here is the planner's own."""

import gc
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from planner.compat.dispatch import lasting_modes_off
from planner.core.objects import dense_tensors

from .real_models import Case


@contextmanager
def beside_the_loop() -> Iterator[None]:
    """What a test does for itself: a plan is not to learn that the training loop does it."""
    with lasting_modes_off():
        yield


def step(case: Case) -> Any:
    """One training step, as users write it: the output is held until the backward pass has ended."""
    output = case.model(**case.batch)
    case.loss(output).backward()
    return output


def step_peak(case: Case, folder: Path) -> int:
    """The most bytes that one step holds above what was held before it, from the profiler's allocator events."""
    for _ in range(2):  # the first compiles and shows the loop, for which the second may be planned anew
        step(case)
        case.model.zero_grad(set_to_none=True)
    peak = peak_of(lambda: step(case), folder)
    case.model.zero_grad(set_to_none=True)
    return peak


def peak_of(run: Callable[[], object], folder: Path) -> int:
    """The most bytes that a piece of code holds above what was held before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return peak_in(profiler, folder)


def peak_in(profiler: profile, folder: Path) -> int:
    """The same for what ran while a profiler was on.

    The profiler tells of the free of a block that an earlier profile in this process saw, such as a gradient of another
    test's model: it is not of this one.
    """
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    events.sort(key=lambda e: (e["ts"], e["args"]["Ev Idx"]))
    live: set[int] = set()
    deltas = []
    for event in events:
        at, nbytes = event["args"]["Addr"], event["args"]["Bytes"]
        if nbytes > 0 or at in live:
            deltas.append(nbytes)
            (live.add if nbytes > 0 else live.remove)(at)
    return max(accumulate(deltas))


def held_before(case: Case) -> int:
    """Bytes of parameters, buffers and batch, counted by storage."""
    return in_storages([*case.model.parameters(), *case.model.buffers(), *dense_tensors(case.batch)])


def in_storages(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors, each counted once and whole."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def results(case: Case, seed: int = 1) -> dict[str, torch.Tensor]:
    """Loss, outputs, gradients and buffers of one step from a given seed, without changing the model's state."""
    with beside_the_loop():
        buffers = {name: b.clone() for name, b in case.model.named_buffers()}
    torch.manual_seed(seed)
    output = step(case)
    with beside_the_loop():
        found = {"loss": case.loss(output).detach().clone()}
        leaves = output.to_tuple() if hasattr(output, "to_tuple") else [output]
        found |= {f"output {i}": t.detach().clone() for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
        found |= {f"grad {name}": p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}
        found |= {f"buffer {name}": b.clone() for name, b in case.model.named_buffers()}
        found["random state"] = torch.get_rng_state()
        for name, b in case.model.named_buffers():
            b.copy_(buffers[name])
    case.model.zero_grad(set_to_none=True)
    return found
