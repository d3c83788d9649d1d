# SPDX-License-Identifier: Apache-2.0
"""A recurrence that stays unrolled: an LSTM that the model itself walks, time step by time step.

A whole `torch.nn.LSTM` is one op a layer; what is said of programs that repeat the same few ops for
every step is tested with this.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn
from torch.nn import functional


class UnrolledLstm(nn.Module):
    """Layers over x f[n, t, width] as ATen spells them out; gives the last layer's states."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.of_input = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.of_state = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        for of_input, of_state in zip(self.of_input, self.of_state, strict=True):
            hidden = cell = x.new_zeros(x.shape[1:])
            states = []
            for gates in of_input(x).unbind(0):
                into, forget, made, out = (of_state(hidden) + gates).chunk(4, 1)
                cell = forget.sigmoid() * cell + into.sigmoid() * made.tanh()
                hidden = out.sigmoid() * cell.tanh()
                states.append(hidden)
            x = torch.stack(states)
        return x.transpose(0, 1)


class LanguageModel(nn.Module):
    """Two layers of an LSTM between an embedding and a projection."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = UnrolledLstm(width, 2)
        self.scores = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scores(self.layers(self.embedding(ids)))


@attrs.frozen
class LanguageTraining:
    """The model, its optimizer, a batch f[2, 4] and the step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, ...]

    def step(self, *batch: torch.Tensor) -> Any:
        """One step of SGD."""
        ids, labels = batch
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def language_training(vocabulary: int = 50, width: int = 16) -> LanguageTraining:
    """The same numbers at every call."""
    torch.manual_seed(0)
    model = LanguageModel(vocabulary, width)
    batch = tuple(torch.randint(0, vocabulary, (2, 4)) for _ in range(2))
    return LanguageTraining(model, torch.optim.SGD(model.parameters(), lr=1.0), batch)
