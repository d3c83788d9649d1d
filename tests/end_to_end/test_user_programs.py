# SPDX-License-Identifier: Apache-2.0
"""Programs as users write them, from other fields than the workloads: compiled as in eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compiled_steps import assert_compiled_alike
from step_comparison import Training, integers, normal

Loss = Callable[..., torch.Tensor]
# A model, its loss (called with the model and the batch), and the batch.
Program = tuple[nn.Module, Loss, tuple[Any, ...]]


class UNet(nn.Module):
    """One level down and up, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.GroupNorm(4, 8), nn.GroupNorm(4, 16)
        self.enter = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm[0], nn.SiLU())
        self.down = nn.Conv2d(8, 16, 4, 2, 1)
        self.middle = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), norm[1], nn.SiLU())
        self.up, self.leave = nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.Conv2d(16, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.enter(x)
        return self.leave(torch.cat([skip, self.up(self.middle(self.down(skip)))], 1))


def segmentation() -> Program:
    images = normal(0, 2, 3, 8, 8), normal(1, 2, 3, 8, 8)
    return UNet(), lambda model, x, y: F.l1_loss(model(x), y), images


class TwoTowers(nn.Module):
    """Similarities of two kinds of inputs, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(10, 16, bias=False), nn.Linear(6, 16, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        return self.temperature.exp() * a @ b.t()


def contrastive() -> Program:
    def loss(model: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        logits, target = model(a, b), torch.arange(len(a))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2

    return TwoTowers(), loss, (normal(0, 8, 10), normal(1, 8, 6))


class Autoencoder(nn.Module):
    """Variational: the noise comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.log_variance = (
            nn.Linear(12, 16),
            nn.Linear(16, 3),
            nn.Linear(16, 3),
        )
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 12))

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = F.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def variational() -> Program:
    def loss(model: nn.Module, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        logits, mean, log_variance = model(x, noise)
        likelihood = F.binary_cross_entropy_with_logits(logits, x.sigmoid(), reduction="sum")
        return likelihood - 0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()

    return Autoencoder(), loss, (normal(0, 4, 12), normal(1, 4, 3))


class RotaryAttention(nn.Module):
    """Causal, with rotary positions and half as many keys as queries, as in LLaMA."""

    def __init__(self, length: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        frequency = 1e4 ** (-torch.arange(0, self.size, 2) / self.size)
        angle = torch.arange(length)[:, None] * frequency
        self.register_buffer("cos", angle.cos().repeat(1, 2))
        self.register_buffer("sin", angle.sin().repeat(1, 2))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = [
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        query, key = self.rotated(split[0]), self.rotated(split[1]).repeat_interleave(2, 1)
        value = split[2].repeat_interleave(2, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """SwiGLU behind an RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    """One layer of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 16), nn.RMSNorm(16)
        self.attention, self.feed_forward = RotaryAttention(6, 16, 4), Gated(16)
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.attention(self.norm(x))
        return self.head(x + self.feed_forward(x))


def language() -> Program:
    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return Decoder(), loss, (integers(0, 20, 2, 6),)


class Experts(nn.Module):
    """Two of four experts a row, by scattered gates and batched matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.inner, self.outer = (
            nn.Parameter(0.3 * normal(k, 4, *shape)) for k, shape in enumerate([(8, 12), (12, 8)])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        best, chosen = gates.topk(2, -1)
        kept = torch.zeros_like(gates).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        hidden = F.silu(torch.einsum("bd,edh->beh", x, self.inner))
        return (torch.einsum("beh,ehd->bed", hidden, self.outer) * kept[..., None]).sum(1)


def experts() -> Program:
    batch = normal(0, 6, 8), normal(1, 6, 8)
    return Experts(), lambda model, x, y: F.mse_loss(model(x), y), batch


class Denoiser(nn.Module):
    """Convolutions with an embedding of the time step."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.enter, self.leave = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angle = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(4) / 4)
        shift = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        return self.leave(F.silu(self.enter(x) + shift[:, :, None, None]))


def diffusion() -> Program:
    kept = torch.linspace(0.99, 0.01, 50)

    def loss(model: nn.Module, x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> Any:
        share = kept[t][:, None, None, None]
        return F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)

    return Denoiser(), loss, (normal(0, 2, 3, 6, 6), normal(1, 2, 3, 6, 6), integers(2, 50, 2))


class Recommender(nn.Module):
    """A product of embeddings, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(9, 6), nn.Embedding(11, 6)
        self.user_bias, self.item_bias = nn.Embedding(9, 1), nn.Embedding(11, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        bias = self.user_bias(user) + self.item_bias(item)
        return (self.user(user) * self.item(item)).sum(-1) + bias.squeeze(-1)


def ratings() -> Program:
    batch = integers(0, 9, 12), integers(1, 11, 12), normal(2, 12)
    return Recommender(), lambda model, u, i, y: F.mse_loss(model(u, i), y), batch


def gradient_penalty() -> Program:
    """The loss of a Wasserstein critic."""
    critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def loss(model: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        between = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        return model(fake).mean() - model(real).mean() + 10 * penalty

    return critic, loss, (normal(0, 5, 6), normal(1, 5, 6))


def reparametrised() -> Program:
    """Weight normalisation, whose weights are computed in every step."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 2))
    return model, lambda m, x, y: F.huber_loss(m(x), y), (normal(0, 5, 6), normal(1, 5, 2))


def normalised_recurrence() -> Program:
    """Each read of a weight under a spectral norm is a power iteration, and a layer reads often."""
    layer = nn.utils.parametrizations.spectral_norm(nn.LSTM(6, 5), "weight_hh_l0")
    return layer, lambda m, x, y: F.mse_loss(m(x)[0], y), (normal(0, 4, 3, 6), normal(1, 4, 3, 5))


def normalised_attention() -> Program:
    """As above: before attention reads a weight, it looks at it twice."""
    attention = nn.MultiheadAttention(6, 2, dropout=0.0, batch_first=True)
    layer = nn.utils.parametrizations.spectral_norm(attention, "in_proj_weight")
    x, y = normal(0, 3, 5, 6), normal(1, 3, 5, 6)
    return layer, lambda m, x, y: F.mse_loss(m(x, x, x, need_weights=False)[0], y), (x, y)


PROGRAMS = [
    segmentation,
    contrastive,
    variational,
    language,
    experts,
    diffusion,
    ratings,
    gradient_penalty,
    reparametrised,
    normalised_recurrence,
    normalised_attention,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_trains_as_in_eager(program: Callable[[], Program]) -> None:
    def build() -> Training:
        model, loss, _ = program()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

        def step(*batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(model, *batch)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return value.detach()

        return Training(model, optimizer, step)

    _, _, batch = program()
    assert assert_compiled_alike(build, lambda _: batch, steps=4) == 1
