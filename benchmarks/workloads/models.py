# SPDX-License-Identifier: Apache-2.0
"""Models that no package here ships, as people write them in PyTorch."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


class ResidualBlock(nn.Module):
    """GroupNorm, SiLU and convolution, twice, around a shortcut (Ho et al., 2020)."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        same = channels_in == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f[rows, channels, height, width]."""
        hidden = self.conv1(functional.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(functional.silu(self.norm2(hidden)))


class UNet(nn.Module):
    """A U-Net of three resolutions that predicts the noise in an image."""

    def __init__(self, widths: tuple[int, int, int]) -> None:
        super().__init__()
        first, second, third = widths
        self.stem = nn.Conv2d(3, first, 3, padding=1)
        self.down1, self.down2 = ResidualBlock(first, first), ResidualBlock(first, second)
        self.middle = nn.Sequential(ResidualBlock(second, third), ResidualBlock(third, third))
        self.up2 = ResidualBlock(third + second, second)
        self.up1 = ResidualBlock(second + first, first)
        self.norm, self.head = nn.GroupNorm(8, first), nn.Conv2d(first, 3, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the noise, f[rows, 3, height, width]."""
        high = self.down1(self.stem(image))
        middle = self.down2(functional.avg_pool2d(high, 2))
        low = self.middle(functional.avg_pool2d(middle, 2))
        low = functional.interpolate(low, scale_factor=2, mode="nearest")
        middle = self.up2(torch.cat([low, middle], 1))
        middle = functional.interpolate(middle, scale_factor=2, mode="nearest")
        high = self.up1(torch.cat([middle, high], 1))
        return self.head(functional.silu(self.norm(high)))


class Dlrm(nn.Module):
    """Embedding tables, a bottom and a top network, pairwise products (Naumov et al., 2019)."""

    def __init__(self, rows: int, width: int, tables: int, bottom: int, top: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(
            *(nn.Linear(13, bottom), nn.ReLU(), nn.Linear(bottom, width), nn.ReLU())
        )
        pairs = tables * (tables + 1) // 2
        self.top = nn.Sequential(
            *(nn.Linear(width + pairs, top), nn.ReLU()),
            *(nn.Linear(top, top // 2), nn.ReLU(), nn.Linear(top // 2, 1)),
        )
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the scores, f[rows]; `numbers` f[rows, 13], `ids` i64[rows, tables]."""
        dense = self.bottom(numbers)
        found = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *found], 1)
        products = vectors @ vectors.mT
        chosen = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, chosen], 1)).squeeze(1)


class Experts(nn.Module):
    """A mixture of gated experts, the best two of each token, every expert over every token."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * hidden) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / math.sqrt(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f[tokens, width]."""
        scores = self.gate(x).softmax(-1)
        best, places = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, places, best / best.sum(-1, keepdim=True))
        gated, linear = torch.matmul(x, self.up).chunk(2, -1)
        results = torch.matmul(functional.silu(gated) * linear, self.down)
        return torch.einsum("etw,te->tw", results, weights)


class MixtureOfExperts(nn.Module):
    """Layers of experts around residuals, a head over classes."""

    def __init__(self, width: int, hidden: int, experts: int, layers: int, classes: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, hidden, experts) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores, f[tokens, classes]."""
        for norm, experts in zip(self.norms, self.experts, strict=True):
            x = x + experts(norm(x))
        return self.head(x)


class DiffusionBlock(nn.Module):
    """A transformer block with adaptive layer norms (Peebles and Xie, 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Return f[rows, tokens, width]; `condition` f[rows, width]."""
        parts = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attend(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Return self-attention, f[rows, tokens, width]."""
        rows, tokens, width = x.shape
        parts = self.qkv(x).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(*parts.unbind(0))
        return self.out(found.transpose(1, 2).reshape(rows, tokens, width))


class DiffusionTransformer(nn.Module):
    """Blocks over patches of an image, conditioned on the time step."""

    def __init__(self, side: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.places = nn.Parameter(torch.randn(1, (side // 2) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16)
        rates = torch.exp(-math.log(10000) * torch.arange(width // 2) / (width // 2))
        self.register_buffer("rates", rates)

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Return the noise in patches, f[rows, tokens, 16]."""
        angles = time[:, None] * self.rates
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        x = self.patches(image).flatten(2).mT + self.places
        for block in self.blocks:
            x = block(x, condition)
        return self.head(self.norm(x))
