# SPDX-License-Identifier: Apache-2.0
"""Models whose parameters are not contiguous, trained by a compiled step and by PyTorch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn

import amp_ir

LAST, LAST_3D = {"memory_format": torch.channels_last}, {"memory_format": torch.channels_last_3d}
Optimizers = Callable[[Any], torch.optim.Optimizer]


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8, padding=1),  # depthwise
        nn.Conv2d(8, 12, 3, groups=2, stride=2),
        nn.GroupNorm(3, 12),
        nn.ConvTranspose2d(12, 6, 3, stride=2),
        nn.Conv2d(6, 5, 1),
        nn.Conv2d(5, 4, (1, 3)),
    ).to(**LAST)  # type: ignore[call-overload]


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 6, 3, padding=1, bias=False),
        nn.BatchNorm3d(6),
        nn.ReLU(),
        nn.ConvTranspose3d(6, 4, 2, stride=2),
        nn.Conv3d(4, 3, (1, 2, 3)),
    ).to(**LAST_3D)  # type: ignore[call-overload]


def signals() -> nn.Module:
    model = nn.Sequential(nn.Conv1d(3, 6, 3), nn.Tanh(), nn.Conv1d(6, 4, 2))
    for one in (model[0], model[2]):
        one.weight = nn.Parameter(permuted(one.weight, 0, 2, 1))
    return model


def matrices() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    for one in (model[0], model[2]):
        one.weight = nn.Parameter(permuted(one.weight, 1, 0))
    return model


class EachOrder(nn.Module):
    """One weight of each of these orders, and little beside them: for what looks at no network."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.Conv3d(2, 4, 2).to(**LAST_3D)  # type: ignore[call-overload]
        self.image = nn.Conv2d(4, 3, 2).to(**LAST)  # type: ignore[call-overload]
        self.signal, self.matrix = nn.Conv1d(3, 4, 2), nn.Linear(4, 3)
        self.signal.weight = nn.Parameter(permuted(self.signal.weight, 0, 2, 1))
        self.matrix.weight = nn.Parameter(permuted(self.matrix.weight, 1, 0))

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(self.image(torch.tanh(self.volume(x)).mean(2)))
        return self.matrix(self.signal(x.flatten(2)).mean(2))


def permuted(tensor: torch.Tensor, *order: int) -> torch.Tensor:
    """The same values, in memory in another order."""
    inverse = [order.index(d) for d in range(len(order))]
    return tensor.detach().permute(order).contiguous().permute(inverse)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (images, (2, 3, 9, 9)),
    "volumes": (volumes, (2, 2, 5, 5, 5)),
    "signals": (signals, (3, 3, 9)),
    "matrices": (matrices, (5, 6)),
}
EACH = {"each": (EachOrder, (2, 2, 4, 4, 4))}
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "dampened": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
}


@attrs.define(eq=False)
class Training:
    """A model with its optimizer, and steps of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any = None
    clips: bool = False
    keeps: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if not self.keeps:
            self.optimizer.zero_grad()
        return loss.detach()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def jit(self, **options: Any) -> Any:
        return amp_ir.jit(self.step, **self.parts, **options)


def two(
    model: Callable[[], nn.Module], optimizer: Optimizers, **options: Any
) -> tuple[Training, Training]:
    """Two equal trainings: one to compile, one for PyTorch."""
    torch.manual_seed(0)
    ours = model()
    theirs = copy.deepcopy(ours)
    return tuple(Training(one, optimizer(one.parameters()), **options) for one in (ours, theirs))  # type: ignore[return-value]


def tensors_of(training: Training) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = dict(training.model.state_dict())
    for name, parameter in training.model.named_parameters():
        if parameter.grad is not None:
            found[f"{name}.grad"] = parameter.grad
        for key, value in training.optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value
    return found


def assert_alike(ours: Training, theirs: Training, *, rtol: float = 1e-4) -> None:
    found, wanted = tensors_of(ours), tensors_of(theirs)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol / 10, check_stride=False)
    strides = {name: (one.shape, layout(one)) for name, one in found.items()}
    assert strides == {name: (one.shape, layout(one)) for name, one in wanted.items()}


def layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of dimensions of more than one element: the others may be any."""
    return tuple(k for k, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)


def batch(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
