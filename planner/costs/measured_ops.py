"""Workspaces and seconds of ops, each distinct op measured once on a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from planner.capture.recomputability import is_collective
from planner.core.call import Call
from planner.costs import cache
from planner.costs.measure_op import Allocated, run_on_accelerator, run_on_cpu
from planner.devices.accelerator import accelerator_of, random_state_kept
from planner.devices.specs import free_memory
from solvers.progress import bar

_BATCH = 16  # ops between two writes: an interruption loses no more
_failed: set[tuple[str, str]] = set()  # ops that fail on zeros: device, key
_STABLE = ("aten", "prims")  # other ops may change without a new torch: they are not kept on disk


def measure(
    calls: Iterable[Call],
    device: torch.device,
    *,
    timed: bool = False,
    progress: bool | None = None,
    gradients: bool = True,
) -> dict[str, Allocated]:
    """Run each distinct op (target, shapes, strides, dtypes, other arguments) once, unless the disk cache knows it.

    Arguments are zeros, or the values for which the op takes the most memory. Left out are ops that fail on them, those
    that there is no memory for, and collectives, which other processes would have to run as well. The random
    generators are left as they were. Measurements before an interruption are kept.

    Args:
        calls: the ops to run.
        device: to run them on.
        timed: run each a few times more, for its seconds.
        progress: show a progress bar; None for only where a terminal is watching.
        gradients: whether gradients are enabled: without, recurrent layers leave nothing for their backward pass.

    Returns:
        The costs of each by `Call.key`, without seconds unless `timed`.
    """
    distinct = {call.key: call for call in calls if not is_collective(call.target)}
    around = cache.surroundings(device)
    stable = [key for key, call in distinct.items() if call.target.namespace in _STABLE]
    digests = {key: cache.digest(around, key if gradients else f"{key} without gradients") for key in stable}
    kept = cache.read(digests.values())
    costs = {key: kept[digest] for key, digest in digests.items() if digest in kept}
    todo = [c for key, c in distinct.items() if key not in costs or (timed and costs[key].seconds is None)]
    todo = [call for call in todo if (str(device), call.key) not in _failed]
    if device.type == "cpu" and todo:  # a GPU says so itself
        most = free_memory()
        todo = [call for call in todo if call.nbytes < most]
    if not timed:  # what only allocates its result has no workspace
        costs |= {call.key: Allocated(0, 0) for call in todo if call.target is torch.ops.aten.empty.memory_format}
        todo = [call for call in todo if call.key not in costs]
    accelerator = None if device.type == "cpu" else accelerator_of(device)
    if todo:
        with (
            random_state_kept(device),
            bar("measuring ops", progress, total=len(todo), unit=" ops") as shown,
            torch.inference_mode(False),
            torch.set_grad_enabled(gradients),
            torch.autocast(device.type, enabled=False),  # the graph has its casts; others would be of other ops
        ):
            for at in range(0, len(todo), _BATCH):
                batch = todo[at : at + _BATCH]
                new = run_on_cpu(batch, timed) if accelerator is None else run_on_accelerator(batch, device, timed)
                cache.write({digests[key]: measured for key, measured in new.items() if key in digests})
                costs |= new
                _failed.update((str(device), call.key) for call in batch if call.key not in new)
                shown.update(len(batch))
        if accelerator is not None:
            accelerator.empty_cache(device)  # blocks cut to fit these runs would fragment the training's memory
    return costs if timed else {key: replace(measured, seconds=None) for key, measured in costs.items()}
