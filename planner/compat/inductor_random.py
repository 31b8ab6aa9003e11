"""What Inductor's code draws from a seed, for graphs that run op by op. Torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from planner.compat.fake import FakeTensorMode, unset_fake_temporarily
from planner.compat.ops import OpOverload

# by the name of the op, what it is given beside its seed, and the device
_COMPILED: dict[tuple[object, ...], Callable[[list[Any]], Any]] = {}


def draw_alike(graph: fx.Graph) -> None:
    """Have what a graph draws from Inductor's seeds be the numbers that its compiled code draws, in place.

    Op by op, `inductor_random` and `inductor_randint` draw from the generator instead, whatever the seed
    (`torch._inductor.inductor_prims`): a dropout mask that a backward graph draws again would be another.
    """
    alike = {"prims::inductor_random": random, "prims::inductor_randint": randint}
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == "prims":
            node.target = alike.get(node.target._schema.name, node.target)


def random(size: Sequence[int], seed: torch.Tensor, mode: str, **options: Any) -> torch.Tensor:
    """As Inductor's code for `prims.inductor_random`."""
    return _drawn("random", (tuple(size), seed, mode), options)


def randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    """As Inductor's code for `prims.inductor_randint`."""
    return _drawn("randint", (low, high, tuple(size), seed), {})


def _drawn(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """What an op draws from its seed, by code that Inductor compiles for it alone: each number is a function of the
    seed and of its place.
    """
    at = next(i for i, x in enumerate(args) if isinstance(x, torch.Tensor))
    seed = args[at]
    key = (name, *args[:at], *args[at + 1 :], *sorted(options.items()), seed.device)
    if key not in _COMPILED:
        from torch._inductor import inductor_prims
        from torch._inductor.compile_fx import compile_fx_inner

        graph = fx.Graph()
        plain = [list(x) if isinstance(x, tuple) else x for x in args]
        given = (*plain[:at], graph.placeholder("seed"), *plain[at + 1 :])
        graph.output((graph.call_function(getattr(inductor_prims, name), given, options),))
        with unset_fake_temporarily(), FakeTensorMode() as mode:
            example = mode.from_tensor(seed)
            compiled = compile_fx_inner(fx.GraphModule({}, graph), [example])
        _COMPILED[key] = cast("Callable[[list[Any]], Any]", compiled)
    return cast("torch.Tensor", _COMPILED[key]([seed])[0])
