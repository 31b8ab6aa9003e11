"""Steps that are hard to capture, or hard to run again. To plan one right or to refuse it in words: both will do."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from . import text, vision
from .case import Case, images, noise, tokens
from .plain import Model, mlp


def _case(forward: Any, batch: Any = None, **parts: Any) -> Case:
    return Case(Model(forward, **parts).train(), noise(256, 128) if batch is None else batch)


# Graph breaks


def graph_breaks() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        print(end="")
        return self.third(x).square().mean()

    second = nn.Sequential(nn.Linear(128, 200), nn.Tanh(), nn.Linear(200, 128))
    return _case(forward, first=mlp(), second=second, third=mlp(layers=3))


def graph_break_skipped_over() -> Case:
    """What is made before the break is used after it, twice."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        twice = h * 2
        torch._dynamo.graph_break()
        return (self.second(h) * twice + h).square().mean()

    return _case(forward, first=mlp(), second=nn.Sequential(nn.Linear(128, 200), nn.Tanh(), nn.Linear(200, 128)))


class _BreakingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + self.layers(x)


def graph_break_in_every_block() -> Case:
    return Case(nn.Sequential(*[_BreakingBlock() for _ in range(4)]).train(), noise(256, 128), _square)


def _square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class _OutsideCompiler(nn.Module):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * torch.sigmoid(x) + x.exp().log1p()


def eager_arithmetic() -> Case:
    return Case(nn.Sequential(mlp(), _OutsideCompiler(), mlp(layers=3)).train(), noise(256, 128), _square)


def module_called_twice_with_a_break() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x)).square().mean()

    return _case(forward, block=_BreakingBlock())


def logging() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        hf.logging.get_logger("survey").warning_once("said once")
        return self.second(x).square().mean()

    return _case(forward, first=mlp(), second=mlp())


# What depends on data


def branch_on_a_value() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.mean().item() > -1e9:
            x = self.second(x)
        return x.square().mean()

    return _case(forward, first=mlp(), second=nn.Linear(128, 64))


def shape_from_data() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x[x.sum(-1) > 0]).square().mean()

    return _case(forward, first=mlp(), second=mlp())


def nan_check() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return self.second(x).square().mean()

    return _case(forward, first=mlp(), second=mlp())


def layer_drop_at_zero() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            skip = torch.rand([]) < 0.0
            if not skip:
                x = x + layer(x)
        return x.square().mean()

    return _case(forward, layers=[mlp(layers=2) for _ in range(3)])


def layer_drop() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) > 0.3:
                x = x + layer(x)
        return (x * self.layers[0][0].weight.mean()).square().mean()

    return _case(forward, layers=[mlp(layers=2) for _ in range(3)])


def python_randomness() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() > 0.3:
                x = x + layer(x)
        return (x * random.uniform(0.9, 1.1) * self.layers[0][0].weight.mean()).square().mean()

    return _case(forward, layers=[mlp(layers=1) for _ in range(4)])


class _Counting(nn.Module):
    def __init__(self, used: bool) -> None:
        super().__init__()
        self.layers = mlp()
        self.used = used
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = self.layers(x).square().mean()
        return loss / self.calls if self.used else loss


def call_counter() -> Case:
    return Case(_Counting(False).train(), noise(256, 128))


def call_counter_in_the_loss() -> Case:
    return Case(_Counting(True).train(), noise(256, 128))


# What is written over


def input_written() -> Case:
    def forward(self: Any, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y = self.layers(x * state.mean())
        state.mul_(0.9).add_(y.detach().mean(0))
        return y.square().mean() + (y * state).mean()

    return _case(forward, (noise(256, 128), torch.ones(128)), layers=mlp())


class _Averaging(nn.Module):
    """Reads a buffer, updates it from the activations, and reads it again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = mlp(), mlp(), how
        self.register_buffer("average", torch.ones(128))
        self.average: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(torch.tanh(x - self.average))
        if self.how == "in place":
            self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        elif self.how == "through data":
            self.average.data.mul_(0.5)
        elif self.how == "assigned":
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        elif self.how == "after a break":
            torch._dynamo.graph_break()
            with torch.no_grad():
                self.average.add_(y.mean(0))
        return self.second(torch.tanh(y * self.average)).square().mean()


def buffer_written() -> Case:
    return Case(_Averaging("in place").train(), noise(256, 128))


def buffer_assigned() -> Case:
    return Case(_Averaging("assigned").train(), noise(256, 128))


def buffer_written_through_data() -> Case:
    return Case(_Averaging("through data").train(), noise(256, 128))


def buffer_written_after_a_break() -> Case:
    return Case(_Averaging("after a break").train(), noise(256, 128))


class _Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp()
        both = torch.ones(2, 128)
        self.register_buffer("row", both[0])
        self.register_buffer("both", both)
        self.row: torch.Tensor
        self.both: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(torch.tanh(x + self.row)))
        self.both.mul_(0.9).add_(h.detach().mean(0) * 0.1 + 1)
        return torch.tanh(self.second(h) + self.row + self.both[0]).square().mean()


def overlapping_buffers() -> Case:
    return Case(_Overlapping().train(), noise(256, 128))


class _Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.scale = nn.Parameter(torch.ones(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.clamp_(0.1, 0.9)
        return (self.layers(torch.tanh(x * self.scale)) * self.scale).square().mean()


def parameter_clamped() -> Case:
    return Case(_Clamped().train(), noise(256, 128))


def in_place_everywhere() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(x)
            h = h.add_(1).clone().mul_(0.5)
            h = F.dropout(F.relu_(h).clone(), 0.1, self.training, inplace=True).clone()
            h[:, :3].mul_(1.5)
            h[:, 5] = h[:, 6] * 2
            x = h
        return x.square().mean()

    return _case(forward, layers=[nn.Linear(128, 128) for _ in range(4)])


def outputs_that_share_storage() -> Case:
    def forward(self: Any, x: torch.Tensor) -> Any:
        h = self.first(x)
        half = h[:, :64]
        half.mul_(2)
        return {"loss": self.second(h).square().mean(), "whole": h, "half": half, "turned": h.t()}

    return _case(forward, first=mlp(), second=mlp())


def batch_norm_used_four_times() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = F.dropout(F.gelu(self.norm(self.convolution(x))), 0.1, self.training) + x
        return x.square().mean()

    return _case(forward, (images(8, 32),), convolution=nn.Conv2d(3, 3, 3, padding=1), norm=nn.BatchNorm2d(3))


def batch_norm_averaging_all() -> Case:
    """`momentum=None` counts the batches, and divides by the count."""
    return Case(
        nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16, momentum=None), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()
        ).train(),
        images(8, 32),
        _square,
    )


def batch_norm_across_a_break() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.first(x)))
        torch._dynamo.graph_break()
        return self.second(F.gelu(self.norm(x))).square().mean()

    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
    return _case(forward, (images(8, 32),), first=first, norm=nn.BatchNorm2d(8), second=second)


def embedding_renormalised() -> Case:
    """`max_norm` writes into the weight in the forward pass."""
    return Case(nn.Sequential(nn.Embedding(256, 64, max_norm=1.0), mlp(64)).train(), tokens(4, 64), _square)


# Autograd


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(2 * x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(2 * x)
        return gradients[0] * (s + 2 * x * s * (1 - s))


class _NoisyGate(torch.autograd.Function):
    """Draws in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mask = (torch.rand_like(x) > 0.1).to(x.dtype)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (mask,) = ctx.saved_tensors
        return gradients[0] * mask + 0.01 * torch.randn_like(gradients[0])


class _NumpyGate(torch.autograd.Function):
    """Leaves torch on the way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gradients[0].numpy() * 2)


def _through(function: Any) -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(function.apply(layer(x)))
        return x.square().mean()

    return _case(forward, layers=[nn.Linear(128, 128) for _ in range(4)])


def autograd_function() -> Case:
    return _through(_Gate)


def autograd_function_that_draws() -> Case:
    return _through(_NoisyGate)


def autograd_function_in_numpy() -> Case:
    return _through(_NumpyGate)


def double_backward() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        return slope.square().mean()

    return _case(forward, layers=mlp(rate=0.0))


def functional_transforms() -> Case:
    """A gradient for every sample, by torch.func."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda one: self.layers(one).sum()))(x)
        return slope.square().mean()

    return _case(forward, layers=mlp(rate=0.0))


def forward_hooks() -> Case:
    model = mlp()
    model[3].register_forward_hook(lambda module, given, output: output * 1.5)
    return Case(model.train(), noise(256, 128), _square)


def backward_hooks() -> Case:
    model = mlp()
    model[6].register_full_backward_hook(lambda module, ours, theirs: tuple(None if g is None else g * 2 for g in ours))
    return Case(model.train(), noise(256, 128), _square)


def tensor_hook() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 3)
        return self.second(h).square().mean()

    return _case(forward, first=mlp(), second=mlp())


def parameter_hook() -> Case:
    model = mlp()
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient * 0.5)
    return Case(model.train(), noise(256, 128), _square)


def gradient_of_the_input() -> Case:
    return Case(mlp().train(), noise(256, 128).requires_grad_(), _square)


def part_without_gradients() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return F.mse_loss(self.student(x), target)

    return _case(forward, student=mlp(), teacher=mlp())


def several_outputs_in_the_loss() -> Case:
    def forward(self: Any, x: torch.Tensor) -> Any:
        h = self.first(x)
        return {"h": h, "k": self.second(h), "view": h.view(-1, 64), "x": x}

    return Case(
        Model(forward, first=mlp(), second=mlp()).train(),
        (noise(256, 128),),
        lambda o: o["h"].square().mean() + o["k"].mean() + o["view"].sin().mean(),
    )


# Parameters


def frozen_parts() -> Case:
    case = text.bert()
    for part in (case.model.bert.embeddings, case.model.bert.encoder.layer[0]):
        part.requires_grad_(False)
    return case


def frozen_backbone() -> Case:
    case = vision.segformer()
    case.model.segformer.requires_grad_(False)
    return case


def unused_parameters() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).square().mean()

    return _case(forward, used=mlp(), unused=nn.Linear(7, 7))


def tied_weights() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(self.body(self.embed(x)), self.embed.weight).flatten(0, 1), x.flatten())

    return _case(forward, (tokens(4, 64),), embed=nn.Embedding(256, 64), body=mlp(64))


def sparse_gradients() -> Case:
    return Case(nn.Sequential(nn.Embedding(256, 64, sparse=True), mlp(64)).train(), tokens(4, 64), _square)


def lora() -> Case:
    import peft

    case = text.llama()
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return Case(peft.get_peft_model(case.model, config).train(), case.batch)


# Modes


def autocast_inside() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.second(self.norm(self.first(x)))
        return x.float().square().mean()

    return _case(forward, first=mlp(), norm=nn.LayerNorm(128), second=mlp())


def autocast_convolutions() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x).float().square().mean()

    layers = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()
    )
    return _case(forward, (images(8, 32),), layers=layers)


def bfloat16_llama() -> Case:
    case = text.llama()
    return Case(case.model.to(torch.bfloat16), case.batch)


def own_checkpoint() -> Case:
    return _checkpointed(False)


def own_checkpoint_reentrant() -> Case:
    return _checkpointed(True)


def _checkpointed(reentrant: bool) -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=reentrant)
        return x.square().mean()

    return _case(forward, stem=nn.Linear(128, 128), blocks=[mlp(layers=2) for _ in range(3)])


def gradient_checkpointing_enable() -> Case:
    case = text.llama()
    case.model.gradient_checkpointing_enable()
    return case


def experts_in_batches() -> Case:
    case = text.mixtral()
    case.model.set_experts_implementation("batched_mm")
    return case


def experts_one_by_one() -> Case:
    case = text.mixtral()
    case.model.set_experts_implementation("eager")
    return case


def sparse_attention() -> Case:
    config = hf.BigBirdConfig(**text.BERT, attention_type="block_sparse", block_size=8, num_random_blocks=2)
    return Case(hf.BigBirdForMaskedLM(config).train(), {"input_ids": tokens(4), "labels": tokens(4)})


def keyword_and_cache() -> Case:
    """A decoder whose output holds a cache of keys and values."""
    case = text.llama()
    return Case(case.model, {**case.batch, "use_cache": True})


CASES = (
    graph_breaks, graph_break_skipped_over, graph_break_in_every_block, eager_arithmetic,
    module_called_twice_with_a_break, logging, branch_on_a_value, shape_from_data, nan_check, layer_drop_at_zero,
    layer_drop, python_randomness, call_counter, call_counter_in_the_loss, input_written, buffer_written,
    buffer_assigned, buffer_written_through_data, buffer_written_after_a_break, overlapping_buffers,
    parameter_clamped, in_place_everywhere, outputs_that_share_storage, batch_norm_used_four_times,
    batch_norm_averaging_all, batch_norm_across_a_break, embedding_renormalised, autograd_function,
    autograd_function_that_draws, autograd_function_in_numpy, double_backward, functional_transforms, forward_hooks,
    backward_hooks, tensor_hook, parameter_hook, gradient_of_the_input, part_without_gradients,
    several_outputs_in_the_loss, frozen_parts, frozen_backbone, unused_parameters, tied_weights, sparse_gradients,
    lora, autocast_inside, autocast_convolutions, bfloat16_llama, own_checkpoint,
    own_checkpoint_reentrant, gradient_checkpointing_enable, experts_in_batches, experts_one_by_one, sparse_attention,
    keyword_and_cache,
)  # fmt: skip
