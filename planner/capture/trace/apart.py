"""Modules that run as without a plan: torch.compile leaves their `forward` alone, and what it calls.

What they compute becomes regions of ops that are kept (`eager_parts`). So a module may make tensors whose sizes depend
on values: the graphs around it stay the same. Parts of it that see none of these tensors are compiled for themselves.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.compat import pytree
from planner.compat.modules import replace_call, replaced_call

Shapes = Mapping[str, list[list[Any]]]  # path of a module -> shapes and strides, or plain values, for each of its calls


@dataclass(frozen=True)
class Paths:
    """Paths of modules of a model.

    Attributes:
        apart: those that torch.compile leaves alone, as they make tensors whose sizes depend on values.
        inner: the parts of these that are compiled for themselves.
    """

    apart: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()


COMPILED = Paths()  # nothing runs apart


class Apart:
    """The modules of a model that run apart.

    Args:
        model: which has them.
        paths: of the modules.
        compiled: compiles the call of a module.
    """

    def __init__(self, model: nn.Module, paths: Paths, compiled: Callable[[nn.Module], Callable[..., Any]]) -> None:
        self._apart = [_Uncompiled(module) for module in map(model.get_submodule, paths.apart)]
        self.inner = [(module, compiled(module)) for module in map(model.get_submodule, paths.inner)]

    @contextmanager
    def here(self) -> Iterator[None]:
        """Has torch.compile leave the modules alone, when it traces and when it runs."""
        before = [vars(each.module).get("forward") for each in self._apart]
        calls = [replaced_call(module) for module, _ in self.inner]
        try:
            for each, own in zip(self._apart, before, strict=True):
                vars(each.module)["forward"] = each.of(own)
            for module, call in self.inner:
                replace_call(module, call)
            yield
        finally:
            for each, own in zip(self._apart, before, strict=True):
                if own is None:
                    vars(each.module).pop("forward", None)
                else:
                    vars(each.module)["forward"] = own
            for (module, _), call in zip(self.inner, calls, strict=True):
                replace_call(module, call)


class _Uncompiled:
    """A module's `forward` under `torch.compiler.disable`, the same one as long as the module has the same."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._of: tuple[Any, Callable[..., Any]] | None = None

    def of(self, own: Callable[..., Any] | None) -> Callable[..., Any]:
        """For the `forward` that the module has of its own now, if any; it does not keep the module alive."""
        if self._of is None or own is not self._of[0]:
            self._of = own, _uncompiled(self.module, own)
        return self._of[1]


def _uncompiled(module: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    reference = weakref.ref(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if own is not None:
            return own(*args, **kwargs)
        alive = reference()
        assert alive is not None
        return type(alive).forward(alive, *args, **kwargs)

    disabled: Callable[..., Any] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return disabled


def shapes_of_calls(model: nn.Module, run: Callable[[], Any]) -> tuple[Shapes, Shapes]:
    """What the modules of a model are called with while something runs, and what they return."""
    given: dict[str, list[list[Any]]] = defaultdict(list)
    returned: dict[str, list[list[Any]]] = defaultdict(list)

    def noting(path: str) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            for noted, values in ((given, (args, kwargs)), (returned, output)):
                noted[path].append([*map(_noted, pytree.tree_leaves(values))])

        return note

    hooks = [m.register_forward_hook(noting(path), with_kwargs=True) for path, m in model.named_modules()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return given, returned


def _noted(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return repr(x)
    return tuple(x.shape), x.stride() if x.layout is torch.strided else ()


def with_callers(sized: Collection[str], returned: Shapes, others: Shapes) -> tuple[str, ...]:
    """Paths of modules whose sizes depend on values, with those that they return such tensors to.

    Args:
        sized: paths of the modules that make them.
        returned: by the modules in one step.
        others: in a step whose tensors have other sizes where these depend on values.
    """
    found, left = set(sized), list(sized)
    while left:
        path = left.pop()
        if path and returned.get(path) != others.get(path):
            caller = path.rpartition(".")[0]
            while caller and caller not in returned:  # a list of modules is not called
                caller = caller.rpartition(".")[0]
            if caller not in found:
                found.add(caller)
                left.append(caller)
    return tuple(sorted(found))


def with_all_callers(sized: Collection[str], called: Collection[str]) -> tuple[str, ...]:
    """Paths of modules with those of all modules around them that are called, the model among these."""
    steps = [path.split(".") for path in sized]
    around = {".".join(path[:n]) for path in steps for n in range(len(path))}
    return tuple(sorted({*sized, *around.intersection(called)}))


def inner_parts(model: nn.Module, sized: Collection[str], shapes: Shapes, others: Shapes) -> tuple[str, ...]:
    """Paths of the parts of modules whose sizes depend on values, for which these do not matter.

    Args:
        model: which has them.
        sized: paths of the modules.
        shapes: of the calls in one step.
        others: of those in a step whose tensors have other sizes where these depend on values.
    """

    def within(path: str) -> Iterator[str]:
        for name, child in model.get_submodule(path).named_children():
            own = f"{path}.{name}" if path else name
            if own in sized:
                continue
            if own not in shapes:  # a list of modules is not called
                yield from within(own)
            elif shapes[own] == others.get(own) and any(child.children()) and _trains(child):
                yield own

    return tuple(dict.fromkeys(inner for path in sized for inner in within(path)))


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
