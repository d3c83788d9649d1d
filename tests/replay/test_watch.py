# SPDX-License-Identifier: Apache-2.0
"""A watch counts what tensors hold, in the steps that are due, and changes nothing else."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir


def training(*, dropout: float = 0.2, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, amp_ir.jit(step, model=model, optimizer=optimizer, **options)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator))
        for _ in range(count)
    ]


def test_every_so_many_steps_are_watched_and_training_is_the_same():
    watch = amp_ir.Watch(every=3, ops="1", phase="forward")
    models = []
    for given in (watch, None):
        model, train = training(dropout=0.0, amp_dtype="bfloat16", rounding="strict", watch=given)
        for batch in batches(7):
            train(*batch)
        models.append(model.state_dict())
        assert len(train.recompiles) == 0
    assert [one.step for one in watch.records()] == [0, 3, 6]
    assert watch.last == watch.records()[-1]
    # Another program may add up sums in another order.
    torch.testing.assert_close(*models, rtol=1e-5, atol=1e-6)


def test_a_watched_step_draws_from_the_same_random_numbers():
    losses = []
    for every in (1, 2):
        _, train = training(dropout=0.5, watch=amp_ir.Watch(every=every))
        train(*batches(1)[0])
        train.load_state_dict({"random_state": torch.tensor([7, 3])})
        losses.append([float(train(*batch)) for batch in batches(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_statistics_are_those_of_the_tensor():
    watch = amp_ir.Watch(every=1, ops="0", phase="forward")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.diag(torch.tensor([1.0, 2.0**-20, 0.0, 6e4])))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    train = amp_ir.jit(step, model=model, amp_dtype="float16", watch=watch)
    x = torch.ones(2, 4)
    x[1] = 0.5
    train(x)
    (found,) = watch.last.tensors
    assert (found.tensor.op, found.tensor.module, found.tensor.elements) == ("relax.matmul", "0", 8)
    assert found.tensor.dtype == "float16"
    # The identity of 1 and 0.5, 2**-20 and 2**-21, 0 and 0, 6e4 and 3e4.
    assert found.largest == float(torch.tensor(6e4).half())
    assert (found.subnormal, found.zero, found.not_finite) == (2, 2, 0)
    assert found.headroom_bits == pytest.approx(math.log2(65504 / 60000), abs=1e-3)
    x[0] = 2.0
    train(x)
    (found,) = watch.last.tensors
    assert found.not_finite == 1
    assert found.largest == float(torch.tensor(3e4).half())


@pytest.mark.parametrize("op", ["relax.tanh", "tanh"])
def test_the_ring_keeps_the_last_records(op):
    watch = amp_ir.Watch(every=1, ops=op, length=2)
    _, train = training(watch=watch)
    for batch in batches(4):
        train(*batch)
    assert [one.step for one in watch.records()] == [2, 3]
    assert all(len(one.tensors) == 1 for one in watch.records())


def test_backward_tensors_and_all_phases():
    backward = amp_ir.Watch(every=1, ops="3", phase="backward")
    everything = amp_ir.Watch(every=1)
    for watch in (backward, everything):
        _, train = training(watch=watch)
        train(*batches(1)[0])
    assert {one.tensor.phase for one in backward.last.tensors} == {"backward"}
    phases = {one.tensor.phase for one in everything.last.tensors}
    assert phases == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "Watch(every=0); expected a positive int"),
        ({"length": True}, "Watch(length=True); expected a positive int"),
        ({"ops": ["0"]}, "Watch(ops=['0']); expected a glob, such as \"*.attn*\""),
        (
            {"phase": "middle"},
            "Watch(phase='middle'); expected one of 'forward', 'backward', 'optimizer', or None",
        ),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        amp_ir.Watch(**options)
    assert str(caught.value) == message


def squares(model: nn.Module, **options: Any) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return amp_ir.jit(step, model=model, **options)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.projection = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.view(2, 5, 2, 4).transpose(1, 2) for one in self.parts(x))
        return F.scaled_dot_product_attention(q, k, v)

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.projection(self.norm(x)).chunk(3, -1)


def test_results_of_ops_with_several_are_watched():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 5, 8)
    expected = {
        "amp_ir.layer_norm": float(model.norm(x).detach().abs().max()),
        "amp_ir.attention": float(model(x).detach().abs().max()),
    }
    watch = amp_ir.Watch(every=1, phase="forward")
    squares(model, watch=watch)(x)
    found: dict[str, list[float]] = {}
    for one in watch.last.tensors:
        found.setdefault(one.tensor.op, []).append(one.largest)
    # The first result of each; the others are what the backward pass reads.
    assert {name: found[name][0] for name in expected} == pytest.approx(expected, rel=1e-5)
    of_norm = amp_ir.Watch(every=1, ops="norm", phase="forward")
    squares(model, watch=of_norm)(x)
    assert of_norm.last.tensors[0].tensor.elements == 80


def test_each_jitted_step_counts_its_own_steps():
    watch = amp_ir.Watch(every=2, ops="relax.matmul", phase="forward")
    first, second = (squares(nn.Linear(8, n), watch=watch) for n in (3, 4))
    for _ in range(3):
        first(torch.randn(2, 8))
        second(torch.randn(2, 8))
    records = [(one.step, one.tensors[0].tensor.elements) for one in watch.records()]
    assert records == [(0, 6), (0, 8), (2, 6), (2, 8)]


def test_a_watch_that_matches_nothing_is_refused_and_nothing_has_changed():
    model, train = training(watch=amp_ir.Watch(ops="decoder.*"))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        train(*batches(1)[0])
    assert str(caught.value) == (
        "Watch(ops='decoder.*') matches no tensor of float16, bfloat16, float32 of the step; "
        'train.ir("amp") lists its ops with their modules'
    )
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
