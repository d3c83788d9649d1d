# SPDX-License-Identifier: Apache-2.0
"""Every op at special values and at random bit patterns is what it is in eager PyTorch.

PyTorch is asked twice, on dense tensors (its vectors) and on strided ones (element by element):
where the two differ either is right. A number may be off by 4 ULP of its dtype (1 of bfloat16 and
float16), or by as much as PyTorch's own is from float64's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.importer.converters import CONVERTERS
from float_distance import is_as, is_near_exact
from special_values import DTYPES, EXCLUDED, ROWS, Row, is_excluded, specials

aten = torch.ops.aten
_SUBNORMAL = "PyTorch's vectors give NaN for a subnormal divisor, C's fmod the exact remainder"
_GELU = "oneDNN's gelu is NaN at inf and inf near the largest number; the exact one is finite"
# What differs and stays -> (where, given the arguments, the result and PyTorch's; why).
DIFFERENCES: dict[Any, tuple[Callable[..., torch.Tensor], str]] = {
    aten.fmod.Tensor: (lambda x, y, *_: _is_subnormal(y), _SUBNORMAL),
    aten.remainder.Tensor: (lambda x, y, *_: _is_subnormal(y), _SUBNORMAL),
    aten.gelu.default: (
        lambda x, *_: (x.double() > 1e38) | ((x < -1) & (x.dtype == torch.float64)),
        f"{_GELU}; in float64 PyTorch's 1 + erf(x) has lost digits",
    ),
    aten.hardsigmoid_backward.default: (
        lambda grad, x: torch.full(x.shape, x.dtype == torch.float64),
        "PyTorch multiplies float64 by the float32 nearest to 1 / 6",
    ),
    aten.binary_cross_entropy_backward.default: (
        lambda grad, pred, *_: torch.full(pred.shape, pred.dtype == torch.float64),
        "PyTorch holds float64 above the float32 nearest to 1e-12",
    ),
    aten.soft_margin_loss_backward.default: (
        lambda grad, pred, target, *_: (
            ((target.double() * pred.double()).abs() > 80) | (target.double().abs() > 1e300)
        ),
        "PyTorch is NaN where e^x is infinite; where it is subnormal, so is its last place",
    ),
    aten.elu_backward.default: (
        lambda grad, *_: grad.double().abs() > 1e300,
        "a product of numbers this large overflows in one order and not in another",
    ),
}
# (elements, their places): which of equal elements comes first PyTorch leaves open; the elements
# count, and zeros of either sign are equal.
_PLACES = {aten.topk.default, aten.sort.default, aten.median.dim, aten.kthvalue.default}
_MEAN = "the mean of a row with an infinity is infinite; PyTorch's running mean (Welford's) is NaN"
# (overload, result) -> why it is another one.
OTHER_RESULTS = {
    (aten.log_sigmoid_forward.default, 1): "a buffer that our gradient does not read",
    (aten.nll_loss_forward.default, 1): "the total weight, which is 0 in PyTorch without a mean",
    (aten.native_layer_norm.default, 1): _MEAN,
    (aten.native_group_norm.default, 1): _MEAN,
    (aten.var_mean.correction, 1): _MEAN,
}


def _is_subnormal(x: torch.Tensor) -> torch.Tensor:
    if not x.dtype.is_floating_point:
        return torch.zeros_like(x, dtype=torch.bool)
    return (x != 0) & (x.abs().double() < torch.finfo(x.dtype).tiny)


def _strided(value: Any) -> Any:
    """A tensor as every second element of another, through which PyTorch goes one by one."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    return torch.stack([value, value], -1)[..., 0]


def _numbers(arguments: tuple[Any, ...]) -> list[Any]:
    return [one for one in arguments if not isinstance(one, torch.Tensor)]


def _padded(value: Any) -> Any:
    """A tensor of one axis several times over, so that PyTorch's vectors take all of it."""
    is_list = isinstance(value, torch.Tensor) and value.ndim == 1 and value.numel() > 1
    return value.repeat(64) if is_list else value


def _call(row: Row, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    result = row.overload(*arguments, **row.options)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _eager(row: Row, arguments: tuple[Any, ...]) -> list[torch.Tensor] | None:
    """PyTorch's results; None where it has none for the dtype."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _call(row, arguments)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _calls(dtype: torch.dtype) -> list[tuple[Row, tuple[Any, ...], list[torch.Tensor]]]:
    found = []
    for row in ROWS:
        if dtype in row.dtypes:
            for arguments in row.arguments(dtype):
                expected = _eager(row, arguments)
                if expected is not None:
                    found.append((row, arguments, expected))
    return found


def _compiled(step: Callable[..., Any], batch: tuple[Any, ...]) -> Any:
    mod, args = amp_ir.trace_step(step, batch, model=nn.Linear(1, 1))
    return amp_ir.compile(mod)(*args)


@attrs.define
class _Distinct:
    """Tensors that differ in their bits: calls that read the same one share kernels and values."""

    tensors: list[torch.Tensor] = attrs.field(factory=list)
    _places: dict[Any, int] = attrs.field(factory=dict)

    def place(self, tensor: torch.Tensor) -> int:
        """Where a tensor is, or one of the same bits."""
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        key = (tensor.dtype, tensor.shape, content)
        if key not in self._places:
            self._places[key] = len(self.tensors)
            self.tensors.append(tensor)
        return self._places[key]


def _normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.special.erfc(x * -(0.5**0.5))


def _exact(row: Row, arguments: tuple[Any, ...], count: int) -> list[torch.Tensor | None]:
    """The results in float64, from the same numbers."""
    wide = tuple(
        one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for one in arguments
    )
    # PyTorch's 1 + erf(x) loses the digits of the tail, in float64 too.
    if row.overload is aten.gelu.default:
        return [wide[0] * _normal_cdf(wide[0])]
    if row.overload is aten.gelu_backward.default:
        grad, x = wide
        bell = torch.exp(x * x * -0.5) * (2 * torch.pi) ** -0.5
        return [grad * (_normal_cdf(x) + x * bell)]
    if row.overload is aten.log_sigmoid_backward.default:
        wide = (*wide[:2], torch.exp(-wide[1].abs()))
    results = _eager(row, wide)
    if results is None:
        return [None] * count
    return [one if one.is_floating_point() else None for one in results]


def _differences(
    row: Row, arguments: tuple[Any, ...], got: list[torch.Tensor], dense: list[torch.Tensor]
) -> list[str]:
    strided = _eager(row, tuple(map(_strided, arguments))) or dense
    padded = _eager(row, tuple(map(_padded, arguments))) or dense
    exact = _exact(row, arguments, len(dense))
    differences = []
    for k, (one, wanted, other, more, ideal) in enumerate(
        zip(got, dense, strided, padded, exact, strict=True)
    ):
        name = f"{row.overload} result {k} {wanted.dtype} {_numbers(arguments)}"
        if (row.overload, k) in OTHER_RESULTS:
            continue
        if (one.shape, one.dtype) != (wanted.shape, wanted.dtype):
            differences.append(f"{name}: {one.dtype}{list(one.shape)} for {wanted.dtype}")
            continue
        if row.overload in _PLACES and k == 1:
            continue
        more = more[: len(wanted)] if wanted.ndim == 1 else wanted
        if row.overload in _PLACES and one.is_floating_point():
            one, wanted = one + 0.0, wanted + 0.0
        right = is_as(one, wanted) | is_as(one, other) | is_as(one, more)
        if wanted.dtype.is_floating_point and ideal is not None:
            right |= is_near_exact(one, ideal, [wanted, other, more])
            if row.by_row:
                right |= _within_row(one, ideal, arguments)
        if row.overload in DIFFERENCES:
            right |= DIFFERENCES[row.overload][0](*arguments).expand(right.shape)
        if not right.all():
            where = (~right).flatten().nonzero().flatten()[:4]
            at = [a.flatten()[where].tolist() for a in arguments
                  if isinstance(a, torch.Tensor) and a.numel() == right.numel()]  # fmt: skip
            differences.append(
                f"{name}: {int((~right).sum())} wrong, at {at} got {one.flatten()[where].tolist()} "
                f"for {wanted.flatten()[where].tolist()}"
            )
    return differences


def _within_row(got: torch.Tensor, exact: torch.Tensor, arguments: tuple[Any, ...]) -> torch.Tensor:
    """Where a sum is right but for roundings of its terms, or overflows on the way."""
    terms = [one.double() for one in arguments if isinstance(one, torch.Tensor)]
    x = terms[0].abs()
    x = x.where(x.isfinite(), 0.0)
    if exact.shape == x.shape:
        largest = x.amax(-1, keepdim=True) if x.ndim > 1 else x
    else:
        largest = x.amax(-1) if exact.shape == x.shape[:-1] else x.max()
    limits = torch.finfo(got.dtype)
    # Products and squares of these overflow or vanish, in one order or another.
    extreme = (largest > limits.max**0.2).expand(exact.shape)
    return extreme | ((got.double() - exact).abs() <= 16 * limits.eps * largest.clamp(min=1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_are_pytorchs(dtype: torch.dtype) -> None:
    calls = _calls(dtype)
    assert len(calls) > 60
    given = _Distinct()
    places = [
        [given.place(a) if isinstance(a, torch.Tensor) else None for a in arguments]
        for _, arguments, _ in calls
    ]

    def step(*batch: torch.Tensor) -> list[list[torch.Tensor]]:
        found = []
        for (row, arguments, _), where in zip(calls, places, strict=True):
            pairs = zip(arguments, where, strict=True)
            filled = [one if place is None else batch[place] for one, place in pairs]
            found.append(_call(row, tuple(filled)))
        return found

    differences = []
    for (row, arguments, expected), got in zip(
        calls, _compiled(step, tuple(given.tensors)), strict=True
    ):
        differences += _differences(row, arguments, got, expected)
    assert not differences, "\n".join(differences)


def test_every_converter_has_a_row_or_a_reason() -> None:
    known = {row.overload for row in ROWS}
    missing = [str(one) for one in CONVERTERS if one not in known and not is_excluded(one)]
    assert not missing, f"give these a row in special_values.py, or a reason: {missing}"
    names = {str(one) for one in CONVERTERS} | {
        one.__module__.rsplit(".", 1)[-1] for one in CONVERTERS.values()
    }
    assert set(EXCLUDED) <= names


def test_every_pair_of_dtypes_is_cast_alike() -> None:
    batch = tuple(specials(dtype) for dtype in DTYPES)

    def step(*tensors: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[one.to(dtype) for dtype in DTYPES] for one in tensors]

    for source, found, wanted in zip(batch, _compiled(step, batch), step(*batch), strict=True):
        for got, expected in zip(found, wanted, strict=True):
            strided = _strided(source).to(expected.dtype)
            right = is_as(got, expected) | is_as(got, strided)
            assert right.all(), (
                source.dtype,
                got.dtype,
                source[~right],
                got[~right],
                expected[~right],
            )


@pytest.mark.parametrize("distances", [torch.cdist, lambda x, _y, p: torch.pdist(x, p)])
def test_the_gradient_of_a_distance_by_absolute_values_stays_nan(distances: Any) -> None:
    x = torch.tensor([[0.0, 1.0, torch.nan], [2.0, torch.inf, 1.0], [torch.inf, torch.inf, 3.0]])

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        result = distances(leaf, x.flip(0), 1.0)
        return [result.detach(), *torch.autograd.grad(result.sum(), [leaf])]

    for got, expected in zip(_compiled(step, (x,)), step(x), strict=True):
        assert is_as(got, expected).all(), (got, expected)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_margin_that_is_nan_adds_nothing(dtype: torch.dtype, p: int, reduction: str) -> None:
    nan, inf = torch.nan, torch.inf
    x = torch.tensor([[0.0, nan, 2.0], [nan, 0.0, 1.0], [inf, 0.0, 1.0], [0.5, 0.0, 1.0]])
    target, weight = torch.tensor([0, 0, 1, 2]), torch.tensor([1.0, 2.0, 0.5]).to(dtype)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for given in (None, weight):
            leaf = x.detach().requires_grad_()
            loss = nn.functional.multi_margin_loss(
                leaf, target, p=p, weight=given, reduction=reduction
            )
            results += [loss.detach(), *torch.autograd.grad(loss.sum(), [leaf])]
        return results

    x = x.to(dtype)
    for got, expected in zip(_compiled(step, (x,)), step(x), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)
