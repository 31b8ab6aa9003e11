"""The memory of an optimizer's step where gradients are sparse, by steps of a copy on small tables."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import optim

from planner.compat import pytree
from planner.compat.dispatch import lasting_modes_off
from planner.core.call import here
from planner.devices.meter import record_allocations
from planner.stepping.step import step_of

ENTRIES = 1024  # of a gradient that is tried: what a step holds beside the state is in proportion to them


def sparse_steps(
    kind: type[optim.Optimizer], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], entries: Sequence[int]
) -> tuple[int, int]:
    """Bytes of an optimizer's state, and the most that its second step holds at once beside it.

    No row of a table is in a gradient twice, as far as it has as many: a step then holds most.

    Args:
        kind: the optimizer's class.
        options: what to give its constructor, which may take only some of them.
        groups: its parameter groups, which hold all its options, with tables whose gradients are sparse in their rows.
        entries: of the gradient of each table.

    Raises:
        Exception: whatever the optimizer raises.
    """
    scale, left = max(1.0, max(entries) / ENTRIES), iter(entries)
    tables: dict[torch.Tensor, int] = {}  # that are tried -> elements of the real one
    with lasting_modes_off(), torch.inference_mode(False):
        tried = [
            {**own_options(group), "params": [_table(here(p), next(left), scale, tables) for p in group["params"]]}
            for group in groups
        ]
        taken = inspect.signature(kind).parameters.keys() & options.keys()
        twin = kind(tried, **own_options({name: options[name] for name in taken}))
        step = step_of(kind)
        step(twin)
        held = record_allocations(lambda: step(twin), anywhere=True).peak()
    state = sum(
        t.element_size() * (n if t.shape == table.shape else t.numel())
        for table, n in tables.items()
        for t in pytree.tree_leaves(twin.state[table])
        if isinstance(t, torch.Tensor)
    )
    return state, math.ceil(scale * held)


def _table(p: torch.Tensor, entries: int, scale: float, tables: dict[torch.Tensor, int]) -> torch.Tensor:
    """A smaller table with as much smaller a gradient; enters it."""
    count, rows = (max(1, math.ceil(n / scale)) for n in (entries, min(entries, p.shape[0])))
    table = torch.zeros(rows, *p.shape[1:], dtype=p.dtype)
    at, values = torch.arange(count)[None] % rows, torch.zeros(count, *p.shape[1:], dtype=p.dtype)
    table.grad = torch.sparse_coo_tensor(at, values, table.shape, check_invariants=False)
    tables[table] = p.numel()
    return table


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an optimizer or a group, whose lists, dictionaries and tensors (a count of steps) may be changed."""
    own = {name: value for name, value in options.items() if name not in ("params", "param_names")}
    copied: dict[str, Any] = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), own)
    return copied
