# SPDX-License-Identifier: Apache-2.0
"""Two optimizers and a scaler: skipped is who `scaler.step` skips in PyTorch, and no other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import amp_ir

INF = math.inf
# Ways of an optimizer through a step, and whether an infinite gradient skips it.
SKIPS = {
    "scaler.step": True,
    "unscale, scaler.step": True,
    "unscale, optimizer.step": False,
    "optimizer.step, scaler.step": True,
    "unscale only": False,
}
BATCHES = [(1.0, 1.0), (INF, 1.0), (2.0, INF), (3.0, 1.0)]
Sides = tuple[list[torch.nn.Linear], list[torch.optim.Optimizer], Any, Any]


def _take(way: str, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    if way != "scaler.step":
        scaler.unscale_(optimizer)
    if "optimizer.step" in way:
        optimizer.step()
    if "scaler.step" in way:
        scaler.step(optimizer)


def _make(ways: tuple[str, str], kind: Any) -> Sides:
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(one.parameters(), lr=0.1) for one in models
    ]
    scaler = kind("cpu", init_scale=2.0**10, growth_interval=2)

    def step(*values: torch.Tensor) -> None:
        for optimizer, model, x in zip(optimizers, models, values, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(x).mean()).backward()
        for way, optimizer in zip(ways, optimizers, strict=True):
            _take(way, scaler, optimizer)
        scaler.update()

    return models, optimizers, scaler, step


@pytest.mark.parametrize("first", SKIPS)
@pytest.mark.parametrize("second", ["scaler.step", "unscale, optimizer.step"])
def test_weights_scales_and_records_of_two_optimizers(first: str, second: str):
    ways = (first, second)
    models, _, scaler, step = _make(ways, torch.amp.GradScaler)
    ours, optimizers, our_scaler, our_step = _make(ways, torch.amp.GradScaler)
    train = amp_ir.jit(our_step, model=ours, optimizer=optimizers, scaler=our_scaler)
    plain_models, _, plain_scaler, plain_step = _make(ways, amp_ir.GradScaler)
    for values in BATCHES:
        batch = [torch.full((2, 3), value) for value in values]
        step(*batch)
        train(*batch)
        plain_step(*batch)
        for mine, plain, theirs in zip(ours, plain_models, models, strict=True):
            for a, b, c in zip(
                mine.parameters(), plain.parameters(), theirs.parameters(), strict=True
            ):
                torch.testing.assert_close(a, c, equal_nan=True)
                torch.testing.assert_close(b, c, equal_nan=True)
        assert our_scaler.get_scale() == plain_scaler.get_scale() == scaler.get_scale()
        skipped = any(SKIPS[way] and value == INF for way, value in zip(ways, values, strict=True))
        assert train.last.skipped is skipped and train.skipped is skipped
        assert plain_scaler.log.last().skipped is skipped


def _set_each_step(new: Any, kind: Any) -> Sides:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=2.0**10, growth_interval=1)

    def step(x: torch.Tensor, scale: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update(new(scaler, scale))

    return [model], [optimizer], scaler, step  # type: ignore[list-item]


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, amp_ir.GradScaler])
@pytest.mark.parametrize(
    "new",
    [
        lambda _scaler, _scale: 256.0,
        lambda _scaler, scale: scale,
        lambda scaler, _scale: torch.clamp(scaler._scale * 2, max=2.0**12),
        lambda scaler, _scale: scaler.get_scale() * 0.5,
    ],
    ids=["number", "tensor", "clamped", "halved"],
)
def test_a_new_scale_is_taken_and_a_skipped_step_is_still_skipped(new: Any, kind: Any):
    _, _, scaler, step = _set_each_step(new, torch.amp.GradScaler)
    models, optimizers, ours, our_step = _set_each_step(new, kind)
    train = amp_ir.jit(our_step, model=models, optimizer=optimizers, scaler=ours)
    for value, is_skipped in ((1.0, False), (INF, True), (2.0, False)):
        batch = torch.full((2, 3), value), torch.tensor(512.0)
        before = models[0][0].weight.clone()  # type: ignore[index]
        step(*batch)
        train(*batch)
        assert ours.get_scale() == scaler.get_scale()
        assert int(ours._growth_tracker) == int(scaler._growth_tracker)
        assert train.last.skipped is is_skipped
        assert torch.equal(before, models[0][0].weight) is is_skipped  # type: ignore[index]


def test_a_new_scale_that_is_no_power_of_two_is_refused_by_the_scaler_that_wants_one():
    models, optimizers, scaler, step = _set_each_step(
        lambda _scaler, _scale: 300.0, amp_ir.GradScaler
    )
    batch = torch.ones(2, 3), torch.tensor(512.0)
    with pytest.raises(amp_ir.errors.OptionError) as error:
        amp_ir.trace_step(step, batch, model=models, optimizer=optimizers, scaler=scaler)
    assert str(error.value) == (
        "new_scale=300.0 is not a power of two, so scaling by it would round every gradient; the "
        "nearest is 256"
    )
