"""The private parts of torch that running needs. Known to work on torch 2.11 to 2.13."""

from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

GLOBAL_HOOKS = (_global_forward_pre_hooks, _global_forward_hooks, _global_backward_pre_hooks, _global_backward_hooks)

__all__ = ["GLOBAL_HOOKS"]
