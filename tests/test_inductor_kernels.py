"""Kernels of C++ that are compiled together: what they compute, how often the compiler starts, what stays alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.utils import fresh_cache

from planner.compat.inductor_kernels import compiled_together

from .test_inductor import Net, batch_of, planned

pytestmark = [
    pytest.mark.compat,
    pytest.mark.usefixtures("short_searches"),
    pytest.mark.filterwarnings("ignore:.*resource_tracker"),
]

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
SCALED = HEADER + (
    'extern "C" void kernel(const float* a, float* out, const int64_t n)\n'
    "{\n    for (int64_t i = 0; i < n; i++) { out[i] = FACTOR * a[i]; }\n}\n"
)
SUMMED = HEADER + (
    'extern "C" void kernel(const float* a, const float* b, float* out, const int64_t n)\n'
    "{\n    #pragma GCC ivdep\n    for (int64_t i = 0; i < n; i++) { out[i] = a[i] + b[i]; }\n}\n"
)
SCALED_TYPES = ["const float*", "float*", "const int64_t"]
SUMMED_TYPES = ["const float*", "const float*", "float*", "const int64_t"]


@pytest.fixture
def cache(tmp_path):
    """An empty cache of Inductor's."""
    with inductor_config.patch({"cpp.vec_isa_ok": True}), fresh_cache(dir=tmp_path):
        yield tmp_path


def libraries(folder):
    return len(list(folder.rglob("*.main.so")))


def asked(**sources):
    """Kernels by name, as a wrapper that Inductor generates asks for them."""
    from torch._inductor.async_compile import AsyncCompile

    asking = AsyncCompile()
    scope = {name: asking.cpp_pybinding(*given) for name, given in sources.items()}
    asking.wait(scope)
    return scope


def loaded(**sources):
    with compiled_together():
        return asked(**sources)


@pytest.mark.parametrize("workers", [1, 2])
def test_kernels_are_one_library_and_each_takes_its_own_arguments(cache, workers):
    with inductor_config.patch({"compile_threads": workers}):
        kernels = loaded(
            twice=(SCALED_TYPES, SCALED.replace("FACTOR", "2")),
            summed=(SUMMED_TYPES, SUMMED),
            thrice=(SCALED_TYPES, SCALED.replace("FACTOR", "3")),
        )
    a, b, out = torch.randn(7), torch.randn(7), torch.zeros(7)
    for name, given, expected in (("twice", (a,), 2 * a), ("thrice", (a,), 3 * a), ("summed", (a, b), a + b)):
        kernels[name](*given, out, 7)
        assert torch.equal(out, expected)
    assert libraries(cache) == 1
    for name, given in (("twice", (a, b, out, 7)), ("summed", (a, out, 7)), ("thrice", ())):
        with pytest.raises(RuntimeError, match="requires"):
            kernels[name](*given)


def test_a_kernel_that_asks_more_of_the_preprocessor_stays_alone(cache):
    kernels = loaded(
        twice=(SCALED_TYPES, "#define FACTOR 2\n" + SCALED), thrice=(SCALED_TYPES, SCALED.replace("FACTOR", "3"))
    )
    a, out = torch.randn(5), torch.zeros(5)
    for name, factor in (("twice", 2), ("thrice", 3)):
        kernels[name](a, out, 5)
        assert torch.equal(out, factor * a)
    assert libraries(cache) == 2


def test_what_another_thread_compiles_meanwhile_is_there_when_it_asks_for_it(cache):
    with compiled_together(), ThreadPoolExecutor(1) as other:
        scope = other.submit(asked, twice=(SCALED_TYPES, SCALED.replace("FACTOR", "2"))).result()
        a, out = torch.randn(5), torch.zeros(5)
        scope["twice"](a, out, 5)
    assert torch.equal(out, 2 * a)


@pytest.mark.thorough
def test_a_planned_step_has_one_library_for_each_of_its_graphs(cache):
    torch.manual_seed(0)
    model, (x, y) = Net(), batch_of()
    loss = model(x, y)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    planned(model, (x, y)).apply()
    model(x, y).backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    assert libraries(cache) <= 2
    assert sum(f.read_text().count("async_compile.cpp_pybinding(") for f in cache.rglob("*.py")) > 2
