# SPDX-License-Identifier: Apache-2.0
"""Python numbers outside of the step that are inputs, as hyper-parameters are.

A second trace decides whether a number can be followed: one with symbolic floats, and one plain
with other values. If the first graph, evaluated with the other values, equals the second one, the
number reaches the step only as a scalar of tensor ops, through arithmetic. Sizes, branches,
strings and C functions show as a difference. What PyTorch's decompositions compute from a scalar
shows in the functional graph, of symbols with other values.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch

from amp_ir.capture.batch import Arguments, Results, can_follow
from amp_ir.capture.guards.places import Place, in_words, is_number
from amp_ir.capture.symbolic_float import (
    BINARY,
    UNARY,
    Expression,
    FloatTape,
    divisors_of,
    inputs_of,
)
from amp_ir.capture.traced import Traced
from amp_ir.errors import StateError

_CLOSE = 1e-9  # two methods to compute a float64 of a few operations differ by less


@attrs.frozen(eq=False)
class FollowedNumber:
    """One number, with the place that each call reads it from."""

    name: str
    place: Place

    def value(self) -> float:
        """Return the current value.

        Raises:
            StateError: there is no longer a number.
        """
        now = self.place.now()
        if not is_number(now) and not isinstance(now, float):
            raise StateError(
                f"{self.name} is an input of the compiled step, but is now {in_words(now)}; "
                "expected a number. Restore it, or capture the step again"
            )
        return float(now)


class Numbers:
    """The numbers that one trace replaces: by symbols, by other values, or both.

    Other values are `others` away, those of floats; 0 leaves all as they are. `put` are the
    replacing objects, by id.
    """

    def __init__(self, wanted: frozenset[str], tape: FloatTape | None, *, others: int = 0) -> None:
        self._wanted = wanted
        self._others = others
        self._tape = tape
        self.found: list[FollowedNumber] = []
        self.put: dict[int, Any] = {}

    def replace(self, place: Place) -> Any:
        """Return what replaces a number while the step runs."""
        other = self.instead_of(place)
        if other is not place.before:
            self.put[id(other)] = other
        return other

    def instead_of(self, place: Place) -> Any:
        """Return what `replace` does, for a value that the step must not store elsewhere."""
        name = place.name()
        if name not in self._wanted or any(one.name == name for one in self.found):
            return place.before
        self.found.append(FollowedNumber(name, place))
        value = another(place.before, self._others) if self._others else place.before
        return value if self._tape is None else self._tape.add_input(value)

    def arguments(self, arguments: Arguments) -> list[Any]:
        """Return the plain values of the arguments as the step receives them."""
        return [
            self.instead_of(Place(arguments.plain, "entry", position, path.__str__, value))
            if is_number(value) and can_follow(value, value)
            else value
            for position, (path, value) in enumerate(
                zip(arguments.plain_paths, arguments.plain, strict=True)
            )
        ]


def another(value: float, distance: int) -> float:
    """Return a number that differs from `value`, with its type and sign: an integer by so much."""
    if isinstance(value, int):
        return value + distance
    return value * 1.25 + math.copysign(0.125, value)


def distance_to_others(tape: FloatTape, numbers: list[FollowedNumber]) -> int:
    """Return how far integers may be moved so that the step's comparisons come out as they did.

    Those of `step % 10` do at a multiple of 10. Where none is found, it is 1.
    """
    divisors = [one for guard in tape.guards for one in divisors_of(guard.left, guard.right)]
    period = math.lcm(*divisors) if divisors else 1
    for distance in (1, period, -period):
        inputs = _moved(tape, numbers, distance)
        if all(one.holds(inputs) for one in tape.guards if not one.depends_on_tensor):
            return distance
    return 1


def _moved(tape: FloatTape, numbers: list[FollowedNumber], distance: int) -> list[float]:
    """Return the inputs of a trace, of which the last ones are the numbers, with other values."""
    others = [float(another(number.place.before, distance)) for number in numbers]
    return [*tape.inputs[: len(tape.inputs) - len(numbers)], *others]


def is_followed(
    symbolic: Traced,
    tape: FloatTape,
    numbers: list[FollowedNumber],
    other: Traced,
    plain: FloatTape,
    distance: int,
) -> bool:
    """Return whether a graph with symbols equals the `other` graph with their values inserted.

    `distance` is how far those are moved.
    """
    positions = range(len(tape.inputs) - len(numbers), len(tape.inputs))
    if any(not inputs_of(one).isdisjoint(positions) for one in tape.shown):
        return False
    inputs = _moved(tape, numbers, distance)
    return first_difference(symbolic, tape, inputs, other, plain) is None


def is_same_graph(one: Traced, tape: FloatTape, two: Traced, other: FloatTape) -> bool:
    """Return whether two traces are of the same step."""
    return first_difference(one, tape, tape.inputs, two, other) is None


def first_difference(
    symbolic: Traced, tape: FloatTape, inputs: list[float], other: Traced, plain: FloatTape
) -> torch.fx.Node | None:
    """Return the first node of a graph with symbols that differs from the `other` graph, if any.

    `inputs` are the values of the symbols. What the step returns counts as the graph's output.
    """
    comparison = _Comparison(tape, inputs, plain, symbolic.graph, other.graph)
    found = comparison.first_difference()
    if found is None and not _same_constants(symbolic, other):
        found = next(iter(reversed(symbolic.graph.graph.nodes)))
    return found


def _same_constants(symbolic: Traced, other: Traced) -> bool:
    kept = {one.place.identity: one.value for one in other.kept}
    pairs = [(one.value, kept.pop(one.place.identity, None)) for one in symbolic.kept]
    # What holds symbols alone is plain in the other trace, which leaves it.
    if kept or not all(two is not None or one.holds_numbers_alone for one, two in pairs):
        return False
    pairs.append((symbolic.results, other.results))
    return all(two is None or _is_alike(one, two) for one, two in pairs)


def _is_alike(one: Results, two: Results) -> bool:
    """Return whether two structures have the same constants, where the first has constants."""
    if len(one.places) != len(two.places):
        return False
    leaves = zip(one.places, one.constants, two.constants, strict=True)
    return all(place is not None or a is b or _is_same(a, b) for place, a, b in leaves)


@attrs.define
class _Comparison:
    tape: FloatTape
    inputs: list[float]
    plain: FloatTape
    module: torch.fx.GraphModule
    other: torch.fx.GraphModule
    _partner: dict[torch.fx.Node, torch.fx.Node] = attrs.field(init=False, factory=dict)

    def first_difference(self) -> torch.fx.Node | None:
        # Either graph ends with its output, so the shorter one differs at its end at the latest.
        pairs = zip(self.module.graph.nodes, self.other.graph.nodes, strict=False)
        return next((one for one, two in pairs if not self._same_node(one, two)), None)

    def _same_node(self, node: torch.fx.Node, other: torch.fx.Node) -> bool:
        self._partner[node] = other
        if node.op == "get_attr" and other.op == "get_attr":
            one, two = (
                getattr(self.module, str(node.target)),
                getattr(self.other, str(other.target)),
            )
            return one is two or _equal(one, two)
        if (node.op, node.target) != (other.op, other.target) and node.op != "placeholder":
            return False
        if _kinds(node.meta.get("val")) != _kinds(other.meta.get("val")):
            return False
        return self._same((node.args, node.kwargs), (other.args, other.kwargs))

    def _same(self, one: Any, two: Any) -> bool:
        if isinstance(one, torch.fx.Node):
            return self._partner.get(one) is two
        if isinstance(one, (tuple, list)):
            return (
                isinstance(two, (tuple, list))
                and len(one) == len(two)
                and all(map(self._same, one, two))
            )
        if isinstance(one, dict):
            return (
                isinstance(two, dict)
                and one.keys() == two.keys()
                and all(self._same(one[key], two[key]) for key in one)
            )
        mine = self._value(one, self.tape, self.inputs)
        others = self._value(two, self.plain, self.plain.inputs)
        if isinstance(mine, float) and isinstance(others, (float, int)):
            return _is_same(mine, others) or math.isclose(mine, others, rel_tol=_CLOSE)
        return type(mine) is type(others) and _is_same(mine, others)

    @staticmethod
    def _value(scalar: Any, tape: FloatTape, inputs: list[float]) -> Any:
        symbol = tape.find(scalar)
        return scalar if symbol is None else _evaluated(symbol.expression, inputs)


def _evaluated(expression: Expression, inputs: list[float]) -> float:
    """Evaluate an expression as `evaluate` does, with a value for each tensor that it reads."""
    if expression.op == "input":
        return inputs[expression.args[0]]
    if expression.op == "constant":
        return float(expression.args[0])
    if expression.op == "tensor":
        return 7.0 + float(expression.args[0])
    function: Any = UNARY.get(expression.op) or BINARY[expression.op]
    try:
        return float(function(*(_evaluated(one, inputs) for one in expression.args)))
    except (ZeroDivisionError, OverflowError, ValueError):
        return math.inf


def _kinds(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.stride()
    if isinstance(value, (tuple, list)):
        return [_kinds(one) for one in value]
    return type(value)


def _equal(one: Any, two: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)):
        return False
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    # A NaN, as `xlogy` and a masked mean have it, is the same constant in both graphs.
    return bool(((one == two) | ((one != one) & (two != two))).all())


def _is_same(one: Any, two: Any) -> bool:
    """Return whether two constants are equal, or NaN."""
    return bool(one == two) or (isinstance(one, float) and one != one and bool(two != two))
