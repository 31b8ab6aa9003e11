"""What mode="inductor" cannot do, refused in words before anything is captured."""

from __future__ import annotations

from torch import nn

from planner.compat.inductor import missing_compiler, missing_parts
from planner.compat.versions import inductor_takes_symbols
from planner.core.options import Options
from planner.devices.specs import Device
from planner.errors import OptionError

_DEVICES = ("cpu", "cuda")


def refuse_inductor(options: Options, model: nn.Module, device: Device) -> None:
    """Raise OptionError where a plan by Inductor is asked for that cannot be made here.

    Args:
        options: of the plan.
        model: that is planned.
        device: that is planned for.
    """
    if options.mode != "inductor" or missing_parts():  # without these, the plan is one of "aten", and says so
        return
    if unable := not_yet(options, model, device):
        raise OptionError(f"mode='inductor' does not plan {', '.join(unable)} yet: plan with mode='aten'")
    if missing := missing_compiler(device.type):
        raise OptionError(f"mode='inductor' needs {missing}; or plan with mode='aten', which compiles nothing")


def not_yet(options: Options, model: nn.Module, device: Device) -> list[str]:
    """What is asked for that mode "inductor" does not plan yet, by name; the arguments are as above."""
    where = next(model.parameters()).device.type
    given = {
        f"for a {device.type} device": device.type not in _DEVICES,
        f"for {device.name} with the model on {where}": where != device.type,
        f"with dynamic={options.dynamic!r}": bool(options.dynamic) and not inductor_takes_symbols(),
        f"with in_flight={options.in_flight}": options.in_flight > 1,
        f"with shard={options.shard}": options.shard > 1,
        f"with checkpoints={options.checkpoints!r}": options.checkpoints != "replace",
    }
    return [name for name, is_given in given.items() if is_given]
