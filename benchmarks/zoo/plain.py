"""Families of models written in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .case import Case, images, integers, noise, tokens


class Model(nn.Module):
    """Parts by name, and what `forward` does with them; the output is the loss."""

    def __init__(self, forward: Callable[..., torch.Tensor], **parts: nn.Module | list[nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, nn.ModuleList(part) if isinstance(part, list) else part)
        self.formula = forward

    def forward(self, *batch: Any) -> torch.Tensor:
        return self.formula(self, *batch)


def _case(forward: Callable[..., torch.Tensor], batch: Any, **parts: Any) -> Case:
    return Case(Model(forward, **parts).train(), batch)


def mlp(width: int = 128, layers: int = 4, rate: float = 0.1) -> nn.Sequential:
    """Linear, GELU and dropout, so many times."""
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU(), nn.Dropout(rate))])


def _convolutions(normalise: Callable[[int], nn.Module], activate: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), normalise(16), activate(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), normalise(32), activate(),
        nn.Conv2d(32, 32, 3, padding=1), normalise(32), activate(),
        nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10),
    )  # fmt: skip


def _classes(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])


def _classifier(model: nn.Module, batch: Any) -> Case:
    return Case(model.train(), batch, _classes)


def perceptron() -> Case:
    return _classifier(mlp(layers=6), noise(256, 128))


def vgg() -> Case:
    return _classifier(_convolutions(lambda c: nn.Identity(), lambda: nn.ReLU(inplace=True)), images(8, 32))


def batch_norm() -> Case:
    return _classifier(_convolutions(nn.BatchNorm2d, lambda: nn.ReLU(inplace=True)), images(8, 32))


def batch_norm_in_evaluation() -> Case:
    model = _convolutions(nn.BatchNorm2d, nn.ReLU).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return Case(model, images(8, 32), _classes)


def group_norm() -> Case:
    return _classifier(_convolutions(lambda c: nn.GroupNorm(4, c), nn.SiLU), images(8, 32))


def instance_norm() -> Case:
    return _classifier(
        _convolutions(lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True), nn.Mish), images(8, 32)
    )


def channels_last() -> Case:
    model = _convolutions(nn.BatchNorm2d, nn.ReLU).to(memory_format=torch.channels_last)
    return _classifier(model, images(8, 32).to(memory_format=torch.channels_last))


def densenet() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return _classes(self.head(torch.cat(features, 1).mean((2, 3))))

    layers = [
        nn.Sequential(
            nn.BatchNorm2d(16 + 8 * i), nn.ReLU(inplace=True), nn.Conv2d(16 + 8 * i, 8, 3, padding=1, bias=False)
        )
        for i in range(6)
    ]
    return _case(forward, (images(8, 32),), stem=nn.Conv2d(3, 16, 3, padding=1), layers=layers, head=nn.Linear(64, 10))


def stochastic_depth() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            keep = 1 - 0.1 * (i + 1)
            x = x + block(x) * torch.empty(len(x), 1, 1, 1).bernoulli_(keep) / keep
        return _classes(self.head(x.mean((2, 3))))

    blocks = [
        nn.Sequential(
            nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32), nn.Hardswish(), nn.Conv2d(32, 16, 3, padding=1, groups=2)
        )
        for _ in range(4)
    ]
    return _case(forward, (images(8, 32),), stem=nn.Conv2d(3, 16, 3, padding=1), blocks=blocks, head=nn.Linear(16, 10))


def squeeze_excite() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for wide, deep, gate, narrow in zip(self.wide, self.deep, self.gate, self.narrow, strict=True):
            h = F.silu(deep(F.silu(wide(x))))
            x = x + narrow(h * torch.sigmoid(gate(h.mean((2, 3), keepdim=True))))
        return _classes(self.head(x.mean((2, 3))))

    return _case(
        forward, (images(8, 32),), stem=nn.Conv2d(3, 16, 3, padding=1), head=nn.Linear(16, 10),
        wide=[nn.Conv2d(16, 48, 1) for _ in range(3)],
        deep=[nn.Conv2d(48, 48, 3, padding=1, groups=48) for _ in range(3)],
        gate=[nn.Conv2d(48, 48, 1) for _ in range(3)],
        narrow=[nn.Conv2d(48, 16, 1) for _ in range(3)],
    )  # fmt: skip


def unet() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
            x = torch.relu(layer(torch.cat([x, skips.pop()], 1)))
        return x.square().mean()

    return _case(
        forward, (images(4, 64),),
        down=[nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 16), (16, 32))],
        up=[nn.Conv2d(a, b, 3, padding=1) for a, b in ((64, 16), (32, 8), (16, 3))],
    )  # fmt: skip


def convolution_3d() -> Case:
    model = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 16, 3, padding=1, stride=2),
        nn.BatchNorm3d(16), nn.ReLU(), nn.Conv3d(16, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1),
        nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    return _classifier(model, noise(4, 1, 16, 16, 16))


def wavenet() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x, out = self.stem(x), 0
        for i, (layer, mix) in enumerate(zip(self.layers, self.mix, strict=True)):
            value, gate = layer(F.pad(x, (2**i, 0))).chunk(2, 1)
            h = mix(torch.tanh(value) * torch.sigmoid(gate))
            x, out = x + h, out + h
        return out.square().mean()

    return _case(
        forward, (noise(8, 1, 256),), stem=nn.Conv1d(1, 16, 1),
        layers=[nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(6)], mix=[nn.Conv1d(16, 16, 1) for _ in range(6)],
    )  # fmt: skip


def variational_autoencoder() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        return F.binary_cross_entropy_with_logits(self.decode(z), x.sigmoid()) + divergence

    return _case(
        forward, (images(8, 32),),
        encode=nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.GELU(), nn.Conv2d(16, 16, 4, 2, 1)),
        decode=nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(16, 3, 4, 2, 1)),
    )  # fmt: skip


def normalising_flow() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        volume = torch.zeros(len(x))
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            x = torch.cat([b * scale.exp() + shift, a], 1)
            volume = volume + scale.sum(1)
        return (0.5 * x.square().sum(1) - volume).mean()

    nets: list[nn.Module] = [nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(6)]
    return _case(forward, (noise(256, 64),), nets=nets)


def spectral_norm() -> Case:
    norm = parametrizations.spectral_norm
    model = nn.Sequential(
        norm(nn.Linear(64, 128)), nn.LeakyReLU(0.2), norm(nn.Linear(128, 128)), nn.LeakyReLU(0.2), nn.Linear(128, 10)
    )
    return _classifier(model, noise(512, 64))


def weight_norm() -> Case:
    norm = parametrizations.weight_norm
    model = nn.Sequential(
        norm(nn.Conv2d(3, 16, 3)), nn.Tanh(), norm(nn.Conv2d(16, 16, 3)), nn.Tanh(), norm(nn.Conv2d(16, 16, 3)),
        nn.ELU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), norm(nn.Linear(64, 10)),
    )  # fmt: skip
    return _classifier(model, images(8, 32))


def transformer_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(64, 4, 192, dropout=0.1, batch_first=True)
    return Case(nn.TransformerEncoder(layer, 3).train(), noise(4, 64, 64), lambda y: y.square().mean())


def transformer() -> Case:
    def forward(self: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.both(source, target, tgt_mask=mask).square().mean()

    both = nn.Transformer(64, 4, 2, 2, 128, dropout=0.1, batch_first=True)
    return _case(forward, (noise(4, 48, 64), noise(4, 40, 64)), both=both)


def attention_weights() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for attend, norm in zip(self.attend, self.norms, strict=True):
            y, weights = attend(x, x, x, need_weights=True)
            x = norm(x + y)
        return x.square().mean() + weights.square().mean()

    return _case(
        forward, (noise(4, 64, 64),),
        attend=[nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True) for _ in range(2)],
        norms=[nn.LayerNorm(64) for _ in range(2)],
    )  # fmt: skip


def causal_attention() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for project in self.layers:
            q, k, v = project(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
            rate = 0.1 if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
            x = x + y.transpose(1, 2).flatten(2)
        return x.square().mean()

    return _case(forward, (noise(4, 64, 64),), layers=[nn.Linear(64, 192) for _ in range(3)])


def linear_attention() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for project in self.layers:
            q, k, v = project(x).chunk(3, -1)
            q, k = F.elu(q) + 1, F.elu(k) + 1
            state = torch.cumsum(torch.einsum("btd,bte->btde", k, v), 1)
            x = x + torch.einsum("btd,btde->bte", q, state) / torch.einsum("btd,btd->bt", q, k.cumsum(1))[..., None]
        return x.square().mean()

    return _case(forward, (noise(2, 32, 32),), layers=[nn.Linear(32, 96) for _ in range(3)])


def mixer() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for norm, across, within in zip(self.norms, self.across, self.within, strict=True):
            x = x + across(norm(x).transpose(1, 2)).transpose(1, 2)
            x = x + within(norm(x))
        return x.square().mean()

    return _case(
        forward, (noise(8, 64, 32),), norms=[nn.LayerNorm(32) for _ in range(3)], across=[mlp(64, 2) for _ in range(3)],
        within=[mlp(32, 2) for _ in range(3)],
    )  # fmt: skip


def mixture_of_experts() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        y = torch.stack([expert(x) for expert in self.experts], 1)
        return (y.gather(1, chosen[..., None].expand(-1, -1, 64)) * weights[..., None]).sum(1).square().mean()

    return _case(forward, (noise(256, 64),), gate=nn.Linear(64, 4), experts=[mlp(64, 2) for _ in range(4)])


def _edges(nodes: int = 256, count: int = 2000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return noise(nodes, 64), integers(nodes, count), integers(nodes, count).flip(0)


def message_passing() -> Case:
    def forward(self: Any, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            message = F.dropout(torch.relu(layer(x))[source], 0.1, self.training)
            x = x + torch.zeros_like(x).index_add(0, target, message) / 8
            x = x.scatter_reduce(0, target[:, None].expand(-1, 64), message, "amax")
        return x.square().mean()

    return _case(forward, _edges(), layers=[nn.Linear(64, 64) for _ in range(3)])


def graph_attention() -> Case:
    def forward(self: Any, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer, score in zip(self.layers, self.scores, strict=True):
            h = layer(x)
            weight = F.leaky_relu(score(torch.cat([h[source], h[target]], 1))).exp()
            total = torch.zeros(len(x), 1).index_add(0, target, weight)
            x = F.elu(torch.zeros_like(x).index_add(0, target, h[source] * weight / total[target]))
        return x.square().mean()

    return _case(
        forward, _edges(), layers=[nn.Linear(64, 64) for _ in range(3)], scores=[nn.Linear(128, 1) for _ in range(3)]
    )


def point_net() -> Case:
    def forward(self: Any, points: torch.Tensor) -> torch.Tensor:
        distance = torch.cdist(points, points)
        near = distance.topk(8, largest=False).indices
        around = torch.gather(points[:, None].expand(-1, 128, -1, -1), 2, near[..., None].expand(-1, -1, -1, 3))
        return _classes(self.head(self.local(around - points[:, :, None]).amax(2).amax(1)))

    local = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU())
    return _case(forward, (noise(8, 128, 3),), local=local, head=nn.Linear(64, 10))


def recommender() -> Case:
    def forward(self: Any, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        parts = torch.stack([self.bottom(dense), *[bag(x) for bag, x in zip(self.bags, sparse, strict=True)]], 1)
        crossed = torch.bmm(parts, parts.transpose(1, 2)).flatten(1)
        return F.binary_cross_entropy_with_logits(self.top(crossed)[:, 0], torch.ones(len(dense)))

    return _case(
        forward, (noise(256, 16), integers(100, 3, 256, 4)),
        bottom=nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)),
        bags=[nn.EmbeddingBag(100, 32, mode="sum") for _ in range(3)],
        top=nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)),
    )  # fmt: skip


def radiance_field() -> Case:
    def forward(self: Any, points: torch.Tensor) -> torch.Tensor:
        turns = points[..., None] * 2 ** torch.arange(6) * math.pi
        x = torch.cat([turns.sin(), turns.cos()], -1).flatten(-2)
        density, colour = self.net(x).split([1, 3], -1)
        alpha = 1 - torch.exp(-F.softplus(density[..., 0]))
        through = torch.cumprod(1 - alpha + 1e-6, -1)
        return ((alpha * through)[..., None] * colour.sigmoid()).sum(1).square().mean()

    net = nn.Sequential(nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    return _case(forward, (noise(64, 32, 3),), net=net)


def fourier_operator() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for mix, layer in zip(self.mix, self.layers, strict=True):
            spectrum = torch.fft.rfft(x) * torch.view_as_complex(mix(torch.ones(65, 2)))
            x = F.gelu(torch.fft.irfft(spectrum, n=128) + layer(x))
        return x.square().mean()

    return _case(
        forward, (noise(256, 128),), mix=[nn.Linear(2, 2) for _ in range(3)],
        layers=[nn.Linear(128, 128) for _ in range(3)],
    )  # fmt: skip


def differential_equation() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):  # Runge and Kutta's method of order four: the same network sixteen times
            a = self.field(x)
            b = self.field(x + 0.05 * a)
            c = self.field(x + 0.05 * b)
            x = x + (a + 2 * b + 2 * c + self.field(x + 0.1 * c)) / 60
        return x.square().mean()

    return _case(forward, (noise(256, 64),), field=nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)))


def spatial_transformer() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.first(x))
        grid = F.affine_grid(self.where(h.mean((2, 3))).view(-1, 2, 3), list(h.shape), align_corners=False)
        h = F.grid_sample(h, grid, align_corners=False, padding_mode="border")
        return _classes(self.head(F.avg_pool2d(F.pad(self.second(h), (1, 1, 1, 1), mode="reflect"), 2).mean((2, 3))))

    return _case(
        forward, (images(8, 32),), first=nn.Conv2d(3, 8, 3, padding=1), second=nn.Conv2d(8, 16, 3, padding=1),
        where=nn.Linear(8, 6), head=nn.Linear(16, 10),
    )  # fmt: skip


def unpooling() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.layers
        h, first = F.max_pool2d(torch.relu(a(x)), 2, return_indices=True)
        h, second = F.max_pool2d(torch.tanh(b(h)), 2, return_indices=True)
        return c(F.max_unpool2d(F.max_unpool2d(h, second, 2), first, 2)).square().mean()

    layers = [nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, 16), (16, 16), (16, 3))]
    return _case(forward, (images(8, 32),), layers=layers)


def speech_recogniser() -> Case:
    def forward(self: Any, sound: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        scores = self.net(sound).permute(2, 0, 1).log_softmax(-1)
        lengths = torch.full((sound.shape[0],), scores.shape[0])
        return F.ctc_loss(scores, said, lengths, torch.full_like(lengths, said.shape[1]))

    net = nn.Sequential(nn.Conv1d(1, 32, 9, 4), nn.GELU(), nn.Conv1d(32, 32, 5, 2), nn.GELU(), nn.Conv1d(32, 20, 3))
    return _case(forward, (noise(4, 1, 1000), integers(20, 4, 12, low=1)), net=net)


def random_everywhere() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x + 0.1 * torch.randn_like(x) * x.sigmoid()
            x = F.rrelu(x * torch.bernoulli(torch.full_like(x, 0.9)), training=self.training)
            x = F.gumbel_softmax(x, hard=True) + torch.tanh(x) * torch.rand(128)
            x = F.alpha_dropout(x, 0.1, self.training)[:, torch.randperm(128)]
        return x.square().mean()

    return _case(forward, (noise(256, 128),), layers=[nn.Linear(128, 128) for _ in range(4)])


def sorting() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = torch.cat([x.topk(64, -1)[0], x.sort(-1)[0][:, :48], x.cummax(-1)[0][:, :8], x[:, :8]], -1)
            x = x + x.median(-1, keepdim=True)[0] + x.logsumexp(-1, keepdim=True)
        return x.square().mean()

    return _case(forward, (noise(256, 128),), layers=[nn.Linear(128, 128) for _ in range(3)])


def complex_numbers() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        z = x.to(torch.complex64)
        for layer in self.layers:
            z = layer(z)
            z = z / (1 + z.abs())
        return z.abs().square().mean()

    return _case(forward, (noise(256, 128),), layers=[nn.Linear(128, 128, dtype=torch.complex64) for _ in range(3)])


def double_precision() -> Case:
    return Case(mlp().double().train(), noise(256, 128).double(), lambda y: y.square().mean())


def bfloat16() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.bfloat16()).float().square().mean()

    model = Model(forward, layers=mlp().bfloat16()).train()
    return Case(model, noise(256, 128))


def _recurrent(layer: nn.Module, width: int, length: int = 24) -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return _classes(self.head(self.layer(self.embed(x))[0][:, -1]))

    return _case(forward, (tokens(8, length),), embed=nn.Embedding(256, 32), layer=layer, head=nn.Linear(width, 10))


def lstm() -> Case:
    return _recurrent(nn.LSTM(32, 64, 2, batch_first=True, dropout=0.1), 64)


def gru() -> Case:
    return _recurrent(nn.GRU(32, 64, 2, batch_first=True, bidirectional=True), 128)


def simple_recurrent() -> Case:
    return _recurrent(nn.RNN(32, 64, 1, batch_first=True), 64)


def lstm_cell() -> Case:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(len(x), 64)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return _classes(self.head(h))

    return _case(forward, (noise(16, 8, 32),), cell=nn.LSTMCell(32, 64), head=nn.Linear(64, 10))


CASES = (
    perceptron, vgg, batch_norm, batch_norm_in_evaluation, group_norm, instance_norm, channels_last, densenet,
    stochastic_depth, squeeze_excite, unet, convolution_3d, wavenet, variational_autoencoder, normalising_flow,
    spectral_norm, weight_norm, transformer_encoder, transformer, attention_weights, causal_attention,
    linear_attention, mixer, mixture_of_experts, message_passing, graph_attention, point_net, recommender,
    radiance_field, fourier_operator, differential_equation, spatial_transformer, unpooling, speech_recogniser,
    random_everywhere, sorting, complex_numbers, double_precision, bfloat16, lstm, gru, simple_recurrent, lstm_cell,
)  # fmt: skip
