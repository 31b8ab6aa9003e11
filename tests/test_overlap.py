"""DistributedDataParallel sends gradients while the planned backward pass still runs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from planner import plan

from .processes import on_ranks

WIDTH, CAP = 48, 0.005  # of a layer, whose weight takes 9 kB; of a bucket in MB
WRAPPINGS = (
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
)


class Net(nn.Module):
    """Layers, of which the first and the last share a weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(5)))
        self.layers[4][0].weight = self.layers[0][0].weight

    def forward(self, x):
        return self.layers(x).relu()


def loss_fn(output):
    return output.square().sum()


def planned():
    model = Net()
    plan(model, budget_gb=1, loss_fn=loss_fn, progress=False).apply()
    return model


def trained(model, **wrapping):
    """Gradients of three steps, of which the second has two batches, one without communication."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP, **wrapping)
    torch.manual_seed(dist.get_rank())
    found = []
    for step in range(3):
        if step == 1 and not ddp.static_graph:
            with ddp.no_sync():
                loss_fn(ddp(torch.randn(4, WIDTH))).backward()
        loss_fn(ddp(torch.randn(4, WIDTH))).backward()
        found += [p.grad.clone() for p in model.parameters()]
        ddp.zero_grad()
    return found


def order(model):
    """The ops of the backward pass of a third step, and where buckets are sent among them."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP)

    def hook(_, bucket):
        with record_function("sent"):
            work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        loss_fn(ddp(torch.ones(4, WIDTH))).backward()
    loss = loss_fn(ddp(torch.ones(4, WIDTH)))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss.backward()
    found = sorted(profiler.events(), key=lambda e: e.time_range.start)
    return [e.name for e in found if e.name in ("sent", "aten::mm")]


def stepped(model):
    """Parameters after two steps, each parameter's in the backward pass, as soon as its gradient is there."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP)
    torch.manual_seed(0)

    @torch.no_grad()
    def step(p):
        p -= 0.01 * p.grad
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    for _ in range(2):
        with ddp.no_sync():
            loss_fn(ddp(torch.ones(4, WIDTH))).backward()
    for handle in handles:
        handle.remove()
    return [p.detach().clone() for p in model.parameters()]


def others(model):
    """Gradients by other ways through a step: a graph that is kept, some gradients only, and after an error."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP)
    names = ("layers.0.0.weight", "layers.2.0.weight", "layers.3.0.bias")
    asked = [model.get_parameter(name) for name in names]
    torch.manual_seed(0)
    with ddp.no_sync():
        loss = loss_fn(ddp(torch.ones(4, WIDTH)))
        loss.backward(retain_graph=True)
        loss.backward()
        found = [*torch.autograd.grad(loss_fn(ddp(torch.ones(4, WIDTH))), asked)]
        found += torch.autograd.grad(loss_fn(ddp(torch.ones(4, WIDTH))), asked[2:])

        def fails(gradient):
            raise ValueError("planted")

        handle = asked[1].register_hook(fails)
        with pytest.raises(ValueError, match="planted"):
            loss_fn(ddp(torch.ones(4, WIDTH))).backward()
        handle.remove()
        ddp.zero_grad()
        loss_fn(ddp(torch.ones(4, WIDTH))).backward()
    return [*found, *(p.grad.clone() for p in model.parameters())]


def compared():
    """What differs from the model without a plan, and the order of the ops."""
    torch.set_num_threads(1)
    usual, model = Net(), planned()
    differ = [w for w in WRAPPINGS if not all(map(torch.equal, trained(usual, **w), trained(model, **w)))]
    differ += [f for f in (others, stepped) if not all(map(torch.equal, f(usual), f(model)))]
    return [str(each) for each in differ], order(model)


def test_gradients_are_sent_as_they_are_made_and_are_those_without_a_plan():
    for differ, ops in on_ranks(2, compared):
        assert differ == []
        assert ops.count("sent") > 2
        assert ops[: ops.index("sent")].count("aten::mm") < ops.count("aten::mm") / 2
        assert ops[-1] == "sent"
