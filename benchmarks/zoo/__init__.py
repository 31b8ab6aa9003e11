"""Models for the survey: small configurations with random weights, as they train; one module a family."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from .case import Case

FAMILIES = ("text", "speech", "vision", "diffusion", "plain", "awkward")


def cases(family: str) -> dict[str, Callable[[], Case]]:
    """The models of a family, by name; none is built yet."""
    return {make.__name__: make for make in import_module(f"{__name__}.{family}").CASES}


def build(family: str, name: str) -> Case:
    """A model in training mode, with its batch and its loss."""
    return cases(family)[name]()


__all__ = ["FAMILIES", "Case", "build", "cases"]
