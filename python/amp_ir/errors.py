# SPDX-License-Identifier: Apache-2.0
"""Every exception class of amp_ir; each is also the builtin that it specialises."""

from __future__ import annotations

import warnings
from typing import Any


class AmpIrError(Exception):
    """Anything that amp_ir raises on purpose."""


class CaptureError(AmpIrError, RuntimeError):
    """The training step cannot be captured; the message lists every place at once."""


class UnsupportedOpError(AmpIrError, NotImplementedError):
    """The captured step has ops without a converter; the message lists all of them."""


class RuleError(AmpIrError, ValueError):
    """A type-hint rule is missing, doubled, or answers for the wrong number of arguments."""


class OptionError(AmpIrError, ValueError):
    """An option has a value that is not among those it accepts."""


class ArgumentError(AmpIrError, TypeError):
    """A step was called with arguments that do not fit what was compiled."""


class ShapeChanged(ArgumentError):
    """A batch tensor has another shape than the captured one; `jit` answers by compiling again."""


class CopyError(AmpIrError, TypeError):
    """A compiled step was to be copied or pickled; its model and optimizer can be."""


class IndexOutOfRangeError(AmpIrError, IndexError):
    """An index lies outside of the axis that it reads or writes; the step has changed nothing."""


class DivisionByZeroError(AmpIrError, ZeroDivisionError, RuntimeError):
    """A step divides an integer by 0, as PyTorch refuses to; the step has changed nothing."""


class StateError(AmpIrError, RuntimeError):
    """The model, optimizer or scaler is no longer as the compiled step needs it."""


class StepFailedError(AmpIrError, RuntimeError):
    """A call of a compiled step failed, or the state that such a failure left is not whole.

    `call` is the kernel or library function, "" where it is not known; `location` is where the
    user's program asks for it, `amp_ir.ir.location.Location` or None. If `is_torn`, the state is
    neither that before the step nor that after it, and steps on it are refused until it is loaded.
    """

    def __init__(
        self, message: str, *, call: str = "", location: object = None, is_torn: bool = False
    ) -> None:
        super().__init__(message)
        self.call = call
        self.location = location
        self.is_torn = is_torn


class OutOfMemoryError(AmpIrError, MemoryError):
    """Memory that a step needs cannot be had; `nbytes` is how much was asked for, 0: not known."""

    def __init__(self, message: str, nbytes: int = 0) -> None:
        super().__init__(message)
        self.nbytes = nbytes


class StepOutOfMemoryError(StepFailedError, OutOfMemoryError):
    """A call of a step could not have its memory: both kinds of error at once."""

    def __init__(
        self,
        message: str,
        *,
        call: str = "",
        location: object = None,
        is_torn: bool = False,
        nbytes: int = 0,
    ) -> None:
        StepFailedError.__init__(self, message, call=call, location=location, is_torn=is_torn)
        self.nbytes = nbytes


class LossScaleError(AmpIrError, ValueError):
    """A step uses its loss scale wrongly; the message lists every place and its repair."""


class SkippedTooOftenError(AmpIrError, FloatingPointError):
    """More steps in a row were skipped for a gradient that is not finite than the scaler allows."""


class FileFormatError(AmpIrError, ValueError):
    """A file is damaged, altered, or of a format that this version does not read."""


class DeviceError(AmpIrError, RuntimeError):
    """A device was asked for that this machine or this build does not have."""


class BuildError(AmpIrError, RuntimeError):
    """A kernel or a library of amp_ir could not be built or loaded."""


class BudgetError(AmpIrError, MemoryError):
    """A step cannot be planned within the memory that it was given; the message says how little.

    `least_bytes` is a budget that can be held.
    """

    def __init__(self, message: str, least_bytes: int = 0) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


# Names of 0.1 -> what they are called now.
_RENAMED = {"IdError": "IndexOutOfRangeError"}


def __getattr__(name: str) -> Any:
    """Give a class by the name that it had in the last minor version."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"amp_ir.errors.{name} is called amp_ir.errors.{_RENAMED[name]} now; the old name goes in "
        "the next minor version",
        DeprecationWarning,
        stacklevel=2,
    )
    return globals()[_RENAMED[name]]
