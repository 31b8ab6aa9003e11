"""What a device can do: peak rates and bandwidth for a roofline (Williams et al., 2009)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import OptionError


@dataclass(frozen=True, slots=True)
class Device:
    """A device's datasheet.

    Attributes:
        name: as given by `device=`.
        type: "cpu" or "cuda".
        bandwidth: bytes per second of its memory.
        flops: peak FLOPs per second of dense matrix work, by bytes per element (2: bf16 and fp16, 4: fp32, 8: fp64).
        draws: random numbers per second.
        launch: seconds that every op takes at least.
    """

    name: str
    type: str
    bandwidth: float
    flops: dict[int, float]
    draws: float
    launch: float


def _cuda(name: str, bandwidth: float, half: float, single: float, double: float) -> Device:
    return Device(name, "cuda", bandwidth, {2: half, 4: single, 8: double}, 1e12, 4e-6)


# Vendors' datasheets, dense, without sparsity; fp32 without TF32.
DEVICES: dict[str, Device] = {
    "cpu": Device("cpu", "cpu", 10e9, {2: 20e9, 4: 40e9, 8: 20e9}, 1e8, 2e-6),
    "h200": _cuda("h200", 4.8e12, 989e12, 67e12, 67e12),
    "h100": _cuda("h100", 3.35e12, 989e12, 67e12, 67e12),
    "a100": _cuda("a100", 2.0e12, 312e12, 19.5e12, 19.5e12),
    "t4": _cuda("t4", 0.32e12, 65e12, 8.1e12, 0.25e12),
}


def find_device(device: str | torch.device | None, model_device: torch.device) -> Device:
    """The device to plan for: a known name, a torch device, or where the model is.

    A CUDA card is looked up by the name that the driver gives it; one that is not known is planned as an A100.

    Raises:
        OptionError: a name that is neither.
    """
    if isinstance(device, str) and device.lower() in DEVICES:
        return DEVICES[device.lower()]
    try:
        found = model_device if device is None else torch.device(device)
    except RuntimeError as e:
        known = ", ".join(DEVICES)
        raise OptionError(f"device={device!r} is not known; give one of {known}, or a torch device") from e
    if found.type == "cuda":
        name = torch.cuda.get_device_name(found).lower() if torch.cuda.is_available() else ""
        return next((d for key, d in DEVICES.items() if key in name), DEVICES["a100"])
    return DEVICES["cpu"]
