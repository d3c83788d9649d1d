# SPDX-License-Identifier: Apache-2.0
"""Models in float64 compute in float64 throughout: no sum, constant or statistic is float32."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# 100 roundings of 2^-53, relative to the largest gradient of a layer.
BOUND = 100 * 2.0**-53


class _Called(nn.Module):
    """A linear layer and a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda y: y.softmax(-1),
    "log_softmax": lambda y: y.log_softmax(-1),
    "attention": lambda y: F.scaled_dot_product_attention(y[None], y[None], y[None]),
    "layer_norm": lambda y: F.layer_norm(y, (6,)),
    "rms_norm": lambda y: F.rms_norm(y, (6,)),
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "leaky_relu": lambda y: F.leaky_relu(y, 0.1),
    "elu": lambda y: F.elu(y, 0.3),
    "selu": F.selu,
    "softplus": lambda y: F.softplus(y, 1.3, 2.0),
    "mish": F.mish,
    "power": lambda y: y.abs() ** 1.5,
    "scalars": lambda y: 0.1 / (y.abs() + 0.7) - y / 3,
    "where": lambda y: torch.where(y > 0.1, y, 0.1 * y),
    "full": lambda y: y * torch.full((6,), 0.1, dtype=torch.float64),
    "lerp": lambda y: torch.lerp(y, y * y, 0.3),
    "clamp": lambda y: y.clamp(-0.3, 0.7),
    "normalize": F.normalize,
    "cumsum": lambda y: y.cumsum(0) * 0.1,
    "addmm": lambda y: torch.addmm(y, y[:, :4], y[:4], alpha=0.1, beta=0.3),
}
LOSSES: dict[str, Loss] = {
    "mse": lambda y, t, c: F.mse_loss(y, t),
    "smooth_l1": lambda y, t, c: F.smooth_l1_loss(y, t, beta=0.3),
    "huber": lambda y, t, c: F.huber_loss(y, t, delta=0.3),
    "bce_logits": lambda y, t, c: F.binary_cross_entropy_with_logits(y, t.sigmoid()),
    "cross_entropy": lambda y, t, c: F.cross_entropy(y, c),
    "label_smoothing": lambda y, t, c: F.cross_entropy(y, c, label_smoothing=0.1),
    "probabilities": lambda y, t, c: F.cross_entropy(y, t.softmax(1), label_smoothing=0.1),
    "kl": lambda y, t, c: F.kl_div(y.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "triplet": lambda y, t, c: F.triplet_margin_loss(y, t, y.roll(1, 0), margin=0.3),
    "gaussian_nll": lambda y, t, c: F.gaussian_nll_loss(y, t, F.softplus(y)),
}


def _worst(models: nn.ModuleList, references: nn.ModuleList) -> list[float]:
    errors = []
    for mine, theirs in zip(models, references, strict=True):
        pairs = list(zip(mine.parameters(), theirs.parameters(), strict=True))
        largest = max(b.grad.norm() for _, b in pairs)
        errors.append(max(float((a.grad - b.grad).norm() / largest) for a, b in pairs))
    return errors


def _check(
    models: nn.ModuleList, losses: Callable[..., torch.Tensor], *batch: torch.Tensor
) -> None:
    models = models.double()
    references = copy.deepcopy(models)

    def step(*arguments: torch.Tensor) -> torch.Tensor:
        loss = losses(models, *arguments)
        loss.backward()
        return loss

    found = amp_ir.jit(step, model=models)(*batch)
    expected = losses(references, *batch)
    expected.backward()
    assert found.dtype is torch.float64
    assert abs(found - expected) <= BOUND * abs(expected)
    assert max(_worst(models, references)) < BOUND


def test_functions_of_a_layer():
    torch.manual_seed(0)
    models = nn.ModuleList(_Called(one) for one in FUNCTIONS.values())

    def losses(models: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        values = [model(x) for model in models]
        return torch.stack([(0.1 * y * y * y + 0.3 * y).mean() for y in values]).sum()

    _check(models, losses, torch.randn(4, 6, dtype=torch.float64))


def test_losses():
    torch.manual_seed(1)
    models = nn.ModuleList(nn.Linear(6, 5) for _ in LOSSES)

    def losses(
        models: nn.ModuleList, x: torch.Tensor, t: torch.Tensor, c: torch.Tensor
    ) -> torch.Tensor:
        pairs = zip(LOSSES.values(), models, strict=True)
        return torch.stack([loss(model(x), t, c) for loss, model in pairs]).sum()

    x, t = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    _check(models, losses, x, t, torch.randint(0, 5, (4,)))


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_tables(padding_idx: int | None):
    torch.manual_seed(2)
    models = nn.ModuleList([nn.Embedding(5, 3, padding_idx=padding_idx), nn.EmbeddingBag(5, 3)])

    def losses(models: nn.ModuleList, ids: torch.Tensor) -> torch.Tensor:
        return (models[0](ids) / 3).square().mean() + (models[1](ids) * 0.1).square().mean()

    _check(models, losses, torch.randint(0, 5, (3, 4)))
