# SPDX-License-Identifier: Apache-2.0
"""Small networks of several kinds, and the shapes of their batches."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """Convolutions, BatchNorm, a residual block and both poolings."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.last = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.stem(x))
        x = functional.relu(x + self.block(x))
        x = functional.adaptive_avg_pool2d(functional.max_pool2d(x, 2), 1)
        return self.last(x.flatten(1))


class Recurrent(nn.Module):
    """An LSTM over four steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    """One pre-norm encoder layer with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.last = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(x).mean(1))


WORKLOADS = {
    "residual": (Residual, (8, 3, 8, 8)),
    "recurrent": (Recurrent, (8, 4, 8)),
    "transformer": (Transformer, (8, 6, 32)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)),
        (32, 64),
    ),
}
