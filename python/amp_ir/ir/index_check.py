# SPDX-License-Identifier: Apache-2.0
"""Valid ranges of an op's indices, and the error for indices out of range."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import attrs
import torch

from amp_ir.errors import (
    CheckFailedError,
    DivisionByZeroError,
    IndexOutOfRangeError,
    SequenceLengthError,
)
from amp_ir.host import native
from amp_ir.ir.location import Location

# Up to here PyTorch uses one thread, too.
_MOST_AT_ONCE = 32768
_BITS = {torch.int64: 64, torch.int32: 32}
# How the message of a check of the user's step begins.
USERS_CHECK = "a check of the step failed"
# Checks that PyTorch makes ops of; `jit` makes them checks of the step.
ASSERTIONS = frozenset({torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg})


@attrs.frozen
class IndexCheck:
    """Indices of one op must be in [least, extent), or equal `ignored`.

    `least` is -extent where negative indices count from the end, else 0.
    """

    op: str
    location: Location
    least: int
    extent: int
    ignored: int | None = None

    def implies(self, other: IndexCheck) -> bool:
        """Return whether indices that pass this check pass `other` too."""
        is_within = other.least <= self.least and self.extent <= other.extent
        return is_within and self.ignored in (None, other.ignored)

    def wrong_value(self, extremes: tuple[int, int]) -> int | None:
        """Return the one of (smallest, largest) that is out of range; None where neither is."""
        smallest, largest = extremes
        if smallest < self.least:
            return smallest
        return largest if largest >= self.extent else None

    def extremes_of(self, indices: torch.Tensor) -> tuple[int, int]:
        """Return the smallest and largest index that counts; (least, least) where none does."""
        if indices.numel() == 0:
            return self.least, self.least
        smallest, largest = _extremes(indices)
        if self.ignored is None or self.wrong_value((smallest, largest)) is None:
            return smallest, largest
        counted = indices[indices != self.ignored]
        if counted.numel() == 0:
            return self.least, self.least
        return _extremes(counted)

    @property
    def expectation(self) -> str:
        """Describe the range, op and location: "expected 0 to 6, for amp_ir.index in ..."."""
        expected = f"{self.least} to {self.extent - 1}"
        if self.extent <= 0:
            expected = "none, since the axis has no elements"
        but = f" (or {self.ignored}, which is ignored)" if self.ignored is not None else ""
        return f"expected {expected}{but}, for {self.op} in {self.location}"

    def describe(self, subject: str, wrong: int) -> str:
        """Describe got and expected: "batch0 holds the index 7, expected 0 to 6, for ..."."""
        return f"{subject} {wrong}, {self.expectation}"


@functools.cache
def _native_extremes() -> Callable[[int, int, int], Sequence[int]]:
    """Return the native function; looking it up takes as long as calling it."""
    return native.function("amp_ir.step.extremes")


def _extremes(indices: torch.Tensor) -> tuple[int, int]:
    """Return the smallest and the largest of at least one index."""
    bits, count = _BITS.get(indices.dtype), indices.numel()
    is_plain = indices.device.type == "cpu" and indices.is_contiguous() and not indices.is_neg()
    if bits and count <= _MOST_AT_ONCE and is_plain:
        found = _native_extremes()(indices.data_ptr(), count, bits)
        return int(found[0]), int(found[1])
    smallest, largest = indices.aminmax()
    return int(smallest), int(largest)


@attrs.frozen
class DivisorCheck(IndexCheck):
    """A flag is 1 where an integer divisor is 0; it must be in [0, 1)."""

    def describe(self, subject: str, wrong: int) -> str:
        """Describe a division by 0, and where it is."""
        return f"the step divides an integer by 0 in {self.location}; PyTorch refuses that too"


@attrs.frozen
class LengthCheck(IndexCheck):
    """Lengths of sequences, or what follows from them, must be in [least, extent)."""

    message: str = ""

    @property
    def expectation(self) -> str:
        """Say what is required, and where."""
        return f"{self.message}, for {self.op} in {self.location}"

    def describe(self, subject: str, wrong: int) -> str:
        """Say what is required, the number that is not that, and where."""
        return f"{self.message}; got {wrong}, in {self.location}"


@attrs.frozen
class UsersCheck(LengthCheck):
    """A flag is 1 where a check of the user's step fails; it must be in [0, 1)."""

    @property
    def expectation(self) -> str:
        """Say which check failed."""
        return self.message

    def describe(self, subject: str, wrong: int) -> str:
        """Say which check failed."""
        return self.message


# The error for checks that are all of one kind.
_ERRORS: dict[type[IndexCheck], type[Exception]] = {
    DivisorCheck: DivisionByZeroError,
    LengthCheck: SequenceLengthError,
    UsersCheck: CheckFailedError,
}


def error_of(checks: Sequence[IndexCheck], message: str) -> Exception:
    """Return the error for checks that failed: the step's own, all of one kind, or indices."""
    kinds = {type(one) for one in checks}
    if UsersCheck in kinds:
        return CheckFailedError(message)
    (kind, *others) = kinds
    return (IndexOutOfRangeError if others else _ERRORS.get(kind, IndexOutOfRangeError))(message)
