"""Training loops as people write them, small; `python -m tests.loops [name ...]` prints what comes of each by a plan.

A loop is given `put`, which puts a plan on a model and returns it, and `ended`, which it calls with its losses at the
end of each step. Each draws a new batch per step, as a DataLoader does.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from .loop_harness import STEPS, Ended, Loop, Put, differences, judged
from .problems import shorten

VOCABULARY = 64


def mlp(width: int = 64, depth: int = 4, out: int = 64) -> nn.Sequential:
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(width, out))


# Plain modules


def mlp_adamw_after(put: Put, ended: Ended) -> None:
    adamw_after(mlp(), 512, put, ended)


def adamw_after(model: nn.Module, rows: int, put: Put, ended: Ended) -> None:
    adamw(put(model), rows, ended)


def adamw(model: nn.Module, rows: int, ended: Ended) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(rows, 64)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


class RefersToItself(nn.Module):
    """What is copied of it, as to capture it, stays until Python's collector comes."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(depth=6)
        self.every = {"itself": self}

    def forward(self, x):
        return self.layers(x)


def microbatches_of_a_cycle(put: Put, ended: Ended) -> None:
    """Microbatches of a model that refers to itself."""
    model = put(RefersToItself())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        for _ in range(2):
            loss = F.mse_loss(model(torch.randn(256, 64)), torch.randn(256, 64)) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def list_of_microbatches(put: Put, ended: Ended) -> None:
    """Those of a step are there before its first call, as in the Trainer; the first call shows no other one's."""
    model = put(mlp(256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        microbatches = [(torch.randn(512, 256), torch.randint(64, (512,))) for _ in range(4)]
        for x, y in microbatches:
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def head_alone_trained(put: Put, ended: Ended) -> None:
    """Fine-tuning by an optimizer of the head's parameters, where nobody has frozen the body: its gradients add up."""
    model = put(nn.Sequential(mlp(depth=3), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)))
    optimizer = torch.optim.AdamW(model[1:].parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(256, 64), torch.randint(8, (256,))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def head_alone_accumulates(put: Put, ended: Ended) -> None:
    """The same by microbatches, which add to the gradients of both."""
    model = put(nn.Sequential(mlp(depth=3), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)))
    optimizer = torch.optim.AdamW(model[1:].parameters(), lr=1e-3)
    for _ in range(STEPS):
        for _ in range(2):
            loss = F.cross_entropy(model(torch.randn(256, 64)), torch.randint(8, (256,))) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def mlp_adamw_before(put: Put, ended: Ended) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    put(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = torch.randn(512, 64), torch.randn(512, 64)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        ended(loss)


def in_a_thread(put: Put, ended: Ended) -> None:
    """As Ray's workers train."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(mlp_adamw_before, put, ended).result()


def new_head(put: Put, ended: Ended) -> None:
    """The last layer and the optimizer are replaced while the model trains: nothing of them stays."""
    model = put(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        if step == 2:
            model[-1] = nn.Linear(64, 64)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loss = model(torch.randn(512, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def failed_at_first(put: Put, ended: Ended) -> None:
    """The first backward pass ends in an error, as one that is out of memory, and the loop goes on."""
    model = put(mlp())

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    y = model(torch.randn(512, 64))
    y.register_hook(fail)
    with suppress(RuntimeError):
        y.mean().backward()
    del y
    adamw(model, 512, ended)


def first_batch_kept(put: Put, ended: Ended) -> None:
    """And the next is there early, as by accelerate's loader that dispatches batches to several processes."""
    model = put(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = ahead = torch.randn(512, 64)
    for _ in range(STEPS):
        x, ahead = ahead, torch.randn(512, 64)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)
    del first


def manual_sgd(put: Put, ended: Ended) -> None:
    """No optimizer object."""
    model = put(mlp())
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randn(512, 64)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        ended(loss)


def phases(rows: int, put: Put, ended: Ended) -> None:
    """One body for training and evaluation, as in torch's tutorial on transfer learning, and the best weights kept.

    The evaluation's output and loss are there until the next training step binds their names.
    """
    model = put(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    best, lowest = copy.deepcopy(model.state_dict()), float("inf")
    for _ in range(STEPS):
        for phase in ("train", "val"):
            model.train(phase == "train")
            inputs = torch.randn(512 if phase == "train" else rows, 64)
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                outputs = model(inputs)
                loss = F.mse_loss(outputs, inputs)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            if phase == "val" and loss.item() < lowest:
                best, lowest = copy.deepcopy(model.state_dict()), loss.item()
        ended(loss.detach())
    del best


class Tagger(nn.Module):
    """Emissions, and a method that makes their loss by parameters that the call does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.transitions = mlp(out=12), nn.Parameter(torch.zeros(12, 12))

    def forward(self, x):
        return self.encoder(x)

    def loss(self, emissions, tags):
        score = emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            score = torch.logsumexp(score[:, :, None] + self.transitions, 1) + emissions[:, t]
        found = emissions.gather(2, tags[..., None]).sum((1, 2)) + self.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        return (score.logsumexp(1) - found).mean()


def loss_by_a_method_of_the_output(put: Put, ended: Ended) -> None:
    """The method is looked up before the model is called."""
    model = put(Tagger())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, tags = torch.randn(32, 16, 64), torch.randint(12, (32, 16))
        loss = model.loss(model(x), tags)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class Numbered(nn.Module):
    """Is told which batch of which epoch comes, and goes by neither."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, batch, index, *, epoch):
        return self.layers(batch["x"])

    def loss(self, x, index):
        return F.mse_loss(self.layers(x), x)


def numbered_batches(methods: bool, put: Put, ended: Ended) -> None:
    model = put(Numbered())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(STEPS):
        x = torch.randn(256, 64)
        loss = model.loss(x, i) if methods else F.mse_loss(model({"x": x}, i, epoch=i / STEPS), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class Corrupted(nn.Module):
    """Draws a mask of its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(), mlp()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code * (torch.rand(code.shape, generator=self.generator) > 0.2))


def own_generators(put: Put, ended: Ended) -> None:
    """The loop draws its batches and its noise, and the model its masks, of generators that are not torch's own."""
    model, generator = put(Corrupted()), torch.Generator().manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, noise = torch.randn(512, 64, generator=generator), torch.randn(512, 64, generator=generator)
        weights = torch.rand(512, 1, generator=generator)
        loss = (weights * (model(x + noise) - torch.randn(512, 64, generator=generator))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def queue_of_keys(put: Put, ended: Ended) -> None:
    """Momentum contrast: the loss reads a queue that is written into after the step."""
    model, encoder = put(mlp()), mlp().requires_grad_(False)
    queue = F.normalize(torch.randn(1024, 64), dim=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x = torch.randn(128, 64)
        q = F.normalize(model(x), dim=1)
        with torch.no_grad():
            for p, own in zip(encoder.parameters(), model.parameters(), strict=True):
                p.lerp_(own, 0.01)
            k = F.normalize(encoder(x + 0.1), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.t()], dim=1)
        loss = F.cross_entropy(logits / 0.1, torch.zeros(128, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue[step * 128 : (step + 1) * 128] = k
        ended(loss)


class Momentum:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters) -> None:
        self.parameters = list(parameters)
        self.means = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for p, mean in zip(self.parameters, self.means, strict=True):
            p -= 0.05 * mean.mul_(0.9).add_(p.grad)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


def own_optimizer(put: Put, ended: Ended) -> None:
    model = put(mlp(out=8))
    optimizer = Momentum(model.parameters())
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randint(8, (512,))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def grad_without_backward(put: Put, ended: Ended) -> None:
    """`torch.autograd.grad` for the parameters, as functional code has it."""
    model = put(mlp())
    parameters = list(model.parameters())
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randn(512, 64)
        loss = F.mse_loss(model(x), y)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.sub_(g, alpha=0.1)
        ended(loss)


def closure(put: Put, ended: Ended) -> None:
    model = put(mlp(depth=6))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randn(512, 64)

        def again(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        ended(optimizer.step(again))


def zero_grad_before_backward(put: Put, ended: Ended) -> None:
    model = put(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randn(512, 64)
        output = model(x)
        loss = F.mse_loss(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def optimizer_in_backward(put: Put, ended: Ended) -> None:
    model = put(mlp())
    optimizers = {p: torch.optim.Adam([p], lr=1e-3, foreach=False) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randn(512, 64)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        ended(loss)


def momentum_in_backward(put: Put, ended: Ended) -> None:
    """An optimizer by hand, whose state only hooks hold, which make it in the first backward pass."""
    model, momentum = put(mlp(256)), {}

    def update(p: torch.Tensor) -> None:
        with torch.no_grad():
            p.sub_(momentum.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=1e-2)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(torch.randn(256, 256)), torch.randint(8, (256,)))
        loss.backward()
        ended(loss)


class Masks:
    """Hold for each parameter which of its entries are trained."""

    def __init__(self, model: nn.Module) -> None:
        self.of = {name: torch.rand_like(p) > 0.5 for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.register_hook(partial(self.masked, name))

    def masked(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.of[name]


def masks_in_hooks(put: Put, ended: Ended) -> None:
    model = put(mlp(256))
    Masks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(torch.randn(256, 256)), torch.randint(8, (256,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def two_optimizers(put: Put, ended: Ended) -> None:
    model = put(mlp(out=8))
    body = torch.optim.AdamW(model[:-1].parameters(), lr=1e-3)
    head = torch.optim.SGD(model[-1].parameters(), lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(body, STEPS)
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randint(8, (512,))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in (body, head):
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        ended(loss)


def optimizer_each_epoch(put: Put, ended: Ended) -> None:
    """An optimizer takes the place of the one before, with another learning rate and no state."""
    model = put(mlp())
    for epoch in range(STEPS):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * 0.9**epoch)
        for _ in range(2):
            x = torch.randn(512, 64)
            loss = F.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ended(loss)


def computed_parameters(put: Put, ended: Ended) -> None:
    """The model is called with tensors that are computed from its parameters, as for noise on weights."""
    model = put(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        computed = {name: p * 0.99 for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, computed, (torch.randn(512, 64),)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def ema(put: Put, ended: Ended) -> None:
    model = put(nn.Sequential(mlp(), nn.BatchNorm1d(64)))
    averaged = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randn(512, 64)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
            ended([loss, F.mse_loss(averaged(x[:32]), y[:32])])


def averaged_later(put: Put, ended: Ended) -> None:
    """Stochastic weight averaging, whose copy of the model is there from the beginning."""
    model = put(mlp(128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for step in range(STEPS):
        x, y = torch.randn(256, 128), torch.randint(8, (256,))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= 3:
            averaged.update_parameters(model)
        ended(loss)


def backward_twice(put: Put, ended: Ended) -> None:
    model = put(mlp(out=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x = torch.randn(512, 64)
        output = model(x)
        first, second = output[:, 0].square().mean(), output[:, 1].abs().mean()
        optimizer.zero_grad()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        ended([first, second])


def gradient_penalty(put: Put, ended: Ended) -> None:
    critic = put(mlp(out=1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)
    for _ in range(STEPS):
        x = torch.randn(256, 64, requires_grad=True)
        score = critic(x).mean()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        loss = score + 10 * (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.left, self.right = nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, x):
        shared = self.body(x)
        return self.left(shared), self.right(shared)


def two_heads_in_turn(put: Put, ended: Ended) -> None:
    model = put(TwoHeads())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x = torch.randn(512, 64)
        classes, value = model(x)
        if step % 2 == 0:
            loss = F.cross_entropy(classes, torch.randint(10, (512,)))
        else:
            loss = F.mse_loss(value[:, 0], torch.randn(512))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class TrainsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def fit(self, ended: Ended) -> None:
        self.minimize(self.encode, ended)

    def minimize(self, function: Callable[[torch.Tensor], torch.Tensor], ended: Ended) -> None:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        for _ in range(STEPS):
            loss = function(torch.randn(512, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ended(loss)


def trains_itself(put: Put, ended: Ended) -> None:
    """The loop is in a method of the model, which only another one of its methods runs."""
    put(TrainsItself()).fit(ended)


def evaluated_by_the_same_names(put: Put, ended: Ended) -> None:
    """What an evaluation returns takes the place of the last step's outputs, and the next step's takes its place."""
    model = put(mlp(out=512))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model.train()
        for _ in range(STEPS // 2 + 1):
            x = torch.randn(512, 64)
            y = model(x)
            loss = y.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ended(loss)
        model.eval()
        with torch.no_grad():
            x = torch.randn(512, 64)
            y = model(x)


class Caching(nn.Module):
    """Returns its loss and what its layers made, as transformers' encoders with decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(mlp(out=64) for _ in range(2)), nn.Linear(64, 256)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        made = [x := layer(x) for layer in self.layers]
        logits = self.head(x)
        cache = {"decoder": {"layers": [{"states": {"keys": each}} for each in made]}}
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "cache": cache}


def evaluated_each_second_step(put: Put, ended: Ended) -> None:
    """What the evaluation returned is there in the next step's forward pass, and gone as that returns."""
    model = put(Caching())
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(STEPS):
        outputs = model(torch.randn(512, 64), torch.randint(256, (512,)))
        loss = outputs["loss"] / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 1:
            model.eval()
            with torch.no_grad():
                outputs = model(torch.randn(512, 64), torch.randint(256, (512,)))
            model.train()
        ended(loss)


class Cell(nn.Module):
    """A step of a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.next = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.next(torch.cat([x, state], 1))) + state


class PackedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(VOCABULARY, 32), nn.GRU(32, 32, batch_first=True, bidirectional=True)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.table(words), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0]


class OfPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        convolutions = [layer for _ in range(6) for layer in (nn.Conv1d(64, 64, 3, padding=1), nn.GELU())]
        self.encoder, self.after, self.head = PackedEncoder(), nn.Sequential(*convolutions), nn.Linear(64, 4)

    def forward(self, words, lengths):
        return self.head(self.after(self.encoder(words, lengths).transpose(1, 2)).amax(2))


def packed(put: Put, ended: Ended) -> None:
    """Sequences of other lengths in each batch, packed for a recurrent layer."""
    model = put(OfPacked())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        words, lengths = torch.randint(VOCABULARY, (128, 12)), torch.randint(6, 13, (128,))
        lengths[0] = 12
        loss = F.cross_entropy(model(words, lengths), torch.randint(4, (128,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


class Carried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.GRU(16, 32, 2, batch_first=True), nn.Linear(32, 16)

    def forward(self, x, state=None):
        y, state = self.layers(x, state)
        return self.head(y), state


def carried_state(put: Put, ended: Ended) -> None:
    """Parts of a sequence one after the other, each with the state that the last one left, and one backward pass: names
    hold what the last call returned.
    """
    model = put(Carried())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        state, losses = None, []
        for part in torch.randn(16, 60, 16).chunk(3, 1):
            y, state = model(part, state)
            losses.append(F.mse_loss(y, part))
        loss = sum(losses)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def similar_views(put: Put, ended: Ended) -> None:
    """Two calls under a cosine: the loss reads both outputs until its backward pass, and no variable holds them."""
    model = put(tanh_layers())
    two_views(model, lambda a, b: 1 - F.cosine_similarity(model(a), model(b)).mean(), ended)


def normalized_views(put: Put, ended: Ended) -> None:
    """The same, with each output normalized as it comes: the loss lets go of that of the second call first."""
    model = put(tanh_layers())
    two_views(model, lambda a, b: -(F.normalize(model(a)) * F.normalize(model(b))).sum(-1).mean(), ended)


def tanh_layers() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())])


def two_views(model: nn.Module, loss_of: Callable[..., torch.Tensor], ended: Ended) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        loss = loss_of(torch.randn(2048, 64), torch.randn(2048, 64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def actor_of_a_critic(put: Put, ended: Ended) -> None:
    """The critic's gradients of its own step are there in the actor's, which adds to them."""
    torch.manual_seed(0)
    actor, critic = (
        nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs))
        for inputs, outputs in ((16, 4), (20, 1))
    )
    actor = put(actor)
    optimizers = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
    for _ in range(STEPS):
        seen, action, after = torch.randn(1024, 16), torch.randn(1024, 4), torch.randn(1024, 16)
        with torch.no_grad():
            target = critic(torch.cat([after, actor(after).tanh()], 1)) + 1
        optimizers[1].zero_grad()
        F.mse_loss(critic(torch.cat([seen, action], 1)), target).backward()
        optimizers[1].step()
        loss = -critic(torch.cat([seen, actor(seen).tanh()], 1)).mean()
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        ended(loss)


def actor_and_critic_with_a_target(put: Put, ended: Ended) -> None:
    """Both are planned: the critic's first plan does not count its target, and takes what is left of the budget."""
    torch.manual_seed(0)
    critic, actor = mlp(depth=3, out=1), mlp(depth=3)
    target = copy.deepcopy(critic).requires_grad_(False)
    critic, actor = put(critic), put(actor)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (critic, actor)]
    for _ in range(STEPS):
        x = torch.randn(256, 64)
        with torch.no_grad():
            wanted = target(x) + 1
        optimizers[0].zero_grad()
        F.mse_loss(critic(x), wanted).backward()
        optimizers[0].step()
        loss = -critic(actor(x).tanh()).mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                old.lerp_(new, 0.01)
        ended(loss)


class EncodesByName(nn.Module):
    """An encoder that the loop calls by its name, and that keeps its means and deviations, of which a loss is made."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.deviation = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(128, 64)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x).relu()
        self.mu, self.log = self.mean(h), self.deviation(h)
        return self.mu + torch.randn_like(self.log) * self.log.exp()

    def divergence(self) -> torch.Tensor:
        return -0.5 * (1 + self.log - self.mu**2 - self.log.exp() ** 2).sum(1).mean()


def encoded_by_name(put: Put, ended: Ended) -> None:
    model = put(EncodesByName())
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(2000, 64)
    for _ in range(STEPS):
        optimizer.zero_grad()
        z = model.encode(x)
        loss = F.mse_loss(z, x) + model.divergence() / 2000
        loss.backward()
        optimizer.step()
        ended(loss)


def one_for_two_modules(put: Put, ended: Ended) -> None:
    """What the loop computes of one module's result goes into two others."""
    model = put(EncodesByName())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        x = torch.randn(2000, 64)
        h = model.body(x).relu()
        loss = F.mse_loss(model.mean(h), x) + model.deviation(h).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class KeepsFeatures(nn.Module):
    """Keeps what its layers return, some of it in the graph that takes it, some for the next one."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.first, self.body, self.last = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 64)

    def forward(self, x):
        self.kept = [F.gelu(self.first(x))]
        if self.apart:
            torch._dynamo.graph_break()
        return self.last(F.gelu(self.body(self.kept[0])))


def keeps_features(put: Put, ended: Ended, *, apart: bool = False, sparse: float = 0) -> None:
    """Features are kept to look at them, or for a penalty on how many are active."""
    model = put(KeepsFeatures(apart=apart))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(4000, 64)
    for _ in range(STEPS):
        loss = F.mse_loss(model(x), x)
        if sparse:
            loss = loss + sparse * sum(each.abs().mean() for each in model.kept)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(model.kept[0].detach().mean()) < 1  # which is no part of the loss
        ended(loss)


class Lookahead:
    """Slow weights beside those that an optimizer steps; every second step, the weights become these.

    Args:
        base: the optimizer.
        at_once: whether the slow weights are there from the start, in lists; else each comes to the state as it is
            first needed, as in timm.
    """

    def __init__(self, base: torch.optim.Optimizer, *, at_once: bool) -> None:
        self.base, self.steps = base, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in base.param_groups] if at_once else None

    def _slow(self, group: int, at: int, p: torch.Tensor) -> torch.Tensor:
        if self.slow is not None:
            return self.slow[group][at]
        state = self.base.state[p]
        return state["slow"] if "slow" in state else state.setdefault("slow", p.detach().clone())

    @torch.no_grad()
    def step(self) -> None:
        self.base.step()
        self.steps += 1
        if self.steps % 2:
            return
        for at, group in enumerate(self.base.param_groups):
            for i, p in enumerate(group["params"]):
                p.copy_(self._slow(at, i, p).lerp_(p, 0.5))


def lookahead(put: Put, ended: Ended, *, at_once: bool = True) -> None:
    model = put(mlp(width=256))
    optimizer = Lookahead(torch.optim.Adam(model.parameters()), at_once=at_once)
    for _ in range(STEPS):
        loss = model(torch.randn(512, 256)).square().mean()
        model.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class InParts(nn.Module):
    """Returns parts of one tensor, as an encoder does its means and variances, or a transformer its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*tanh_layers(), nn.Linear(64, 512))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.layers(x)
        return h[..., :128], h[..., 128:256], h[..., 256:]


def parts_of_one(put: Put, ended: Ended) -> None:
    """The gradients of outputs that are parts of one tensor are added up outside the planned graphs, at the peak."""
    model = put(InParts())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        loss = torch.stack([part.square().mean() for part in model(torch.randn(32, 65, 64))]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class GatedInTwoGraphs(nn.Module):
    """torch.compile breaks it where one graph is given both parts of what another one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*tanh_layers(), nn.Linear(64, 1024))
        self.head = nn.Sequential(nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers(x)
        signal, gate = h[..., :512], h[..., 512:]
        torch._dynamo.graph_break()
        return self.head(signal) + self.head(gate)


def parts_across_graphs(put: Put, ended: Ended) -> None:
    """The gradients of parts that other graphs take are added up outside all of them, at the peak."""
    model = put(GatedInTwoGraphs())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        loss = model(torch.randn(32, 65, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def unrolled(put: Put, ended: Ended) -> None:
    """Each call is given what the one before has returned, which its graph alone holds; the first, zeros."""
    cell = put(Cell())
    optimizer = torch.optim.Adam(cell.parameters())
    for _ in range(STEPS):
        state, loss = torch.zeros(256, 64), torch.zeros(())
        for _ in range(8):
            state = cell(torch.randn(256, 64), state)
            loss = loss + state.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def layers_by_forward(put: Put, ended: Ended) -> None:
    """`model.forward(x)` calls the layers one by one; the results of some are in no graph, and go as the next come."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.ReLU())]
    model = put(nn.Sequential(*layers, nn.Linear(128, 10)))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        loss = F.cross_entropy(model.forward(torch.randn(1024, 128)), torch.randint(10, (1024,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def distances(put: Put, ended: Ended) -> None:
    """A variable has a view of what an op has made until the next step's takes its place."""
    model = put(mlp())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        z = model(torch.randn(512, 64))
        distance = torch.cdist(z, z)
        loss = distance.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class DeepHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = mlp(depth=4), mlp(depth=3), mlp(depth=3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shared = self.trunk(x)
        return self.left(shared), self.right(shared)


def trains_heads(put: Put, ended: Ended, of_step: Sequence[int]) -> None:
    model = put(DeepHeads())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in of_step:
        outputs = model(torch.randn(512, 64))
        loss = outputs[at].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def head_left_out(put: Put, ended: Ended) -> None:
    """What the head without a loss has saved is there until the next outputs come."""
    trains_heads(put, ended, [0] * STEPS)


def deep_heads_in_turn(put: Put, ended: Ended) -> None:
    trains_heads(put, ended, [step % 2 for step in range(STEPS)])


class Gated(torch.autograd.Function):
    """Keeps what it needs on its own context, where the end of a backward pass does not free it."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, g):
        s = ctx.x.sigmoid()
        return g * s * (1 + ctx.x * (1 - s))


class KeptByItsGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.head = nn.Linear(64, 256), mlp(256, 2, 256), nn.Linear(256, 64)

    def forward(self, x):
        scale = torch.tanh(self.first(x))
        hidden = self.body(Gated.apply(scale))
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g * scale.detach())
        return self.head(Gated.apply(hidden))


def kept_by_its_graph(put: Put, ended: Ended) -> None:
    """What hooks and functions of the graph name by themselves is there as long as the loop names the loss."""
    model = put(KeptByItsGraph())
    cleared_late(torch.optim.Adam(model.parameters()), lambda: model(torch.randn(512, 64)), ended)


def elastic_weights(put: Put, ended: Ended) -> None:
    """A penalty on how far parameters are from what they were: copies that the loss reads."""
    model = put(mlp(128))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        penalty = sum(((p - before[name]) ** 2).sum() for name, p in model.named_parameters())
        loss = model(torch.randn(128, 128)).square().mean() + 0.1 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.keys, self.score, self.step = nn.Linear(64, 64), nn.Linear(64, 1), nn.Linear(3 * 64, 64)

    def forward(self, token, state, memory):
        scores = self.score(torch.tanh(self.keys(memory) + state[:, None]))
        read = (scores.softmax(1).transpose(1, 2) @ memory)[:, 0]
        state = torch.tanh(self.step(torch.cat([self.embedding(token), read, state], 1)))
        return self.out(state), state


def decoder_of_an_encoder(put: Put, ended: Ended) -> None:
    """The calls of one step are all given what the encoder made, and each the state of the one before."""
    encoder, decoder = nn.Embedding(100, 64), put(Decoder())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (encoder, decoder)]
    for _ in range(STEPS):
        source, target = torch.randint(100, (64, 12)), torch.randint(100, (64, 8))
        for optimizer in optimizers:
            optimizer.zero_grad()
        memory = encoder(source)
        state, token, loss = memory.mean(1), torch.zeros(64, dtype=torch.long), 0
        for at in range(8):
            output, state = decoder(token, state, memory)
            loss = loss + F.cross_entropy(output, target[:, at])
            token = target[:, at]
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        ended(loss)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp()
        self.branches = nn.ModuleList([mlp(depth=6), mlp(depth=6), mlp(depth=8)])

    def forward(self, x, at):
        return self.branches[at](self.trunk(x))


def tasks_in_turn(put: Put, ended: Ended) -> None:
    """Each step trains one of the branches, and its gradients stay until the next one; the last comes late."""
    model = put(Branches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in (0, 1, 0, 1, 2, 0):
        loss = model(torch.randn(128, 64), at).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def branches_that_wait(put: Put, ended: Ended) -> None:
    """Two of the branches are never trained: nobody has frozen them, and they get neither gradients nor state."""
    branches_by_adam((0,) * STEPS, put, ended)


def branches_that_would_not_fit(put: Put, ended: Ended) -> None:
    """With the state of all branches, the step would not fit."""
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    branches((0,) * STEPS, put(model), optimizer, ended, rows=512)


def branch_that_comes_late(put: Put, ended: Ended) -> None:
    branches_by_adam((0, 0, 0, 1, 0, 1), put, ended)


def branches_by_adam(turns: Sequence[int], put: Put, ended: Ended) -> None:
    model = put(Branches())
    branches(turns, model, torch.optim.AdamW(model.parameters(), lr=1e-3), ended)


def branches(
    turns: Sequence[int], model: nn.Module, optimizer: torch.optim.Optimizer, ended: Ended, rows: int = 128
) -> None:
    for at in turns:
        loss = model(torch.randn(rows, 64), at).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


class Routed(nn.Module):
    """Leaves the loss that balances its experts as an attribute."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = mlp(depth=3), nn.Linear(64, 4), mlp(depth=3, out=8)
        self.aux_loss = torch.zeros(())

    def forward(self, x):
        hidden = self.first(x)
        weights = self.gate(hidden).softmax(-1)
        self.aux_loss = weights.mean(0).square().sum()
        return self.last(hidden * weights.sum(-1, keepdim=True))


def auxiliary_loss(put: Put, ended: Ended) -> None:
    model = put(Routed())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randint(8, (512,))
        loss = F.cross_entropy(model(x), y) + 0.01 * model.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended([loss, model.aux_loss])


class Views(nn.Module):
    """Makes views of its batch outside torch.compile's graphs, and names all of them while it goes on with one."""

    def __init__(self):
        super().__init__()
        self.net = mlp(depth=6)

    @torch.compiler.disable
    def crops(self, x):
        self.last = {"view": x.abs()}
        return [x + shift for shift in range(8)]

    def forward(self, x):
        views = self.crops(x)
        return self.net(views[0]).square().mean() + self.last["view"].mean()


def views_that_are_named(put: Put, ended: Ended) -> None:
    model = put(Views())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(512, 64)
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


class Generator(nn.Module):
    """A model that has its critic as a part, and calls what it generates with."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = mlp(), mlp(depth=2, out=1)

    def forward(self, z):
        return self.generator(z)


def critic_by_turns(put: Put, ended: Ended) -> None:
    """While the critic is trained, no parameter that the model's call uses needs a gradient."""
    model = put(Generator())
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (model.critic, model.generator)]
    for _ in range(STEPS):
        losses = []
        for trained, other, optimizer in zip(("critic", "generator"), ("generator", "critic"), optimizers, strict=True):
            model.get_submodule(trained).requires_grad_(True)
            model.get_submodule(other).requires_grad_(False)
            score = model.critic(model(torch.randn(512, 64)))
            loss = score.square().mean() if trained == "critic" else -score.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        ended(losses)


class TwoTowers(nn.Module):
    """Embeds two inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.scale = mlp(), mlp(), nn.Parameter(torch.tensor(1.0))

    def forward(self, x, y):
        return self.first(x), self.second(y)


def bound_together(put: Put, ended: Ended) -> None:
    """One statement binds both embeddings to their norms."""
    model = put(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = model(torch.randn(256, 64), torch.randn(256, 64))
        x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
        logits, target = model.scale.exp() * x @ y.T, torch.arange(256)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class Noisy(nn.Module):
    """Adds noise, as much of it as an attribute says, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.layers, self.noise, self.calls = nn.ModuleList([mlp(depth=1) for _ in range(4)]), 0.0, 0

    def forward(self, x):
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
            if self.noise:
                x = (x * torch.exp(self.noise * torch.randn_like(x))).tanh()
        return x


def noise_from_some_step_on(put: Put, ended: Ended) -> None:
    """Until then the model fits as it is."""
    model = put(Noisy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model.noise = 0.1 * (step > 2)
        loss = model(torch.randn(512, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


class Embedded(nn.Module):
    """An embedding and what a head makes of it."""

    def __init__(self):
        super().__init__()
        self.net, self.head = mlp(), nn.Linear(64, 50)

    def forward(self, x):
        z = F.normalize(self.net(x), dim=1)
        return z, self.head(z)


def detached_embedding(put: Put, ended: Ended) -> None:
    """Of an output, the step has an alias alone while the backward pass runs."""
    model = put(Embedded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> torch.Tensor:
        z, head = model(torch.randn(512, 64))
        z = z.detach()
        loss = head.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return torch.stack([loss.detach(), z.mean()])

    for _ in range(STEPS):
        ended(step().tolist())


class Weighted(nn.Module):
    """Several outputs, and weights of their losses that only the loop uses."""

    def __init__(self):
        super().__init__()
        self.net, self.heads = mlp(), nn.ModuleList(nn.Linear(64, n) for n in (10, 1))
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        features = self.net(x)
        return [head(features) for head in self.heads]


def weights_of_losses(put: Put, ended: Ended) -> None:
    """The weights have gradients when the backward pass of the model begins: these are new, and not added to."""
    model = put(Weighted())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        kind, depth = model(torch.randn(512, 64))
        losses = torch.stack([F.cross_entropy(kind, torch.randint(10, (512,))), F.l1_loss(depth, torch.randn(512, 1))])
        loss = (losses * torch.exp(-model.weights) + model.weights).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class Named(nn.Module):
    """Is given dictionaries with names, of which it goes by that of the task, and returns those of the files."""

    def __init__(self, tasks):
        super().__init__()
        self.net, self.heads = mlp(), nn.ModuleDict({task: mlp(depth=depth, out=10) for task, depth in tasks})

    def forward(self, batch):
        return {"logits": self.heads[batch["task"]](self.net(batch["x"])), "files": batch["files"]}


def _named(put, ended, **tasks):
    model = put(Named(tasks.items()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for i in range(STEPS):
        batch = {"x": torch.randn(512, 64), "files": [f"{i}.png", f"{i}.txt"], "task": [*tasks][i % len(tasks)]}
        loss = F.cross_entropy(model(batch)["logits"], torch.randint(10, (512,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def names_of_files(put: Put, ended: Ended) -> None:
    _named(put, ended, kind=1)


def names_of_tasks(put: Put, ended: Ended) -> None:
    _named(put, ended, kind=1, place=2)


def frozen_in_the_middle(put: Put, ended: Ended) -> None:
    """The optimizer keeps the state of parameters that it trains no longer."""
    model = put(mlp(depth=6))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for i in range(STEPS):
        optimizer.zero_grad()
        if i == 2:
            model[:8].requires_grad_(False)
        x = torch.randn(128, 64)
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        ended(loss)


class Quantized(nn.Module):
    """Returns a penalty of its codes first, and then the reconstruction that it does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(depth=3, out=16), nn.Sequential(nn.Linear(16, 64), mlp(depth=3))
        self.codes = nn.Parameter(torch.randn(32, 16))

    def forward(self, x):
        z = self.encoder(x)
        nearest = self.codes[torch.cdist(z, self.codes).argmin(1)]
        penalty = F.mse_loss(nearest, z.detach()) + 0.25 * F.mse_loss(nearest.detach(), z)
        return penalty, self.decoder(z + (nearest - z).detach())


def quantized(put: Put, ended: Ended) -> None:
    model = put(Quantized())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(512, 64)
        optimizer.zero_grad()
        penalty, reconstruction = model(x)
        loss = F.mse_loss(reconstruction, x) + penalty
        loss.backward()
        optimizer.step()
        ended(loss)


class Both(nn.Module):
    """A loss, and another one that it is not computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x, y):
        h = self.body(x)
        return F.mse_loss(h, y), h.abs().mean()


def several_losses(put: Put, ended: Ended) -> None:
    model = put(Both())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        error, sparsity = model(torch.randn(512, 64), torch.randn(512, 64))
        loss = error + 0.1 * sparsity
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class Latent(nn.Module):
    """An output that the other one is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(depth=3), mlp(depth=3)

    def forward(self, x):
        z = self.encoder(x)
        return self.decoder(z), z


def retained_gradient(put: Put, ended: Ended) -> None:
    """The gradient of an output that is also an intermediate stays until the next call has returned."""
    model = put(Latent())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(512, 64)
        y, z = model(x)
        z.retain_grad()
        loss = F.mse_loss(y, x) + 0.1 * z.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended([loss, z.grad.norm()])


def reconstruct(model: nn.Module, ended: Ended, call=None, shape=(512, 64)) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(shape)
        loss = F.mse_loss((call or model)(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class Keeps(nn.Module):
    """Each call puts what it makes in the place of what the call before has made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.kept = nn.Linear(64, 64), mlp(), []

    def forward(self, x):
        x = self.first(x)
        wide = torch.cat([x, x], 1)
        self.kept = [wide.detach(), wide.detach() * 2]
        return self.body(x + wide[:, :64])


def kept_by_the_model(put: Put, ended: Ended) -> None:
    reconstruct(put(Keeps()), ended)


class Attending(nn.Module):
    """Keys and values that it keeps for evaluations are no buffers, nor is the table that a training step uses."""

    def __init__(self, width=64, table=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.cache, self.table = [torch.zeros(1024, width), torch.zeros(1024, width)], table

    def forward(self, x):
        if not self.training:
            for cached in self.cache:
                cached[: len(x)] = x
            return x + self.net(x) * self.cache[0][: len(x)]
        return x + self.net(x) * self.table[: len(x)]


def keeps_tables(put: Put, ended: Ended) -> None:
    table = torch.randn(4096, 64)
    model = put(nn.Sequential(*(Attending(table=table) for _ in range(4))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        loss = model(torch.randn(512, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)
        if step == 2:
            with torch.no_grad():
                model.eval()(torch.randn(64, 64))
            model.train()


class Noting(nn.Module):
    """It writes into what it keeps, in place, where a captured graph writes into a copy."""

    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.notes = torch.zeros(100_000, width)

    def forward(self, x):
        self.notes[: len(x)] = x.detach()
        return x + self.net(x)


def takes_notes(put: Put, ended: Ended) -> None:
    reconstruct(put(nn.Sequential(Noting(), Noting())), ended)


class Remembers(nn.Module):
    """It keeps the means of its latest outputs, and uses them from the fourth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.latest, self.state = mlp(), deque(maxlen=3), (None, {"calls": []})

    def forward(self, x):
        y = self.body(x)
        if len(self.latest) == 3:
            y = y + 0.1 * torch.stack(list(self.latest)).mean(0)
        self.latest.append(y.detach().mean(0))
        self.state[1]["calls"].append(len(self.latest))
        return y


def remembered(put: Put, ended: Ended) -> None:
    """What the model keeps in containers decides which graph it has, and what is in it."""
    reconstruct(put(Remembers()), ended)


class Replaces(nn.Module):
    """Computes with what its last call left as an attribute, and leaves another tensor there."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.state = mlp(depth=4, out=64), torch.zeros(512, 64)

    def forward(self, x):
        y = self.body(x + self.state)
        self.state = y.detach().tanh() / 2
        return y


def state_replaced(put: Put, ended: Ended) -> None:
    """A plan computes again from the old state, which the model has let go of."""
    reconstruct(put(Replaces()), ended)


class Leaky(nn.Module):
    """A neuron that adds up what it is given, with the graph of that, until it is told to forget."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.state = mlp(depth=2), None

    def forward(self, x):
        if self.state is None:
            self.state = torch.zeros_like(x)
        self.state = 0.9 * self.state + self.body(x)
        return self.state.tanh()


def state_with_its_graph(put: Put, ended: Ended) -> None:
    """Several calls go on from each other's states, and one backward pass goes through all."""
    model = put(Leaky())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        outputs = [model(torch.randn(256, 64)) for _ in range(4)]
        loss = sum(outputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.state = None
        ended([loss, *(output.sum() for output in outputs)])


class Smoothed(nn.Module):
    """It averages its latest outputs, and scales by what torch.compile mistakes, too: an iterator, and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.latest, self.random = mlp(), deque(maxlen=2), random.Random(3)
        self.scales = zip(itertools.cycle([1.0, 0.5]), itertools.count())

    def forward(self, x):
        y = self.body(x)
        self.latest.append(y.detach().mean(0))
        scale = next(self.scales)[0] * (1 if self.random.random() < 0.5 else 2)
        return (y + torch.stack(list(self.latest)).mean(0)) * scale


def latest_outputs(put: Put, ended: Ended) -> None:
    """The average takes the output of the call itself."""
    adamw(put(Smoothed()), 512, ended)


class Observer(nn.Module):
    """Its buffer is empty until its first call, as those of `torch.ao.quantization` are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("least", torch.tensor([]))

    def forward(self, x):
        y = self.body(x)
        with torch.no_grad():
            now = y.amin(0)
            if self.least.numel() == 0:
                self.least.resize_(now.shape).copy_(now)
            else:
                self.least.copy_(torch.minimum(self.least, now))
        return y - self.least


def buffer_that_grows(put: Put, ended: Ended) -> None:
    """The first call makes room in it."""
    adamw(put(Observer()), 512, ended)


class Noted:
    """What `Averaging` knows of earlier calls."""

    def __init__(self) -> None:
        self.mean: torch.Tensor | None = None
        self.calls = 0


class Averaging(nn.Module):
    """Its state is in an object of another class, and in an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.noted, self.scales = mlp(), Noted(), itertools.cycle([1.0])

    def forward(self, x):
        y, noted = self.body(x), self.noted
        now = y.detach().mean(0)
        noted.mean = now if noted.mean is None else 0.9 * noted.mean + 0.1 * now
        noted.calls += 1
        return (y + noted.mean) * next(self.scales)


def state_in_an_object(put: Put, ended: Ended) -> None:
    """It changes in each call, once."""
    model = put(Averaging())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(512, 64)
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended([loss, torch.tensor(float(model.noted.calls))])


def larger_later(put: Put, ended: Ended) -> None:
    """What the graph of the step before keeps grows with the batch, as all that the loop makes of the outputs."""
    model = put(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(STEPS):
        x = torch.randn(512 if i < 3 else 1024, 64)
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(depth=4, out=16), nn.Sequential(nn.Linear(16, 64), mlp(depth=4))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoder(z)

    def forward(self, x):
        return self.decode(self.encode(x))


def autoencoder(put: Put, ended: Ended) -> None:
    model = put(Autoencoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(512, 64)
        z = model.encode(x)
        loss = F.mse_loss(model.decode(z), x) + 1e-3 * z.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def averaged_by_methods(put: Put, ended: Ended) -> None:
    """Weights are averaged once the loop has been looked at."""
    model, average = put(Autoencoder()), dict[str, torch.Tensor]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for at in range(STEPS):
        x = torch.randn(512, 64)
        loss = F.mse_loss(model.decode(model.encode(x)), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)
        if at == 1:
            average = {name: value.clone() for name, value in model.state_dict().items()}
        for name, value in average.items():
            value.lerp_(model.state_dict()[name], 0.1)


class DropsLayers(nn.Module):
    """Layers of torch.nn in a loop that a number of NumPy's stops torch.compile in."""

    def __init__(self, draw=np.random.uniform):
        super().__init__()
        kept = [nn.Sequential(nn.Linear(64, 64), nn.ELU(), nn.Dropout(0.1)) for _ in range(6)]
        self.layers, self.head, self.draw = nn.ModuleList(kept), nn.Linear(64, 8), draw

    def forward(self, x):
        for layer in self.layers:
            if self.draw() >= 0.15 or not self.training:
                x = x + layer(x)
        return self.head(x)


class Draws:
    """A helper with a generator of its own."""

    def __init__(self) -> None:
        self.rngs = {"layers": np.random.default_rng(0)}

    def __call__(self) -> float:
        return self.rngs["layers"].uniform()


def layers_dropped_in_a_loop(put: Put, ended: Ended) -> None:
    drops_layers(DropsLayers(), put, ended)


def layers_dropped_by_a_helper(put: Put, ended: Ended) -> None:
    drops_layers(DropsLayers(Draws()), put, ended)


class DropsItself(nn.Module):
    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.body, self.rng = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), rng

    def forward(self, x):
        return x if self.training and self.rng.random() < 0.15 else x + self.body(x)


def blocks_that_drop_themselves(put: Put, ended: Ended) -> None:
    """They share a generator, whose use torch.compile leaves with all around it."""
    rng = np.random.default_rng(3)
    drops_layers(nn.Sequential(*(DropsItself(rng) for _ in range(4)), nn.Linear(64, 8)), put, ended)


def drops_layers(model: nn.Module, put: Put, ended: Ended) -> None:
    model = put(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(torch.randn(512, 64)), torch.randint(0, 8, (512,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class VariationalAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.mean, self.spread = nn.Linear(64, 128), nn.Linear(128, 16), nn.Linear(128, 16)
        self.dropout = nn.Dropout(0.1)
        self.up, self.out = nn.Linear(16, 128), nn.Linear(128, 64)

    def encode(self, x):
        h = self.dropout(torch.tanh(self.hidden(x)).sigmoid())
        return self.mean(h), self.spread(h)

    def decode(self, z):
        return torch.sigmoid(self.out(torch.tanh(F.gelu(self.up(z)))))


def variational(put: Put, ended: Ended) -> None:
    """Methods, and what the loop computes between them."""
    model = put(VariationalAutoencoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.rand(512, 64)
        mean, log_variance = model.encode(x)
        deviation = torch.exp(0.5 * log_variance)
        again = model.decode(mean + torch.randn_like(deviation) * deviation)
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        loss = F.mse_loss(again, x, reduction="sum") + divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class EncodesToHalves(nn.Module):
    """An autoencoder whose code comes as both halves of one tensor, beside a third that is made of one."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(depth=3), nn.Sequential(nn.Linear(32, 64), mlp(depth=3))

    def encode(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return mean, log_variance, torch.exp(0.5 * log_variance)

    def decode(self, z):
        return self.decoder(z)


def halves_by_methods(put: Put, ended: Ended) -> None:
    """One node of autograd's makes two results of the first call."""
    model = put(EncodesToHalves())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        x = torch.randn(512, 64)
        mean, log_variance, deviation = model.encode(x)
        again = model.decode(mean + deviation * torch.randn_like(mean))
        loss = F.mse_loss(again, x) + 1e-3 * (mean.square() + deviation.square() - log_variance).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def saved_between_methods(put: Put, ended: Ended) -> None:
    """What autograd keeps of the loop's own ops between two methods is gone when the first one is differentiated."""
    model = Autoencoder()
    model.encoder, model.decoder = mlp(depth=6, out=16), nn.Linear(16, 64)
    model = put(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(512, 64)
        z = model.encode(x)
        for _ in range(6):
            z = torch.tanh(z + 0.1 * torch.randn_like(z)).exp()
        loss = F.mse_loss(model.decode(z), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class MixesChannels(nn.Module):
    """A linear layer for each place of an image, and a norm after it; then convolutions."""

    def __init__(self):
        super().__init__()
        self.up, self.mix, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 16), nn.GroupNorm(4, 16)
        self.down = nn.Sequential(*(m for _ in range(6) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.SiLU())))
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def encode(self, x):
        h = self.up(x)
        mixed = F.gelu(self.mix(h.flatten(2).transpose(1, 2))).transpose(1, 2).reshape(h.shape)
        return self.norm(F.silu(mixed))

    def decode(self, h):
        return self.out(self.down(h))

    def forward(self, x):
        h = self.encode(x)
        torch._dynamo.graph_break()
        return self.decode(h)


def one_image_by_methods(put: Put, ended: Ended) -> None:
    """The stride of the dimension of one image decides whether kernels take it for channels-last; torch's fake tensors
    have another one than it has.
    """
    model = put(MixesChannels())
    reconstruct(model, ended, lambda x: model.decode(model.encode(x)), (1, 3, 64, 64))


def one_image_in_two_graphs(put: Put, ended: Ended) -> None:
    """The same image, which one graph hands to another."""
    reconstruct(put(MixesChannels()), ended, shape=(1, 3, 64, 64))


class GatedImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 8)
        gated = [nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.GLU(1)]
        padded = [nn.ReflectionPad2d(1), nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16), nn.SiLU()]
        self.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(gated), *copy.deepcopy(padded)) for _ in range(3))

    def forward(self, x):
        x = self.up(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def gated_channels_last(put: Put, ended: Ended) -> None:
    """Kernels lay out gradients otherwise than torch's fake tensors say, and group norms take copies of them."""
    model = put(GatedImages().to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        x, y = torch.randn(8, 3, 32, 32).to(memory_format=torch.channels_last), torch.randint(0, 8, (8,))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def best_weights(put: Put, ended: Ended) -> None:
    """A copy of the weights that no step reads, as of the best model so far."""
    model = put(mlp(depth=6))
    best = copy.deepcopy(model.state_dict())
    adamw(model, 512, ended)
    model.load_state_dict(best)


class MomentumEncoder(nn.Module):
    """Gives the parameters of another encoder other memory as it is called, and decides by the value of a buffer."""

    def __init__(self):
        super().__init__()
        self.encoder, self.averaged = mlp(out=16), mlp(out=16).requires_grad_(False)
        self.register_buffer("queue", torch.randn(16, 64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        queries = self.encoder(x)
        with torch.no_grad():
            for own, average in zip(self.encoder.parameters(), self.averaged.parameters(), strict=True):
                average.data = average.data * 0.9 + own.data * 0.1
            keys = self.averaged(x)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone()], 1)
        place = int(self.place)
        self.queue[:, place : place + 8] = keys[:8].T
        self.place[0] = (place + 8) % 64
        return logits


def momentum_encoder(put: Put, ended: Ended) -> None:
    model = put(MomentumEncoder())
    optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(torch.randn(512, 64)), torch.zeros(512, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def statistics_by_turns(put: Put, ended: Ended) -> None:
    """Every other step leaves the running statistics alone, as the second passes of a sharpness-aware optimizer."""
    model = put(nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU()))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        for norm in model[1::3]:
            norm.momentum = 0.0 if step % 2 else 0.1
        x = torch.randn(512, 64)
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class ReturnsItsParts(nn.Module):
    """A variational autoencoder whose mean and spread are the halves of one tensor."""

    def __init__(self):
        super().__init__()
        self.up, self.down = mlp(depth=3, out=32), nn.Sequential(nn.Linear(16, 64), mlp(depth=3))

    def forward(self, x):
        mean, spread = self.up(x).chunk(2, 1)
        return self.down(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread


def parts_of_a_tensor(put: Put, ended: Ended) -> None:
    """Outputs that are parts of another tensor, whose gradients are not."""
    model = put(ReturnsItsParts())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(256, 64)
        again, mean, spread = model(x)
        divergence = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
        loss = F.mse_loss(again, x, reduction="sum") + divergence
        loss.backward()
        optimizer.step()
        ended(loss)


def each_learns_alone(put: Put, ended: Ended) -> None:
    """Two models, and two backward passes: what the second has saved waits while that of the first runs."""
    models = [put(mlp()), put(mlp(depth=2))]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    for _ in range(STEPS):
        x = torch.randn(512, 64)
        losses = [F.mse_loss(model(x), x) for model in models]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ended(losses)


def modules_by_themselves(put: Put, ended: Ended) -> None:
    model = put(Autoencoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        for _ in range(2):
            x = torch.randn(256, 64)
            loss = F.mse_loss(model.decoder(model.encoder(x)), x)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def block_by_block(put: Put, ended: Ended) -> None:
    """Each block lets go of what it was given, and a variable holds what the last but one returned a little longer."""
    model = put(nn.ModuleList(Block(32, 2, 0.1) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(16, 16, 32), torch.randn(16, 16, 32)
        for block in model:
            x = block(x)
        loss = F.mse_loss(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def contrastive(put: Put, ended: Ended) -> None:
    """Two forward passes before one backward pass."""
    model = put(mlp(out=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(256, 64)
        a = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        b = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        loss = F.cross_entropy(a @ b.T / 0.1, torch.arange(256))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def behind_a_trained_stem(put: Put, ended: Ended) -> None:
    """The input is computed by a trained module that has no plan."""
    stem, model = nn.Linear(64, 64), put(mlp())
    optimizer = torch.optim.AdamW([*stem.parameters(), *model.parameters()], lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(256, 64)
        features = stem(x)
        loss = F.mse_loss(model(features), x)
        loss.backward()
        optimizer.step()
        ended(loss)


def boundary_points(put: Put, ended: Ended) -> None:
    """A network is called twice in a step, with other numbers of rows, before one backward pass."""
    model = put(mlp(64, 4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        inner, boundary = torch.randn(256, 64), torch.randn(64, 64)
        at_boundary = model(boundary).square().mean()
        residual = (model(inner).sin() - inner.sum(1, keepdim=True)).square().mean()
        loss = at_boundary + 10 * residual
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended([at_boundary, residual])


class Tasks(nn.Module):
    """An encoder with a head that classifies, and one that reconstructs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.rows = mlp(), nn.Linear(64, 8), nn.Linear(64, 64)

    def forward(self, x, classify):
        z = self.body(x)
        return self.classes(z) if classify else self.rows(z)


def several_tasks(put: Put, ended: Ended) -> None:
    """Two kinds of calls, told apart by a number of Python's, go into one loss; each trains a head of its own."""
    model = put(Tasks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y, u = torch.randn(256, 64), torch.randint(8, (256,)), torch.randn(384, 64)
        loss = F.cross_entropy(model(x, True), y) + F.mse_loss(model(u, False), u)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def distillation(put: Put, ended: Ended) -> None:
    """A teacher that does not train, beside the model."""
    teacher = mlp(depth=3, out=8).eval().requires_grad_(False)
    student = put(mlp(out=8))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randint(8, (512,))
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        output = student(x)
        loss = F.cross_entropy(output, y) + F.kl_div(output.log_softmax(-1), target, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


class Temperature(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.prototypes = nn.Parameter(torch.randn(32, 16))

    def forward(self, output, y):
        return F.cross_entropy(self.scale.exp() * F.normalize(output, dim=-1) @ self.prototypes.T, y)


def heads_in_turn(put: Put, ended: Ended) -> None:
    """Of the trunk, which is planned, and of heads that are not; one optimizer has all of them."""
    trunk, heads = put(mlp()), [mlp(), mlp(), mlp(), mlp()]
    optimizer = torch.optim.AdamW([p for each in (trunk, *heads) for p in each.parameters()], lr=1e-3)
    for step in range(STEPS):
        loss = heads[step % 4](trunk(torch.randn(256, 64))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def loss_in_chunks(put: Put, ended: Ended) -> None:
    """The gradients of a large head outside the model are cleared after the forward pass."""
    model, head = put(mlp(depth=2)), nn.Linear(64, 512)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)

    def part(h, y):
        return F.cross_entropy(head(h), y, reduction="sum")

    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randint(512, (512,))
        parts = zip(model(x).chunk(4), y.chunk(4), strict=True)
        loss = sum(checkpoint(part, *each, use_reentrant=False, preserve_rng_state=False) for each in parts) / 512
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def loss_with_parameters(put: Put, ended: Ended) -> None:
    model, criterion = put(mlp(out=16)), Temperature()
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=1e-3)
    _classified(model, criterion, optimizer, 32, ended)


def _classified(model, criterion, optimizer, classes, ended):
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randint(classes, (512,))
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def compiled_criterion(put: Put, ended: Ended) -> None:
    model, criterion = put(mlp(out=8)), torch.compile(nn.CrossEntropyLoss(label_smoothing=0.1), backend="aot_eager")
    _classified(model, criterion, torch.optim.AdamW(model.parameters(), lr=1e-3), 8, ended)


def compiled_head(put: Put, ended: Ended) -> None:
    """What is compiled beside the model allocates in code that Inductor generates."""
    model, head = put(mlp(out=16)), nn.Linear(16, 1024).requires_grad_(False)
    criterion = torch.compile(lambda features, classes: F.cross_entropy(head(features).sin().cos(), classes))
    _classified(model, criterion, torch.optim.AdamW(model.parameters(), lr=1e-3), 1024, ended)


def compiled_discriminator(put: Put, ended: Ended) -> None:
    generator = put(mlp(out=16))
    discriminator = torch.compile(nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1)))
    makes, judges = (torch.optim.Adam(model.parameters(), lr=1e-3) for model in (generator, discriminator))
    for _ in range(STEPS):
        made = generator(torch.randn(512, 64))
        judged = F.softplus(discriminator(made.detach())) + F.softplus(-discriminator(torch.randn(512, 16)))
        judges.zero_grad()
        judged.mean().backward()
        judges.step()
        loss = F.softplus(-discriminator(made)).mean()
        makes.zero_grad()
        loss.backward()
        makes.step()
        ended([judged.mean(), loss])


def called_by_its_wrapper(put: Put, ended: Ended) -> None:
    """The model was given to torch.compile() before it was planned, and the loop calls what that made."""
    model = mlp(out=256)
    called = torch.compile(model, backend="aot_eager")
    put(model)
    _classified(called, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-3), 256, ended)


def triplet(put: Put, ended: Ended) -> None:
    """Three calls, one backward pass."""
    model, criterion = put(mlp()), nn.TripletMarginLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        anchor, near, far = (torch.randn(256, 64) for _ in range(3))
        loss = criterion(model(anchor), model(near), model(far))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def encoder_and_decoder(put: Put, ended: Ended) -> None:
    """Two planned models under one loss, and one optimizer."""
    encoder, decoder = put(mlp(128, 6, 64)), put(mlp(64, 3, 64))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(256, 128), torch.randn(256, 64)
        loss = F.mse_loss(decoder(encoder(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def target_network(put: Put, ended: Ended) -> None:
    """The target's parameters, and the batch that it sees, are used between the steps alone."""
    online, target = mlp(96, 4, 4), mlp(96, 4, 4)
    target.load_state_dict(online.state_dict())
    put(online)
    optimizer = torch.optim.RMSprop(online.parameters(), lr=1e-3)
    for at in range(STEPS):
        state, after = torch.randn(512, 96), torch.randn(512, 96)
        action, reward = torch.randint(4, (512, 1)), torch.randn(512)
        with torch.no_grad():
            goal = reward + 0.99 * target(after).max(1).values
        loss = F.smooth_l1_loss(online(state).gather(1, action).squeeze(1), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if at % 2:
            target.load_state_dict(online.state_dict())
        ended(loss)


def adversarial(put: Put, ended: Ended) -> None:
    """Each step begins with one for the gradient of the batch, which stays beside the other one."""
    model = put(mlp(96, 4, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        x, y = torch.randn(512, 96, requires_grad=True), torch.randint(8, (512,))
        F.cross_entropy(model(x), y).backward()
        attacked = (x + 0.03 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(attacked), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


class Pooled(nn.Module):
    """Returns its last states, and what a head makes of the first of them, as BERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.pooler = mlp(64, 3), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.norm(self.body(x))
        return states, torch.tanh(self.pooler(states[:, 0]))


def without_the_pooled(put: Put, ended: Ended) -> None:
    """The states that a head of the model's own has read are freed by whoever reads them last."""
    model, head = put(Pooled()), nn.Linear(64, 4)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(32, 32, 64), torch.randint(4, (32,))
        loss = F.cross_entropy(head(model(x)[0][:, 0]), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def attacked_before_clearing(put: Put, ended: Ended) -> None:
    """A call for the gradient of the batch alone, while the gradients of the step before are still there."""
    model = put(mlp(64, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(512, 64, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
        attacked = (x + 0.1 * gradient.sign()).detach()
        del gradient, x
        optimizer.zero_grad()
        loss = model(attacked).square().mean()
        loss.backward()
        optimizer.step()
        ended(loss)


def projected_gradients(put: Put, ended: Ended) -> None:
    """Three steps for the gradient of a change of the batch, whose gradients of parameters are cleared afterwards."""
    model = put(mlp(96, 5, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(512, 96), torch.randint(8, (512,))
        change = torch.zeros_like(x).uniform_(-0.1, 0.1).requires_grad_(True)
        for _ in range(3):
            F.cross_entropy(model(x + change), y).backward()
            change.data = (change + 0.02 * change.grad.sign()).clamp(-0.1, 0.1)
            change.grad.zero_()
        optimizer.zero_grad()
        loss = F.cross_entropy(model((x + change).detach()), y)
        loss.backward()
        optimizer.step()
        ended(loss)


def pseudo_labels(put: Put, ended: Ended) -> None:
    """A call without gradients between one of the labelled and two of the others."""
    model = put(Convolutional())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        labelled, labels, others = torch.randn(4, 3, 16, 16), torch.randint(10, (4,)), torch.randn(12, 3, 16, 16)
        loss = F.cross_entropy(model(labelled), labels)
        with torch.no_grad():
            guessed = model(others).argmax(dim=1)
        for _ in range(2):
            loss = loss + F.cross_entropy(model(others + 0.1 * torch.randn_like(others)), guessed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def two_losses_in_turn(put: Put, ended: Ended) -> None:
    """Two calls with a backward pass each, of batches that are drawn together; the second loss is the larger one."""
    model = put(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        a, b = torch.randn(512, 64), torch.randn(512, 64)
        first = F.mse_loss(model(a), torch.randn(512, 64))
        first.backward()
        second = F.cross_entropy(model(b) @ torch.randn(64, 256), torch.randint(256, (512,)))
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended([first, second])


def gradients_put_aside(put: Put, ended: Ended) -> None:
    """The gradients of a first loss are kept beside the model while those of another one are computed."""
    model = put(mlp(out=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        a, b = torch.randn(512, 64), torch.randn(512, 64)
        first = F.cross_entropy(model(a), torch.randint(8, (512,)))
        first.backward()
        aside = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        second = model(b).abs().mean()
        second.backward()
        for p, gradient in zip(model.parameters(), aside, strict=True):
            p.grad += gradient
        optimizer.step()
        optimizer.zero_grad()
        ended([first, second])


def actor_critic(put: Put, ended: Ended) -> None:
    """Two planned models: the critic is frozen, and not its input, while the actor is trained through it."""
    actor, critic = put(mlp(out=16)), put(mlp(80, 3, 1))
    target = copy.deepcopy(critic)
    of_actor, of_critic = (torch.optim.Adam(model.parameters(), 1e-3) for model in (actor, critic))
    for _ in range(STEPS):
        seen, did, after = torch.randn(256, 64), torch.randn(256, 16), torch.randn(256, 64)
        with torch.no_grad():
            worth = torch.randn(256, 1) + 0.99 * target(torch.cat([after, actor(after).tanh()], 1))
        first = F.mse_loss(critic(torch.cat([seen, did], 1)), worth)
        of_critic.zero_grad()
        first.backward()
        of_critic.step()
        critic.requires_grad_(False)
        second = -critic(torch.cat([seen, actor(seen).tanh()], 1)).mean()
        of_actor.zero_grad()
        second.backward()
        of_actor.step()
        critic.requires_grad_(True)
        ended([first, second])


def policy_gradient(put: Put, ended: Ended) -> None:
    """Many small calls and one backward pass: the gradients of each call are added to those of the others."""
    policy = put(nn.Sequential(nn.Linear(16, 2048), nn.Dropout(0.6), nn.ReLU(), nn.Linear(2048, 16), nn.Softmax(1)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(STEPS):
        gains = []
        for _ in range(6):
            chosen = torch.distributions.Categorical(policy(torch.randn(1, 16)))
            gains.append(-chosen.log_prob(action := chosen.sample()) * (action.item() - 8))
        optimizer.zero_grad()
        loss = torch.cat(gains).sum()
        loss.backward()
        optimizer.step()
        ended(loss)


def rollouts(put: Put, ended: Ended) -> None:
    """Proximal policy optimization: what a policy has done is collected, and trained on in parts, several times."""
    model = put(mlp(out=9))
    optimizer = torch.optim.Adam(model.parameters(), 3e-4)
    for _ in range(STEPS):
        rows: list[list[torch.Tensor]] = [[], [], [], []]
        with torch.no_grad():
            for _ in range(8):
                seen = torch.randn(64, 64)
                out = model(seen)
                policy = torch.distributions.Categorical(logits=out[:, :8])
                action = policy.sample()
                for row, each in zip(rows, (seen, action, policy.log_prob(action), out[:, 8]), strict=True):
                    row.append(each)
        all_seen, actions, before, values = map(torch.cat, rows)
        advantages, losses = torch.randn(512), []
        for part in (part for _ in range(2) for part in torch.randperm(512).split(256)):
            out = model(all_seen[part])
            policy = torch.distributions.Categorical(logits=out[:, :8])
            ratio = (policy.log_prob(actions[part]) - before[part]).exp() * advantages[part]
            loss = F.mse_loss(out[:, 8], values[part]) - ratio.mean() - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        ended(losses)


class Reconstructs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(mlp(96, 3, 96), nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layers(x)
        return y, y.square().mean()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = mlp(depth=4), nn.ModuleList(nn.Linear(64, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = self.body(x)
        return [head(h) for head in self.heads]


def losses_one_by_one(put: Put, ended: Ended) -> None:
    """A backward pass for each of three losses, all but the last of which keep the graph; gradients are compared."""
    model = put(Heads())
    optimizer = torch.optim.Adam(model.parameters())
    before = None
    for _ in range(STEPS):
        outputs = model(torch.randn(512, 64))
        optimizer.zero_grad()
        losses = [F.mse_loss(output, torch.randn(512, 16)) for output in outputs]
        for at, loss in enumerate(losses):
            loss.backward(retain_graph=at < 2)
        now = torch.cat([p.grad.flatten() for p in model.parameters()])
        alike = 0.0 if before is None else F.cosine_similarity(now, before, dim=0)
        before = now.clone()
        optimizer.step()
        ended([*losses, alike])


def stepped_by_hand(put: Put, ended: Ended) -> None:
    """The parameters are stepped by gradients of two batches, which `torch.autograd.grad` has returned."""
    model = put(mlp(out=8))
    parameters = [*model.parameters()]
    for _ in range(STEPS):
        one = F.cross_entropy(model(torch.randn(64, 64)), torch.randint(8, (64,)))
        first = torch.autograd.grad(one, parameters)
        other = F.cross_entropy(model(torch.randn(64, 64)), torch.randint(8, (64,)))
        second = torch.autograd.grad(other, parameters)
        with torch.no_grad():
            for p, a, b in zip(parameters, first, second, strict=True):
                p -= 0.05 * (a + b)
        ended([one.detach(), other.detach()])


def masks_and_anchors(put: Put, ended: Ended) -> None:
    """A loop reads, between its steps alone, what it keeps for each parameter, and for all in a vector: of that, it
    writes a difference into gradients.
    """
    model = put(mlp(256, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    masks = [(torch.rand_like(p) > 0.5).float() for p in model.parameters()]
    anchors = torch.cat([p.detach().flatten() for p in model.parameters()])
    sizes = [p.numel() for p in model.parameters()]
    for _ in range(STEPS):
        loss = model(torch.randn(512, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p, mask, anchor in zip(model.parameters(), masks, anchors.split(sizes), strict=True):
            p.grad.mul_(mask).add_(p.detach() - anchor.view_as(p), alpha=0.01)
        optimizer.step()
        ended(loss)


def masked_by_hand(put: Put, ended: Ended, how: str) -> None:
    """Masks go into the parameters by what was there before, in the place of their data, or through sparse tensors."""
    model = put(mlp(256, 2))
    masks = [(torch.rand_like(p) > 0.5).float() for p in model.parameters()]
    averages = [torch.zeros_like(p) for p in model.parameters() if how == "by buffers"] or masks
    for _ in range(STEPS):
        loss = model(torch.randn(512, 256)).square().mean()
        model.zero_grad()
        loss.backward()
        for p, mask, average in zip(model.parameters(), masks, averages, strict=True):
            if how == "by buffers":
                average.lerp_(p.grad * mask, 0.1)
                p.data -= 0.1 * average
            elif how == "as data":
                p.data = p.data - 0.1 * p.grad * mask
            else:
                p.grad = (p.grad * mask).to_sparse().to_dense()
                p.data.sub_(p.grad, alpha=0.1)
        ended(loss)


def adam_by_hand(put: Put, ended: Ended) -> None:
    """What the step of an optimizer of the loop's own takes beside parameters and gradients is the peak."""
    model = put(mlp(256, out=10))
    first, second = ([torch.zeros_like(p) for p in model.parameters()] for _ in range(2))
    for t in range(1, STEPS + 1):
        loss = F.cross_entropy(model(torch.randn(128, 256)), torch.randint(10, (128,)))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, m, v in zip(model.parameters(), first, second, strict=True):
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p -= 1e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        ended(loss)


def average_of_copies(put: Put, ended: Ended) -> None:
    """The second step takes more than the first one between the steps, where an average takes another's place."""
    model = put(mlp(256, out=10))
    optimizer, average = torch.optim.SGD(model.parameters(), 0.1), None
    for n in range(1, STEPS + 1):
        loss = F.cross_entropy(model(torch.randn(128, 256)), torch.randint(10, (128,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = copy.deepcopy(model.state_dict())
        average = now if average is None else {k: a + (now[k] - a) / n for k, a in average.items()}
        ended(loss)


class Features(nn.Module):
    """What it makes of an image in three steps, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(i, 16, 3, padding=1), nn.ReLU()) for i in (3, 16, 16))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for block in self.blocks:
            found.append(x := block(x))
        return found


def perceptual(put: Put, ended: Ended) -> None:
    """A frozen network's lists of features are compared: those of the last step go as their names have new ones."""
    model = put(nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.GELU(), nn.Conv2d(8, 3, 5, padding=2)))
    judge = Features().eval().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.rand(4, 3, 48, 48)
        made, wanted = judge(model(x)), judge(x)
        loss = sum(F.mse_loss(a, b) for a, b in zip(made, wanted, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def gradients_of_each(put: Put, ended: Ended, *, at_once: bool = True) -> None:
    """The gradients of three losses are put together (as PCGrad does): those of the last step are there, under a name,
    until there is a new list of them.
    """
    model = put(Heads())
    optimizer, shared = torch.optim.Adam(model.parameters()), [*model.body.parameters()]
    for _ in range(STEPS):
        outputs = model(torch.randn(64, 64))
        losses = [F.mse_loss(output, torch.randn(64, 16)) for output in outputs]
        if at_once:
            each = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
        else:
            one = torch.autograd.grad(losses[0], shared, retain_graph=True)
            other = torch.autograd.grad(losses[1], shared, retain_graph=True)
            each = [one, other]
        optimizer.zero_grad()
        sum(losses).backward()
        for p, *own in zip(shared, *each, strict=True):
            p.grad = sum(own)
        optimizer.step()
        ended(losses)


def weights_from_gradients(put: Put, ended: Ended) -> None:
    """The weight of a loss is computed from the gradients of both, before those of the last step are cleared."""
    model = put(mlp(out=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shared = model[-3].weight
    for _ in range(STEPS):
        output, y = model(torch.randn(512, 64)), torch.randint(8, (512,))
        one, other = F.cross_entropy(output, y), output.square().mean()
        (a,) = torch.autograd.grad(one, shared, retain_graph=True)
        (b,) = torch.autograd.grad(other, shared, retain_graph=True)
        loss = one + (a.norm() / b.norm()).clamp(0, 10) * other
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def critics_of_one_optimizer(put: Put, ended: Ended) -> None:
    """An actor beside two critics, which have their optimizer in common: each is planned."""
    actor, *critics = put(mlp(256)), put(mlp(256)), put(mlp(256))
    optimizers = [torch.optim.Adam([p for c in critics for p in c.parameters()]), torch.optim.Adam(actor.parameters())]
    for _ in range(STEPS):
        x, y = torch.randn(256, 256), torch.randn(256, 64)
        losses = []
        for optimizer, models in zip(optimizers, (critics, [actor]), strict=True):
            optimizer.zero_grad()
            for model in models:
                losses.append((model(x) - y).square().mean())
                losses[-1].backward()
            optimizer.step()
        ended(losses)


class ActorCritic(nn.Module):
    """Two heads read what one body makes: autograd adds up their gradients. The actor's output is a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.mean, self.value, self.width = nn.Linear(128, 4), nn.Linear(128, 1), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        h = self.body(x)
        mean = self.mean(h)
        return torch.distributions.Normal(mean, self.width.exp().expand_as(mean)), self.value(h)


def distribution_and_value(put: Put, ended: Ended) -> None:
    """A distribution holds its parameters as given where they need no broadcasting: a graph returns them twice."""
    model = put(ActorCritic())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        chosen, value = model(torch.randn(1024, 16))
        loss = value.square().mean() - chosen.log_prob(torch.randn(1024, 4)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def own_predictions(put: Put, ended: Ended) -> None:
    """A model of dynamics goes on from its own predictions, and is differentiated through all of them."""
    model = put(mlp(depth=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        states = torch.randn(4, 256, 64)
        at, loss = states[0], torch.zeros(())
        for target in states[1:]:
            at = at + model(at)
            loss = loss + F.mse_loss(at, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def neural_ode(put: Put, ended: Ended) -> None:
    """The model is the right-hand side of a differential equation, which the loop solves by Runge and Kutta."""
    model = put(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 32)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        y, h = torch.randn(256, 32), torch.tensor(1 / 3)
        path = [y]
        for _ in range(3):
            a = model(y)
            b = model(y + h * a / 2)
            c = model(y + h * b / 2)
            d = model(y + h * c)
            y = y + h / 6 * (a + 2 * b + 2 * c + d)
            path.append(y)
        loss = torch.stack(path).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def bootstrapped(put: Put, ended: Ended) -> None:
    """Two views of each batch, and a target network whose parameters are new tensors after each step."""
    online = put(mlp(out=32))
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters())
    for _ in range(STEPS):
        one, other = torch.randn(256, 64), torch.randn(256, 64)
        a, b = online(one), online(other)
        with torch.no_grad():
            u, v = target(one), target(other)
        loss = 2 - F.cosine_similarity(a, v).mean() - F.cosine_similarity(b, u).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for p, q in zip(target.parameters(), online.parameters(), strict=True):
            p.data = 0.99 * p.data + 0.01 * q.data
        ended(loss)


def two_sources_of_loss(put: Put, ended: Ended) -> None:
    """A part of the loss is the model's own, as in a VQ-VAE; nobody holds the gradient of the other output."""
    model = put(Reconstructs())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(512, 96)
        y, penalty = model(x)
        loss = F.mse_loss(y, x) + penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def given_gradients(put: Put, ended: Ended) -> None:
    """A gradient comes from elsewhere, and the loop holds it."""
    model = put(mlp(64, 4, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        y = model(torch.randn(512, 64))
        gradient = torch.randn_like(y) * 1e-3
        optimizer.zero_grad()
        y.backward(gradient)
        optimizer.step()
        ended(y.detach().sum())


def features_by_a_hook(put: Put, ended: Ended) -> None:
    model, seen = mlp(96, 4, 8), {}
    model[3].register_forward_hook(lambda module, args, output: seen.update(features=output))
    put(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(512, 96), torch.randint(8, (512,))
        loss = F.cross_entropy(model(x), y) + 0.01 * seen["features"].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def features_in_a_list(put: Put, ended: Ended) -> None:
    """Hooks append to it, and each step begins by clearing it."""
    model, seen = mlp(96, 4, 8), []
    for at in (1, 3, 5):
        model[at].register_forward_hook(lambda module, args, output: seen.append(output))
    put(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        seen.clear()
        x, y = torch.randn(512, 96), torch.randint(8, (512,))
        loss = F.cross_entropy(model(x), y) + 0.01 * sum(feature.square().mean() for feature in seen)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended([loss, torch.tensor(float(len(seen)))])


def sharpness_aware(put: Put, ended: Ended) -> None:
    """Two passes each way per step, with a copy of the first one's gradients."""
    model = put(mlp(out=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randint(8, (512,))
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moved = [p.grad * (0.05 / norm) for p in model.parameters()]
            for p, by in zip(model.parameters(), moved, strict=True):
                p.add_(by)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.sub_(by)
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def autocast_scaler(put: Put, ended: Ended) -> None:
    model = put(mlp(out=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randint(8, (512,))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        ended(loss)


# Images


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [self._block(a, b) for a, b in ((3, 8), (8, 8), (8, 16), (16, 16))]
        self.blocks, self.pool, self.head = nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    @staticmethod
    def _block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

    def forward(self, x):
        return self.head(self.pool(self.blocks(x)).flatten(1))


def cnn_smaller_last_batch(put: Put, ended: Ended) -> None:
    model = put(Convolutional())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for size in [16] * (STEPS - 1) + [5]:
        images, labels = torch.randn(size, 3, 16, 16), torch.randint(10, (size,))
        optimizer.zero_grad()
        output = model(images)
        loss = criterion(output, labels)
        loss.backward()
        optimizer.step()
        ended(loss)


def segmentation(put: Put, ended: Ended) -> None:
    """The gradient of the output comes with the channels last, as the loss reads it."""
    layers = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(3):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    model = put(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        images, labels = torch.randn(8, 3, 32, 32), torch.randint(16, (8, 32, 32))
        scores = model(images).permute(0, 2, 3, 1).reshape(-1, 16)
        loss = F.cross_entropy(scores, labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def _generator():
    layers = [nn.Unflatten(1, (16, 1, 1)), nn.ConvTranspose2d(16, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)]
    layers += [nn.ConvTranspose2d(16, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh())


def _discriminator():
    layers = [nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    layers += [nn.Conv2d(16, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(16, 1, 4, bias=False), nn.Sigmoid(), nn.Flatten(0))


def _gan(generator, discriminator, ended):
    """The loop of PyTorch's DCGAN tutorial."""
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for _ in range(STEPS):
        discriminator.zero_grad()
        real = torch.randn(32, 3, 16, 16)
        label = torch.ones(32)
        error_real = criterion(discriminator(real), label)
        error_real.backward()
        fake = generator(torch.randn(32, 16))
        label.fill_(0)
        error_fake = criterion(discriminator(fake.detach()), label)
        error_fake.backward()
        optimizer_d.step()
        generator.zero_grad()
        label.fill_(1)
        error_g = criterion(discriminator(fake), label)
        error_g.backward()
        optimizer_g.step()
        ended([error_real, error_fake, error_g])


def gan_generator(put: Put, ended: Ended) -> None:
    _gan(put(_generator()), _discriminator(), ended)


def gan_both(put: Put, ended: Ended) -> None:
    _gan(put(_generator()), put(_discriminator()), ended)


def gan_discriminator(put: Put, ended: Ended) -> None:
    """Both backward passes of the discriminator's step find the generator's gradients of the step before."""
    _gan(_generator(), put(_discriminator()), ended)


def gan_generator_first(put: Put, ended: Ended) -> None:
    """The generator's gradients are cleared before its step, and the discriminator is called in between."""
    generator = put(mlp(128, out=196))
    discriminator = put(nn.Sequential(nn.Linear(196, 256), nn.ReLU(), mlp(256, 1, 1)))
    criterion = nn.BCEWithLogitsLoss()
    optimizer_g, optimizer_d = (torch.optim.Adam(m.parameters(), lr=2e-4) for m in (generator, discriminator))
    for _ in range(STEPS):
        real, valid, fake = torch.rand(64, 196), torch.ones(64, 1), torch.zeros(64, 1)
        optimizer_g.zero_grad()
        made = generator(torch.randn(64, 128))
        loss_g = criterion(discriminator(made), valid)
        loss_g.backward()
        optimizer_g.step()
        optimizer_d.zero_grad()
        loss_d = (criterion(discriminator(real), valid) + criterion(discriminator(made.detach()), fake)) / 2
        loss_d.backward()
        optimizer_d.step()
        ended([loss_g, loss_d])


def table_in_front(put: Put, ended: Ended) -> None:
    """A trained table that no plan is for, whose gradient of the step before is there until the backward pass."""
    table, model = nn.Embedding(4000, 64), put(mlp())
    optimizer = torch.optim.SGD([*table.parameters(), *model.parameters()], lr=0.1)
    cleared_late(optimizer, lambda: model(table(torch.randint(4000, (1024,)))), ended)


def cleared_late(optimizer: torch.optim.Optimizer, forward: Callable[[], torch.Tensor], ended: Ended) -> None:
    for _ in range(STEPS):
        loss = forward().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def table_in_front_by_parts(put: Put, ended: Ended) -> None:
    """The same with microbatches, whose gradients are added up."""
    table, model = nn.Embedding(4000, 64), put(mlp())
    optimizer = torch.optim.SGD([*table.parameters(), *model.parameters()], lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            loss = model(table(torch.randint(4000, (512,)))).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def table_whose_step_holds_most(put: Put, ended: Ended) -> None:
    """The optimizer's step has the gradient of the table, too."""
    table, model = nn.Embedding(8000, 64), put(mlp())
    optimizer = torch.optim.AdamW([*table.parameters(), *model.parameters()])
    cleared_late(optimizer, lambda: model(table(torch.randint(8000, (512,)))), ended)


def dropout_of_the_input(put: Put, ended: Ended) -> None:
    """No gradient goes through it; its rate is one that eager mode rounds otherwise than `native_dropout`."""
    adamw(put(nn.Sequential(nn.Dropout(0.15), mlp())), 512, ended)


def critic_alone_at_first(put: Put, ended: Ended) -> None:
    """The generator is planned, and trained later than the steps that are measured."""
    generator, critic = put(mlp(depth=1)), put(mlp(out=1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4)
    for _ in range(STEPS):
        real, fake = torch.randn(512, 64), generator(torch.randn(512, 64)).detach()
        loss = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def wasserstein_gan(put: Put, ended: Ended) -> None:
    """Two steps of the critic, to which the generator gives samples without their graph, for one of the generator."""
    generator, critic = put(mlp(depth=3)), put(mlp(depth=3, out=1))
    optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
    optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
    for _ in range(STEPS):
        for _ in range(2):
            real = torch.randn(256, 64)
            optimizer_c.zero_grad()
            z = torch.randn(256, 64)
            fake = generator(z).detach()
            loss_c = -torch.mean(critic(real)) + torch.mean(critic(fake))
            loss_c.backward()
            optimizer_c.step()
            for p in critic.parameters():
                p.data.clamp_(-0.01, 0.01)
        optimizer_g.zero_grad()
        made = generator(torch.randn(256, 64))
        loss_g = -torch.mean(critic(made))
        loss_g.backward()
        optimizer_g.step()
        ended([loss_c, loss_g])


def cycle_consistency(put: Put, ended: Ended) -> None:
    """Two models whose calls take turns before one backward pass, as CycleGAN's generators do."""
    to_b, to_a = put(mlp(depth=4)), put(mlp(depth=4))
    optimizer = torch.optim.Adam([*to_b.parameters(), *to_a.parameters()], lr=2e-4, betas=(0.5, 0.999))
    for _ in range(STEPS):
        a, b = torch.randn(256, 64), torch.randn(256, 64)
        optimizer.zero_grad()
        fake_b = to_b(a)
        back_a = to_a(fake_b)
        fake_a = to_a(b)
        back_b = to_b(fake_a)
        loss = F.l1_loss(back_a, a) + F.l1_loss(back_b, b) + F.l1_loss(to_b(b), b) + F.l1_loss(to_a(a), a)
        loss.backward()
        optimizer.step()
        ended(loss)


def evaluated_with_gradients(put: Put, ended: Ended) -> None:
    """An evaluation without `torch.no_grad()`, whose result holds its graph during the next step."""
    model = put(nn.Sequential(mlp(), nn.Dropout(0.5), nn.Linear(64, 8)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    x, y = torch.randn(512, 64), torch.randint(8, (512,))
    train, held_out = torch.arange(400), torch.arange(400, 512)
    for _ in range(STEPS):
        model.train()
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output[train], y[train])
        loss.backward()
        optimizer.step()
        model.eval()
        output = model(x)
        validation = F.cross_entropy(output[held_out], y[held_out])
        ended([loss, validation])


# Sequences


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """As in nanoGPT: tied weights, `return logits, loss`."""

    def __init__(self, width=32, layers=1, dropout=0.1):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.h = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        if targets is None:
            return self.lm_head(self.ln_f(x)[:, [-1], :]), None
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def tokens(rows, length):
    data = torch.randint(VOCABULARY, (rows, length + 1))
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


@torch.no_grad()
def _estimate_loss(model):
    model.eval()
    losses = torch.zeros(2)
    for k in range(2):
        _, loss = model(*tokens(16, 32))
        losses[k] = loss.item()
    model.train()
    return losses.mean()


def step_in_a_function(put: Put, ended: Ended) -> None:
    """A step that is a function, whose loss and output its caller holds until it returns those of the next step."""
    model = put(mlp(depth=6))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        output = model(x)
        loss = F.mse_loss(output, y)  # a scalar in as much memory as the output
        loss.backward()
        optimizer.step()
        return loss, output.detach()

    for _ in range(STEPS):
        loss, _output = train(torch.randn(256, 64), torch.randn(256, 64))
        ended(loss)


def loss_by_a_function(put: Put, ended: Ended) -> None:
    """A loss and an output that a function returns before the backward pass."""
    model = put(mlp(depth=6))
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = model(x)
        return F.mse_loss(output, y), output

    for _ in range(STEPS):
        loss, _output = loss_of(torch.randn(256, 64), torch.randn(256, 64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def two_calls_in_a_function(put: Put, ended: Ended) -> None:
    """A step that is a function, which calls the model twice and returns both outputs."""
    model = put(mlp(depth=6))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(a: torch.Tensor, b: torch.Tensor, alike: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, other = model(a), model(b)
        distance = F.pairwise_distance(one, other)
        loss = (alike * distance.pow(2) + (1 - alike) * F.relu(1 - distance).pow(2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return one, other, loss

    for _ in range(STEPS):
        _one, _other, loss = train(torch.randn(256, 64), torch.randn(256, 64), torch.randint(0, 2, (256,)).float())
        ended(loss)


def trains_and_evaluates(put: Put, ended: Ended) -> None:
    """Evaluation in a function of its own after each step, as early stopping wants it."""
    model = put(mlp(depth=6))
    optimizer = torch.optim.AdamW(model.parameters())

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(256, 64), torch.randn(256, 64)

    def train(x: torch.Tensor, y: torch.Tensor) -> float:
        model.train()
        output = model(x)
        loss = F.mse_loss(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        return sum(F.mse_loss(model(x), y).item() for x, y in (batch() for _ in range(2)))

    for _ in range(STEPS):
        loss = train(*batch())
        evaluate()
        ended(loss)


def step_of_a_generator(put: Put, ended: Ended) -> None:
    """A generator that trains, whose caller holds what it has given beside its own variables."""
    model = put(mlp(depth=6))
    optimizer = torch.optim.AdamW(model.parameters())

    def steps() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(STEPS):
            output = model(torch.randn(256, 64))
            loss = F.mse_loss(output, torch.randn(256, 64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss, output

    for loss, _output in steps():
        ended(loss)


def outputs_in_a_callback(put: Put, ended: Ended) -> None:
    """A callback that holds the loss and the output of a step once it has ended."""
    model = put(mlp(depth=6))
    optimizer = torch.optim.AdamW(model.parameters())
    latest = SimpleNamespace()

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        output = model(x)
        loss = F.mse_loss(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        latest.loss, latest.output = loss, output

    for _ in range(STEPS):
        train(torch.randn(256, 64), torch.randn(256, 64))
        ended(latest.loss)


def outputs_in_state(put: Put, ended: Ended) -> None:
    """A step that keeps its output and loss in a dictionary of an object of the trainer's."""
    model = put(mlp(depth=6))
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = SimpleNamespace(state=SimpleNamespace(seen={}))

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        trainer.state.seen["output"] = model(x)
        trainer.state.seen["loss"] = F.mse_loss(trainer.state.seen["output"], y)
        optimizer.zero_grad()
        trainer.state.seen["loss"].backward()
        optimizer.step()

    for _ in range(STEPS):
        train(torch.randn(256, 64), torch.randn(256, 64))
        ended(trainer.state.seen["loss"])


def step_of_an_object(put: Put, ended: Ended) -> None:
    """A step whose output and loss are attributes of the object that trains."""

    class Trainer:
        def __init__(self) -> None:
            self.model = put(mlp(depth=6))
            self.optimizer = torch.optim.AdamW(self.model.parameters())

        def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
            self.output = self.model(x)
            self.loss = F.mse_loss(self.output, y)
            self.optimizer.zero_grad()
            self.loss.backward()
            self.optimizer.step()

    trainer = Trainer()
    for _ in range(STEPS):
        trainer.step(torch.randn(256, 64), torch.randn(256, 64))
        ended(trainer.loss)


def nanogpt(put: Put, ended: Ended) -> None:
    model = put(NanoGPT())
    decayed, others = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    x, y = tokens(16, 32)
    for step in range(STEPS):
        losses = [_estimate_loss(model)] if step % 2 == 0 else []
        for _ in range(2):
            logits, loss = model(x, y)  # noqa: RUF059  # held, as there
            loss = loss / 2
            x, y = tokens(16, 32)  # while the backward pass runs, on a GPU
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ended([*losses, loss])


def targets_in_turn(put: Put, ended: Ended) -> None:
    """The model gives its loss in every other step, and logits alone in the rest."""
    model = put(NanoGPT(dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS + 2):
        x, y = tokens(16, 32)
        if step % 2 == 0:
            _, loss = model(x, y)
        else:
            logits, _ = model(x)
            loss = F.cross_entropy(logits[:, -1], y[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended(loss)


def varying_lengths(put: Put, ended: Ended) -> None:
    model = put(NanoGPT(dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for length in (48, 40, 64, 29, 56, 37):
        x, y = tokens(16, length)
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def _reconstruction():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 3, 3, padding=1),
    )


@dataclass
class Examples:
    rows: torch.Tensor
    labels: torch.Tensor


class OfExamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(out=8)

    def forward(self, batch):
        return F.cross_entropy(self.inner(batch.rows), batch.labels)


def batches_that_are_objects(put: Put, ended: Ended) -> None:
    """As those of graphs are: of a class of the user's own."""
    model = put(OfExamples())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for rows in (512, 512, 512, 448, 448, 512):
        batch = Examples(torch.randn(rows, 64), torch.randint(8, (rows,)))
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


class Layers(nn.Module):
    """Returns what each layer makes beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        hidden = [x := F.gelu(layer(x)) for layer in self.layers]
        return self.head(x), tuple(hidden)


def logits_of_a_tuple(put: Put, ended: Ended) -> None:
    """The other outputs get no gradient."""
    model = put(Layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randint(8, (512,))
        logits, _ = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def hidden_states_later(put: Put, ended: Ended) -> None:
    """From the third step on, another output gets a gradient, too."""
    model = put(Layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x, y = torch.randn(512, 64), torch.randint(8, (512,))
        logits, hidden = model(x)
        loss = F.cross_entropy(logits, y)
        if step >= 2:
            loss = loss + hidden[1].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


class LossOfLayers(nn.Module):
    """Returns its loss, its logits, and what each layer adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)
        )

    def forward(self, x, y):
        hidden = [x := self.first(x), *(x := x + layer(x) for layer in self.layers)]
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "hidden_states": hidden}


def hidden_states_distilled(put: Put, ended: Ended) -> None:
    """The loss is that of the model and that of intermediates, which a teacher has, too."""
    model, teacher = put(LossOfLayers()), LossOfLayers().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(512, 64), torch.randint(8, (512,))
        with torch.no_grad():
            theirs = teacher(x, y)["hidden_states"]
        output = model(x, y)
        loss = output["loss"] + sum(map(F.mse_loss, output["hidden_states"], theirs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def compiled_teacher(put: Put, ended: Ended) -> None:
    """Kernels that Inductor generates read the table of its embedding."""
    teacher = nn.Sequential(nn.Embedding(4000, 64), nn.GELU(), nn.Linear(64, 16)).requires_grad_(False)
    teach = torch.compile(lambda x: teacher(x))
    model = put(nn.Sequential(nn.Embedding(100, 64), mlp(depth=3, out=16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = torch.randint(100, (512,))
        with torch.no_grad():
            soft = teach(x).softmax(-1)
        loss = F.kl_div(model(x).log_softmax(-1), soft, reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def compiled_siamese(put: Put, ended: Ended) -> None:
    """Two calls of other lengths before one backward pass, by graphs that Inductor compiles."""
    model = put(torch.compile(mlp(depth=2, out=64), dynamic=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        queries, documents = model(torch.randn(256, 64)), model(torch.randn(768, 64))
        loss = F.cross_entropy(queries[:128] @ documents[:128].T, torch.arange(128))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def prefetched(put: Put, ended: Ended) -> None:
    """The next batch is made while the backward pass runs on a GPU, as prefetchers do."""
    model = put(_reconstruction())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, 3, 16, 16), torch.randn(32, 3, 16, 16)
    for _ in range(STEPS):
        loss = F.mse_loss(model(x), y)
        coming = torch.randn(32, 3, 16, 16), torch.randn(32, 3, 16, 16)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        x, y = coming
        ended(loss)


def one_batch_ahead(put: Put, ended: Ended) -> None:
    """A generator has the next batch ready when it gives one, whose inputs it makes of numbers of Python's."""

    def batch():
        return torch.tensor(torch.randn(32, 3, 16, 16).tolist()), torch.randn(32, 3, 16, 16)

    def batches():
        coming = batch()
        while True:
            now, coming = coming, batch()
            yield now

    model = put(_reconstruction())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _, (x, y) in zip(range(STEPS), batches(), strict=False):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def _gpt2():
    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=32,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def transformers_loss_only(put: Put, ended: Ended) -> None:
    model = put(_gpt2().train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (16, 48))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


class ChannelsLast(nn.Module):
    """Convolutions that are channels-last, and a loss by a target that is not."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(3) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.GELU())]
        body = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *layers, nn.Conv2d(64, 64, 1))
        self.body = body.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        return F.mse_loss(self.body(x), target)


class TellsPrediction(ChannelsLast):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        prediction = self.body(x)
        return F.l1_loss(prediction, target), prediction


def _with_images(model: nn.Module, ended: Ended) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(8, 3, 32, 32).to(memory_format=torch.channels_last), torch.randn(8, 64, 32, 32)
        output = model(x, y)
        loss = output[0] if isinstance(output, tuple) else output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


def channels_last(put: Put, ended: Ended) -> None:
    """The kernel of the loss's backward pass makes a tensor of another layout than its fake one does."""
    _with_images(put(ChannelsLast()), ended)


def channels_last_prediction(put: Put, ended: Ended) -> None:
    """The gradient that comes has another layout than its sum with one that does not come would have."""
    _with_images(put(TellsPrediction()), ended)


class Recommender(nn.Module):
    def __init__(self, rows: int = 1000) -> None:
        super().__init__()
        self.bags, self.items = nn.EmbeddingBag(rows, 64, sparse=True), nn.Embedding(rows, 64, sparse=True)
        self.head = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, bags: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.bags(bags), self.items(items)], 1)).squeeze(1)


def sparse_tables(put: Put, ended: Ended) -> None:
    """Gradients with more entries than their tables have, which are cleared between the passes."""
    model = put(Recommender())
    tables = [*model.bags.parameters(), *model.items.parameters()]
    sparse, dense = torch.optim.SGD(tables, lr=0.1), torch.optim.Adam(model.head.parameters())
    for _ in range(STEPS):
        bags, items = torch.randint(1000, (1024, 5)), torch.randint(1000, (1024,))
        loss = F.binary_cross_entropy_with_logits(model(bags, items), torch.rand(1024))
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        ended(loss)
    sparse.zero_grad()


def sparse_adam(put: Put, ended: Ended) -> None:
    """The optimizers hold more in their step than the passes do; one of them takes no gradients but sparse ones."""
    model = put(Recommender(5000))
    optimizers = (
        torch.optim.SparseAdam(model.bags.parameters()),
        torch.optim.Adagrad(model.items.parameters()),
        torch.optim.Adam(model.head.parameters()),
    )
    for _ in range(STEPS):
        bags, items = torch.randperm(5000)[:4096].view(1024, 4), torch.randint(5000, (1024,))
        F.binary_cross_entropy_with_logits(model(bags, items), torch.rand(1024)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ended([])


def sparse_microbatches(put: Put, ended: Ended) -> None:
    """Gradients of tables that are added to each other, by one optimizer with those of the layers."""
    model = put(Recommender())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(3):
            bags, items = torch.randint(1000, (512, 5)), torch.randint(1000, (512,))
            loss = F.binary_cross_entropy_with_logits(model(bags, items), torch.rand(512))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)


# Loops of libraries


@dataclass
class Rows(Dataset[Any]):
    """Makes each row when it is asked for."""

    rows: int
    words: bool

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> Any:
        generator = torch.Generator().manual_seed(i)
        if self.words:
            ids = torch.randint(VOCABULARY, (48,), generator=generator)
            return {"input_ids": ids, "labels": ids}
        return torch.randn(64, generator=generator), i % 8


def trainer(put: Put, ended: Ended) -> list[float]:
    model = put(_gpt2())

    class Told(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            ended([])

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=16, save_strategy="no", logging_steps=1, use_cpu=True,
            report_to=[], disable_tqdm=True, log_level="error", learning_rate=1e-3,
        )  # fmt: skip
        data = Rows(16 * STEPS, words=True)
        its = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Told()])
        its.remove_callback(transformers.PrinterCallback)
        its.train()
    return [entry[k] for entry in its.state.log_history for k in ("loss", "grad_norm") if k in entry]


class Classifier(lightning.pytorch.LightningModule):
    def __init__(self, put):
        super().__init__()
        self.net = put(mlp(out=8))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Tells(lightning.pytorch.Callback):
    def __init__(self, ended):
        self.ended = ended

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.ended(outputs["loss"])


def fitted(module: lightning.pytorch.LightningModule, ended: Ended) -> None:
    with tempfile.TemporaryDirectory() as folder:
        its = lightning.pytorch.Trainer(
            default_root_dir=folder, max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[Tells(ended)],
        )  # fmt: skip
        its.fit(module, DataLoader(Rows(512 * STEPS, words=False), batch_size=512, shuffle=False))


def lightning_automatic(put: Put, ended: Ended) -> None:
    fitted(Classifier(put), ended)


class LitAutoencoder(lightning.pytorch.LightningModule):
    """Its step calls two parts of it, and logs."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(out=8), nn.Sequential(nn.Linear(8, 64), *mlp())

    def training_step(self, batch, index):
        x, _ = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, batch_size=len(x))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def lightning_autoencoder(put: Put, ended: Ended) -> None:
    module = LitAutoencoder()
    put(module)
    fitted(module, ended)


LOOPS: dict[str, Loop] = {
    "mlp_adamw_after": Loop(mlp_adamw_after),
    "in_a_thread": Loop(in_a_thread),
    "new_head": Loop(new_head, plans=3, share=1.0),
    "failed_at_first": Loop(failed_at_first),
    "mlp_adamw_before": Loop(mlp_adamw_before, thorough=True),
    "microbatches_of_a_cycle": Loop(microbatches_of_a_cycle, thorough=True),
    "list_of_microbatches": Loop(list_of_microbatches, thorough=True),
    "head_alone_trained": Loop(head_alone_trained, thorough=True),
    "head_alone_accumulates": Loop(head_alone_accumulates, thorough=True),
    "step_in_a_function": Loop(step_in_a_function, thorough=True),
    "loss_by_a_function": Loop(loss_by_a_function, thorough=True),
    "two_calls_in_a_function": Loop(two_calls_in_a_function, thorough=True),
    "trains_and_evaluates": Loop(trains_and_evaluates),
    "step_of_a_generator": Loop(step_of_a_generator, thorough=True),
    "outputs_in_a_callback": Loop(outputs_in_a_callback, thorough=True),
    "outputs_in_state": Loop(outputs_in_state, thorough=True),
    "step_of_an_object": Loop(step_of_an_object, thorough=True),
    "nanogpt": Loop(nanogpt),
    "targets_in_turn": Loop(targets_in_turn, plans=4, thorough=True),
    "cnn_smaller_last_batch": Loop(cnn_smaller_last_batch, plans=3),
    "transformers_loss_only": Loop(transformers_loss_only),
    "two_heads_in_turn": Loop(two_heads_in_turn),
    "tasks_in_turn": Loop(tasks_in_turn, plans=6, thorough=True),
    "branches_that_wait": Loop(branches_that_wait),
    "branches_that_would_not_fit": Loop(branches_that_would_not_fit, share=0.5, thorough=True),
    "branch_that_comes_late": Loop(branch_that_comes_late, plans=5, thorough=True),
    "backward_twice": Loop(backward_twice),
    "batches_that_are_objects": Loop(batches_that_are_objects, plans=3, thorough=True),
    "logits_of_a_tuple": Loop(logits_of_a_tuple, thorough=True),
    "hidden_states_distilled": Loop(hidden_states_distilled, thorough=True),
    "compiled_teacher": Loop(compiled_teacher, thorough=True),
    "compiled_siamese": Loop(compiled_siamese, plans=7, thorough=True),  # each, both as one, and what these meet
    "hidden_states_later": Loop(hidden_states_later, plans=3, thorough=True),
    "prefetched": Loop(prefetched, thorough=True),
    "one_batch_ahead": Loop(one_batch_ahead, thorough=True),
    "segmentation": Loop(segmentation, thorough=True),
    "varying_lengths": Loop(varying_lengths, plans=3),
    "auxiliary_loss": Loop(auxiliary_loss),
    "views_that_are_named": Loop(views_that_are_named, thorough=True),
    "critic_by_turns": Loop(critic_by_turns, off=0.12, thorough=True),
    "bound_together": Loop(bound_together, thorough=True),
    "noise_from_some_step_on": Loop(noise_from_some_step_on, plans=4, share=0.9, thorough=True),
    "detached_embedding": Loop(detached_embedding, thorough=True),
    "weights_of_losses": Loop(weights_of_losses, thorough=True),
    "names_of_files": Loop(names_of_files, thorough=True),
    "names_of_tasks": Loop(names_of_tasks, plans=5, thorough=True),
    "frozen_in_the_middle": Loop(frozen_in_the_middle, plans=3, share=0.72, thorough=True),
    "quantized": Loop(quantized, thorough=True),
    "several_losses": Loop(several_losses, off=0.025, thorough=True),
    "kept_by_the_model": Loop(kept_by_the_model),
    "keeps_tables": Loop(keeps_tables, thorough=True),
    "takes_notes": Loop(takes_notes, share=1.01, thorough=True),
    "remembered": Loop(remembered, plans=3),
    "state_replaced": Loop(state_replaced),
    "state_with_its_graph": Loop(state_with_its_graph, plans=6, off=0.13, thorough=True),
    "latest_outputs": Loop(latest_outputs),
    "buffer_that_grows": Loop(buffer_that_grows, plans=4, thorough=True),
    "state_in_an_object": Loop(state_in_an_object, plans=4, off=0.09, thorough=True),
    "larger_later": Loop(larger_later, plans=3, share=0.7, thorough=True),
    "autoencoder": Loop(autoencoder),
    "layers_dropped_in_a_loop": Loop(layers_dropped_in_a_loop, thorough=True),
    "blocks_that_drop_themselves": Loop(blocks_that_drop_themselves, plans=4, off=0.03, thorough=True),
    "layers_dropped_by_a_helper": Loop(layers_dropped_by_a_helper, plans=3, off=0.07, thorough=True),
    "averaged_by_methods": Loop(averaged_by_methods, thorough=True),
    "variational": Loop(variational),
    "halves_by_methods": Loop(halves_by_methods, thorough=True),
    # what the first method returned counts to the loss, though the loop has put something else in its place
    "saved_between_methods": Loop(saved_between_methods, off=0.02, thorough=True),
    "best_weights": Loop(best_weights, thorough=True),
    "momentum_encoder": Loop(momentum_encoder, share=1.2, off=0.05, thorough=True),
    "statistics_by_turns": Loop(statistics_by_turns, plans=5, thorough=True),
    "one_image_by_methods": Loop(one_image_by_methods, thorough=True),
    "one_image_in_two_graphs": Loop(one_image_in_two_graphs, thorough=True),
    "parts_of_a_tensor": Loop(parts_of_a_tensor, thorough=True),
    "sparse_tables": Loop(sparse_tables, share=0.8, thorough=True),
    "sparse_adam": Loop(sparse_adam, share=1.02, off=0.02),
    "sparse_microbatches": Loop(sparse_microbatches, share=0.9, off=0.07, thorough=True),
    "channels_last": Loop(channels_last, thorough=True),
    "channels_last_prediction": Loop(channels_last_prediction, thorough=True),
    "gated_channels_last": Loop(gated_channels_last, share=0.5, thorough=True),
    "modules_by_themselves": Loop(modules_by_themselves, thorough=True),
    "block_by_block": Loop(block_by_block, thorough=True),
    "gan_generator": Loop(gan_generator, share=0.77, thorough=True),
    "gan_discriminator": Loop(gan_discriminator, plans=5, share=1.02, thorough=True),
    "gan_generator_first": Loop(gan_generator_first, plans=7, share=1.02, off=0.025, thorough=True),
    "gan_both": Loop(gan_both, plans=6, share=0.785, thorough=True),
    "each_learns_alone": Loop(each_learns_alone, plans=4, thorough=True),
    "encoder_and_decoder": Loop(encoder_and_decoder, plans=4, thorough=True),
    "table_in_front": Loop(table_in_front),
    "table_in_front_by_parts": Loop(table_in_front_by_parts, share=0.9, thorough=True),
    "table_whose_step_holds_most": Loop(table_whose_step_holds_most, share=1.02, off=0.02, thorough=True),
    "dropout_of_the_input": Loop(dropout_of_the_input),
    "critic_alone_at_first": Loop(critic_alone_at_first, plans=3, off=0.02, thorough=True),
    "wasserstein_gan": Loop(wasserstein_gan, plans=6, thorough=True),
    "cycle_consistency": Loop(cycle_consistency, plans=8, off=0.33, thorough=True),
    "evaluated_with_gradients": Loop(evaluated_with_gradients, plans=3, thorough=True),
    "ema": Loop(ema),
    "averaged_later": Loop(averaged_later, thorough=True),
    "autocast_scaler": Loop(autocast_scaler, tolerance=1e-2),
    "trainer": Loop(trainer),
    "lightning_autoencoder": Loop(lightning_autoencoder, thorough=True),
    "lightning_automatic": Loop(lightning_automatic),
    "manual_sgd": Loop(manual_sgd),
    "numbered_batches": Loop(partial(numbered_batches, False)),
    "numbered_batches_of_a_method": Loop(partial(numbered_batches, True), thorough=True),
    "own_generators": Loop(own_generators, thorough=True),
    "phases": Loop(partial(phases, 512)),
    "phases_of_unlike_batches": Loop(partial(phases, 768), thorough=True),
    "loss_by_a_method_of_the_output": Loop(loss_by_a_method_of_the_output),
    "own_optimizer": Loop(own_optimizer),
    "queue_of_keys": Loop(queue_of_keys),
    "grad_without_backward": Loop(grad_without_backward),
    "contrastive": Loop(contrastive),
    "triplet": Loop(triplet, thorough=True),
    "target_network": Loop(target_network),
    "adversarial": Loop(adversarial, plans=3, off=0.02, thorough=True),
    "without_the_pooled": Loop(without_the_pooled, off=0.03, thorough=True),
    "attacked_before_clearing": Loop(attacked_before_clearing, plans=4, thorough=True),
    "projected_gradients": Loop(projected_gradients, plans=5, thorough=True),
    "pseudo_labels": Loop(pseudo_labels, plans=3, thorough=True),
    "two_losses_in_turn": Loop(two_losses_in_turn, plans=3),
    "gradients_put_aside": Loop(gradients_put_aside, plans=3, thorough=True),
    "two_sources_of_loss": Loop(two_sources_of_loss, thorough=True),
    "losses_one_by_one": Loop(losses_one_by_one, thorough=True),
    "stepped_by_hand": Loop(stepped_by_hand, plans=3, share=0.9, thorough=True),
    "adam_by_hand": Loop(adam_by_hand, thorough=True),
    "average_of_copies": Loop(average_of_copies, share=1.02),
    "masked_by_buffers": Loop(partial(masked_by_hand, how="by buffers"), thorough=True),
    "masked_as_data": Loop(partial(masked_by_hand, how="as data"), thorough=True),
    "masked_as_sparse": Loop(partial(masked_by_hand, how="as sparse"), thorough=True),
    "masks_and_anchors": Loop(masks_and_anchors, thorough=True),
    "perceptual": Loop(perceptual, share=0.97),
    "gradients_of_each": Loop(gradients_of_each, off=0.03, share=0.95, thorough=True),
    "gradients_of_two": Loop(partial(gradients_of_each, at_once=False), off=0.03, share=0.95, thorough=True),
    "critics_of_one_optimizer": Loop(critics_of_one_optimizer, plans=6, thorough=True),
    "actor_critic": Loop(actor_critic, plans=6, share=0.77, thorough=True),
    "policy_gradient": Loop(policy_gradient, share=0.98),
    "rollouts": Loop(rollouts, thorough=True),
    "weights_from_gradients": Loop(weights_from_gradients, thorough=True),
    "distribution_and_value": Loop(distribution_and_value, share=0.9, thorough=True),
    "evaluated_each_second_step": Loop(evaluated_each_second_step, thorough=True),
    "packed": Loop(packed, thorough=True),
    "carried_state": Loop(carried_state, plans=4, tolerance=1e-4, thorough=True),
    "similar_views": Loop(similar_views),
    "similar_views_leaner": Loop(similar_views, share=0.64, thorough=True),
    "normalized_views": Loop(normalized_views, share=0.64, thorough=True),
    "actor_of_a_critic": Loop(actor_of_a_critic, share=0.7, thorough=True),
    "actor_and_critic_with_a_target": Loop(actor_and_critic_with_a_target, share=0.6, plans=5),
    "encoded_by_name": Loop(encoded_by_name, off=0.09, share=0.85),
    "one_for_two_modules": Loop(one_for_two_modules, off=0.12, share=1.0),
    "keeps_features": Loop(keeps_features, share=0.95),
    "keeps_features_of_another_graph": Loop(partial(keeps_features, apart=True), share=0.85, thorough=True),
    "sparse_features": Loop(partial(keeps_features, sparse=0.1), share=1.1),
    "sparse_features_of_another_graph": Loop(partial(keeps_features, apart=True, sparse=0.1)),
    "lookahead": Loop(lookahead),
    "lookahead_late": Loop(partial(lookahead, at_once=False), plans=3),
    "parts_of_one": Loop(parts_of_one),
    "parts_across_graphs": Loop(parts_across_graphs, thorough=True),
    "unrolled": Loop(unrolled, plans=4, off=0.02, share=0.9),
    "unrolled_leaner": Loop(unrolled, plans=4, off=0.05, share=0.6, thorough=True),
    "evaluated_by_the_same_names": Loop(evaluated_by_the_same_names, share=1.02),
    "layers_by_forward": Loop(layers_by_forward, share=1.0, thorough=True),
    "distances": Loop(distances, share=1.0),
    "trains_itself": Loop(trains_itself),
    "head_left_out": Loop(head_left_out, share=1.02),
    "decoder_of_an_encoder": Loop(decoder_of_an_encoder, plans=4, off=0.06, thorough=True),
    "elastic_weights": Loop(elastic_weights, share=0.78, thorough=True),
    "kept_by_its_graph": Loop(kept_by_its_graph, thorough=True),
    "deep_heads_in_turn": Loop(deep_heads_in_turn, plans=3, thorough=True),
    "two_heads_with_room": Loop(distribution_and_value, share=1.03, thorough=True),
    "own_predictions": Loop(own_predictions, plans=4, thorough=True),
    "neural_ode": Loop(neural_ode, plans=4, thorough=True),
    "bootstrapped": Loop(bootstrapped, thorough=True),
    "given_gradients": Loop(given_gradients),
    "features_by_a_hook": Loop(features_by_a_hook, thorough=True),
    "features_in_a_list": Loop(features_in_a_list, thorough=True),
    "sharpness_aware": Loop(sharpness_aware, thorough=True),
    "behind_a_trained_stem": Loop(behind_a_trained_stem),
    "boundary_points": Loop(boundary_points, plans=3, thorough=True),
    "several_tasks": Loop(several_tasks, plans=3, thorough=True),
    "distillation": Loop(distillation),
    "heads_in_turn": Loop(heads_in_turn, thorough=True),
    "loss_in_chunks": Loop(loss_in_chunks, thorough=True),
    "loss_with_parameters": Loop(loss_with_parameters, thorough=True),
    "closure": Loop(closure, thorough=True),
    "zero_grad_before_backward": Loop(zero_grad_before_backward, thorough=True),
    "optimizer_in_backward": Loop(optimizer_in_backward),
    "momentum_in_backward": Loop(momentum_in_backward, thorough=True),
    "masks_in_hooks": Loop(masks_in_hooks, thorough=True),
    "two_optimizers": Loop(two_optimizers),
    "optimizer_each_epoch": Loop(optimizer_each_epoch, thorough=True),
    "computed_parameters": Loop(computed_parameters),
    "compiled_criterion": Loop(compiled_criterion, thorough=True),
    "compiled_head": Loop(compiled_head, thorough=True),
    "compiled_discriminator": Loop(compiled_discriminator, share=0.8, thorough=True),
    "called_by_its_wrapper": Loop(called_by_its_wrapper, thorough=True),
    "gradient_penalty": Loop(gradient_penalty, refused="(?i)double backward|create_graph"),
}


def row(name: str) -> str:
    """One line of the table: sizes in MB of 2**20 bytes."""
    began = time.perf_counter()
    try:
        unplanned, seen = judged(LOOPS[name])
    except Exception as e:
        return f"{name:26} {type(e).__name__}: {' '.join(str(e).split())[:150]}"
    seconds = time.perf_counter() - began
    off = differences(seen, unplanned, LOOPS[name].tolerance)
    predicted = max(seen.predicted)
    steps = " ".join(f"{m / 2**20:6.3f}" for m in seen.measured)
    within = "yes" if seen.peak <= seen.budget else f"{seen.peak / seen.budget - 1:+.1%}"
    error = f"{seen.peak / predicted - 1:+.2%}" if predicted else "no plan"
    return (
        f"{name:26} {unplanned.peak / 2**20:9.3f} {seen.budget / 2**20:7.3f}{'*' if seen.infeasible else ' '}"
        f"{predicted / 2**20:9.3f}  {steps}  {within:>7} {error:>8} {seen.plans:5}  "
        f"{'yes' if not off else '; '.join(off[:2])[:70]}  ({seconds:.0f} s)"
    )


def main(names: list[str]) -> None:
    """The table, by searches as short as those of the tests."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    transformers.logging.set_verbosity_error()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    head = f"{'loop':26} {'unplanned':>9} {'budget':>7}  {'predicted':>9}  {'measured, steps 2 to 6':34}"
    print(f"{head}  {'within':>7} {'off by':>8} plans  losses and state equal", flush=True)
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        for name in names or LOOPS:
            print(row(name), flush=True)
    print("Sizes in MB of 2**20 bytes. *: the least feasible budget, as 75% of the unplanned peak was refused.")


if __name__ == "__main__":
    main(sys.argv[1:])
