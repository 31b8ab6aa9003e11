"""What Lightning's objects do not say in public. Lightning 2.5 and 2.6."""

from __future__ import annotations

from typing import Any


def is_compiled(lightning_module: Any) -> bool:
    """Whether a LightningModule was made by torch.compile (`_compiler_ctx`, Lightning 2.5 and 2.6)."""
    return lightning_module._compiler_ctx is not None


def checkpoints_activations(strategy: Any) -> bool:
    """Whether an FSDPStrategy checkpoints activations (`_activation_checkpointing_kwargs`, Lightning 2.5 and 2.6)."""
    return bool(strategy._activation_checkpointing_kwargs)
