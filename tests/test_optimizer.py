"""What an optimizer takes: predicted without memory, measured on real steps."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planner.costs.optimizer import OptimizerMemory, optimizer_memory
from planner.errors import OptionError
from planner.requests.optimizers import wraps_another

from .measure import peak_of

SHAPES = [(300, 200), (200,), (64, 3, 7, 7), (300, 200), (512, 256)]
FORMS = [{"foreach": True}, {"fused": True}, {"foreach": False}]


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.randn(s).to(dtype)) for dtype in dtypes or (torch.float32,) for s in SHAPES]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def state_bytes(optimizer: optim.Optimizer) -> int:
    held = {}
    for state in optimizer.state.values():
        for value in state.values():
            for t in value if isinstance(value, list) else [value]:
                if isinstance(t, torch.Tensor):
                    held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(held.values())


def measured(optimizer: optim.Optimizer, folder: Path) -> OptimizerMemory:
    """Two real steps; the state is made in the first of them, or (Adagrad's) before."""

    def step() -> None:
        torch.empty(1)  # some steps allocate nothing, of which the profiler makes no trace
        optimizer.step()

    before = state_bytes(optimizer)
    first, second = peak_of(step, folder), peak_of(step, folder)
    state = state_bytes(optimizer)
    return OptimizerMemory(state, max(first - (state - before), second))


def assert_close(predicted: OptimizerMemory, real: OptimizerMemory) -> None:
    assert predicted.state == real.state
    assert predicted.step == pytest.approx(real.step, rel=0.01, abs=4096)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *[(kind, form) for kind in (optim.Adam, optim.AdamW, optim.Adagrad) for form in FORMS],
        *[(optim.SGD, {"momentum": 0.9, **form}) for form in FORMS],
        (optim.SGD, {}),
        *[(optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": f}) for f in (True, False)],
        (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
        (optim.AdamW, {"amsgrad": True, "maximize": True, "foreach": True}),
        (optim.Adam, {"lr": torch.tensor(1e-3)}),
        *[(kind, form) for kind in (optim.Adafactor, optim.RMSprop) for form in ({"foreach": True}, {})],
    ],
    ids=str,
)
def test_prediction_is_what_real_steps_take(kind: type[optim.Optimizer], options: dict, tmp_path: Path):
    optimizer = kind(parameters(torch.float32, torch.bfloat16), **options)
    predicted = optimizer_memory([], optimizer, cuda=False)
    assert_close(predicted, measured(optimizer, tmp_path))
    assert optimizer_memory([], optimizer, cuda=False) == predicted  # also after it has stepped


def test_groups_have_their_own_options_and_frozen_parameters_take_nothing(tmp_path: Path):
    several = parameters()
    several[0].requires_grad_(False).grad = None
    optimizer = optim.SGD(
        [{"params": several[:2], "momentum": 0.9, "foreach": True}, {"params": several[2:], "nesterov": False}]
    )
    real = measured(optimizer, tmp_path)
    assert real.state == several[1].numel() * 4
    assert_close(optimizer_memory(several, optimizer, cuda=False), real)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", optim.SGD),
        ("Momentum", lambda ps: optim.SGD(ps, momentum=0.9)),
        ("AdamW", optim.AdamW),
        ("adamw-foreach", lambda ps: optim.AdamW(ps, foreach=True)),
        ("adam-fused", lambda ps: optim.Adam(ps, fused=True)),
        ("rmsprop-forloop", lambda ps: optim.RMSprop(ps, foreach=False)),
        ("adafactor", optim.Adafactor),
    ],
)
@pytest.mark.parametrize("cuda", [False, True])
def test_a_name_is_the_optimizer_with_its_defaults(
    name: str, make: Callable[[list[nn.Parameter]], optim.Optimizer], cuda: bool
):
    several = parameters()
    meta = [nn.Parameter(torch.empty_like(p, device="meta")) for p in several]
    assert optimizer_memory(meta, name, cuda=cuda) == optimizer_memory([], make(several), cuda=cuda)


def test_cuda_takes_foreach_by_default_and_has_step_counters_on_the_cpu(tmp_path: Path):
    several = parameters()
    default, foreach, loop, fused, capturable = (
        optimizer_memory([], optim.AdamW(several, **options), cuda=True)
        for options in ({}, *({"foreach": f} for f in (True, False)), {"fused": True}, {"capturable": True})
    )
    counters = 4 * len(several)
    assert default == foreach != loop
    assert fused.state == capturable.state == default.state + counters
    real = measured(optim.AdamW(several, foreach=True), tmp_path)
    assert_close(default, OptimizerMemory(real.state - counters, real.step))
    # where torch does not default to it
    adam, adam_loop = (optim.Adam(several, lr=torch.tensor(0.1), foreach=foreach) for foreach in (None, False))
    assert optimizer_memory([], adam, cuda=True) == optimizer_memory([], adam_loop, cuda=True)
    assert optimizer_memory([], optim.AdamW(several, fused=False), cuda=True) == loop
    assert optimizer_memory(several, "adafactor", cuda=True) == optimizer_memory(
        several, "adafactor-forloop", cuda=True
    )


@pytest.mark.parametrize("stepped", [False, True])
def test_the_optimizer_is_left_as_it_was(stepped: bool):
    several = parameters()
    optimizer = optim.AdamW(
        [{"params": several[:2], "lr": torch.tensor(0.1)}, {"params": several[2:], "betas": [0.8, 0.9]}]
    )
    if stepped:
        optimizer.step()
    groups, state = optimizer.param_groups, optimizer.state
    groups_before = [dict(group) for group in groups]
    state_before = {p: {name: t.clone() for name, t in each.items()} for p, each in state.items()}
    values_before = [(p.detach().clone(), p.grad, p._version) for p in several]
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook was called"))
    optimizer.step = lambda *_: pytest.fail("the optimizer has stepped")
    hook = register_optimizer_step_pre_hook(lambda *_: pytest.fail("a global hook was called"))
    try:
        for cuda in (False, True):
            assert optimizer_memory(several, optimizer, cuda=cuda).state
    finally:
        hook.remove()
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert [group.keys() for group in groups] == [group.keys() for group in groups_before]
    assert all(
        group[name] is value for group, old in zip(groups, groups_before, strict=True) for name, value in old.items()
    )
    assert state.keys() == state_before.keys()
    assert all(torch.equal(state[p][name], t) for p, each in state_before.items() for name, t in each.items())
    for p, (value, grad, version) in zip(several, values_before, strict=True):
        assert torch.equal(p, value)
        assert p.grad is grad
        assert p._version == version


class Remembering(optim.SGD):
    """As some optimizers do, it writes to a list among its options."""

    def step(self) -> None:
        for group in self.param_groups:
            group["seen"].append(group["lr"])
        super().step()


def test_an_optimizer_not_of_torch_is_tried_too_and_left_as_it_was():
    several = parameters()
    seen: list[float] = []
    optimizer = Remembering([{"params": several, "seen": seen}], momentum=0.9)
    assert optimizer_memory([], optimizer, cuda=False) == optimizer_memory(several, "momentum", cuda=False)
    assert not seen


class Counting(optim.SGD):
    """As Lamb of timm does, it counts its steps in a tensor of each group."""

    def step(self) -> None:
        for group in self.param_groups:
            group["count"] += 1
        super().step()


def test_a_tensor_among_the_options_stays_as_it_is():
    count = torch.tensor(3)
    optimizer = Counting([{"params": parameters(), "count": count}], momentum=0.9)
    assert optimizer_memory([], optimizer, cuda=False).state
    assert count == 3


class Orthogonal(optim.SGD):
    """It takes steps along the nearest orthogonal matrix, whose kernel copies what it decomposes."""

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            u, _, v = torch.linalg.svd(p.grad)
            p.addmm_(u, v, alpha=-0.1)


def test_workspaces_of_an_optimizers_ops_count(tmp_path: Path):
    weight = nn.Parameter(torch.randn(256, 256))
    weight.grad = torch.randn(256, 256)
    optimizer = Orthogonal([weight])
    assert_close(optimizer_memory([], optimizer, cuda=False), measured(optimizer, tmp_path))


@pytest.mark.parametrize("kind", [optim.SparseAdam, optim.Adagrad, optim.SGD])
def test_steps_by_sparse_gradients_take_what_real_ones_do(kind: type[optim.Optimizer], tmp_path: Path):
    """Of two tables: one whose rows come once each at most, and one all of whose rows come several times."""
    tables = [nn.Parameter(torch.randn(rows, 16)) for rows in (20_000, 500)]
    entries = [8000, 4000]
    for p, n in zip(tables, entries, strict=True):
        at = torch.arange(n)[None] * 2 % len(p) if len(p) > n else torch.arange(n)[None] % len(p)
        p.grad = torch.sparse_coo_tensor(at, torch.randn(n, 16), p.shape, check_invariants=True)
    optimizer = kind(tables, lr=0.1)
    sparse = {id(p): n for p, n in zip(tables, entries, strict=True)}
    assert_close(optimizer_memory([], optimizer, cuda=False, sparse=sparse), measured(optimizer, tmp_path))


def test_an_optimizer_that_takes_sparse_gradients_alone_has_a_state_before_any_is_there():
    table = nn.Parameter(torch.randn(1000, 16))
    assert optimizer_memory([], optim.SparseAdam([table]), cuda=False).state == 2 * table.nbytes


def test_what_cannot_be_tried_is_counted_once_it_has_stepped():
    class Another(optim.LBFGS):
        pass

    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = Another([weight])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    with pytest.raises(OptionError, match=r"Another .* has no state yet"):
        optimizer_memory([weight], optimizer, cuda=False)
    optimizer.step(closure)
    with pytest.warns(UserWarning, match="not known"):
        found = optimizer_memory([weight], optimizer, cuda=False)
    assert found == OptimizerMemory(state_bytes(optimizer), 0)
    assert found.state >= weight.numel() * 4


def test_lbfgs_is_counted_with_its_whole_history_before_its_first_step():
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = optim.LBFGS([weight], lr=1e-3, max_iter=6, history_size=3, tolerance_grad=0, tolerance_change=0)
    before = optimizer_memory([weight], optimizer, cuda=False)

    def closure() -> torch.Tensor:
        weight.grad = None
        loss = weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert before.state == pytest.approx(state_bytes(optimizer), rel=0.01)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_what_lbfgs_holds_in_its_closure_is_counted(search):
    weight = nn.Parameter(torch.linspace(-2, 2, 999))
    optimizer = optim.LBFGS([weight], max_iter=5, history_size=3, line_search_fn=search, tolerance_change=0)
    most = 0

    def closure() -> torch.Tensor:
        nonlocal most
        weight.grad = None
        alive = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.shape == weight.shape]
        most = max(most, len({t.data_ptr() for t in alive} - {weight.data_ptr()}))
        loss = (weight.abs() ** 1.5).sum() * 0.1 + torch.sin(3 * weight).sum()
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)
    counted = optimizer_memory([weight], optimizer, cuda=False)
    assert 0.9 * (counted.state + counted.closure) <= most * weight.nbytes <= counted.state + counted.closure


def test_nothing_takes_nothing():
    assert optimizer_memory(parameters(), None, cuda=False) == OptimizerMemory(0, 0)
    frozen = [p.requires_grad_(False) for p in parameters()]
    assert optimizer_memory(frozen, "adamw", cuda=False) == OptimizerMemory(0, 0)


@pytest.mark.parametrize("given", ["magic", "adamw-magic", "rmsprop-fused", "lbfgs", "optimizer", 3, optim.AdamW])
def test_what_is_no_optimizer_is_refused_by_name(given: object):
    with pytest.raises(OptionError) as e:
        optimizer_memory(parameters(), given, cuda=False)
    assert repr(given) in str(e.value)
    if isinstance(given, str):
        assert all(known in str(e.value) for known in ("momentum", "adamw", "adamw-fused"))


def test_a_name_that_does_not_suit_the_parameters_is_refused():
    with pytest.raises(OptionError, match="2D"):
        optimizer_memory(parameters(), "muon", cuda=False)


def test_an_optimizer_that_knows_one_of_other_parameters_counts():
    own, other = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    around, partner = optim.Adam([own]), optim.Adam([own])
    around.inner, partner.partner = optim.SGD([own]), optim.SGD([other])
    assert wraps_another(around)
    assert not wraps_another(partner)
