"""Ctrl-C while a plan is made, in the Python that torch calls for an op: there, C++ may not pass an exception on."""

import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from planner import plan

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("short_searches")]
ended: list[bool] = []


@torch.library.custom_op("planner_tests::interrupted", mutates_args=())
def interrupted(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@interrupted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    if not ended:
        signal.raise_signal(signal.SIGINT)
    ended.append(True)
    return torch.empty_like(x)


interrupted.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = interrupted(self.linear(x))
        return x.square().mean()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler, which processes in the background do not have."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    ended.clear()
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.mark.parametrize("mode", ["aten", "eager"])
def test_an_interruption_waits_for_the_end_of_the_op_that_runs(mode: str, ctrl_c: None):
    model, x = Interrupted(), torch.randn(4, 8)
    with pytest.raises(KeyboardInterrupt):
        plan(model, x, budget_gb=1, mode=mode)
    assert ended  # it was not raised in the op
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    plan(model, x, budget_gb=1, mode=mode).apply()(x).backward()
    assert model.linear.weight.grad is not None


IMPORTED = """
import signal
signal.raise_signal(signal.SIGINT)
for _ in range(100_000):
    pass
END = True
"""


class Importing(nn.Module):
    """Imports a module in its first call, as torch.compile does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import imported_by_a_test  # noqa: F401

        return self.linear(x).square().mean()


def test_an_interruption_leaves_no_module_imported_by_half(ctrl_c: None, tmp_path, monkeypatch):
    (tmp_path / "imported_by_a_test.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(KeyboardInterrupt):
            plan(Importing(), torch.randn(4, 8), budget_gb=1)
        assert sys.modules["imported_by_a_test"].END
    finally:
        sys.modules.pop("imported_by_a_test", None)


def test_an_interruption_that_waits_to_the_end_of_planning_is_raised_there(ctrl_c: None, monkeypatch):
    monkeypatch.setattr("planner.compat.interrupts._in_op", lambda frame: True)
    with pytest.raises(KeyboardInterrupt):
        plan(Interrupted(), torch.randn(4, 8), budget_gb=1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_own_is_called_at_once(ctrl_c: None):
    calls: list[bool] = []
    signal.signal(signal.SIGINT, lambda *_: calls.append(bool(ended)))
    plan(Interrupted(), torch.randn(4, 8), budget_gb=1)
    assert calls == [False]
