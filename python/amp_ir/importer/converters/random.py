# SPDX-License-Identifier: Apache-2.0
"""Random ops, on the counter-based generator of the dialect: no op has a hidden state."""

from __future__ import annotations

import math
from typing import Any

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import Operand, dtype_of, shape_of
from amp_ir.importer.converters.registry import converts

aten = torch.ops.aten


def uniform_numbers(ops: Emitter, dtype: str) -> relax.Expr:
    """Return uniform numbers in [0, 1), in the node's shape."""
    state, index = ops.draw()
    drawn = ops.call("amp_ir.random_uniform", state, shape=ops.shape, index=index)
    return ops.cast(drawn, dtype)


def normal_numbers(ops: Emitter, dtype: str) -> relax.Expr:
    """Return standard normal numbers, in the node's shape."""
    state, index = ops.draw()
    drawn = ops.call("amp_ir.random_normal", state, shape=ops.shape, index=index)
    return ops.cast(drawn, dtype)


@converts(aten.native_dropout.default)
def native_dropout(
    ops: Emitter, x: relax.Expr, p: float, train: bool | None
) -> tuple[relax.Expr, relax.Expr]:
    """Return (x with elements zeroed with probability p, the mask of the kept elements)."""
    if train is False or p == 0.0:
        return x, ops.full(ops.result[1].shape, True, "bool")
    state, index = ops.draw()
    result: tuple[relax.Expr, relax.Expr] = ops.call(
        "amp_ir.dropout", x, state, p=float(p), index=index
    )
    return result


@converts(aten.native_dropout_backward.default)
def native_dropout_backward(
    ops: Emitter, grad: relax.Expr, mask: relax.Expr, scale: float
) -> relax.Expr:
    """Return the gradient of the kept elements, times scale."""
    return ops.call("amp_ir.dropout_backward", grad, mask, scale=float(scale))


@converts(aten.rand.default, aten.rand_like.default)
def rand(ops: Emitter, *_arguments: Any, **_options: Any) -> relax.Expr:
    """Return uniform numbers in [0, 1)."""
    return uniform_numbers(ops, ops.dtype)


@converts(aten.randn.default, aten.randn_like.default)
def randn(ops: Emitter, *_arguments: Any, **_options: Any) -> relax.Expr:
    """Return standard normal numbers."""
    return normal_numbers(ops, ops.dtype)


@converts(aten.uniform.default)
def uniform(
    ops: Emitter, _x: relax.Expr, low: float = 0.0, high: float = 1.0, *, generator: None = None
) -> relax.Expr:
    """Return uniform numbers in [low, high)."""
    unit = uniform_numbers(ops, "float32")
    return ops.cast(ops.add(ops.multiply(unit, high - low), low), ops.dtype)


@converts(aten.normal_functional.default)
def normal(
    ops: Emitter, _x: relax.Expr, mean: float = 0.0, std: float = 1.0, *, generator: None = None
) -> relax.Expr:
    """Return normal numbers with a mean and a standard deviation."""
    standard = normal_numbers(ops, "float32")
    return ops.cast(ops.add(ops.multiply(standard, std), mean), ops.dtype)


@converts(aten.normal.float_float)
def normal_of_size(
    ops: Emitter, mean: float, std: float, _size: Any, **_options: Any
) -> relax.Expr:
    """Return normal numbers of a size."""
    standard = normal_numbers(ops, "float32")
    return ops.cast(ops.add(ops.multiply(standard, std), mean), ops.dtype)


@converts(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def normal_of_tensors(
    ops: Emitter, mean: Operand, std: Operand = 1.0, *, generator: None = None
) -> relax.Expr:
    """Return normal numbers of each element's mean and standard deviation.

    PyTorch refuses a standard deviation below 0, which is in the data; it gives NaN here.
    """
    drawn = ops.add(ops.multiply(normal_numbers(ops, "float32"), std), mean)
    is_right = ops.binary(relax.op.greater_equal, std, 0)
    return ops.cast(ops.where(is_right, drawn, math.nan), ops.dtype)


@converts(aten.bernoulli.p, aten.bernoulli.Tensor)
def bernoulli_with(
    ops: Emitter, _x: relax.Expr, p: Operand = 0.5, *, generator: None = None
) -> relax.Expr:
    """Return 1 with probability p, else 0."""
    return ops.cast(ops.binary(relax.op.less, uniform_numbers(ops, "float32"), p), ops.dtype)


@converts(aten.bernoulli.default)
def bernoulli(ops: Emitter, p: relax.Expr, *, generator: None = None) -> relax.Expr:
    """Return 1 with the probability in the corresponding element of p, else 0."""
    unit = uniform_numbers(ops, "float32")
    return ops.cast(ops.binary(relax.op.less, unit, p), dtype_of(p))


@converts(aten.exponential.default)
def exponential(
    ops: Emitter, _x: relax.Expr, rate: float = 1.0, *, generator: None = None
) -> relax.Expr:
    """Return exponential numbers with a rate, by inversion; 1 - u is never 0."""
    rest = ops.subtract(1.0, uniform_numbers(ops, "float32"))
    drawn = ops.multiply(ops.emit(relax.op.log(rest)), -1.0 / rate)
    return ops.cast(drawn, ops.dtype)


@converts(aten.log_normal.default)
def log_normal(
    ops: Emitter, _x: relax.Expr, mean: float = 1.0, std: float = 2.0, *, generator: None = None
) -> relax.Expr:
    """Return exponentials of normal numbers with a mean and a standard deviation."""
    drawn = ops.add(ops.multiply(normal_numbers(ops, "float32"), std), mean)
    return ops.cast(ops.emit(relax.op.exp(drawn)), ops.dtype)


@converts(aten.geometric.default)
def geometric(ops: Emitter, _x: relax.Expr, p: float, *, generator: None = None) -> relax.Expr:
    """Return how often to draw until the first success with probability p, by inversion."""
    rest = ops.subtract(1.0, uniform_numbers(ops, "float32"))
    tries = ops.multiply(ops.emit(relax.op.log(rest)), 1.0 / math.log1p(-p))
    whole = ops.emit(relax.op.ceil(tries))
    return ops.cast(ops.emit(relax.op.maximum(whole, ops.constant(1.0, "float32"))), ops.dtype)


@converts(aten.cauchy.default)
def cauchy(
    ops: Emitter, _x: relax.Expr, median: float = 0.0, sigma: float = 1.0, *, generator: None = None
) -> relax.Expr:
    """Return Cauchy numbers by inversion, in float64, whose tangent is right in the tails.

    Half a step of the uniform numbers is added, so that none of them is a pole.
    """
    unit = ops.add(ops.cast(uniform_numbers(ops, "float32"), "float64"), 2.0**-25 - 0.5)
    drawn = ops.emit(relax.op.tan(ops.multiply(unit, math.pi)))
    return ops.cast(ops.add(ops.multiply(drawn, sigma), median), ops.dtype)


@converts(aten.randint.default)
def randint(ops: Emitter, high: int, _size: Any, **_options: Any) -> relax.Expr:
    """Draw integers in [0, high)."""
    return _integers(ops, 0, high)


@converts(aten.randint.low)
def randint_low(ops: Emitter, low: int, high: int, _size: Any, **_options: Any) -> relax.Expr:
    """Draw integers in [low, high)."""
    return _integers(ops, low, high)


@converts(aten.randint_like.default)
def randint_like(ops: Emitter, _x: relax.Expr, high: int, **_options: Any) -> relax.Expr:
    """Draw integers in [0, high)."""
    return _integers(ops, 0, high)


@converts(aten.randint_like.low_dtype)
def randint_like_low(
    ops: Emitter, _x: relax.Expr, low: int, high: int, **_options: Any
) -> relax.Expr:
    """Draw integers in [low, high)."""
    return _integers(ops, low, high)


def _integers(ops: Emitter, low: int, high: int) -> relax.Expr:
    count = high - low
    if count > 2**48:
        ops.reject(f"{count} different integers; the generator gives 2**48")
    # Multiples of 2**-24 or 2**-48 below 1, so that in float64 the product stays below the count.
    fine = _fine_uniform_numbers(ops) if count > 2**24 else uniform_numbers(ops, "float32")
    wide = ops.multiply(ops.cast(fine, "float64"), float(count))
    drawn = ops.add(ops.cast(ops.emit(relax.op.floor(wide)), "int64"), low)
    return ops.cast(drawn, ops.dtype)


def _fine_uniform_numbers(ops: Emitter) -> relax.Expr:
    """Return uniform multiples of 2**-48 in [0, 1), float64, of two draws for each element."""
    state, index = ops.draw()
    two = ops.call("amp_ir.random_uniform", state, shape=(2, *ops.shape), index=index)
    two = ops.cast(two, "float64")
    upper, lower = (ops.reshape(ops.slice(two, 0, k, k + 1), ops.shape) for k in range(2))
    return ops.add(upper, ops.multiply(lower, 2.0**-24))


@converts(aten.randperm.default)
def randperm(ops: Emitter, _n: int, **_options: Any) -> relax.Expr:
    """Return a permutation: the sorting order of uniform numbers."""
    order = ops.emit(relax.op.argsort(uniform_numbers(ops, "float32"), 0, False, "int64"))
    return ops.cast(order, ops.dtype)


@converts(aten.rrelu_with_noise_functional.default)
def rrelu(
    ops: Emitter,
    x: relax.Expr,
    noise: relax.Expr,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: None = None,
) -> tuple[relax.Expr, relax.Expr]:
    """Return (x where positive, else x times a slope; the factors); training draws the slopes."""
    positive = ops.binary(relax.op.greater, x, 0)
    if not training:
        return ops.where(positive, x, ops.multiply(x, (lower + upper) / 2)), noise
    state, index = ops.draw()
    unit = ops.call("amp_ir.random_uniform", state, shape=shape_of(x), index=index)
    slopes = ops.cast(ops.add(ops.multiply(unit, upper - lower), lower), dtype_of(x))
    factors = ops.where(positive, 1.0, slopes)
    return ops.multiply(x, factors), factors


@converts(aten.rrelu_with_noise_backward.default)
def rrelu_backward(
    ops: Emitter,
    grad: relax.Expr,
    x: relax.Expr,
    noise: relax.Expr,
    lower: float,
    upper: float,
    training: bool,
    _self_is_result: bool,
) -> relax.Expr:
    """Return the gradient times the factors of the forward op."""
    if training and upper - lower > 1e-6:
        return ops.multiply(grad, noise)
    positive = ops.binary(relax.op.greater, x, 0)
    return ops.where(positive, grad, ops.multiply(grad, (lower + upper) / 2))
