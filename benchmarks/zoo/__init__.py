"""Models for the survey: small configurations with random weights, as they train; one module a family."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from .case import Case

FAMILIES = ("text", "speech", "vision", "diffusion", "plain", "awkward")
LIBRARIES = (
    "timm", "torchvision", "segmentation_models_pytorch", "monai", "nnunet", "torch_geometric", "torchaudio",
    "x_transformers", "vit_pytorch", "kornia", "peft",
)  # fmt: skip


def cases(family: str) -> dict[str, Callable[[], Case]]:
    """The models of a family, by name; none is built yet. Those of a library are named `library/model`.

    Raises:
        ImportError: the library is not here.
    """
    found = import_module(module_of(family)).CASES
    if family in LIBRARIES:
        return {f"{family}/{name}": make for name, make in found.items()}
    return {make.__name__: make for make in found}


def module_of(family: str) -> str:
    """Where the models of a family are written down."""
    return f"{__name__}.libraries.{family}" if family in LIBRARIES else f"{__name__}.{family}"


def build(family: str, name: str) -> Case:
    """A model in training mode, with its batch and its loss."""
    return cases(family)[name]()


__all__ = ["FAMILIES", "LIBRARIES", "Case", "build", "cases", "module_of"]
