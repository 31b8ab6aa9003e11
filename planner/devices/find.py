"""Which device a name, a torch device or a model's place means, and whether it works."""

from __future__ import annotations

import os
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch

from planner.compat.cuda import asked_blas_workspace
from planner.devices.accelerator import ACCELERATORS, present
from planner.devices.specs import DEVICES, Device, blas_workspace, driver_words, held_and_brought, profile_of
from planner.errors import DeviceError, OptionError, warn


def find_device(device: str | torch.device | None, model_device: torch.device) -> Device:
    """The device to plan for: a known name, a torch device, or where the model is.

    Names are matched without case, maker and punctuation ("NVIDIA RTX 4090", "A100 40GB"). A card that is here is
    looked up by the name that the driver gives it; its memory is its own. The name of the card that the model is on
    means that card.

    Raises:
        OptionError: a name that is neither.
        DeviceError: a device that is not there, or that its driver cannot run.
    """
    if isinstance(device, str) and (name := profile_of(device)) is not None:
        here = find_device(None, model_device) if present(model_device) is not None else DEVICES["cpu"]
        own = profile_of(here.name)
        return here if own is not None and _alike(own, name) else DEVICES[name]
    try:
        place = model_device if device is None else torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise OptionError(f"device={device!r} is not known{_nearest(device)}; {_choices()}") from e
    if place.type == "cpu":
        return DEVICES["cpu"]
    if place.type not in {d.type for d in DEVICES.values()}:
        raise OptionError(f"device={str(place)!r} is not supported; {_choices()}")
    return _card(place)


def _alike(one: str, other: str) -> bool:
    """Whether two names have the same data sheet, as "a100" and "a100-80gb"."""
    return replace(DEVICES[one], name="") == replace(DEVICES[other], name="")


def _nearest(given: Any) -> str:
    known = {driver_words(name): name for name in DEVICES}
    near = get_close_matches(driver_words(given), known, 3) if isinstance(given, str) else []
    return f" (near it: {', '.join(known[n] for n in near)})" if near else ""


def _choices() -> str:
    return f"give one of {', '.join(DEVICES)} to plan for a card that is not here, or a torch device that is"


def _card(place: torch.device) -> Device:
    """A device that is here, with its own memory.

    Raises:
        DeviceError: it is not, or its driver cannot run it.
    """
    accelerator = ACCELERATORS.get(place.type)
    count = 0 if accelerator is None else accelerator.count()
    if accelerator is None or not count:
        why = built_for(place.type) + _why_none(place.type)
        raise DeviceError(f"device={str(place)!r}: torch sees none here{why}; {_choices()}")
    if place.index is not None and place.index >= count:
        raise DeviceError(f"device={str(place)!r} is not there: torch sees {count} of that type, numbered from 0")
    try:
        name, capability, memory = accelerator.properties(place)
    except (RuntimeError, AssertionError) as e:  # what torch says of a driver that is too old, or of a failed card
        raise DeviceError(
            f"device={str(place)!r} is there, and cannot be used{built_for(place.type)}: {first_line(e)}. Install a "
            f"driver for that, or the build of torch for the driver (pytorch.org/get-started); or {_choices()}"
        ) from e
    known = profile_of(name)
    alike = known or _nearest_capability(place.type, capability)
    if known is None:
        warn(
            f"{name} has no profile: rates that are not measured are taken from {alike}'s data sheet; memory is its own"
        )
    rocm = torch.version.hip is not None
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    workspace = asked_blas_workspace(place) or blas_workspace(capability, config, rocm=rocm)
    card = replace(DEVICES[alike], name=name, capability=capability, memory=memory)
    held, brought = held_and_brought(workspace, rocm=rocm) if place.type == "cuda" else (0, 0)
    return replace(card, blas=held, product=brought)


def _why_none(kind: str) -> str:
    """What the driver says where a build for CUDA sees no card: that there is none, or that it is too old."""
    if kind != "cuda" or torch.version.cuda is None:
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as e:
        return f", {first_line(e)}"
    return ""


def built_for(kind: str) -> str:
    """What this torch is built for, as a remark; empty where that explains nothing."""
    if kind != "cuda":
        return ""
    if torch.version.hip is not None:
        return f" (this torch {torch.__version__} is built for ROCm {torch.version.hip})"
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return f" (this torch {torch.__version__} is built {built})"


def first_line(error: BaseException) -> str:
    """The first sentence of an error's message, which torch continues with advice of its own."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _nearest_capability(kind: str, capability: tuple[int, int]) -> str:
    cards = {name: d.capability for name, d in DEVICES.items() if d.type == kind}
    return min(cards, key=lambda name: _apart(cards[name], capability))


def _apart(one: tuple[int, int], other: tuple[int, int]) -> int:
    return abs(10 * (one[0] - other[0]) + one[1] - other[1])


def check_working(device: torch.device) -> None:
    """Raise DeviceError where a device is out of order, before anything is allocated there."""
    accelerator = present(device)
    if accelerator is None:
        return
    try:
        accelerator.synchronize(device)
    except RuntimeError as e:
        raise out_of_order(device, e) from e


def out_of_order(device: torch.device, error: BaseException) -> DeviceError:
    """The error for a device on which nothing runs any more."""
    return DeviceError(
        f"{device} is out of order: {first_line(error)}. An op that ran before has failed there, and nothing runs on "
        "it in this process any more: start a new process; CUDA_LAUNCH_BLOCKING=1 in its environment shows which op"
    )
