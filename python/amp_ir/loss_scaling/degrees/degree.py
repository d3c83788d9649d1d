# SPDX-License-Identifier: Apache-2.0
"""Degrees in the loss scale: how a value changes when the scale does.

A value of degree d is multiplied by k**d when the loss scale is multiplied by k > 0. A degree is
rational (sqrt halves it), and a step with several scalers has one for each: a degree is a vector.
The degree of a gradient that lives between calls is an unknown vector, which its first use in the
step determines: `Solver` records it. All equations are linear, so one substitution solves each.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

import attrs


@attrs.frozen
class Degree:
    """A vector of powers; `powers` holds (scaler or unknown, power) sorted by name, no power 0."""

    powers: tuple[tuple[str, Fraction], ...] = ()

    @classmethod
    def of(cls, symbol: str, power: Fraction | int = 1) -> Degree:
        """Return the degree `power` in one scale."""
        return cls(((symbol, Fraction(power)),))

    def __add__(self, other: Degree) -> Degree:
        if not other.powers:
            return self
        total = dict(self.powers)
        for symbol, power in other.powers:
            total[symbol] = total.get(symbol, Fraction(0)) + power
        return Degree(tuple(sorted((s, power) for s, power in total.items() if power)))

    def __sub__(self, other: Degree) -> Degree:
        return self + other.times(-1)

    def times(self, factor: Fraction | int) -> Degree:
        """Return the degree of a value raised to the power `factor`."""
        if not factor:
            return ZERO
        return Degree(tuple((symbol, power * factor) for symbol, power in self.powers))

    def power_of(self, symbol: str) -> Fraction:
        """Return the power of one scale."""
        return dict(self.powers).get(symbol, Fraction(0))


ZERO = Degree()


class Special(enum.Enum):
    """Degrees that are not vectors of numbers."""

    ANY = "zeros and infinities, which no positive factor changes: they fit every degree"
    WRONG = "computed from what an error names already"


@attrs.frozen
class Unknown:
    """A degree that the analysis cannot determine, and the reason as a sentence."""

    reason: str


ValueDegree: TypeAlias = "Degree | Special | Unknown"


class Solver:
    """The unknown degrees of a step, and the substitutions found so far."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._settled: dict[str, Degree] = {}

    def new_unknown(self, symbol: str) -> Degree:
        """Return a new unknown degree; `symbol` must not name a scaler."""
        self._open.add(symbol)
        return Degree.of(symbol)

    def resolve(self, degree: Degree) -> Degree:
        """Substitute every known value into `degree`."""
        while True:
            symbol = next((s for s, _ in degree.powers if s in self._settled), None)
            if symbol is None:
                return degree
            power = degree.power_of(symbol)
            degree = degree - Degree.of(symbol, power) + self._settled[symbol].times(power)

    def is_open(self, degree: Degree) -> bool:
        """Return whether a resolved degree still contains an unknown."""
        return any(symbol in self._open for symbol, _ in degree.powers)

    def equate(self, a: Degree, b: Degree) -> bool:
        """Make two degrees equal, solving for one unknown if needed; return whether it worked."""
        difference = self.resolve(a) - self.resolve(b)
        if not difference.powers:
            return True
        symbol = next((s for s, _ in difference.powers if s in self._open), None)
        if symbol is None:
            return False
        power = difference.power_of(symbol)
        self._open.remove(symbol)
        self._settled[symbol] = (difference - Degree.of(symbol, power)).times(-1 / power)
        return True


@attrs.frozen
class Words:
    """The text of degrees in messages; `scalers` are the names of the step's scalers."""

    scalers: Sequence[str]

    def of(self, degree: Degree) -> str:
        """Describe a degree: "multiplied by the loss scale", "divided by the loss scale", ..."""
        if not degree.powers:
            return "not multiplied by the loss scale"
        return " and ".join(self._of_power(symbol, power) for symbol, power in degree.powers)

    def scale(self, symbol: str) -> str:
        """Name one scale: "the loss scale", or "the loss scale of scaler1" where there are more."""
        if symbol not in self.scalers:
            return f"what {symbol} is multiplied by"
        return "the loss scale" if len(self.scalers) == 1 else f"the loss scale of {symbol}"

    def _of_power(self, symbol: str, power: Fraction) -> str:
        verb, scale = "multiplied" if power > 0 else "divided", self.scale(symbol)
        if abs(power) == 1:
            return f"{verb} by {scale}"
        if abs(power) == 2:
            return f"{verb} by the square of {scale}"
        return f"{verb} by {scale} to the power {abs(power)}"
