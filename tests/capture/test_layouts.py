# SPDX-License-Identifier: Apache-2.0
"""Views of values whose layout the capture changed, and ops that speak of layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.capture.decompositions.layouts import is_viewable, strided
from amp_ir.errors import UnsupportedOpError
from amp_ir.importer.import_step import import_step
from step_comparison import Training, assert_trains_alike, normal

SHAPE = (2, 3, 1, 4)
SIZES = [
    (24,),
    (6, 4),
    (2, 12),
    (2, 3, 4),
    (3, 8),
    (4, 6),
    (2, 3, 2, 2),
    (4, 2, 3),
    (-1, 4),
    (3, -1),
]


def layouts() -> list[torch.Tensor]:
    """Tensors of one storage in every order of the axes, some with gaps."""
    whole = torch.arange(48.0).view(2, 3, 1, 8)
    dense = torch.arange(24.0)
    orders = itertools.permutations(range(4))
    permuted = [dense.view([SHAPE[k] for k in order]).permute(order) for order in orders]
    return [*permuted, whole[..., :4], whole[..., ::2], torch.zeros(1, 1, 1, 4).expand(SHAPE)]


@pytest.mark.parametrize("size", SIZES)
def test_is_viewable_says_what_view_does(size: tuple[int, ...]) -> None:
    for x in layouts():
        try:
            x.view(size)
            possible = True
        except RuntimeError:
            possible = False
        assert is_viewable(x, size) == possible, (tuple(x.shape), x.stride())


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_strided_takes_the_elements_that_as_strided_takes(order: tuple[int, ...]) -> None:
    shape, strides = [(2, 3, 4)[k] for k in order], [(12, 4, 1)[k] for k in order]
    for laid_out in layouts()[:24]:
        expected = laid_out.as_strided(shape, strides)
        found = strided(laid_out.contiguous(), laid_out, shape, strides)
        assert found is not None and torch.equal(found, expected)


def test_strided_leaves_windows_gaps_and_parts_to_as_strided() -> None:
    x = torch.arange(6.0)
    assert strided(x, x, (5, 2), (1, 1)) is None
    assert strided(x, x, (3,), (2,)) is None
    assert strided(x[:4], x[:4], (4,), (1,), 2) is None
    assert strided(torch.zeros(3, 4), torch.zeros(3, 8)[:, :4], (12,), (1,)) is None


class FusedHeads(nn.Module):
    """One matrix for queries, keys and values, interleaved head by head, as in BLOOM."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(12, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(x).view(2, 5, 2, 3, 4)
        query, key, value = (parts[..., k, :].transpose(1, 2).reshape(4, 5, 4) for k in range(3))
        return torch.bmm(torch.bmm(query, key.transpose(-1, -2)).softmax(-1), value)


class PooledRows(nn.Module):
    """Averages over the rows, whose layout PyTorch takes for channels_last and restrides."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.pool = nn.Linear(12, 8), nn.AdaptiveAvgPool1d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.project(x).transpose(1, 2)).flatten(1)


class WritesThroughViews(nn.Module):
    """Writes to a view of a value that decompositions give another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(2, 12, 5).select_scatter(self.project(x)[:, 1], 2, 3)
        rows.view(2, 3, 4, 5)[:, 1].mul_(2)
        return rows.transpose(1, 2) + rows.view(2, 60)[:, ::12][:, :, None]


@pytest.mark.parametrize("model", [FusedHeads, PooledRows, WritesThroughViews])
def test_they_train_as_in_eager(model: type[nn.Module]) -> None:
    def build() -> Training:
        built = model()
        optimizer = torch.optim.SGD(built.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = built(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Training(built, optimizer, step)

    assert assert_trains_alike(build, lambda k: (normal(k, 2, 5, 12),)) == 1


def test_windows_that_overlap_are_copies() -> None:
    def build() -> Training:
        built = nn.Linear(6, 6)
        optimizer = torch.optim.SGD(built.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = built(x).as_strided((5, 2), (1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Training(built, optimizer, step)

    assert_trains_alike(build, lambda k: (normal(k, 1, 6),))


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gaps": lambda h: h.as_strided((6, 2), (4, 1), 1),
    "every third": lambda h: h.as_strided((7,), (3,)),
    "repeated rows": lambda h: h.as_strided((3, 4), (0, 1)),
    "windows": lambda h: h.as_strided((11, 3, 2), (2, 1, 1)),
    "of rows": lambda h: h[1:].as_strided((2, 3), (8, 1)),
    "of a transposed": lambda h: h.t().as_strided((6, 2), (4, 1)),
    "of 4 axes": lambda h: h.view(2, 3, 1, 4).permute(3, 2, 0, 1).as_strided((2, 5), (12, 2)),
    "after a write": lambda h: h.neg().mul_(2).as_strided((11, 2), (2, 1)),
    "written": lambda h: written(h, lambda part, x: part.copy_(x)),
    "multiplied in place": lambda h: written(h, torch.Tensor.mul_),
    "read by another view": lambda h: written(h.t(), torch.Tensor.add_).t(),
}


def written(h: torch.Tensor, write: Callable[..., Any]) -> torch.Tensor:
    """Write to a part of the memory of a copy, which another view reads."""
    values = h.detach().clone()
    write(values.transpose(0, 1).as_strided((6, 2), (4, 2)), torch.full((2,), 3.0))
    return h * values


@pytest.mark.parametrize("name", STRIDED)
def test_parts_of_memory_train_as_in_eager(name: str) -> None:
    def build() -> tuple[nn.Module, Any, Callable[..., Any]]:
        torch.manual_seed(0)
        built = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(built.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            optimizer.zero_grad()
            y = STRIDED[name](built(x))
            weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).view(y.shape)
            loss = (y * weights.cos()).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach(), y.detach()

        return built, optimizer, step

    (built, optimizer, step), (other, _, eager) = build(), build()
    train = amp_ir.jit(step, model=built, optimizer=optimizer)
    for k in range(3):
        x = normal(k, 6, 4)
        found, wanted = [*train(x), *built.parameters()], [*eager(x), *other.parameters()]
        for one, its in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, its, rtol=1e-5, atol=1e-6)


def test_windows_beyond_a_tensor_are_refused() -> None:
    model = nn.Linear(6, 6)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)[:, :3].as_strided((5, 2), (1, 1))

    captured = Training(model, None, step).capture((normal(0, 1, 6),))
    with pytest.raises(UnsupportedOpError, match="depends on how its tensor is laid out in memory"):
        import_step(captured)
