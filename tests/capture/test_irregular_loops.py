# SPDX-License-Identifier: Apache-2.0
"""Loops whose first, middle or read steps are unlike the others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_ir

WIDTH = 6


class FirstReadsItsOwn(nn.Module):
    """The first step reads its own value where the others read that of the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
        before, made = None, []
        for t in range(20):
            now = torch.tanh(x[:, t] @ self.weight)
            made.append(torch.tanh((now if before is None else before) * self.scale + now))
            before = now
        return torch.stack(made, 1)


class ResetInTheMiddle(FirstReadsItsOwn):
    """A step begins anew, without an op more or less."""

    reset = 19

    def forward(self, x: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
        start = torch.tanh(x[:, 0] + self.scale)
        h, c, d, made = start, start * 2, start * 3, []
        for t in range(36):
            if t == self.reset:
                h = start
            h = torch.tanh(h @ self.weight + x[:, t])
            c = torch.tanh(c * 0.5 + h)
            d = torch.tanh(d + c)
            made.append(d)
        return torch.stack(made)


class EverySecond(FirstReadsItsOwn):
    """Steps read every second entry, forwards and backwards; others are no index."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        h, made = torch.zeros_like(x[:, 0]), []
        for t in range(18):
            read = self.words(ids[:, 2 * t]) + self.words(ids[:, 34 - 2 * t])
            h = torch.tanh(h @ self.weight + x[:, 2 * t] @ self.weight + read)
            made.append(h)
        return torch.stack(made, 1)


def training(model: nn.Module):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, ids):
        optimizer.zero_grad()
        loss = model(x, ids).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, optimizer


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (3, 36), generator=draws)
    ids[:, 1::2] = -1
    return torch.randn(3, 36, WIDTH, generator=draws), ids


@pytest.mark.parametrize("kind", [FirstReadsItsOwn, ResetInTheMiddle, EverySecond])
def test_three_steps_equal_pytorch_in_float64(kind):
    torch.manual_seed(0)
    model = kind()
    exact = copy.deepcopy(model).double()
    step, optimizer = training(model)
    exact_step, _ = training(exact)
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for seed in range(3):
        x, ids = batch(seed)
        # Float32's rounding, through some 20 x 10 ops.
        torch.testing.assert_close(
            train(x, ids).double(), exact_step(x.double(), ids), rtol=1e-5, atol=1e-6
        )
    for got, wanted in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
def test_a_loop_is_one_call_of_a_profile(amp_dtype):
    model = EverySecond()
    step, optimizer = training(model)
    mod, args = amp_ir.trace_step(step, batch(0), model=model, optimizer=optimizer)
    if amp_dtype:
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    profile = amp_ir.profile_kernels(mod, "cpu", args)
    assert any("loop" in one.name for one in profile.calls)
