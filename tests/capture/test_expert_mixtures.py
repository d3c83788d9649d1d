# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts as they are first written: each expert computes the rows that chose it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError
from compiled_steps import assert_compiled_alike
from own_function import Doubled
from step_comparison import Training, normal

N, D, EXPERTS = 10, 6, 3


class Gated(nn.Module):
    """An expert as in Mixtral, with norms before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(D), nn.RMSNorm(D, eps=1e-6)
        self.up, self.gate, self.down = nn.Linear(D, 8), nn.Linear(D, 8), nn.Linear(8, D)
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return self.last(self.down(F.silu(self.gate(h)) * self.up(h))) * self.scale


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, D))


class Mixture(nn.Module):
    """A router and experts of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList([perceptron(), Gated(), perceptron()])


# Of the model and rows f[n, d].
Forward = Callable[[Mixture, torch.Tensor], torch.Tensor]


def routed(model: Mixture, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight, choice = model.router(x).softmax(-1).max(-1)
    # Of an expert that nobody chooses at times, and rows that are not finite below.
    return weight, torch.where(x[..., 0] > 1, 2, choice.clamp(max=1))


def by_mask(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    weight, choice = routed(model, x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        m = choice == e
        out[m] = expert(x[m])
    return out * weight[..., None]


def by_mask_in_place(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    weight, choice = routed(model, x)
    out = x.clone()
    for e, expert in enumerate(model.experts):
        m = choice == e
        out[m] += weight[m, None] * expert(x[m])
        out[m] *= weight[m].unsqueeze(-1) + weight[m][:, None]
    return out


def by_column(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    scores = model.router(x).softmax(-1)
    chosen = F.one_hot(routed(model, x)[1], EXPERTS).bool()
    out = torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        m = chosen[..., e]
        out[m] = expert(x[m]) * scores[m, e, None] + scores[m, e : e + 1]
    return out


def of_tokens(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    """Select of f[batch, time, d]."""
    return by_mask(model, x.view(2, -1, D)).view(x.shape)


def by_nonzero(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    weight, choice = routed(model, x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        i = (choice == e).nonzero()[:, 0]
        out[i] = expert(x[i]) * weight[i, None]
    return out


def by_where(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    weight, choice = routed(model, x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        i = torch.where(choice == e)[0]
        rows = expert(x.index_select(0, i)) * weight[i].view(-1, 1)
        out.index_add_(0, i, rows)
        out = out.index_add(0, i, rows.to(x.dtype))
        out.index_copy_(0, i, out[i] - rows)
    return out


def by_flat_nonzero(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    weight, choice = routed(model, x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        (i,) = torch.nonzero(choice == e, as_tuple=True)
        j = torch.nonzero(choice == e).squeeze(1).flatten()
        out[i] += expert(x[i])
        out[j] *= weight[j][:, None]
    return out


def as_mixtral(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    """Follow transformers' MixtralSparseMoeBlock before its experts were one op."""
    weights, selected = torch.topk(F.softmax(model.router(x), dim=1, dtype=torch.float), 2, dim=-1)
    weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
    # A row may choose one expert twice, which topk does not make.
    selected = torch.where(x[:, 1:2] > 0.5, selected[:, :1], selected)
    return mixed_as_mixtral(model, x, weights, F.one_hot(selected, EXPERTS).permute(2, 1, 0))


def mixed_as_mixtral(
    model: Mixture, x: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros((x.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    for e, expert in enumerate(model.experts):
        idx, top_x = torch.where(mask[e])
        current = x[None, top_x].reshape(-1, x.shape[1])
        rows = expert(current) * weights[top_x, idx, None]
        out.index_add_(0, top_x, rows.to(x.dtype))
    return out


def of_many_choices(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    """Add up more rows of one place than are added one after the other."""
    mask = x[None, :, :1].permute(0, 2, 1) * torch.linspace(-1, 1, 20)[None, :, None]
    mask = torch.cat([mask > 0.5, mask < -0.7, mask > 3])
    return mixed_as_mixtral(model, x, mask.sum(0).T.to(x.dtype) + 1, mask)


def in_pieces(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    """Compute along rows without parameters, and with a weight of its own."""
    _, choice = routed(model, x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        m = choice == e
        rows = x[m]
        first, second = rows.chunk(2, dim=-1)
        joined = torch.cat([second, F.normalize(first, dim=-1)], dim=1)
        joined = joined - joined.mean(-1, keepdim=True) + rows.shape[-1] + rows.dim()
        joined[..., 0].mul_(2)
        joined = joined.view(-1, 2, D // 2).flatten(1) @ model.experts[0][0].weight.T[:, :D]
        out[m] = expert(joined) + joined.softmax(dim=1) * joined.amax(1, keepdim=True)
        out += rows.mean(0) * rows.sum(dim=0)
    return out.nan_to_num()


FORWARDS: list[Forward] = [
    by_mask, by_mask_in_place, by_column, of_tokens, by_nonzero, by_where, by_flat_nonzero,
    as_mixtral, of_many_choices, in_pieces,
]  # fmt: skip


def training(forward: Forward, dtype: torch.dtype = torch.float32) -> Training:
    model = Mixture().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (forward(model, x) - x.roll(1, 0).nan_to_num(0, 0, 0)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda one: one.__name__)
def test_mixtures_train_as_in_eager(forward: Forward) -> None:
    batches = [(normal(index, N, D),) for index in range(4)]
    assert assert_compiled_alike(lambda: training(forward), batches.__getitem__, steps=4) == 1


@pytest.mark.parametrize("forward", [by_mask_in_place, by_where, of_many_choices])
def test_mixtures_train_as_in_eager_in_float64(forward: Forward) -> None:
    batches = [(normal(index, N, D).double(),) for index in range(4)]
    compilations = assert_compiled_alike(
        lambda: training(forward, torch.float64), batches.__getitem__, steps=4, rtol=1e-12,
        gradient_rtol=1e-11, state_rtol=1e-9,
    )  # fmt: skip
    assert compilations == 1


@pytest.mark.parametrize("forward", [by_mask_in_place, by_where, as_mixtral])
def test_mixtures_train_in_bfloat16(forward: Forward) -> None:
    torch.manual_seed(0)
    one = training(forward)
    torch.manual_seed(0)
    two = training(forward)
    train = amp_ir.jit(two.step, model=two.model, optimizer=two.optimizer, amp_dtype="bfloat16")
    for index in range(4):
        x = normal(index, N, D)
        # Some roundings to bfloat16, 2^-8 each, along three layers.
        torch.testing.assert_close(train(x), one.step(x), rtol=0.05, atol=0)


def test_mixtures_train_in_float16_under_a_loss_scale() -> None:
    torch.manual_seed(0)
    one = training(as_mixtral)
    torch.manual_seed(0)
    two, scaler = training(as_mixtral), amp_ir.GradScaler(init_scale=1024.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        two.optimizer.zero_grad()
        loss = (as_mixtral(two.model, x) - x.roll(1, 0)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(two.optimizer)
        scaler.update()
        return loss.detach()

    train = amp_ir.jit(
        step, model=two.model, optimizer=two.optimizer, scaler=scaler, amp_dtype="float16"
    )
    for index in range(3):
        x = normal(index, N, D)
        torch.testing.assert_close(train(x), one.step(x), rtol=0.01, atol=0)


def only_finite(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    """Compute an expert on rows that are finite, of which some are not: log, then a layer."""
    out = torch.zeros_like(x)
    (i,) = torch.where((x > 0).all(1) & x.isfinite().all(1))
    out[i] = model.experts[1](model.experts[0](x[i].log()) / x[i])
    return out


def none_for_one(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    """Let nobody choose an expert whose weights are infinite."""
    with torch.no_grad():
        model.experts[2][0].weight.fill_(torch.inf)
    m = x[:, 0] > torch.inf
    out = only_finite(model, x)
    out[m] = model.experts[2](x[m])
    i = m.nonzero()[:, 0]
    return out.index_add(0, i, model.experts[2](x[i]))


@pytest.mark.parametrize("forward", [only_finite, none_for_one])
def test_rows_that_are_not_selected_leave_nothing(forward: Forward) -> None:
    def batch(index: int) -> tuple[torch.Tensor]:
        x = normal(index, N, D).abs() + 0.1
        x[0], x[1], x[2, 3], x[3] = torch.nan, torch.inf, -torch.inf, -1.0
        x[4, 0] = 0.0
        return (x,)

    one = training(forward)
    one.step(*batch(0))
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in one.models[0].parameters())
    assert assert_compiled_alike(lambda: training(forward), batch) == 1


def test_dropout_drops_selected_elements_by_numbers_of_their_own() -> None:
    model = nn.Dropout(0.25)
    x = torch.ones(2, 400, 50)
    mask = torch.arange(400) % 2 == 0

    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = -x.flatten(0, 1)
        _, i = torch.where(mask.expand(2, -1) & (x[..., 0] > 0))
        y = torch.zeros(2, 400, 50)
        m = mask.expand(2, -1)
        y[m] = model(x[m])
        # Rows of one place drop other elements.
        out[:400].index_add_(0, i, model(x[0][i]))
        return torch.cat([y, out[:400][None]])

    train = amp_ir.jit(step, model=model)
    first = train(x, mask)
    assert not torch.equal(train(x, mask), first)
    kept = first[:2, mask]
    torch.testing.assert_close(kept[kept > 0], torch.full(((kept > 0).sum(),), 1 / 0.75))
    # 20000 draws: a deviation of 0.003.
    assert abs((kept > 0).double().mean() - 0.75) < 0.015
    assert bool((first[:2, ~mask] == 0).all()) and bool((first[2, ~mask] == -1).all())
    # Two draws each: both kept, one kept, none.
    twice = (first[2, mask] + 1) * 0.75
    shares = [(twice - count).abs().lt(1e-5).double().mean().item() for count in (0, 1, 2)]
    torch.testing.assert_close(
        torch.tensor(shares), torch.tensor([1 / 16, 6 / 16, 9 / 16]), rtol=0, atol=0.02
    )


def batch_norm(model: Mixture, x: torch.Tensor, m: torch.Tensor) -> Any:
    return F.batch_norm(x[m], None, None, training=True).sum()


def counted(model: Mixture, x: torch.Tensor, m: torch.Tensor) -> Any:
    i = m.nonzero()[:, 0]
    return x[i].sum() if i.numel() else x.sum()


def with_a_length(model: Mixture, x: torch.Tensor, m: torch.Tensor) -> Any:
    return x.sum() if len(torch.where(m)[0]) == 0 else x[m].sum()


def another_mask(model: Mixture, x: torch.Tensor, m: torch.Tensor) -> Any:
    return x.index_add(0, torch.where(m)[0], x[~m]).sum()


def twice_taken(model: Mixture, x: torch.Tensor, m: torch.Tensor) -> Any:
    out, (i, _) = x.clone(), torch.where(x > 0)
    out[i] = x[i] * 2
    return out.sum()


def changed_places(model: Mixture, x: torch.Tensor, m: torch.Tensor) -> Any:
    (i,) = torch.where(m)
    i += 1
    return x[i].sum()


def along_the_count(model: Mixture, x: torch.Tensor, m: torch.Tensor) -> Any:
    return x[m].softmax(0).square().sum()


def under_one(model: Mixture, x: torch.Tensor, m: torch.Tensor) -> Any:
    return (x[None, torch.where(m)[0]] * 2).sum()


def own_function(model: Mixture, x: torch.Tensor, m: torch.Tensor) -> Any:
    return Doubled.apply(model.router(x)[m]).sum()


def over_those_hit(model: Mixture, x: torch.Tensor, m: torch.Tensor) -> Any:
    """Loop as transformers' experts do."""
    hit = torch.greater(F.one_hot(routed(model, x)[1], EXPERTS).sum(0), 0).nonzero()
    return sum(model.experts[0](x).sum() for _ in hit)


def squeezed(model: Mixture, x: torch.Tensor, m: torch.Tensor) -> Any:
    return x[m.nonzero().squeeze()].mean(0).sum()


_ROWS = (
    "on what a mask selects, x[mask], whose number of rows the data decide. A compiled step has "
    "fixed shapes. "
)
_WORKS = (
    "What computes each row, or element, by itself works: arithmetic, activations, Linear, "
    "LayerNorm, dropout, softmax along a row; so do assigning by the same mask, sums, means and "
    "losses. For all else compute on all rows, and choose by torch.where(mask, a, b)"
)
_NUMBER = (
    "The number is mask.sum(), a tensor. A selection of no rows needs no if: without it, what is "
    "computed of no rows has gradients of 0"
)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (batch_norm, f"calls batch_norm {_ROWS}{_WORKS}"),
        (counted, f"calls numel {_ROWS}{_NUMBER}"),
        (with_a_length, f"calls __len__ {_ROWS}{_NUMBER}"),
        (another_mask, f"calls index_add_ {_ROWS}{_WORKS}"),
        (twice_taken, f"calls __setitem__ {_ROWS}{_WORKS}"),
        (changed_places, f"calls add_ {_ROWS}{_WORKS}"),
        (along_the_count, f"calls softmax {_ROWS}{_WORKS}"),
        (
            over_those_hit,
            f"calls unbind {_ROWS}Loop over all, for e in range(n): a selection of no rows "
            "changes nothing, and what is computed of it has gradients of 0",
        ),
        (
            squeezed,
            "calls squeeze() on mask.nonzero(), which drops the axis of a single place, too. Write "
            "mask.nonzero().squeeze(1), or torch.where(mask)",
        ),
        (own_function, f"calls forward {_ROWS}{_WORKS}"),
        (under_one, f"calls mul {_ROWS}{_WORKS}"),
    ],
)
def test_what_mixes_rows_is_refused(forward: Any, message: str) -> None:
    model = Mixture()
    train = amp_ir.jit(lambda x: forward(model, x, x[:, 0] > 0), model=model)
    with pytest.raises(CaptureError) as caught:
        train(normal(0, N, D))
    assert str(caught.value).endswith(f": {message}")
