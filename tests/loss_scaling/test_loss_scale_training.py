# SPDX-License-Identifier: Apache-2.0
"""200 steps in float16 with a loss scale and in bfloat16 end where float32 ends; without, not.

The targets are of size 1e-3, as quantities in SI units often are, so that the gradients of the
activations are below float16's least number 6e-8 unless the loss is scaled. Adam would not mind
their size, only their being zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_ir

UNIT = 1e-3
STEPS, SEEDS = 200, range(5)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.LayerNorm(32),
        nn.GELU(),
        nn.Linear(32, 32),
        nn.GELU(),
        nn.Linear(32, 8),
    )


def make_batch(generator: torch.Generator, size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and a fixed function of them times UNIT."""
    teacher = torch.Generator().manual_seed(123)
    first, second = (torch.randn(shape, generator=teacher) for shape in ((16, 32), (32, 8)))
    x = torch.randn(size, 16, generator=generator)
    return x, UNIT * torch.tanh(x @ first / 4) @ second / 6


@attrs.define(eq=False)
class Experiment:
    """One way to train, from several seeds; a low one is captured once for all of them."""

    amp_dtype: str | None
    is_scaled: bool
    scaler: amp_ir.GradScaler = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.scaler = amp_ir.GradScaler(
            init_scale=2.0**44, growth_interval=50, enabled=self.is_scaled, max_scale=None
        )

    def run(self) -> list[float]:
        """The final loss of each seed, on data of its own, in units of UNIT**2."""
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-15)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x) * UNIT, y)
            self.scaler.scale(loss).backward()
            self.scaler.step(optimizer)
            self.scaler.update()

        train = step
        if self.amp_dtype is not None:
            options = {"model": model, "optimizer": optimizer, "scaler": self.scaler}
            mod, args = amp_ir.trace_step(step, make_batch(torch.Generator()), **options)
            mod = amp_ir.autocast(mod, args, amp_dtype=self.amp_dtype)
            # Strict: every value is rounded as a machine would that computes op by op.
            train = amp_ir.compile(mod, rounding="strict")
        start = self.scaler.state_dict()
        losses = []
        for seed in SEEDS:
            torch.manual_seed(seed)
            model.load_state_dict(make_model().state_dict())
            self.scaler.load_state_dict(start)
            for state in optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
            generator = torch.Generator().manual_seed(1000 + seed)
            for _ in range(STEPS):
                train(*make_batch(generator))
            losses.append(final_loss(model))
        return losses


def final_loss(model: nn.Module) -> float:
    x, y = make_batch(torch.Generator().manual_seed(7), 1024)
    with torch.no_grad():
        return float(functional.mse_loss(model(x) * UNIT, y)) / UNIT**2


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The steps are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def full() -> list[float]:
    """The final losses of plain PyTorch in float32."""
    losses = Experiment(None, is_scaled=False).run()
    untrained = final_loss(make_model())
    assert max(losses) < 0.2 * untrained
    return losses


def test_float16_with_a_loss_scale_ends_within_the_spread_of_float32(full: list[float]):
    experiment = Experiment("float16", is_scaled=True)
    losses = experiment.run()
    assert min(full) <= statistics.mean(losses) <= max(full), (losses, full)
    # The scale had to come down first, and tried again to go up: skipped steps cost nothing.
    log = experiment.scaler.log
    assert log is not None
    last_run = log.history()[-STEPS:]
    scales = [record.scale for record in last_run]
    assert any(record.skipped for record in last_run)
    assert any(after > before for before, after in zip(scales, scales[1:], strict=False))


def test_bfloat16_without_a_loss_scale_ends_within_the_spread_of_float32(full: list[float]):
    losses = Experiment("bfloat16", is_scaled=False).run()
    assert min(full) <= statistics.mean(losses) <= max(full), (losses, full)


def test_float16_without_a_loss_scale_is_worse(full: list[float]):
    losses = Experiment("float16", is_scaled=False).run()
    assert min(losses) > 2 * max(full), (losses, full)
