"""Walks through nested containers: `torch.utils._pytree`, whose functions are as in torch 2.11 to 2.15."""

from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_is_leaf,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_map_with_path,
    tree_unflatten,
)

__all__ = [
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_is_leaf",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_map_with_path",
    "tree_unflatten",
]
