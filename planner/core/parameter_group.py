"""Parameters that devices share and gather together for use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that are gathered together, as `fully_shard` groups them; bytes.

    Attributes:
        paths: of the modules around whose calls the group is gathered and resharded.
        whole: the gathered parameters.
        buffer: the all-gather's result, from which they are copied; 0 where nothing is gathered.
        casting: held only during the all-gather: this device's share in another data type.
        reduced: the buffer that gradients are copied into for the reduce-scatter.
        share: this device's share of the gradients.
        scattering: held only during the reduce-scatter: that share in another data type.
        stays: whether the whole parameters are held from the forward to the backward pass.
        copied: whether the backend copies a message (gloo), and frees the copy some time after.
        next_forward: groups that are gathered ahead once its module's call has begun.
        next_backward: the same once its backward pass has begun; empty for the one whose call ended before its own.
    """

    paths: tuple[str, ...]
    whole: int
    buffer: int
    casting: int
    reduced: int
    share: int
    scattering: int
    stays: bool
    copied: bool = False
    next_forward: tuple[int, ...] = ()
    next_backward: tuple[int, ...] = ()


def is_around(group: ParameterGroup, path: str) -> bool:
    """Whether a module is one of the group's own, or inside one."""
    return any(not own or path == own or path.startswith(f"{own}.") for own in group.paths)
