# SPDX-License-Identifier: Apache-2.0
"""Symbolic floats: any arithmetic on them evaluates to what plain floats give."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_ir.capture.symbolic_float import FloatTape, evaluate

OPERATIONS = ("add", "sub", "mul", "div", "pow", "neg", "abs")


def apply(operation: str, left: float, right: float) -> float:
    if operation == "neg":
        return -left
    if operation == "abs":
        return abs(left)
    return {
        "add": lambda: left + right,
        "sub": lambda: left - right,
        "mul": lambda: left * right,
        "div": lambda: left / right,
        "pow": lambda: left**right,
    }[operation]()


def tape(*values: float) -> FloatTape:
    return FloatTape(list(values), pytest.fail)


@given(
    first=st.floats(0.1, 2.0),
    second=st.floats(0.1, 2.0),
    later=st.floats(0.1, 2.0),
    program=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.booleans(), st.floats(0.5, 2.0)), max_size=8
    ),
)
def test_expressions_evaluate_to_what_floats_give(
    first: float, second: float, later: float, program: list[tuple[str, bool, float]]
) -> None:
    symbols = tape(first, second)
    value, other = symbols.input(0), symbols.input(1)
    plain = later
    try:
        for operation, swapped, constant in program:
            operand = other if swapped else constant
            plain_operand = second if swapped else constant
            value = apply(operation, value, operand)
            plain = apply(operation, plain, plain_operand)
    except (ZeroDivisionError, OverflowError):
        return
    if isinstance(plain, complex):
        return
    found = evaluate(value.expression, [later, second])
    assert found == plain or math.isnan(found)


def test_each_expression_is_a_double_of_its_own() -> None:
    symbols = tape(0.1, 0.1)
    values = [symbols.input(0), symbols.input(1), -symbols.input(0), symbols.input(0) * 1]
    doubles = [float.__add__(value, 0.0) for value in values]
    assert len({*doubles, 0.1, -0.1}) == 6
    assert all(symbols.find(double) is value for double, value in zip(doubles, values, strict=True))
    assert symbols.find(0.1) is None and symbols.find(1) is None


def test_comparisons_see_the_true_value_and_are_remembered() -> None:
    symbols = tape(0.0, 0.9)
    decay, momentum = symbols.input(0), symbols.input(1)
    assert decay == 0 and not decay and momentum > 0.5 and 0.9 == momentum
    assert [guard.holds([0.0, 0.9]) for guard in symbols.guards] == [True] * 4
    assert [guard.holds([0.1, 0.4]) for guard in symbols.guards] == [False] * 4


def test_texts_show_the_true_value() -> None:
    rate = tape(0.1).input(0)
    assert (str(rate), repr(rate), f"{rate:.3e}") == ("0.1", "0.1", "1.000e-01")


def test_what_cannot_be_followed_is_reported() -> None:
    reasons: list[str] = []
    symbols = FloatTape([0.1], reasons.append)
    float(symbols.input(0))
    int(symbols.input(0))
    assert symbols.tensor(0) > 5
    assert reasons == [
        "converts a hyper-parameter with float() or int()",
        "converts a hyper-parameter with float() or int()",
        "compares a tensor's value (a loss scale, a step count of an optimizer) in Python. After "
        "the call, train.skipped says whether the loss scale skipped the step",
    ]
