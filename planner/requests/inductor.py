"""What mode="inductor" cannot do, refused in words before anything is captured."""

from __future__ import annotations

from planner.compat.inductor import missing_compiler, missing_parts
from planner.core.options import Options
from planner.errors import OptionError
from planner.parallel.group import world_size


def refuse_inductor(options: Options, device: str) -> None:
    """Raise OptionError where a plan by Inductor is asked for that cannot be made here.

    Args:
        options: of the plan.
        device: the kind of device that is planned for, as "cpu".
    """
    if options.mode != "inductor" or missing_parts():  # without these, the plan is one of "aten", and says so
        return
    if missing := missing_compiler(device):
        raise OptionError(f"mode='inductor' needs {missing}; or plan with mode='aten', which compiles nothing")
    if unable := not_yet(options, device):
        raise OptionError(
            f"mode='inductor' plans one process on a CPU, with fixed shapes, and not for {', '.join(unable)} yet: plan "
            "with mode='aten'"
        )


def not_yet(options: Options, device: str) -> list[str]:
    """What is asked for that mode "inductor" does not plan yet, by name; the arguments are as above."""
    given = {
        f"a {device} device": device != "cpu",
        f"dynamic={options.dynamic!r}": bool(options.dynamic),
        f"in_flight={options.in_flight}": options.in_flight > 1,
        f"shard={options.shard}": options.shard > 1,
        f"checkpoints={options.checkpoints!r}": options.checkpoints != "replace",
        f"{world_size()} processes": world_size() > 1,
    }
    return [name for name, is_given in given.items() if is_given]
