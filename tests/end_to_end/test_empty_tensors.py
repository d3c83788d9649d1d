# SPDX-License-Identifier: Apache-2.0
"""Tensors without elements, and of one: every family of ops as in eager PyTorch, or refused alike.

Every case runs with its gradient. Of what eager refuses, only reductions are asked.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from compiled_steps import assert_compiled_alike
from step_comparison import Training

Function = Callable[[torch.Tensor], Any]


def _class(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(x), dtype=torch.long)


def _with_column(x: torch.Tensor) -> torch.Tensor:
    return x[:, None, None]


CASES: dict[str, Function] = {
    "mean": lambda x: x.mean(),
    "mean of columns": lambda x: x.mean(0),
    "mean of rows": lambda x: x.mean(1),
    "sum": lambda x: x.sum(),
    "sum of columns": lambda x: x.sum(0),
    "var": lambda x: x.var(),
    "var of columns": lambda x: x.var(0),
    "std": lambda x: x.std(1),
    "prod": lambda x: x.prod(),
    "norm": lambda x: x.norm(),
    "any": lambda x: x.any(),
    "all": lambda x: x.all(),
    "logsumexp": lambda x: x.logsumexp(1),
    "amax": lambda x: x.amax(1),
    "argmax": lambda x: x.argmax(1),
    "median": lambda x: x.median(),
    "median of rows": lambda x: x.median(1)[0],
    "sort": lambda x: x.sort(0)[0],
    "topk": lambda x: x.topk(min(2, x.shape[1]), 1)[0],
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(1),
    "matmul": lambda x: x @ torch.ones(x.shape[1], 4),
    "linear": lambda x: F.linear(x, torch.ones(5, x.shape[1]), torch.ones(5)),
    "bmm": lambda x: torch.bmm(x[None], x[None].transpose(1, 2)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "conv": lambda x: F.conv1d(x[:, None], torch.ones(2, 1, 1)),
    "attention": lambda x: F.scaled_dot_product_attention(*[_with_column(x)] * 3),
    "attention of rows": lambda x: F.scaled_dot_product_attention(*[x.expand(2, 1, *x.shape)] * 3),
    "attention without heads": lambda x: F.scaled_dot_product_attention(*[x[None]] * 3),
    "attention by nothing": lambda x: F.scaled_dot_product_attention(
        *[_with_column(x)[..., :0]] * 2, _with_column(x) + torch.arange(x.shape[1])
    ),
    "embedding": lambda x: F.embedding(x.long(), torch.ones(5, 2)) * x[..., None],
    "softmax of rows": lambda x: x.softmax(1),
    "softmax of columns": lambda x: x.softmax(0),
    "layer_norm": lambda x: F.layer_norm(x, (x.shape[1],), torch.ones(x.shape[1])),
    "rms_norm": lambda x: F.rms_norm(x, (x.shape[1],)),
    "group_norm": lambda x: F.group_norm(x[..., None], 1),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "gelu": F.gelu,
    "glu": lambda x: F.glu(x[:, : x.shape[1] // 2 * 2]),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.5)),
    "max_pool": lambda x: F.max_pool1d(x[:, None], 2),
    "avg_pool": lambda x: F.avg_pool1d(x[:, None], 2),
    "adaptive": lambda x: F.adaptive_avg_pool1d(x[:, None], 2),
    "cross_entropy": lambda x: F.cross_entropy(x, _class(x)),
    "cross_entropy sum": lambda x: F.cross_entropy(x, _class(x), reduction="sum"),
    "nll": lambda x: F.nll_loss(x.log_softmax(1), _class(x), torch.ones(x.shape[1])),
    "mse": lambda x: F.mse_loss(x, x * 2),
    "l1": lambda x: F.l1_loss(x, x * 2),
    "huber": lambda x: F.huber_loss(x, x * 2),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x * 2, reduction="sum"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "kl_div": lambda x: F.kl_div(x, x.exp(), reduction="batchmean"),
    "normalize": F.normalize,
    "cosine": lambda x: F.cosine_similarity(x, x),
    "where": lambda x: torch.where(x > 0, x, -1.0),
    "no rows": lambda x: x[torch.zeros(0, dtype=torch.long)],
    "gather": lambda x: x.gather(1, x.long()),
    "scatter": lambda x: x.scatter_add(1, x.long(), x),
    "nothing is put": lambda x: (x + 1).index_put((_class(x[:0]),), x[:0]),
    "one_hot": lambda x: F.one_hot(x.long(), 3),
    "cat": lambda x: torch.cat([x, torch.ones(2, x.shape[1]), x]),
    "stack": lambda x: torch.stack([x, x]),
    "split": lambda x: x.split(2, 1),
    "pad": lambda x: F.pad(x, (1, 1), value=2.0),
    "pad rows": lambda x: F.pad(x, (0, 0, 1, 1)),
    "flip": lambda x: x.flip(1).roll(1, 1).tril().t(),
    "repeat": lambda x: x.repeat(2, 2),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2.0),
    "interpolate rows": lambda x: F.interpolate(x[:, None], scale_factor=2.0),
    "interpolate linearly": lambda x: F.interpolate(x[:, None], scale_factor=2.0, mode="linear"),
    "interpolate images": lambda x: F.interpolate(x[:, None, :, None], scale_factor=2.0),
    "nonzero": lambda x: x[:0].nonzero(),
    "clamp": lambda x: x.clamp(-1, 1),
    "bool": lambda x: (x > 0).sum(),
}  # fmt: skip


def _with_gradient(function: Function) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    def run(given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = given.clone().requires_grad_()
        result = function(x)
        results = result if isinstance(result, (tuple, list)) else (result,)
        sums = [one.sum() for one in results if one.requires_grad]
        return (*results, *(torch.autograd.grad(sum(sums), x) if sums else ()))

    return run


def _asked(shape: tuple[int, int]) -> dict[str, tuple[torch.Tensor, ...]]:
    """What eager gives for each case that it takes."""
    expected = {}
    for name, function in CASES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected[name] = _with_gradient(function)(torch.zeros(shape))
        except (RuntimeError, IndexError, ValueError):
            continue
    return expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (1, 1), (2, 3)], ids=str)
def test_every_family_of_ops(shape: tuple[int, int]) -> None:
    expected = _asked(shape)
    assert len(expected) > len(CASES) / 2
    # A step of all is no quicker to compile than several of some.
    for first in range(_STEPS):
        _assert_as_expected(shape, dict([*expected.items()][first::_STEPS]))


_STEPS = 4


def _assert_as_expected(
    shape: tuple[int, int], expected: dict[str, tuple[torch.Tensor, ...]]
) -> None:
    def step(x: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        return [_with_gradient(CASES[name])(x) for name in expected]

    x = torch.zeros(shape)
    mod, args = amp_ir.trace_step(step, (x,), model=nn.Linear(1, 1))
    for (name, wanted), found in zip(expected.items(), amp_ir.compile(mod)(*args), strict=True):
        for got, one in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                got, one, rtol=1e-6, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


WITHOUT_A_VALUE: dict[str, Function] = {
    "max": lambda x: x.max(),
    "min": torch.min,
    "max of rows": lambda x: x.max(1)[0],
    "min of rows": lambda x: x.min(-1)[0],
    "amax": lambda x: x.amax(1),
    "amin of all": lambda x: x.amin(),
    "argmax": lambda x: x.argmax(1),
    "argmin of all": lambda x: x.argmin(),
    "aminmax": lambda x: x.aminmax(dim=1)[0],
    "median": lambda x: x.median(1)[0],
    "nanmedian": lambda x: x.nanmedian(dim=1, keepdim=True)[0],
    "mode": lambda x: x.mode()[0],
    "kthvalue": lambda x: x.kthvalue(1, 1)[0],
    "norm": lambda x: torch.linalg.vector_norm(x, math.inf, 1),
    "quantile": lambda x: x.quantile(0.5),
}


@pytest.mark.parametrize("name", WITHOUT_A_VALUE)
def test_what_no_elements_have_is_refused_as_in_eager(name: str) -> None:
    x, reduced = torch.zeros(2, 0), WITHOUT_A_VALUE[name]
    with pytest.raises((RuntimeError, IndexError), match="dim|empty"):
        reduced(x)
    train = amp_ir.jit(lambda x: reduced(x), model=nn.Linear(1, 1))
    with pytest.raises(amp_ir.errors.CaptureError, match="dim|empty"):
        train(x)


def test_no_rows_of_several_columns_have_maxima() -> None:
    x = torch.zeros(0, 3)
    train = amp_ir.jit(lambda x: (*x.max(1), *x.min(-1)), model=nn.Linear(1, 1))
    assert [tuple(one.shape) for one in train(x)] == [(0,)] * 4


NORMS: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "group 1": lambda shape: nn.GroupNorm(1, shape[1]),
    "group 2": lambda shape: nn.GroupNorm(2, shape[1]),
    "group, no parameters": lambda shape: nn.GroupNorm(2, shape[1], affine=False),
    "layer": lambda shape: nn.LayerNorm(shape[1:]),
    "last axis": lambda shape: nn.LayerNorm(shape[-1:]),
    "rms": lambda shape: nn.RMSNorm(shape[-1:]),
    "batch": lambda shape: _by_dimensions("BatchNorm", shape)(shape[1]),
    "batch, eval": lambda shape: _by_dimensions("BatchNorm", shape)(shape[1]).eval(),
    "instance": lambda shape: _by_dimensions("InstanceNorm", shape)(shape[1], affine=True),
    "local response": lambda _: nn.LocalResponseNorm(2),
}
EMPTY_SHAPES = (
    *((0, 2), (0, 4), (2, 0), (0, 0)),
    *((0, 2, 3), (2, 0, 3), (2, 2, 0), (2, 4, 0), (0, 2, 0)),
    *((0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (0, 0, 0, 0)),
)


def _by_dimensions(kind: str, shape: tuple[int, ...]) -> Any:
    return getattr(nn, f"{kind}{max(len(shape) - 2, 1)}d")


def _norm_and_gradients(norm: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    y = norm(x)
    gradients = torch.autograd.grad((y * y).sum() + y.sum(), [x, *norm.parameters()])
    return (y, *gradients, *norm.buffers())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_every_normalization_of_nothing(name: str, dtype: torch.dtype) -> None:
    norms, expected = nn.ModuleList(), {}
    for shape in EMPTY_SHAPES:
        try:
            norm = NORMS[name](shape).to(dtype)
            wanted = _norm_and_gradients(copy.deepcopy(norm), torch.zeros(shape, dtype=dtype))
        except (RuntimeError, ValueError, IndexError):
            continue
        expected[shape] = wanted
        norms.append(norm)
    assert len(expected) >= 4

    def step(*batch: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        return [_norm_and_gradients(norm, x) for norm, x in zip(norms, batch, strict=True)]

    batch = tuple(torch.zeros(shape, dtype=dtype) for shape in expected)
    mod, args = amp_ir.trace_step(step, batch, model=norms)
    found = amp_ir.compile(mod)(*args)
    for (shape, wanted), got in zip(expected.items(), found, strict=True):
        # Nothing is rounded: what is not empty is a parameter, 0 or NaN.
        torch.testing.assert_close(
            tuple(got), wanted, rtol=0, atol=0, equal_nan=True, msg=lambda m, s=shape: f"{s}: {m}"
        )


class _WithNothing(nn.Module):
    """A network with a parameter of no elements, a norm over none and a branch of no columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.RMSNorm(0)
        self.nothing = nn.Linear(4, 0)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        empty = self.norm(self.nothing(x))
        result: torch.Tensor = self.last(torch.cat([x, empty], 1))
        return result


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_parameters_without_elements_train(optimizer: Any) -> None:
    def build() -> Training:
        model = _WithNothing()
        opt = optimizer(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        return Training(model, opt, step)

    assert_compiled_alike(build, lambda k: (torch.randn(5, 4), torch.arange(5) % 3))


def test_a_batch_of_no_rows_trains_as_in_eager() -> None:
    def build() -> Training:
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3))
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction="sum")
            loss.backward()
            opt.step()
            return loss

        return Training(model, opt, step)

    assert_compiled_alike(build, lambda k: (torch.randn(0, 4), torch.zeros(0, dtype=torch.long)))


def test_a_norm_over_nothing_in_low_precision() -> None:
    x = torch.randn(3, 0, dtype=torch.bfloat16)
    model = nn.RMSNorm(0).bfloat16()
    mod, args = amp_ir.trace_model(model, (x,))
    assert amp_ir.compile(mod)(*args).shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 2])
def test_gradients_without_elements_are_unscaled(dtype: torch.dtype, rows: int) -> None:
    """The gradients beside them decide whether a step is skipped: the second one is."""

    def build(*, is_compiled: bool) -> tuple[nn.Module, Callable[..., Any]]:
        model = nn.ParameterList([torch.ones(0), torch.ones(rows, 3)]).to(dtype)
        opt = torch.optim.Adam(model.parameters(), lr=0.25)
        scaler = amp_ir.GradScaler("cpu", init_scale=8.0)

        def step(x: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = sum((one.square().sum() * x.sum() for one in model), x.sum())
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            return loss.detach()

        if not is_compiled:
            return model, step
        return model, amp_ir.jit(step, model=model, optimizer=opt, scaler=scaler)

    (model, step), (other, train) = build(is_compiled=False), build(is_compiled=True)
    for k in range(3):
        x = torch.full((2,), math.inf if k == 1 else 1.0, dtype=dtype)
        torch.testing.assert_close(train(x), step(x), equal_nan=True)
        assert train.last.skipped == (k == 1 and rows > 0)
    torch.testing.assert_close(list(other.parameters()), list(model.parameters()))


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_a_scaled_loss_of_nothing(shape: tuple[int, ...]) -> None:
    """Some gradients have no elements, others are NaN, or sums of nothing."""

    def build(*, is_compiled: bool) -> tuple[nn.Module, Any, Callable[..., Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(shape[-1], 2), nn.Linear(2, 1))
        model.register_parameter("weight", nn.Parameter(torch.ones(1)))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = amp_ir.GradScaler("cpu", init_scale=8.0)

        def step(x: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            x = x * model.weight
            loss = F.softplus(model(x)).mean() + x.mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            return loss.detach()

        if not is_compiled:
            return model, scaler, step
        return model, scaler, amp_ir.jit(step, model=model, optimizer=opt, scaler=scaler)

    model, scaler, step = build(is_compiled=False)
    other, other_scaler, train = build(is_compiled=True)
    x = torch.ones(shape)
    torch.testing.assert_close(train(x), step(x), equal_nan=True)
    torch.testing.assert_close(list(other.parameters()), list(model.parameters()), equal_nan=True)
    assert other_scaler.get_scale() == scaler.get_scale()
