# SPDX-License-Identifier: Apache-2.0
"""Floats that record how they were computed, so that hyper-parameters stay inputs of a graph.

`torch.optim` computes with hyper-parameters as Python floats (`1 - beta1 ** step`) and passes the
results to ATen as scalars. During a capture they are `SymbolicFloat`: to C++ each is a double that
occurs nowhere else (its `float` value, near the true one), and arithmetic on it is recorded.
The capture then replaces a scalar of the graph that equals such a double by its expression.
"""

from __future__ import annotations

import contextlib
import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

UNARY: Mapping[str, Callable[[float], float]] = {
    "neg": operator.neg,
    "abs": abs,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
}
BINARY: Mapping[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "mod": operator.mod,  # of an integer by a constant one
}
_INTEGER_OPS = ("neg", "abs", "add", "sub", "mul", "pow", "mod")
_EXACT = 2**53  # float64 holds every integer up to here
_SMALL = 2**32
COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@attrs.frozen
class Expression:
    """The computation of a float.

    `op` is "input" (args: position of the hyper-parameter), "tensor" (args: position among the
    0-d tensors that the step read), "constant" (args: the float), or a key of UNARY or BINARY
    (args: expressions).
    """

    op: str
    args: tuple[Any, ...]


@attrs.frozen
class Guard:
    """A comparison of the step in Python: the graph is valid while its result is the same."""

    compare: str
    left: Expression
    right: Expression
    outcome: bool

    @property
    def depends_on_tensor(self) -> bool:
        """Whether a side reads a tensor of the step."""
        return depends_on_tensor(self.left) or depends_on_tensor(self.right)

    def holds(self, inputs: list[float]) -> bool:
        """Return whether the comparison has the same result for these hyper-parameters."""
        left, right = evaluate(self.left, inputs), evaluate(self.right, inputs)
        return COMPARE[self.compare](left, right) == self.outcome


def inputs_of(expression: Expression) -> frozenset[int]:
    """Return the positions of the inputs that an expression depends on."""
    if expression.op == "input":
        return frozenset(expression.args)
    inner = (one for one in expression.args if isinstance(one, Expression))
    return frozenset().union(*map(inputs_of, inner))


def divisors_of(*expressions: Expression) -> Iterator[int]:
    """Return the constants by which integers are divided for a remainder."""
    for one in expressions:
        inner = [part for part in one.args if isinstance(part, Expression)]
        if one.op == "mod":
            yield int(inner[1].args[0])
        yield from divisors_of(*inner)


def depends_on_tensor(expression: Expression) -> bool:
    """Return whether an expression reads a tensor of the step."""
    return expression.op == "tensor" or any(
        isinstance(one, Expression) and depends_on_tensor(one) for one in expression.args
    )


def evaluate(expression: Expression, inputs: list[float]) -> float:
    """Return the value of an expression of hyper-parameters alone; NaN where it has none.

    Raises:
        LookupError: the expression depends on a tensor.
    """
    if expression.op == "input":
        return inputs[expression.args[0]]
    if expression.op == "constant":
        return float(expression.args[0])
    if expression.op == "tensor":
        raise LookupError("the value depends on a tensor")
    function = UNARY.get(expression.op) or BINARY[expression.op]
    try:
        return function(*(evaluate(argument, inputs) for argument in expression.args))
    except (ZeroDivisionError, OverflowError, ValueError):
        return math.nan


class FloatTape:
    """All symbolic floats of one capture.

    `inputs` are the true values of the inputs; `guards` the comparisons made so far;
    `shown` are those that the step converted to text or used as a key, which are frozen;
    `on_unsupported(reason)` is called when the step does what cannot be followed.
    """

    def __init__(self, inputs: list[float], on_unsupported: Callable[[str], None]) -> None:
        self.guards: list[Guard] = []
        self.inputs = inputs
        self.shown: list[Expression] = []
        self._refuse = on_unsupported
        self._by_value: dict[float, SymbolicFloat] = {}
        self._derived: dict[tuple[Any, ...], SymbolicFloat] = {}
        self._random = random.Random(20)

    def input(self, index: int) -> SymbolicFloat:
        """Return the hyper-parameter at a position."""
        return self._new(Expression("input", (index,)), self.inputs[index])

    def add_input(self, value: float) -> SymbolicFloat:
        """Append an input."""
        self.inputs.append(float(value))
        added = self.input(len(self.inputs) - 1)
        added.is_integer_valued = isinstance(value, int)
        return added

    def tensor(self, index: int) -> SymbolicFloat:
        """Return the value of the 0-d tensor at a position; near 7, a typical step count."""
        return self._new(Expression("tensor", (index,)), 7.0)

    def find(self, value: object) -> SymbolicFloat | None:
        """Return the symbolic float that a scalar of the graph represents, if any."""
        return self._by_value.get(value) if type(value) is float else None

    def expression_of(self, value: float) -> Expression:
        """Return the expression of a symbolic float, or a constant."""
        if isinstance(value, SymbolicFloat):
            return value.expression
        return Expression("constant", (float(value),))

    def derive(self, op: str, *operands: float) -> SymbolicFloat:
        """Return the float of an operation on others, the same for the same operands.

        `torch.optim` computes `1 - beta` for each parameter: equal scalars make equal calls, which
        repeat (`repeated_ops.py`).
        """
        key = (op, *map(_operand_key, operands))
        known = self._derived.get(key)
        if known is None:
            known = self._derived[key] = self._derive(op, *operands)
        return known

    def _derive(self, op: str, *operands: float) -> SymbolicFloat:
        function: Callable[..., float] = UNARY.get(op) or BINARY[op]
        expression = Expression(op, tuple(self.expression_of(value) for value in operands))
        try:
            value = function(*map(plain, operands))
        except (ZeroDivisionError, OverflowError, ValueError):
            value = math.nan
        made = self._new(expression, value)
        if op in _INTEGER_OPS and all(map(_is_integer, operands)):
            made.is_integer_valued = True
            # Python's integers are exact, also where float64 rounds.
            if not _stays_exact(op, operands) and not self.compare("le", abs(made), _EXACT):
                self.reject_function("an integer beyond 2**53")
        return made

    def compare(self, op: str, left: float, right: float) -> bool:
        """Compare the true values, and record the outcome."""
        expressions = self.expression_of(left), self.expression_of(right)
        try:
            outcome = COMPARE[op](*(evaluate(side, self.inputs) for side in expressions))
        except LookupError:
            self._refuse(
                "compares a tensor's value (a loss scale, a step count of an optimizer) in Python. "
                "After the call, train.skipped says whether the loss scale skipped the step"
            )
            return COMPARE[op](plain(left), plain(right))
        guard = Guard(op, *expressions, outcome)
        if guard not in self.guards:
            self.guards.append(guard)
        return outcome

    def reject_conversion(self) -> None:
        """Reject a conversion: arithmetic on its result could not be followed."""
        self._refuse("converts a hyper-parameter with float() or int()")

    def reject_function(self, name: str) -> None:
        """Reject a function that no op computes at each call."""
        self._refuse(f"computes {name} of a hyper-parameter in Python")

    def all_guards(self) -> list[Guard]:
        """Return the comparisons, and that what was shown is what it was."""
        shown = []
        for one in self.shown:
            with contextlib.suppress(LookupError):
                now = Expression("constant", (evaluate(one, self.inputs),))
                shown.append(Guard("eq", one, now, outcome=True))
        return [*self.guards, *(one for one in dict.fromkeys(shown) if one.holds(self.inputs))]

    def true_value(self, value: SymbolicFloat) -> float:
        """Return the value that the user would see."""
        self.shown.append(value.expression)
        try:
            return evaluate(value.expression, self.inputs)
        except LookupError:
            return plain(value)

    def _new(self, expression: Expression, near: float) -> SymbolicFloat:
        usable = isinstance(near, float) and math.isfinite(near) and abs(near) > 1e-300
        near = near if usable else 1e-3
        value = near
        while value in self._by_value or value == near:
            value = near * (1 + self._random.uniform(1e-10, 2e-10))
        symbolic = SymbolicFloat(value)
        symbolic.expression = expression
        symbolic.tape = self
        self._by_value[value] = symbolic
        return symbolic


def _operand_key(value: float) -> Any:
    """Return what tells an operand apart: which symbolic float, or a constant's type and bits."""
    if isinstance(value, SymbolicFloat):
        return id(value)
    sign = math.copysign(1.0, value) if isinstance(value, float) else None
    return (type(value), value, sign)


def _is_integer(value: float) -> bool:
    return value.is_integer_valued if isinstance(value, SymbolicFloat) else isinstance(value, int)


def _stays_exact(op: str, operands: tuple[float, ...]) -> bool:
    """Return whether the result is exact without a check.

    Inputs are at most half of what float64 holds, so a million small constants can be added to one.
    """
    small = [not isinstance(one, SymbolicFloat) and abs(one) <= _SMALL for one in operands]
    return op in ("neg", "abs", "mod") or (op in ("add", "sub") and any(small))


def plain(value: float) -> float:
    """Return the double that a number is to ATen."""
    return float.__add__(value, 0.0) if isinstance(value, SymbolicFloat) else float(value)


def _rejected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that rejects its call: its result jumps, which other values may not show."""

    def method(self: SymbolicFloat, *operands: Any) -> Any:
        self.tape.reject_function(function.__name__)
        return function(plain(self), *operands)

    return method


def _unary(op: str) -> Callable[..., Any]:
    def method(self: SymbolicFloat) -> SymbolicFloat:
        return self.tape.derive(op, self)

    return method


def _binary(op: str, *, swapped: bool = False) -> Callable[..., Any]:
    def method(self: SymbolicFloat, other: object) -> Any:
        if not isinstance(other, (float, int)):
            return NotImplemented
        return self.tape.derive(op, other, self) if swapped else self.tape.derive(op, self, other)

    return method


def _modulo(self: SymbolicFloat, other: object) -> Any:
    """Follow the remainder of an integer by a constant one.

    Of other floats it jumps where float64 and the op at each call may round to either side.
    """
    if not isinstance(other, (float, int)):
        return NotImplemented
    if isinstance(other, SymbolicFloat) or not (self.is_integer_valued and isinstance(other, int)):
        self.tape.reject_function("__mod__")
        return plain(self) % plain(other)
    if other == 0:
        raise ZeroDivisionError("integer modulo by zero")
    return self.tape.derive("mod", self, other)


def _comparison(op: str) -> Callable[..., Any]:
    def method(self: SymbolicFloat, other: object) -> Any:
        if not isinstance(other, (float, int)):
            return NotImplemented
        return self.tape.compare(op, self, other)

    return method


class SymbolicFloat(float):
    """A double for ATen, an expression for amp_ir; made by a `FloatTape` only."""

    expression: Expression
    tape: FloatTape
    is_integer_valued = False  # as a Python int: followed where float64 holds it exactly

    __neg__, __abs__ = _unary("neg"), _unary("abs")
    __add__, __radd__ = _binary("add"), _binary("add", swapped=True)
    __sub__, __rsub__ = _binary("sub"), _binary("sub", swapped=True)
    __mul__, __rmul__ = _binary("mul"), _binary("mul", swapped=True)
    __truediv__, __rtruediv__ = _binary("div"), _binary("div", swapped=True)
    __pow__, __rpow__ = _binary("pow"), _binary("pow", swapped=True)
    __eq__, __ne__ = _comparison("eq"), _comparison("ne")
    __lt__, __le__ = _comparison("lt"), _comparison("le")
    __gt__, __ge__ = _comparison("gt"), _comparison("ge")
    __floordiv__, __rfloordiv__ = _rejected(float.__floordiv__), _rejected(float.__rfloordiv__)
    __mod__, __rmod__ = _modulo, _rejected(float.__rmod__)
    __divmod__, __rdivmod__ = _rejected(float.__divmod__), _rejected(float.__rdivmod__)
    __round__, __trunc__ = _rejected(round), _rejected(math.trunc)
    __floor__, __ceil__ = _rejected(math.floor), _rejected(math.ceil)
    is_integer, hex = _rejected(float.is_integer), _rejected(float.hex)
    as_integer_ratio = _rejected(float.as_integer_ratio)

    @property
    def is_of_numbers(self) -> bool:
        """Whether the value depends on no tensor, so that it can be compared."""
        return not depends_on_tensor(self.expression)

    def __hash__(self) -> int:
        """Return the hash of the true value; record the use as a key, which freezes it."""
        return hash(self.tape.true_value(self))

    def __bool__(self) -> bool:
        """Return whether the true value is not zero."""
        return self.tape.compare("ne", self, 0.0)

    def __float__(self) -> float:
        """Return the double; report the conversion, since it loses the expression."""
        self.tape.reject_conversion()
        return plain(self)

    def __int__(self) -> int:
        """Return the integer; report the conversion, since it loses the expression."""
        self.tape.reject_conversion()
        return int(plain(self))

    def __repr__(self) -> str:
        """Show the true value, as the user would see it."""
        return repr(self.tape.true_value(self))

    def __str__(self) -> str:
        """Show the true value, as the user would see it."""
        return str(self.tape.true_value(self))

    def __format__(self, spec: str) -> str:
        """Show the true value, as the user would see it."""
        return format(self.tape.true_value(self), spec)
