"""Kernels of C++ that Inductor generates, compiled together. Torch 2.11 to 2.15.

Imported by `planner.compat.inductor` once a plan needs Inductor, which starts a compiler for each kernel. Most of its
time, half a second, goes to headers and linking; a kernel itself takes a tenth of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any
from unittest import mock

from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.utils import clear_on_fresh_cache

LEAST = 32_000  # characters of C++ that are worth a process of the compiler: they take about as long as its headers
_EXTERN = 'extern "C"'


@dataclass(frozen=True)
class _Kernel:
    """A kernel that waits to be compiled: the C++ types of its arguments, and its source, a function `kernel`."""

    types: Sequence[str]
    source: str

    def is_plain(self) -> bool:
        """Whether it can stand in a namespace: it has one function of C, and needs headers alone before that."""
        asked = [line.split()[0] for line in self.source.splitlines() if line.startswith("#")]
        return set(asked) <= {"#include"} and self.source.count(_EXTERN) == 1

    def parts(self) -> tuple[list[str], str]:
        """The lines that include headers, and the rest."""
        lines = self.source.replace(_EXTERN, "").splitlines()
        return [s for s in lines if s.startswith("#")], "\n".join(s for s in lines if not s.startswith("#"))


@clear_on_fresh_cache
class _Library(CppPythonBindingsCodeCache):
    """Kernels in one library, by one function: its first argument is the number of a kernel, the others are its own."""

    cache: dict[str, Any] = {}  # noqa: RUF012  # Inductor's classes have one each
    cache_clear = staticmethod(cache.clear)
    entry_function = "kernels"

    @classmethod
    def loading(cls, kernels: Sequence[_Kernel], submit: Callable[..., Any] | None) -> Callable[[], Any]:
        """Compile kernels; the module is there once what is returned was called.

        Args:
            kernels: in the order of their numbers.
            submit: what starts the compiler, at once; None to start it when the module is asked for.
        """
        headers, spaces, cases, counts = dict[str, None](), [], [], []
        for number, kernel in enumerate(kernels):
            included, body = kernel.parts()
            headers |= dict.fromkeys(included)
            spaces.append(f"namespace k{number} {{\n{body}\n}}")
            given = (f"parse_arg<{t.replace('const ', '')}>(args, {n})" for n, t in enumerate(kernel.types, 1))
            cases.append(f"case {number}: k{number}::kernel({', '.join(given)}); break;")
            counts.append(str(1 + len(kernel.types)))
        number_given = "parse_arg<int64_t>(args, 0)"
        suffix = cls.suffix_template.format(
            entry_func=cls.entry_function,
            extra_parse_arg=f"static const int64_t counts[] = {{{', '.join(counts)}}};",
            arg_len=f"counts[{number_given}]",
            call_entry_func=f"switch ({number_given}) {{ {' '.join(cases)} }} Py_RETURN_NONE;",
        )
        loaded: Callable[[], Any] = cls.load_async("\n".join([*headers, *spaces, suffix]), submit_fn=submit)
        return loaded


@contextmanager
def compiled_together() -> Iterator[None]:
    """A context whose wrappers are loaded before their kernels, which are compiled by its end (`AsyncCompile.wait`).

    All kernels of a wrapper are compiled together, or in as many parts as Inductor has workers, where there is enough
    for each. The compiler is at work on those of the forward graph while Inductor writes those of the backward graph.
    What other threads compile meanwhile is compiled as ever.
    """
    own, own_wait, here = AsyncCompile.cpp_pybinding, AsyncCompile.wait, get_ident()
    waiting: list[tuple[AsyncCompile, dict[str, Any], list[tuple[list[str], Callable[[], Any]]]]] = []

    def ask(kernels: AsyncCompile, types: list[str], source: str) -> Any:
        kernel = _Kernel(types, source)
        return kernel if get_ident() == here and kernel.is_plain() else own(kernels, types, source)

    def start(kernels: AsyncCompile, scope: dict[str, Any]) -> None:
        if get_ident() != here:
            return own_wait(kernels, scope)
        asked = {name: value for name, value in scope.items() if isinstance(value, _Kernel)}
        submit = AsyncCompile.submit if get_compile_threads() > 1 else None
        libraries = [
            (names, _Library.loading([asked[name] for name in names], submit)) for names in _shares(asked) if names
        ]
        waiting.append((kernels, scope, libraries))

    with mock.patch.object(AsyncCompile, "cpp_pybinding", ask), mock.patch.object(AsyncCompile, "wait", start):
        yield
    for kernels, scope, libraries in waiting:
        for names, loaded in libraries:
            call = loaded().kernels
            scope.update((name, partial(call, number)) for number, name in enumerate(names))
        own_wait(kernels, scope)


def _shares(kernels: dict[str, _Kernel]) -> list[list[str]]:
    """The names of kernels, for each process of the compiler."""
    work = sum(len(kernel.source) for kernel in kernels.values())
    count = max(1, min(get_compile_threads(), work // LEAST))
    return [list(kernels)[i::count] for i in range(count)]
