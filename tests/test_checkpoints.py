"""Models that checkpoint themselves: planned like the rest, or left as they are; measured beside eager."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from planner import OptionError, plan

from .measure import held_before, results, step_peak
from .plans import leanest
from .real_models import Case, gpt2
from .variants import keeping, more

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")


class Block(nn.Module):
    def __init__(self, norm: bool):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)
        self.norm = nn.BatchNorm1d(64) if norm else nn.LayerNorm(64)

    def forward(self, x):
        return x + F.dropout(self.norm(self.narrow(F.gelu(self.wide(x)))), 0.1)


class Checkpointed(nn.Module):
    def __init__(self, norm: bool = False, **options):
        super().__init__()
        self.first, self.options = nn.Linear(64, 64), options
        self.blocks = nn.ModuleList([Block(norm) for _ in range(4)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.options) if self.options else block(x)
        return x.square().mean()


def save_products(_context, op, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


WAYS = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, save_products),
    },
}


def case_of(**options):
    torch.manual_seed(0)
    return Case(Checkpointed(**options), {"x": torch.randn(512, 64)}, lambda loss: loss)


@pytest.mark.parametrize("way", keeping(*(way for way in WAYS if way != "reentrant"), of=WAYS))
def test_left_as_they_are_they_hold_what_they_do_in_eager_mode(way, tmp_path):
    case = case_of(**WAYS[way])
    eager, own = results(case), held_before(case) + step_peak(case, tmp_path)
    p = plan(case.model, case.batch, budget_gb=1, checkpoints="keep")
    p.apply()
    ours, measured = results(case), held_before(case) + step_peak(case, tmp_path)
    assert "4 checkpointed calls" in p.note
    assert measured == pytest.approx(p.peak_bytes, rel=0.002)
    assert 0.95 * own < measured < 1.02 * own
    for key, value in eager.items():
        assert torch.equal(ours[key], value), key


@pytest.mark.compat
def test_planned_like_the_rest_they_hold_what_they_would_without_checkpoints(tmp_path):
    case = case_of(**WAYS["reentrant"])
    own = held_before(case) + step_peak(case, tmp_path)
    p = plan(case.model, case.batch, budget_gb=1)
    plain = plan(case_of().model, case.batch, budget_gb=1)
    assert "4 checkpointed calls" in p.note
    assert "checkpointed" not in plain.note
    assert p.peak_bytes == plain.peak_bytes > 1.5 * own
    p.apply()
    assert held_before(case) + step_peak(case, tmp_path) == pytest.approx(p.peak_bytes, rel=0.002)


def test_a_plan_around_them_goes_below_what_they_reach(tmp_path):
    case = case_of(**WAYS["non-reentrant"])
    kept = plan(case.model, case.batch, budget_gb=1, checkpoints="keep")
    kept.apply()
    everything = results(case)
    kept.remove()
    p = leanest(kept, solver="chen")
    p.apply()
    ours, measured = results(case), held_before(case) + step_peak(case, tmp_path)
    assert measured == pytest.approx(p.peak_bytes, rel=0.002)
    assert measured < kept.peak_bytes
    assert all(torch.equal(ours[key], value) for key, value in everything.items())


class InSegments(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.layers, self.options = nn.Sequential(nn.Linear(64, 64), *(Block(norm=False) for _ in range(6))), options

    def forward(self, x):
        return checkpoint_sequential(self.layers, 3, x, **self.options).square().mean()


@pytest.mark.compat
@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": True, "preserve_rng_state": True}])
def test_segments_of_a_sequence_are_planned_and_go_below_what_they_reach(options, tmp_path):
    torch.manual_seed(0)
    case = Case(InSegments(options), {"x": torch.randn(512, 64, requires_grad=True)}, lambda loss: loss)
    eager, own = results(case), held_before(case) + step_peak(case, tmp_path)
    p = plan(case.model, case.batch, budget_gb=0.9 * own / 2**30)
    p.apply()
    ours, measured = results(case), held_before(case) + step_peak(case, tmp_path)
    assert measured == pytest.approx(p.peak_bytes, rel=0.002)
    assert measured <= 0.9 * own
    for key, value in eager.items():
        assert torch.equal(ours[key], value), key


@pytest.mark.compat
@pytest.mark.parametrize("checkpoints", [*more("replace"), "keep"])
def test_running_statistics_are_updated_once(checkpoints):
    """Eager checkpointing updates them twice."""
    case, plain = case_of(norm=True, **WAYS["non-reentrant"]), case_of(norm=True)
    plain.model.load_state_dict(case.model.state_dict())
    plan(case.model, case.batch, budget_gb=1, checkpoints=checkpoints).apply()
    ours, expected = results(case), results(plain)
    assert expected["buffer blocks.0.norm.num_batches_tracked"] == 1
    assert expected.keys() == ours.keys()
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.thorough
def test_the_switch_of_transformers(tmp_path):
    case = gpt2(dropout=0.1, layers=2)
    case.model.gradient_checkpointing_enable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, own = results(case), held_before(case) + step_peak(case, tmp_path)
        p = plan(case.model, case.batch, budget_gb=1, checkpoints="keep")
        p.apply()
        ours, measured = results(case), held_before(case) + step_peak(case, tmp_path)
    assert "2 checkpointed calls" in p.note
    assert measured == pytest.approx(p.peak_bytes, rel=0.002)
    assert measured < 1.02 * own
    for key, value in eager.items():
        torch.testing.assert_close(ours[key], value, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.thorough
def test_the_switch_of_diffusers():
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32,),
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), norm_num_groups=8,
    )  # fmt: skip
    batch = {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.arange(2)}
    model.train().enable_gradient_checkpointing()
    p = plan(model, batch, budget_gb=1, loss_fn=lambda output: output.sample.square().mean(), checkpoints="keep")
    assert "checkpointed calls" in p.note
    assert p.peak_bytes < plan(model, batch, budget_gb=1, loss_fn=p.request.loss_fn).peak_bytes


def test_an_unknown_choice():
    case = case_of()
    with pytest.raises(OptionError, match="'replace', 'keep'"):
        plan(case.model, case.batch, budget_gb=1, checkpoints="both")
