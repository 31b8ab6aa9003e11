"""Plans for models that `fully_shard` shards: gradients of FSDP without a plan, and what each rank really holds."""

import copy
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from planner import BatchError, ModelError, OptionError, Plan, PlanWarning, applied_plan, plan
from planner.runtime.interception import attached

from .measure import peak_of
from .processes import on_ranks
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")

WIDTH, TOKENS = 32, 50


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.out(self.norm(x))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, x, y):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())


def by_block(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def in_parts(model):
    """Embedding and head by themselves, a part of a block, frozen parameters, gathered ahead in the forward pass."""
    fully_shard(model.embed)
    model.embed.requires_grad_(False)
    model.layers[1].norm.requires_grad_(False)
    fully_shard(model.layers[0].mlp)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard([model.norm, model.head])
    fully_shard(model, reshard_after_forward=False)
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1], model.layers[2]])
    return model


def mixed(model):
    return by_block(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def gathered(model):
    return by_block(model, reshard_after_forward=False)


WAYS = {
    "by block": by_block,
    "bf16": mixed,
    "gathered all the time": gathered,
    "in parts": in_parts,
}
LAYERS = {gathered: 4, in_parts: 3}  # of which more are gathered at once than a block and the next


def batch_of(rank):
    torch.manual_seed(rank)
    return torch.randint(0, TOKENS, (24, 64)), torch.randint(0, TOKENS, (24, 64))


def made(shard):
    torch.manual_seed(0)
    return shard(Net(LAYERS.get(shard, 2)))


def step(model, batch):
    torch.manual_seed(1)  # dropout
    loss = model(*batch)
    loss.backward()
    return loss


def here(tensors):
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]


def held(*tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in here(tensors)}
    return sum(storages.values())


def measured(model, batch):
    """Bytes at the peak of a step of a loop that is known, with what is there before it; and gradients."""
    for _ in range(2):  # the first shows the loop, for which the second may be planned anew
        step(model, batch)
        model.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        peak = peak_of(lambda: step(model, batch), Path(folder)) + held(*model.parameters(), *batch)
    return peak, [g.clone() for g in here(p.grad for p in model.parameters())]


def settle():
    """Have gloo's own threads let go of tensors: what they are the last to free, the profiler does not see."""

    def wrapped(function):
        def call(*args, **kwargs):
            work = function(*args, **kwargs)
            time.sleep(0.003)
            return work

        return call

    for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"):
        if hasattr(torch.distributed, name):
            setattr(torch.distributed, name, wrapped(getattr(torch.distributed, name)))


def compare(names):
    """On one rank, without and with a plan."""
    settle()
    batch = batch_of(torch.distributed.get_rank())
    found = {}
    for name in names:
        usual, expected = measured(made(WAYS[name]), batch)
        model = made(WAYS[name])
        planned = plan(model, batch, budget_gb=0.7 * usual / 2**30, progress=False)
        peak, gradients = measured(planned.apply(), batch)
        equal = len(expected) == len(gradients) > 0 and all(map(torch.equal, expected, gradients))
        found[name] = usual, peak, applied_plan(model).peak_bytes, planned.budget_bytes, equal
    return found


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        pytest.param(2, ["by block", "bf16"], marks=pytest.mark.compat),
        *more((2, ["gathered all the time"])),
        *more((3, ["in parts"])),
    ],
)
def test_gradients_and_peaks(ranks, names):
    for found in on_ranks(ranks, compare, names):
        assert list(found) == names
        for name, (usual, peak, predicted, budget, equal) in found.items():
            assert equal, name
            assert peak <= budget < usual, name
            assert peak <= predicted, name
            assert predicted == pytest.approx(peak, rel=0.03), name


def train_on():
    """What a rank sees of accumulation, verify(), files, evaluation first, and sharding after apply()."""
    settle()
    rank = torch.distributed.get_rank()
    batch = batch_of(rank)
    found = {}

    model = made(by_block)
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"optimizer": optimizer, "accumulate": True, "progress": False}
    counted = plan(model, batch, budget_gb=0.0047, **given)
    counted.apply()
    step(model, batch)
    step(model, batch)
    optimizer.step()
    before = held(*model.parameters(), *(p.grad for p in model.parameters()), *batch)
    before += held(*(t for s in optimizer.state.values() for t in s.values()))
    with tempfile.TemporaryDirectory() as folder:
        peak = peak_of(lambda: (step(model, batch), optimizer.step()), Path(folder)) + before
    found["accumulating"] = peak, counted.peak_bytes, counted.budget_bytes

    model = made(by_block)
    known = plan(model, batch, budget_gb=0.0044, progress=False)
    found["verified"] = known.verify()
    with tempfile.TemporaryDirectory() as folder:
        known.save(f"{folder}/plan.json")
        again = made(by_block)
        Plan.load(f"{folder}/plan.json").apply(again)
        step(again, batch)
        found["from the file"] = applied_plan(again).recipe == known.recipe

    late = made(lambda m: m)
    plan(late, batch, budget_gb=0.005, progress=False).apply()
    by_block(late).eval()
    with torch.no_grad():
        late(*batch)
    step(late.train(), batch)
    found["sharded late"] = list(map(torch.equal, *(here(p.grad for p in m.parameters()) for m in (again, late))))
    found["account"] = dict(applied_plan(late).account), held(*late.parameters())

    found["reduced later"] = {known: reduced_later(batch, known) for known in (True, False)}
    evaluated = made(mixed)
    plan(evaluated, budget_gb=0.005, progress=False).apply()
    step(evaluated, batch)
    with torch.no_grad():
        evaluated.eval()(*batch)
    step(evaluated.train(), batch)  # with the root's parameters gathered, in another data type
    found["plans"] = len(attached(evaluated).plans)
    return found


def reduced_later(batch, known):
    """The peak of the second of two microbatches of which the first leaves whole gradients, and what is warned of."""
    model = made(by_block)
    plan(model, batch if known else None, budget_gb=0.0047, progress=False).apply()
    with warnings.catch_warnings(record=True) as said, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always", PlanWarning)
        model.set_requires_gradient_sync(False)
        step(model, batch)
        model.set_requires_gradient_sync(True)
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        peak = peak_of(lambda: step(model, batch), Path(folder)) + held(*model.parameters(), *batch) + whole
    p = applied_plan(model)
    return peak, p.peak_bytes, p.budget_bytes, [str(w.message) for w in said if w.category is PlanWarning]


@pytest.mark.thorough
def test_training():
    for found in on_ranks(2, train_on):
        peak, predicted, budget = found["accumulating"]
        assert peak <= budget
        assert peak <= predicted
        assert predicted == pytest.approx(peak, rel=0.03)
        assert found["verified"].gradients_agree
        assert found["verified"].within_budget
        assert found["from the file"]
        assert all(found["sharded late"])
        account, shards = found["account"]
        assert account["parameters"] == shards
        assert account["parameters gathered for use"] > 0
        peak, _, budget, said = found["reduced later"][True]
        assert peak > budget
        assert len(said) == 1
        assert "set_requires_gradient_sync" in said[0]
        peak, predicted, budget, said = found["reduced later"][False]
        assert peak <= predicted <= budget
        assert predicted == pytest.approx(peak, rel=0.03)
        assert not said
        assert found["plans"] == 1


def refused():
    """What a rank is told where a model cannot be planned; nothing waits for another rank."""
    said = []
    for shard, options in (
        (by_block, {"mode": "eager"}),
        (by_block, {"shard": 2}),
        (lambda m: by_block(m, offload_policy=CPUOffloadPolicy(pin_memory=False)), {}),
        (lambda m: [fully_shard(layer) for layer in m.layers] and m, {}),
    ):
        with pytest.raises((OptionError, ModelError)) as error:
            plan(made(shard), batch_of(0), budget_gb=1, **options)
        said.append(str(error.value))
    if torch.distributed.get_rank() == 0:  # alone
        with pytest.raises(BatchError, match="does not accept the batch"):
            plan(made(by_block), (torch.zeros(3, 64), batch_of(0)[1]), budget_gb=1)
    inner = made(lambda m: m)
    plan(inner, budget_gb=1).apply()
    wrapped = FullyShardedDataParallel(inner, device_id=torch.device("cpu"))
    for refused in (lambda: plan(wrapped, batch_of(0), budget_gb=1), lambda: wrapped(*batch_of(0))):
        with pytest.raises(ModelError, match="in FullyShardedDataParallel"):
            refused()
    model = made(by_block)
    before = [type(m) for m in model.modules()], copy.copy(model._forward_pre_hooks)
    plan(model, batch_of(0), budget_gb=1)
    assert before == ([type(m) for m in model.modules()], model._forward_pre_hooks)
    return said


def test_refusals():
    for eager, shard, offload, roots in on_ranks(2, refused):
        assert eager.startswith("mode='eager' is for models on one device")
        assert shard.startswith("shard=2 is for models on one device")
        assert "CPUOffloadPolicy" in offload
        assert "none of them inside another" in roots
