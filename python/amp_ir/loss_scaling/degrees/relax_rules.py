# SPDX-License-Identifier: Apache-2.0
"""The degree of every op's results in the loss scale, from those of its operands: one table.

A rule is verified by scaling: if every operand x of degree d becomes k**d x, the results must
become exactly k**d' times their previous values, for every k > 0.
tests/loss_scaling/test_degree_rules.py checks that for each entry of the table, and shows that what
a rule rejects does not scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

from amp_ir.loss_scaling.degrees.degree import ZERO, Degree, Special
from amp_ir.loss_scaling.degrees.operands import CannotTell, Known, Operands

# A constant up to this, added to a value that is multiplied by the loss scale or compared with it,
# is a guard against a division by zero (1e-6 in clip_grad_norm_, 1e-12 in normalize). The scale
# only weakens it. Float32 stores 1e-5 as 9.99999975e-06.
GUARD = 1e-5

Rule = Callable[[Operands], "Known | tuple[Known, ...]"]
AnyRule = TypeVar("AnyRule", bound=Rule)
RULES: dict[str, Rule] = {}
# Results that do not depend on the scale, even when the degree of an operand is unknown: the
# position of each such result. They exist to detect overflow caused by the scale itself.
INDIFFERENT: dict[str, tuple[int, ...]] = {
    "relax.isfinite": (0,),
    "relax.isinf": (0,),
    "relax.isnan": (0,),
    "amp_ir.all_finite": (0,),
    "amp_ir.random_uniform": (0,),
    "amp_ir.random_normal": (0,),
}


def rule_for(*names: str) -> Callable[[AnyRule], AnyRule]:
    """Register the rule of some ops; raise ValueError where one has a rule already."""

    def register(rule: AnyRule) -> AnyRule:
        for name in names:
            if name in RULES:
                raise ValueError(f"{name} has two degree rules")
            RULES[name] = rule
        return rule

    return register


def _relax(names: str) -> list[str]:
    return [f"relax.{name}" for name in names.split()]


def times(degree: Known, factor: Fraction | int) -> Known:
    """Return the degree of a value raised to the power `factor`."""
    return degree.times(factor) if isinstance(degree, Degree) else degree


def every(op: Operands) -> range:
    """Return the positions of all operands."""
    return range(len(op.degrees))


@rule_for(
    *_relax(
        "negative abs nn.relu nn.leakyrelu sum mean max min cumsum sort reshape permute_dims "
        "broadcast_to strided_slice flip full tril triu take gather_elements"
    ),
)
def linear_in_first(op: Operands) -> Known:
    """Apply f(k x, y) = k f(x, y): the first operand's degree; the others must be unscaled."""
    op.expect_plain(*every(op)[1:])
    return op.degree(0)


@rule_for("relax.topk")
def largest(op: Operands) -> Known | tuple[Known, ...]:
    """Return the degree for the values, and 0 for indices: a positive factor keeps them."""
    kind = str(op.options("ret_type"))
    if kind == "both":
        return op.degree(0), ZERO
    return op.degree(0) if kind == "values" else ZERO


@rule_for(*_relax("argmax argmin argsort sign isfinite isinf isnan"))
def indifferent(op: Operands) -> Known:
    """Return degree 0: order and signs of numbers do not depend on a positive factor."""
    return ZERO


@rule_for(
    *_relax("multiply matmul"),
)
def product(op: Operands) -> Known:
    """Add the degrees: (k**a x)(k**b y) = k**(a + b) x y."""
    return op.total(*every(op))


@rule_for("relax.divide")
def quotient(op: Operands) -> Known:
    """Subtract the degrees."""
    degrees = [op.degree(0), times(op.degree(1), -1)]
    numbers = [degree for degree in degrees if isinstance(degree, Degree)]
    return numbers[0] + numbers[1] if len(numbers) == 2 else Special.ANY


@rule_for("relax.square")
def square(op: Operands) -> Known:
    """Double the degree."""
    return times(op.degree(0), 2)


@rule_for("relax.sqrt")
def square_root(op: Operands) -> Known:
    """Halve the degree."""
    return times(op.degree(0), Fraction(1, 2))


@rule_for("relax.rsqrt")
def inverse_square_root(op: Operands) -> Known:
    """Return minus half the degree."""
    return times(op.degree(0), Fraction(-1, 2))


@rule_for("relax.power")
def power(op: Operands) -> Known:
    """Multiply the degree by a constant exponent; allow any exponent where nothing is scaled."""
    exponent = op.numbers[1]
    if exponent is None or op.is_plain(0):
        op.expect_plain(0, 1)
        return Special.ANY if op.degree(0) is Special.ANY and exponent else ZERO
    if not math.isfinite(exponent):
        raise CannotTell(0)
    # A third, stored as float32 or float64, stands for a third.
    simple = Fraction(exponent).limit_denominator(64)
    if abs(simple - Fraction(exponent)) > abs(simple) / 2**23:
        raise CannotTell(0)
    return times(op.degree(0), simple)


@rule_for("relax.prod")
def product_of_elements(op: Operands) -> Known:
    """Multiply the degree by the number of factors."""
    count = math.prod(op.shapes[0]) // max(math.prod(op.result_shapes[0]), 1)
    return times(op.degree(0), count)


def _guard(op: Operands) -> int | None:
    """Return the operand, if any, that guards the other one against 0 (see GUARD)."""
    for guard, other in ((1, 0), (0, 1)):
        number, degree = op.numbers[guard], op.degree(other)
        if number is None or not 0 < number <= GUARD or not isinstance(degree, Degree):
            continue
        if degree.powers and all(power > 0 for _, power in degree.powers):
            return guard
    return None


@rule_for(*_relax("add maximum"))
def guarded_join(op: Operands) -> Known:
    """Return the one degree of both operands; a guard has none of its own."""
    op.guarded_by = _guard(op)
    return op.join(0, 1) if op.guarded_by is None else op.degree(1 - op.guarded_by)


@rule_for(*_relax("subtract minimum concat mod floor_mod"))
def join(op: Operands) -> Known:
    """Return the one degree of all operands."""
    return op.join(*every(op))


@rule_for(*_relax("equal not_equal less less_equal greater greater_equal floor_divide"))
def comparison(op: Operands) -> Known:
    """Require one degree of both operands; the result does not depend on it."""
    op.join(0, 1)
    return ZERO


@rule_for("relax.where")
def choice(op: Operands) -> Known:
    """Return the one degree of both branches; require an unscaled condition."""
    op.expect_plain(0)
    return op.join(1, 2)


@rule_for("relax.scatter_elements")
def scatter(op: Operands) -> Known:
    """Require inserted values of the destination's degree; require unscaled factors."""
    op.expect_plain(1)
    if str(op.options("reduction")) == "mul":
        op.expect_plain(2)
        return op.degree(0)
    return op.join(0, 2)


@rule_for("relax.astype")
def cast(op: Operands) -> Known:
    """Keep the degree for floats; casts to integers round, and a cast to bool compares with 0."""
    dtype = op.result_dtypes[0]
    if dtype == "bool":
        return ZERO
    if "float" not in dtype:
        op.expect_plain(0)
    return op.degree(0)


@rule_for(
    *_relax(
        "exp log sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid erf floor "
        "ceil round trunc cumprod nn.gelu nn.gelu_tanh nn.silu nn.softmax nn.log_softmax "
        "logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or "
        "bitwise_xor left_shift right_shift ones arange"
    ),
)
def plain(op: Operands) -> Known:
    """Require unscaled operands: f(k x) is not a multiple of f(x)."""
    op.expect_plain(*every(op))
    return ZERO


@rule_for("relax.zeros")
def zeros(op: Operands) -> Known:
    """Return the degree that fits every other one: the result is zero."""
    return Special.ANY
