# SPDX-License-Identifier: Apache-2.0
"""What a mask of the data selects: assigned by the same mask, and summed; the rest is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError
from compiled_steps import assert_compiled_alike
from step_comparison import Training, normal

# Of results f[6, 4] that have a gradient, others, a mask of the batch, and the model.
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, nn.Module], torch.Tensor]


def assigning(assign: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> Loss:
    """Return the loss of what `assign(a, b, mask)` leaves in a."""

    def loss(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor, _: nn.Module) -> torch.Tensor:
        a = a * 1
        assign(a, b, mask)
        return a.square().mean()

    return loss


def added(a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> None:
    a[m] += b[m]


def doubled(a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> None:
    a[m] *= 2


def in_parts(a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> None:
    part = b[m]
    part *= 3
    part.add_(1).clamp_(max=1.5)
    a[m] = part


def both(a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> None:
    a[m], a[~m] = b[m].tanh(), -a[~m]


def labels(a: torch.Tensor) -> torch.Tensor:
    return torch.arange(a.shape[0]) % a.shape[1]


def with_token(a: torch.Tensor, m: torch.Tensor, model: nn.Module) -> torch.Tensor:
    a, token = a * 1, model.first.bias * model.scale
    a[m[:, 0]] = token.view(1, 1, 4)
    a[m] = model.scale
    (i,) = torch.where(m[:, 0])
    a[i] = 2 * token
    a[i, 1] = 0.5
    return a.square().mean()


def changed_later(a: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    m, now = m.clone(), a.detach()
    part, other = now[m], now[m]
    m.logical_not_()
    return a.square().mean() * ((part * other).mean() + part.sum())


LOSSES: dict[str, Loss] = {
    "a copy": assigning(lambda a, b, m: a.__setitem__(m, b[m])),
    "a product": assigning(lambda a, b, m: a.__setitem__(m, 2 * b[m])),
    "by a tuple": assigning(lambda a, b, m: a.__setitem__((m,), b[m,] - 1)),
    "a number": assigning(lambda a, b, m: a.__setitem__(m, 0)),
    "a sum in place": assigning(added),
    "a product in place": assigning(doubled),
    "a part": assigning(in_parts),
    "both parts": assigning(both),
    "a mask computed twice": assigning(lambda a, b, m: a.__setitem__(b > 0, b[b > 0].sqrt())),
    "rows": assigning(lambda a, b, m: a.__setitem__(m[:, 0], b[m[:, 0]] * b[m[:, 0]])),
    "rows times a vector": assigning(lambda a, b, m: a.__setitem__(m[:, 0], b[m[:, 0]] * b[0])),
    # Not selected, they are NaN and infinite, and so are their slopes.
    "roots": assigning(lambda a, b, m: a.__setitem__(b > 0, b[b > 0].log() / (b[b > 0]).sqrt())),
    # A token that is learned, as in masked autoencoders, of [1, 1, 4] and [].
    "a token": lambda a, b, m, model: with_token(a, m, model),
    "a mean": lambda a, b, m, _: (a * b)[m].mean(),
    "a sum of squares": lambda a, b, m, _: (a[m] - b[m]).square().sum(),
    "a mean of rows": lambda a, b, m, _: a[m[:, 0]].exp().mean(),
    "a parameter": lambda a, b, m, model: (1 / (a[m] * model.scale - 1)).square().mean(),
    "a matmul": lambda a, b, m, _: (a[m[:, 0]] @ b.T).sum(),
    "counted": lambda a, b, m, _: a.square().mean() * (a[m] > b[m]).float().mean(),
    "hits": lambda a, b, m, _: a.square().mean() * (a[m] > b[m]).sum(),
    "mse": lambda a, b, m, _: F.mse_loss(a[m], b[m]),
    "sum of distances": lambda a, b, m, _: F.l1_loss(a[m], b[m], reduction="sum"),
    "distances": lambda a, b, m, _: F.smooth_l1_loss(a[m], b[m], reduction="none").sum(),
    "crossings": lambda a, b, m, _: F.binary_cross_entropy(a.sigmoid()[m], m.float()[m]),
    # Above 1 where the mask is not set, which is refused of what a loss reads.
    "doubled crossings": lambda a, b, m, _: F.binary_cross_entropy(
        2 * a.sigmoid()[a < 0], m.float()[a < 0]
    ),
    "a mask that changes later": lambda a, b, m, _: changed_later(a, m),
    "of logits": lambda a, b, m, _: F.binary_cross_entropy_with_logits(a[m], b.sigmoid()[m]),
    "classes": lambda a, b, m, _: F.cross_entropy(a[m[:, 0]], labels(a)[m[:, 0]]),
    "weighted classes": lambda a, b, m, _: F.cross_entropy(
        a[m[:, 0]],
        labels(a)[m[:, 0]],
        weight=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        ignore_index=1,
        label_smoothing=0.1,
    ),
    "classes of tokens": lambda a, b, m, _: F.cross_entropy(
        a.view(2, 3, 4)[m.view(2, 3, 4)[..., 0]], labels(a).view(2, 3)[m.view(2, 3, 4)[..., 0]]
    ),
    "each class": lambda a, b, m, _: F.nll_loss(
        a.log_softmax(-1)[m[:, 0]], labels(a)[m[:, 0]], reduction="none"
    ).sum(),
}


class Model(nn.Module):
    """Two layers, and a factor that begins with 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.ones(()))


def training(loss: Loss) -> Training:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        result = loss(model.first(x), model.second(x), mask, model)
        result.backward()
        optimizer.step()
        return result.detach()

    return Training(model, optimizer, step)


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = normal(7 + index, 6, 4) > 0.3
    mask[:, 0] = torch.arange(6) % (index + 2) == 0
    return normal(index, 6, 5), mask


@pytest.mark.parametrize("name", LOSSES)
def test_they_train_as_in_eager(name: str) -> None:
    assert assert_compiled_alike(lambda: training(LOSSES[name]), batch) == 1


@pytest.mark.parametrize("name", ["a product", "a sum in place", "a mean", "classes"])
def test_in_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    one = training(LOSSES[name])
    other = copy.deepcopy((one.model, one.optimizer))
    torch.manual_seed(0)
    two = training(LOSSES[name])
    assert one.optimizer is not None and other
    train = amp_ir.jit(two.step, model=two.model, optimizer=two.optimizer, amp_dtype="bfloat16")
    for index in range(3):
        # Two roundings to bfloat16, 2^-8 each, of operands of a few layers.
        torch.testing.assert_close(train(*batch(index)), one.step(*batch(index)), rtol=0.05, atol=0)


def test_nothing_is_selected() -> None:
    x, mask = batch(0)
    for name, expected in (
        ("a mean", torch.nan),
        ("a sum of squares", 0.0),
        ("classes", torch.nan),
    ):
        two = training(LOSSES[name])
        train = amp_ir.jit(two.step, model=two.model, optimizer=two.optimizer)
        found = train(x, torch.zeros_like(mask))
        torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True)


def changed(a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> None:
    m = m.clone()
    part = b[m]
    m.logical_not_()
    a[m] = part


REFUSED: dict[str, Loss] = {
    "another mask": assigning(lambda a, b, m: a.__setitem__(m, b[~m])),
    "a mask that has changed": assigning(changed),
    "a shape": lambda a, b, m, _: a[m].sum() / a[m].shape[0],
    "elements": lambda a, b, m, _: a[m][0],
    "an order": lambda a, b, m, _: a[m].sort().values.sum(),
    "two masks": lambda a, b, m, _: (a[m] * b[~m]).sum(),
    "more axes": lambda a, b, m, _: (a[m[:, 0]] * b).sum(),
    "a matmul": lambda a, b, m, _: (b.T @ a[m[:, 0]]).sum(),
    "a sum of products": lambda a, b, m, _: (a[m[:, 0]].T @ a[m[:, 0]]).sum(),
    "joined": lambda a, b, m, _: torch.cat([a[m], b[m]]).sum(),
    "returned": lambda a, b, m, _: a[m],
    "numbers": lambda a, b, m, _: a.sum() * len(a[m].tolist()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_the_count_is_refused(name: str) -> None:
    one = training(REFUSED[name])
    before = copy.deepcopy(one.model.state_dict())
    train = amp_ir.jit(one.step, model=one.model, optimizer=one.optimizer)
    with pytest.raises(CaptureError, match=r"calls \w+ on what a mask selects, x\[mask\], whose"):
        train(*batch(0))
    for key, value in one.model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def kept(kind: str) -> Callable[..., Any]:
    """Return a step that leaves what a mask selects somewhere."""
    model, held = nn.Linear(1, 1), [0.0]

    def step(x: torch.Tensor) -> Any:
        part = x[x > 0]
        if kind == "a result":
            return {"parts": (2 * part,), "sum": x.sum()}
        if kind == "an attribute":
            model.part = part
        else:
            held[0] = part
        return x.sum()

    return amp_ir.jit(step, model=model)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a result", "the step returns what a mask selects, x[mask], whose shape depends on"),
        ("an attribute", "keeps a tensor of shape (3, 3) in "),
        ("a list", "keeps a tensor of shape (3, 3) in "),
    ],
)
def test_what_leaves_the_step_is_refused(kind: str, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        kept(kind)(torch.randn(3, 3))
    assert message in str(caught.value)


def test_another_dtype_is_refused_as_in_pytorch() -> None:
    loss = assigning(lambda a, b, m: a.__setitem__(m, b[m].double()))
    one = training(loss)
    with pytest.raises(RuntimeError):
        one.step(*batch(0))
    train = amp_ir.jit(one.step, model=one.model, optimizer=one.optimizer)
    with pytest.raises(CaptureError) as caught:
        train(*batch(0))
    assert str(caught.value).endswith(
        ": assigns float64 to float32 by a mask, which PyTorch refuses too. Cast it: "
        "b[mask].to(torch.float32)"
    )
