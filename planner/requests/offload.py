"""What `offload=` cannot do, refused in words before anything is captured."""

from __future__ import annotations

import os

from planner.core.options import Options
from planner.errors import OffloadError, OptionError
from planner.offload.links import folder_of, measured_disk
from planner.parallel.group import world_size


def refuse_offload(options: Options, device: str) -> None:
    """Raise OptionError where values cannot leave as it is asked; OffloadError where the folder cannot be used.

    Args:
        options: of the plan.
        device: the kind of device that is planned for, as "cpu".
    """
    if options.offload is None:
        for name in ("host_gb", "offload_dir"):
            if (value := getattr(options, name)) is not None:
                raise OptionError(f"{name}={value!r} says how values leave: give offload='disk' or 'cpu', too")
        return
    if options.offload == "cpu" and device == "cpu":
        raise OptionError("offload='cpu' is for models on a GPU; for one on the CPU, whose memory that is, 'disk'")
    if options.offload == "disk" and device != "cpu":
        raise OptionError(f"offload='disk' is for models on the CPU so far, and not for a {device} device: give 'cpu'")
    if options.offload != "disk" and options.offload_dir is not None:
        raise OptionError(f"offload_dir={options.offload_dir!r} is the folder of offload='disk'; leave it out")
    given = {
        f"mode={options.mode!r}": options.mode != "aten",
        f"solver={options.solver!r}": options.solver in ("chen", "ilp"),
        f"dynamic={options.dynamic!r}": bool(options.dynamic),
        f"in_flight={options.in_flight}": options.in_flight > 1,
        f"{world_size()} processes": world_size() > 1,
    }
    if unable := [name for name, is_given in given.items() if is_given]:
        raise OptionError(
            f"offload={options.offload!r} is for one process, fixed shapes, mode='aten' and solver='auto', and not for "
            f"{', '.join(unable)} yet: leave one of the two out"
        )
    if options.offload != "disk":
        return
    folder = folder_of(options)
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        why = "cannot be written to" if os.path.isdir(folder) else "is no folder"
        raise OffloadError(f"offload_dir={options.offload_dir!r} ({folder}) {why}: name a folder of a fast disk")
    measured_disk(folder)  # before the training, whose memory the test would take
