# SPDX-License-Identifier: Apache-2.0
"""Small training steps of several kinds that ranks run together, and their batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, ...]
Wrap = Callable[[nn.Module], nn.Module]


class Bert(nn.Module):
    """Embeddings, one post-norm encoder layer, a head over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, 32), nn.Embedding(8, 32)
        self.norm = nn.LayerNorm(32)
        self.layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.layer(self.norm(x)))


class Gpt2(nn.Module):
    """A pre-norm block with causal attention, and a head that is the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 32)
        self.first, self.second, self.last = (nn.LayerNorm(32) for _ in range(3))
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        rows, length, width = x.shape
        q, k, v = (
            one.view(rows, length, 4, width // 4).transpose(1, 2)
            for one in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        x = x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))
        return self.last(x) @ self.words.weight.T


class Resnet(nn.Module):
    """Convolutions with BatchNorm around a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.last = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.block(x))
        return self.last(F.adaptive_avg_pool2d(F.max_pool2d(x, 2), 1).flatten(1))


class SsdHead(nn.Module):
    """Boxes and classes from two sizes of features."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, padding=1)
        self.boxes = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.kinds = nn.ModuleList(nn.Conv2d(8, 6, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        near = F.relu(self.near(x))
        features = [near, F.relu(self.far(near))]
        boxes = [f(one).flatten(2) for f, one in zip(self.boxes, features, strict=True)]
        kinds = [f(one).flatten(2) for f, one in zip(self.kinds, features, strict=True)]
        return torch.cat(boxes, 2), torch.cat(kinds, 2)


class Lstm(nn.Module):
    """An LSTM over six steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x)[0][:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
    )


@attrs.define(eq=False)
class Training:
    """A step with what it trains; called with a batch."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    step: Callable[..., Any]

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that the step updates, by name."""
        found = {}
        for k, model in enumerate(self.models):
            inner = (
                model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
            )
            found |= {f"{k}.{name}": one for name, one in inner.state_dict().items()}
        for k, optimizer in enumerate(self.optimizers):
            # Not its state_dict(), which an optimizer that holds parts refuses.
            held = [one for group in optimizer.param_groups for one in group["params"]]
            for owner, parameter in enumerate(held):
                values = optimizer.state.get(parameter, {})
                tensors = {key: one for key, one in values.items() if torch.is_tensor(one)}
                found |= {f"optimizer{k}.{owner}.{key}": one for key, one in tensors.items()}
        return found

    def digest(self) -> str:
        """Of every bit of the state."""
        whole = hashlib.sha256()
        for name, one in sorted(self.state().items()):
            whole.update(name.encode() + one.detach().contiguous().view(-1).numpy().tobytes())
        return whole.hexdigest()


def _loss_of(model: nn.Module, x: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
    out = model(x)
    if isinstance(out, tuple):
        boxes, kinds = out
        return F.smooth_l1_loss(boxes, targets[0]) + F.cross_entropy(kinds, targets[1])
    return F.cross_entropy(out.flatten(0, -2), targets[0].flatten())


def plain(make: Callable[[], nn.Module], optimizer_of: Any, *, clip: float = 0.0) -> Any:
    """A model, one optimizer, and the step that everyone writes."""

    def training(wrap: Wrap) -> Training:
        torch.manual_seed(0)
        model = wrap(make())
        optimizer = optimizer_of(model.parameters())

        def step(x: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
            loss = _loss_of(model, x, *targets)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training([model], [optimizer], step)

    return training


def gan(wrap: Wrap) -> Training:
    """A discriminator and a generator, each with its optimizer."""
    torch.manual_seed(0)
    judge = wrap(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    maker = wrap(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.5)
    of_maker = torch.optim.SGD(maker.parameters(), lr=0.05, momentum=0.5)

    def loss_of(score: torch.Tensor, is_real: float) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(score, torch.full_like(score, is_real))

    def step(real: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = maker(noise)
        both = judge(torch.cat([real, made.detach()]))
        first, second = both.chunk(2)
        judged = loss_of(first, 1.0) + loss_of(second, 0.0)
        judged.backward()
        of_judge.step()
        of_judge.zero_grad()
        fooled = loss_of(judge(made), 1.0)
        fooled.backward()
        of_maker.step()
        of_maker.zero_grad()
        of_judge.zero_grad()
        return judged.detach(), fooled.detach()

    return Training([judge, maker], [of_judge, of_maker], step)


def _ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


# How to make each training, given what wraps its models, and a batch of one rank.
WORKLOADS: dict[str, tuple[Callable[[Wrap], Training], Callable[[], Batch]]] = {
    "mlp": (plain(mlp, _sgd), lambda: (torch.randn(8, 16), _ints(4, 8))),
    "bert": (plain(Bert, _sgd, clip=1.0), lambda: (_ints(64, 4, 8), _ints(64, 4, 8))),
    "gpt2": (plain(Gpt2, _adamw), lambda: (_ints(64, 4, 8), _ints(64, 4, 8))),
    "resnet": (plain(Resnet, _sgd), lambda: (torch.randn(4, 3, 8, 8), _ints(10, 4))),
    "ssd": (
        plain(SsdHead, _sgd),
        lambda: (torch.randn(2, 3, 8, 8), torch.randn(2, 8, 80), _ints(6, 2, 80)),
    ),
    "lstm": (plain(Lstm, _sgd), lambda: (torch.randn(4, 6, 8), _ints(10, 4))),
    "gan": (gan, lambda: (torch.randn(8, 8), torch.randn(8, 4))),
}


def batches(name: str, count: int, rank: int) -> list[Batch]:
    """A rank's batches: the same at every call, others on other ranks."""
    torch.manual_seed(1000 + rank)
    return [WORKLOADS[name][1]() for _ in range(count)]


def wrapped(model: nn.Module, **options: Any) -> nn.Module:
    """A model as PyTorch trains it on several ranks."""
    return nn.parallel.DistributedDataParallel(model, **options)
