"""The releases of torch that the tests ran with."""

from __future__ import annotations

TESTED = ("2.13",)


def tested(version: str) -> bool:
    """Whether the tests ran with a release of torch.

    Args:
        version: as `torch.__version__` has it.

    Examples:
        >>> tested(f"{TESTED[0]}.1+cu130"), tested("1.0.0")
        (True, False)
    """
    return ".".join(version.split(".")[:2]) in TESTED
