# SPDX-License-Identifier: Apache-2.0
"""Models whose parameters are in low precision themselves: `model.bfloat16()`, no autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_ir

IDS = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(2))


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


# Whose library calls read parameters as they lie: dense and transposed, conv, recurrent, embedding.
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 10)),
        _numbers(16, 24),
    ),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
        ),
        _numbers(4, 3, 8, 8),
    ),
    "attention": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        _numbers(2, 6, 16),
    ),
    "recurrence": (lambda: nn.LSTM(8, 12, batch_first=True), _numbers(4, 5, 8)),
    "language": (
        lambda: nn.Sequential(nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 50)),
        IDS,
    ),
}
# Eager rounds after every op, we after every kernel: a few roundings of 2^-8 and 2^-11 a loss.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def losses(name: str, dtype: torch.dtype, optimizer_type: type, compiles: bool) -> torch.Tensor:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make().to(dtype)
    # AdamW's own eps is 0 in float16, and its first step 0 / 0.
    options = {"eps": 1e-3} if optimizer_type is torch.optim.AdamW else {}
    optimizer = optimizer_type(model.parameters(), lr=0.01, **options)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        loss = (y[0] if isinstance(y, tuple) else y).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer) if compiles else step
    batch = batch.to(dtype) if batch.is_floating_point() else batch
    found = torch.stack([train(batch) for _ in range(4)])
    assert all(p.dtype == dtype for p in model.parameters())
    return found


@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", MODELS)
def test_they_train_as_in_pytorch(name: str, dtype: torch.dtype, optimizer_type: type) -> None:
    ours, eager = (losses(name, dtype, optimizer_type, compiles) for compiles in (True, False))
    torch.testing.assert_close(ours, eager, rtol=TOLERANCES[dtype], atol=0)
