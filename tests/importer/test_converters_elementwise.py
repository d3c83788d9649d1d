# SPDX-License-Identifier: Apache-2.0
"""Elementwise converters and PyTorch's type promotion, forward and backward."""

from __future__ import annotations

import operator

import pytest
import torch

from import_checks import check, imported

A = torch.tensor([[0.5, -1.25, 2.0], [3.5, -0.75, 0.0]])
B = torch.tensor([[1.5, 0.25, -2.0], [0.5, 4.0, 1.0]])
POSITIVE = torch.tensor([[0.5, 1.25, 2.0], [3.5, 0.75, 1e-3]])
UNIT = torch.tensor([[0.5, -0.25, 0.9], [-0.9, 0.75, 0.1]])
INTEGERS = torch.tensor([[7, -7, 0], [3, -2, 5]])
DIVISORS = torch.tensor([[2, 2, -3], [-2, 3, 1]])
BOOLS = torch.tensor([[True, False, True], [False, False, True]])
OTHER_BOOLS = torch.tensor([[True, True, False], [False, True, True]])
SPECIAL = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), -0.0])


def grad(x: torch.Tensor) -> torch.Tensor:
    """A copy that requires a gradient."""
    return x.clone().requires_grad_()


REAL = {
    "exp": (torch.exp, A), "log": (torch.log, POSITIVE), "sqrt": (torch.sqrt, POSITIVE),
    "rsqrt": (torch.rsqrt, POSITIVE), "sin": (torch.sin, A), "cos": (torch.cos, A),
    "tan": (torch.tan, A), "asin": (torch.asin, UNIT), "acos": (torch.acos, UNIT),
    "atan": (torch.atan, A), "sinh": (torch.sinh, A), "cosh": (torch.cosh, A),
    "tanh": (torch.tanh, A), "sigmoid": (torch.sigmoid, A), "erf": (torch.erf, A),
    "log1p": (torch.log1p, POSITIVE), "expm1": (torch.expm1, A), "log2": (torch.log2, POSITIVE),
    "log10": (torch.log10, POSITIVE), "exp2": (torch.exp2, A), "abs": (torch.abs, A),
    "neg": (torch.neg, A), "sign": (torch.sign, A), "square": (torch.square, A),
    "reciprocal": (torch.reciprocal, POSITIVE), "logit": (torch.logit, POSITIVE / 4),
    "floor": (torch.floor, A), "ceil": (torch.ceil, A), "round": (torch.round, A),
    "trunc": (torch.trunc, A), "frac": (torch.frac, A), "nan_to_num": (torch.nan_to_num, SPECIAL),
    "relu6": (torch.nn.functional.relu6, 4 * A), "rad2deg": (torch.rad2deg, A),
    "clone": (torch.clone, A), "contiguous": (lambda x: x.t().contiguous(), A),
    "detach": (lambda x: x * x.detach(), A), "double": (lambda x: x.double() * 2, A),
    "half": (lambda x: x.half().float(), A), "pow 0": (lambda x: x**0, A),
    "pow 1": (lambda x: x**1, A), "pow 2": (lambda x: x**2, A), "pow 3": (lambda x: x**3, A),
    "pow 4": (lambda x: x**4, A), "pow 2.5": (lambda x: x**2.5, POSITIVE),
    "pow 0.5": (lambda x: x**0.5, POSITIVE), "pow -0.5": (lambda x: x**-0.5, POSITIVE),
    "pow -1": (lambda x: x**-1, POSITIVE), "pow -2": (lambda x: x**-2, POSITIVE),
    "2 ** x": (lambda x: 2**x, A), "clamp": (lambda x: x.clamp(-1, 1), A),
    "clamp_min": (lambda x: x.clamp(min=0.3), A), "clamp_max": (lambda x: x.clamp(max=1), A),
    "clamp crossed": (lambda x: x.clamp(2, 1), A), "rsub": (lambda x: 1 - x, A),
    "remainder scalar": (lambda x: x % 0.75, A), "fmod": (lambda x: x.fmod(0.75), A),
    
    
    "lerp": (lambda x: torch.lerp(x, B, 0.3), A),
    "hypot": (lambda x: torch.sqrt(x * x + B * B), A),
    "xlogy": (lambda x: torch.xlogy(B, x), POSITIVE),
    "asinh": (torch.asinh, A), "acosh": (torch.acosh, POSITIVE + 1), "atanh": (torch.atanh, UNIT),
    "sinc": (torch.sinc, UNIT), "logaddexp": (lambda x: torch.logaddexp(x, B), A),
    "copysign by where": (lambda x: torch.where(B < 0, -x.abs(), x.abs()), A),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_function_of_a_tensor(name):
    function, x = REAL[name]
    check(function, grad(x))


PAIRS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "add alpha": lambda x, y: torch.add(x, y, alpha=3),
    "atan2": torch.atan2,
    "atan2 upwards": lambda x, y: torch.atan2(y.abs(), 100 * x),
    "sub alpha": lambda x, y: torch.sub(x, y, alpha=0.5),
    "pow": lambda x, y: x.abs().add(0.1).pow(y),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax by clamp": lambda x, y: x.clamp(min=y),
    "clamp tensors": lambda x, y: x.clamp(y - 1, y + 1),
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "where scalar": lambda x, y: torch.where(x > y, x * y, 1.5),
    "masked_fill": lambda x, y: (x * y).masked_fill(y > 0.3, -3.0),
    "masked_fill tensor": lambda x, y: (x * y).masked_fill(y > 0.3, torch.tensor(2.0)),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=-2),
    "hypot": torch.hypot,
    "fmax": torch.fmax,
    "fmin": lambda x, y: torch.fmin(x * y, y),
    "lerp by a tensor": lambda x, y: torch.lerp(x, y, torch.sigmoid(y)),
    "broadcast": lambda x, y: x[:, None, :] * y[None, :1] - y[0],
    "transposed": lambda x, y: x.t() @ y + (y.t() @ x).t(),
    "copy": lambda x, y: torch.zeros(2, 3).copy_(x[0]) + y,
    "floor mode": lambda x, y: torch.div(x, y, rounding_mode="floor") + x,
    "trunc mode": lambda x, y: torch.div(x, y, rounding_mode="trunc") + x,
}


@pytest.mark.parametrize("name", PAIRS)
def test_function_of_two_tensors(name):
    check(PAIRS[name], grad(A), grad(B))


@pytest.mark.parametrize("comparison", [torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge])
@pytest.mark.parametrize(
    "x, y",
    [
        (A, B), (A, 0.5), (INTEGERS, 0.5), (INTEGERS, 3), (INTEGERS, A), (A.double(), A),
        (BOOLS, OTHER_BOOLS), (BOOLS, True), (A.bfloat16(), 0.5),
        (SPECIAL, 1.0),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)  # fmt: skip
def test_comparison(comparison, x, y):
    if isinstance(y, torch.Tensor):
        check(comparison, x, y)
    else:
        check(lambda x: comparison(x, y), x)


LOGIC = {
    "and": lambda x, y: torch.logical_and(x, y),
    "or": lambda x, y: torch.logical_or(x, y),
    "xor": lambda x, y: torch.logical_xor(x, y),
    "not": lambda x, y: torch.logical_not(x),
    "any": lambda x, y: (x != 0).any() & (y != 0).any(0).all(),
}
BITS = {
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "invert": lambda x, y: ~x,
    "and scalar": lambda x, y: x & 1,
}


@pytest.mark.parametrize("name", LOGIC)
@pytest.mark.parametrize("pair", [(BOOLS, OTHER_BOOLS), (INTEGERS, DIVISORS), (A, BOOLS)])
def test_logic(name, pair):
    check(LOGIC[name], *pair)


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("pair", [(BOOLS, OTHER_BOOLS), (INTEGERS, DIVISORS)])
def test_bits(name, pair):
    check(BITS[name], *pair)


INTEGER = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "true division gives floats": operator.truediv,
    "floor division rounds down": operator.floordiv,
    "trunc division": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "remainder has the sign of y": operator.mod,
    "fmod has the sign of x": torch.fmod,
    "pow": lambda x, y: x ** (y.abs()),
    "square": lambda x, y: x**2,
    "fourth power": lambda x, y: x**4,
    "shift": lambda x, y: (x.abs() << 2) + (x >> 1),
    "abs": lambda x, y: x.abs() + torch.sign(y),
    "neg": lambda x, y: -x,
    "floor": lambda x, y: torch.floor(x),
    "exp": lambda x, y: torch.exp(x),
    "sqrt": lambda x, y: torch.sqrt(x.abs()),
    "clamp": lambda x, y: x.clamp(-2, 3),
    "clamp by floats": lambda x, y: x.clamp(-1.5, 2.5),
    "maximum": torch.maximum,
    "relu": lambda x, y: torch.relu(x),
    "where": lambda x, y: torch.where(x > y, x, 0),
    "isfinite": lambda x, y: torch.isfinite(x) & ~torch.isnan(y) & ~torch.isinf(y),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("name", INTEGER)
def test_integers(name, dtype):
    x, y = (INTEGERS, DIVISORS) if dtype.is_signed else (INTEGERS.abs(), DIVISORS.abs())
    check(INTEGER[name], x.to(dtype), y.to(dtype))


ZERO_D = torch.tensor(0.1, dtype=torch.float64)
PROMOTION = {
    "int tensor by float": (lambda x: x * 0.5, INTEGERS),
    "int tensor plus int": (lambda x: x + 1, INTEGERS.int()),
    "bool plus int": (lambda x: x + 1, BOOLS),
    "bool times float": (lambda x: x * 0.5, BOOLS),
    "bool plus bool is or": (lambda x: x + x, BOOLS),
    "bool times bool is and": (lambda x: x * ~x, BOOLS),
    "float plus int tensor": (lambda x, y: x + y, A, INTEGERS),
    "float32 and 0-d float64": (lambda x, y: x * y, A, ZERO_D),
    "0-d float64 and float32": (lambda x, y: y - x, A, ZERO_D),
    "bfloat16 and 0-d float64": (lambda x, y: x * y, A.bfloat16(), ZERO_D),
    "bfloat16 and 0-d float32": (lambda x, y: x / y, A.bfloat16(), ZERO_D.float()),
    "0-d with 0-d": (lambda x, y: x * y, torch.tensor(0.1), ZERO_D),
    "0-d int with 0-d float": (lambda x, y: 1 - y**x, torch.tensor(3), ZERO_D),
    "0-d int by python float": (lambda x: 0.999**x, torch.tensor(3)),
    "0-d float64 bias correction": (
        lambda x, y: x / (1 - y ** torch.tensor(7.0)).sqrt(), A, ZERO_D,
    ),
    "int32 and 0-d int64": (lambda x, y: x + y, INTEGERS.int(), torch.tensor(3)),
    "int32 and 0-d float32": (lambda x, y: x + y, INTEGERS.int(), torch.tensor(3.5)),
    "uint8 and int8": (lambda x, y: x + y, INTEGERS.abs().byte(), INTEGERS.to(torch.int8)),
    "half and bfloat16": (lambda x, y: x + y, A.half(), A.bfloat16()),
    "float32 and float64": (lambda x, y: x + y, A, B.double()),
    "bfloat16 by a python float": (lambda x: x * 0.1 + 0.3, A.bfloat16()),
    "half by a python float": (lambda x: (x - 0.1) / 3.0, A.half()),
    "where promotes": (lambda x, y: torch.where(x > 0, x, y), A, B.double()),
    "cat promotes": (lambda x, y: torch.cat([x, y]), A, INTEGERS),
    "stack promotes": (lambda x, y: torch.stack([x, y]), A, B.double()),
    "add alpha in low precision": (
        lambda x, y: torch.add(x, y, alpha=0.1), A.bfloat16(), B.bfloat16(),
    ),
    "maximum promotes": (lambda x, y: torch.maximum(x, y), A, INTEGERS),
    "to bool": (lambda x: x.bool(), SPECIAL),
    "to int": (lambda x: x.long(), A),
    "bool to float": (lambda x: x.float(), BOOLS),
    "bool to int": (lambda x: x.long(), BOOLS),
    "to uint8": (lambda x: x.byte(), INTEGERS.abs()),
    "special values": (lambda x: (x.isnan(), x.isinf(), x.isfinite()), SPECIAL),
    "negative zero": (lambda x: 1 / (x * -0.0), POSITIVE),
    "remainder of signed zeros": (lambda x: x % -2.0, A),
    "floor division of floats": (lambda x: x // 0.1, A),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMOTION)
def test_promotion_is_pytorchs(name):
    function, *inputs = PROMOTION[name]
    check(function, *inputs)


def test_a_cast_of_the_users_is_relax_astype():
    script = imported(lambda x: x.bfloat16() * 2, A).script()
    assert 'R.astype(batch0, dtype="bfloat16")' in script


def test_no_cast_where_the_dtype_is_right_already():
    assert "astype" not in imported(lambda x: x.float() * 2 + 0.5, A).script()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_float_dtypes_with_gradients(dtype):
    # Low precision: each op rounds once in both, but PyTorch keeps float32 between the parts of
    # some backward formulas: a few units of the last place.
    tolerance = 1e-12 if dtype == torch.float64 else 8 * torch.finfo(dtype).eps
    function = lambda x, y: torch.tanh(x * y) + torch.sigmoid(x) / (y * y + 1)  # noqa: E731
    x, y = grad(A.to(dtype)), grad(B.to(dtype))
    check(function, x, y, rtol=tolerance, atol=tolerance)
