"""The private parts of torch that training on several devices needs, on the torch that is installed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.compat import distributed as compat

pytestmark = pytest.mark.compat


@pytest.fixture
def mesh():
    """One of four ranks that do not communicate."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (4,))
    finally:
        dist.destroy_process_group()


def network():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def test_ddp_is_known_while_it_calls_the_model(mesh):
    model = network()
    ddp = DistributedDataParallel(model)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(compat.running_ddp()))
    assert compat.running_ddp() is None
    ddp(torch.ones(2, 8))
    assert seen == [ddp]
    assert compat.running_ddp() is None


def test_the_sizes_of_buckets_are_those_that_ddp_fills(mesh):
    for given, sizes in (({}, (2**20, 25 * 2**20)), ({"bucket_cap_mb": 2}, (2 * 2**20,) * 2)):
        assert compat.bucket_sizes(DistributedDataParallel(network(), **given)) == sizes


def test_ddp_on_a_mesh_marks_the_parameters_that_it_swaps(mesh):
    squared = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    model = distribute_module(network(), squared["parts"])
    assert not any(map(compat.swapped_by_ddp, model.parameters()))
    ddp = DistributedDataParallel(model, device_mesh=squared["copies"])
    assert all(map(compat.swapped_by_ddp, ddp.module.parameters()))


class Tracker(compat.QuietTracker):
    """Counts how often it is asked whether, or how, random ops communicate, which they need not."""

    asked = 0

    def __getattribute__(self, name):
        if "distribute_region" in name:
            type(self).asked += 1
        return super().__getattribute__(name)


def test_random_ops_on_a_mesh_ask_the_tracker(mesh):
    before, tracker = compat.rng_tracker(), Tracker()
    try:
        compat.set_rng_tracker(tracker)
        assert compat.rng_tracker() is tracker
        nn.functional.dropout(distribute_tensor(torch.ones(8), mesh, [Replicate()]))
        assert tracker.asked > 0
    finally:
        compat.set_rng_tracker(before)


def test_states_of_fully_shard(mesh):
    model, policy = network(), MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard([model[1], model[2]], mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[0].set_modules_to_backward_prefetch([model])
    first, pair, root = map(compat.state_of, (model[0], model[1], model))
    assert compat.state_of(model[2]) is pair
    assert list(compat.modules_of(pair)) == [model[1], model[2]]
    assert compat.prefetched(first) == ([pair], [root])
    assert compat.autocast_policy(first) == policy
    assert [compat.keeps_root_gathered(state) for state in (first, pair, root)] == [True, False, False]
    (group,), (other,) = map(compat.param_groups, (first, pair))
    assert compat.param_groups(root) == []  # its parameters are all in the other two
    assert [compat.reshards_after_forward(g) for g in (group, other)] == [True, True]
    assert [compat.reshards_to_smaller_mesh(g) for g in (group, other)] == [False, True]
    weight = group.fsdp_params[0]
    assert compat.mixed_precision(weight) == policy
    assert compat.mixed_precision(other.fsdp_params[0]).param_dtype is None
    assert compat.gathered_parameter(weight) is None
    assert isinstance(weight.sharded_param, DTensor)
    model(torch.ones(2, 8))
    assert compat.gathered_parameter(weight).shape == (8, 8)


def test_hooks_of_fully_shard_run_before_and_after_the_forward_pass(mesh):
    model = network()
    fully_shard(model, mesh=mesh)
    fully_shard_hooks = list(compat.forward_hooks(compat.state_of(model)))
    before = [hook for hook, runs_before in fully_shard_hooks if runs_before]
    after = [hook for hook, runs_before in fully_shard_hooks if not runs_before]
    assert before == list(model._forward_pre_hooks.values())
    assert after == list(model._forward_hooks.values())
    assert len(before) == len(after) == 1


@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16, None])
def test_gradients_wait_and_are_reduced_in_one_data_type(mesh, reduced):
    model = network()
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduced))
    (group,) = compat.param_groups(compat.state_of(model))
    weight = group.fsdp_params[0]
    assert not compat.has_unreduced(weight)
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    assert compat.has_unreduced(weight)
    waits = getattr(weight, "unsharded_accumulated_grad", None)
    waits = compat.gathered_parameter(weight).grad if waits is None else waits
    assert waits.dtype == compat.gradient_dtype(weight)
    seen = []
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    reduce = getattr(dist, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, lambda **given: (seen.append(given), reduce(**given))[1])
        model.set_requires_gradient_sync(True)
        model(torch.ones(2, 8)).sum().backward()
    assert not compat.has_unreduced(weight)
    assert [given["input"].dtype for given in seen] == [waits.dtype]
