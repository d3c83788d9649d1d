# SPDX-License-Identifier: Apache-2.0
"""What is known of a set of numbers: an interval, and whether infinities and NaN are among them.

The interval arithmetic of the padding proof. It is about real numbers: it takes it that a
computation on padding overflows only where one on data does too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs

# Added to an attention score, numbers up to this leave no weight after softmax: e^-10000 is 0 in
# every dtype. Models use -10000, the least number of a dtype, or -inf.
HIDDEN = -1e4
USUAL = 1e3
# Products and sums of numbers that are known to be as large may overflow.
_LARGE = 1e15


@attrs.frozen
class Range:
    """Numbers in [low, high]; bounds that are infinite are reached only if the flags say so."""

    low: float = -math.inf
    high: float = math.inf
    has_minus_inf: bool = False
    has_plus_inf: bool = False
    has_nan: bool = False
    # `is_offset`: far below usual numbers, as scores plus -10000 are. `is_masked`: -inf or such
    # numbers are among them, at other places (by other axes) than among data.
    is_offset: bool = False
    is_masked: bool = False

    @property
    def is_finite(self) -> bool:
        """Return whether all are finite."""
        return not (self.has_minus_inf or self.has_plus_inf or self.has_nan)

    @property
    def constant(self) -> float | None:
        """Return the one number that all are; None where they may differ."""
        return self.low if self.low == self.high and not self.has_nan else None

    @property
    def is_zero(self) -> bool:
        """Return whether all are 0."""
        return self.constant == 0.0

    @property
    def is_hidden(self) -> bool:
        """Return whether softmax gives all of them a weight of 0 beside usual numbers."""
        return (self.high <= HIDDEN or self.is_offset) and not self.has_nan

    @property
    def is_usual(self) -> bool:
        """Return whether all are finite, and not known to be large."""
        return self.is_finite and not USUAL < self.high < math.inf

    @property
    def is_large(self) -> bool:
        """Return whether numbers are known to be among them that overflow when multiplied."""
        return -math.inf < self.low <= -_LARGE or _LARGE <= self.high < math.inf

    @property
    def may_mask(self) -> bool:
        """Return whether numbers that hide are known to be among them."""
        is_low = self.has_minus_inf or -math.inf < self.low <= HIDDEN
        return self.is_masked or self.is_hidden or is_low

    def join(self, other: Range) -> Range:
        """Return what is known of the numbers of both."""
        return Range(
            min(self.low, other.low),
            max(self.high, other.high),
            self.has_minus_inf or other.has_minus_inf,
            self.has_plus_inf or other.has_plus_inf,
            self.has_nan or other.has_nan,
            self.is_hidden and other.is_hidden,
            self.is_masked or other.is_masked,
        )


FINITE = Range()
ANY = Range(has_minus_inf=True, has_plus_inf=True, has_nan=True)
ZERO = Range(0.0, 0.0)
BOOL = Range(0.0, 1.0)
NOT_NEGATIVE = Range(0.0)


def finite_of(*ranges: Range) -> Range:
    """Return the range of a function that is finite where all its arguments are."""
    return FINITE if all(one.is_finite and not one.is_large for one in ranges) else ANY


def linear_of(a: Range, *others: Range) -> Range:
    """Return the range of a * f(others...) with an f that is finite where they are."""
    return ZERO if a.is_zero and all(one.is_finite for one in others) else finite_of(a, *others)


def known_finite(a: Range) -> Range:
    """Return the range of numbers that are known to be finite besides."""
    return attrs.evolve(a, has_minus_inf=False, has_plus_inf=False, has_nan=False)


def constant(number: float) -> Range:
    """Return the range of one number."""
    if math.isnan(number):
        return Range(has_nan=True)
    return Range(number, number, number == -math.inf, number == math.inf)


def joined(ranges: Iterable[Range]) -> Range:
    """Return what is known of the numbers of all ranges, of which there is at least one."""
    first, *others = ranges
    for one in others:
        first = first.join(one)
    return first


_LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
}


def stored(a: Range, dtype: str) -> Range:
    """Return the range of numbers as a dtype holds them.

    Known ones beyond it are infinite; integers wrap around, and may be any.
    """
    largest = _LARGEST.get(dtype)
    if largest is None:
        wraps = _wraps(a.low, dtype) or _wraps(a.high, dtype)
        return FINITE if wraps else attrs.evolve(a, is_offset=False, is_masked=False)
    low, high = a.low, a.high
    if math.isfinite(low) and low < -largest:
        a = attrs.evolve(a, low=-math.inf, has_minus_inf=True)
    if math.isfinite(high) and high < -largest:
        a = attrs.evolve(a, high=-math.inf)
    if math.isfinite(high) and high > largest:
        a = attrs.evolve(a, high=math.inf, has_plus_inf=True)
    if math.isfinite(low) and low > largest:
        a = attrs.evolve(a, low=math.inf)
    return a


def _wraps(bound: float, dtype: str) -> bool:
    if "int" not in dtype or math.isinf(bound):
        return False
    count = int(dtype.partition("int")[2])
    limits = (0, 2**count) if dtype.startswith("u") else (-(2 ** (count - 1)), 2 ** (count - 1))
    return not limits[0] <= bound < limits[1]


def of_dtype(dtype: str) -> Range:
    """Return what is known of usual numbers of a dtype."""
    return BOOL if dtype == "bool" else FINITE


def add(a: Range, b: Range) -> Range:
    """Return the range of a + b."""
    opposite = (a.has_minus_inf and b.has_plus_inf) or (a.has_plus_inf and b.has_minus_inf)
    low, high = a.low + b.low, a.high + b.high
    for one, other in ((a, b), (b, a)):
        if one.constant is not None and math.isinf(one.constant) and other.is_finite:
            return one
    return Range(
        -math.inf if math.isnan(low) else low,
        math.inf if math.isnan(high) else high,
        a.has_minus_inf or b.has_minus_inf,
        a.has_plus_inf or b.has_plus_inf,
        a.has_nan or b.has_nan or opposite,
        (a.is_hidden and b.is_usual) or (b.is_hidden and a.is_usual),
    )


def negative(a: Range) -> Range:
    """Return the range of -a."""
    return Range(-a.high, -a.low, a.has_plus_inf, a.has_minus_inf, a.has_nan)


def subtract(a: Range, b: Range) -> Range:
    """Return the range of a - b."""
    return add(a, negative(b))


def _contains_zero(a: Range) -> bool:
    return a.low <= 0.0 <= a.high


def _has_inf(a: Range) -> bool:
    return a.has_minus_inf or a.has_plus_inf


def multiply(a: Range, b: Range) -> Range:
    """Return the range of a * b."""
    if (a.is_zero and b.is_finite) or (b.is_zero and a.is_finite):
        return ZERO
    pairs = [(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    bounds = [0.0 if 0.0 in pair else pair[0] * pair[1] for pair in pairs]
    unbounded = any(math.isinf(bound) for bound in bounds)
    infinite = _has_inf(a) or _has_inf(b) or (unbounded and (a.is_large or b.is_large))
    nan = (_has_inf(a) and _contains_zero(b)) or (_has_inf(b) and _contains_zero(a))
    low, high = min(bounds), max(bounds)
    return Range(
        low,
        high,
        infinite and low == -math.inf,
        infinite and high == math.inf,
        a.has_nan or b.has_nan or nan,
    )


def divide(a: Range, b: Range) -> Range:
    """Return the range of a / b."""
    if _contains_zero(b) or _has_inf(b) or b.has_nan or not a.is_finite:
        return ANY
    if a.is_zero:
        return ZERO
    inverse = Range(1.0 / b.high, 1.0 / b.low)
    return multiply(a, inverse)


def divide_integers(a: Range, b: Range) -> Range:
    """Return the range of a / b without its fraction."""
    found = divide(a, b)
    if not found.is_finite:
        return found
    return Range(_truncated(found.low), _truncated(found.high))


def _truncated(number: float) -> float:
    return number if math.isinf(number) else float(math.trunc(number))


def divide_by_usual(a: Range, b: Range) -> Range:
    """Return the range of a / b for numbers b that are not 0."""
    if not (a.is_finite and b.is_finite) or b.is_zero:
        return ANY
    if a.is_zero:
        return ZERO
    if not _contains_zero(b):
        return divide(a, b)
    return NOT_NEGATIVE if a.low >= 0.0 and b.low >= 0.0 else FINITE


def logarithm(a: Range) -> Range:
    """Return the range of the natural logarithm of a."""
    if a.is_zero:
        return constant(-math.inf)
    if a.low < 0.0 or not a.is_finite:
        return ANY
    if a.low == 0.0:
        high = math.inf if a.high == math.inf else math.log(a.high)
        return Range(high=high, has_minus_inf=True)
    return Range(math.log(a.low), math.inf if a.high == math.inf else math.log(a.high))


def maximum(a: Range, b: Range) -> Range:
    """Return the range of max(a, b)."""
    return Range(
        max(a.low, b.low),
        max(a.high, b.high),
        a.has_minus_inf and b.has_minus_inf,
        a.has_plus_inf or b.has_plus_inf,
        a.has_nan or b.has_nan,
    )


def minimum(a: Range, b: Range) -> Range:
    """Return the range of min(a, b)."""
    return negative(maximum(negative(a), negative(b)))


def truth(*, always: bool, never: bool) -> Range:
    """Return the range of a condition."""
    return constant(1.0) if always else constant(0.0) if never else BOOL


def less(a: Range, b: Range) -> Range:
    """Return the range of a < b."""
    nan = a.has_nan or b.has_nan
    return truth(always=a.high < b.low and not nan, never=a.low >= b.high)


def less_equal(a: Range, b: Range) -> Range:
    """Return the range of a <= b."""
    nan = a.has_nan or b.has_nan
    return truth(always=a.high <= b.low and not nan, never=a.low > b.high)


def equal(a: Range, b: Range) -> Range:
    """Return the range of a == b."""
    same = a.constant is not None and a.constant == b.constant
    apart = a.high < b.low or a.low > b.high
    return truth(always=same, never=apart or _is_other_inf(a, b) or _is_other_inf(b, a))


def _is_other_inf(a: Range, b: Range) -> bool:
    """Return whether a is one infinity, which b is never."""
    return (a.constant == math.inf and not b.has_plus_inf) or (
        a.constant == -math.inf and not b.has_minus_inf
    )


def logical_not(a: Range) -> Range:
    """Return the range of not a, where a number other than 0 counts as true."""
    return equal(a, ZERO)


def as_bool(a: Range) -> Range:
    """Return the range of a != 0."""
    return logical_not(logical_not(a))


def exp(a: Range) -> Range:
    """Return the range of e^a."""
    if a.has_nan:
        return ANY
    if a.is_hidden:
        return ZERO
    # An exponent without bound may overflow.
    is_small = a.high <= 80.0
    return Range(0.0, math.exp(a.high) if is_small else math.inf, has_plus_inf=not is_small)


def sigmoid(a: Range) -> Range:
    """Return the range of 1 / (1 + e^-a), which is 0 where a is hidden."""
    return ANY if a.has_nan else ZERO if a.is_hidden else BOOL


def softplus(a: Range) -> Range:
    """Return the range of log(1 + e^a), which is 0 where a is hidden."""
    if a.is_hidden:
        return ZERO
    return NOT_NEGATIVE if a.is_finite else ANY


def rounded(a: Range) -> Range:
    """Return the range of integers beside a."""
    if not a.is_finite or a.is_large:
        return ANY
    low = a.low if math.isinf(a.low) else float(math.floor(a.low))
    return Range(low, a.high if math.isinf(a.high) else float(math.ceil(a.high)))


def power(a: Range, b: Range) -> Range:
    """Return the range of a ** b."""
    if b.is_finite and b.low >= 0.0 and 0.0 < a.low and a.high <= 1.0:
        return BOOL  # as a decay over places
    exponent = b.constant
    if exponent is None or not a.is_finite or exponent < 0 or exponent != int(exponent):
        return ANY
    if a.is_zero and exponent > 0:
        return ZERO
    if a.is_large:
        return ANY
    return NOT_NEGATIVE if exponent % 2 == 0 else FINITE


def square_root(a: Range) -> Range:
    """Return the range of the square root of a."""
    if a.is_zero:
        return ZERO
    return NOT_NEGATIVE if a.low >= 0.0 and a.is_finite else ANY


def inverse_square_root(a: Range) -> Range:
    """Return the range of 1 / sqrt(a)."""
    return NOT_NEGATIVE if a.low > 0.0 and a.is_finite else ANY


def choose(condition: Range, a: Range, b: Range) -> Range:
    """Return the range of a where the condition holds, else b."""
    known = condition.constant
    if known is None:
        return a.join(b)
    return a if known else b


def sum_of(a: Range) -> Range:
    """Return the range of a sum of any number of numbers."""
    if a.is_zero:
        return ZERO
    bounds = (0.0 if a.low >= 0 else -math.inf), (0.0 if a.high <= 0 else math.inf)
    minus, plus = (one and a.is_large for one in (a.low < 0, a.high > 0))
    minus, plus = minus or a.has_minus_inf, plus or a.has_plus_inf
    return Range(*bounds, minus, plus, a.has_nan or (a.has_minus_inf and a.has_plus_inf))
