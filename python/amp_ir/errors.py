# SPDX-License-Identifier: Apache-2.0
"""Every exception class of amp_ir; each one is also the builtin that it specialises."""

from __future__ import annotations

from amp_ir.deprecation import renamed_in


class AmpIrError(Exception):
    """An error that amp_ir raises on purpose."""


class CaptureError(AmpIrError, RuntimeError):
    """The training step cannot be captured; the message lists every place at once.

    `places` are those: each has `what`, `location` and `advice`; none where the step itself failed.
    `failure` says then where and how; else it is empty.
    """

    def __init__(self, message: str, places: tuple[object, ...] = (), *, failure: str = "") -> None:
        super().__init__(message)
        self.places = places
        self.failure = failure


class UnsupportedOpError(AmpIrError, NotImplementedError):
    """The captured step has ops without a converter; the message lists all of them."""


class RuleError(AmpIrError, ValueError):
    """A type-hint rule is missing, duplicated, or returns the wrong number of hints."""


class OptionError(AmpIrError, ValueError):
    """An option has a value that it does not accept."""


class ShardingError(AmpIrError, NotImplementedError):
    """A step cannot be split over ranks as `shard=` asks; the message lists every op."""


class ArgumentError(AmpIrError, TypeError):
    """A step was called with arguments that do not fit the compiled program."""


class ShapeMismatchError(ArgumentError):
    """A batch tensor has another shape than the captured one; `jit` compiles again on it."""


class CopyError(AmpIrError, TypeError):
    """A compiled step cannot be copied or pickled; its model and optimizer can."""


class IndexOutOfRangeError(AmpIrError, IndexError):
    """An index is out of range for the axis that it reads or writes; no state has changed."""


class DivisionByZeroError(AmpIrError, ZeroDivisionError, RuntimeError):
    """A step divides an integer by 0, an error in PyTorch too; no state has changed."""


class SequenceLengthError(AmpIrError, ValueError, RuntimeError):
    """Lengths of sequences that PyTorch or the compiled step refuses; no state has changed."""


class CheckFailedError(AmpIrError, ValueError, RuntimeError):
    """A check of the step itself (`if ...: raise`, `assert`) failed; no state has changed."""


class StateError(AmpIrError, RuntimeError):
    """The model, optimizer or scaler no longer fits the compiled step."""


class PaddingError(AmpIrError, ValueError):
    """Padding of a batch to a bucket may change the results or the state of the step."""


class StepFailedError(AmpIrError, RuntimeError):
    """A call of a compiled step failed, or an earlier failure left incomplete state.

    `call` is the kernel or library function, "" where it is not known; `location` is where the
    user's program calls for it, `amp_ir.ir.location.Location` or None. If `is_torn`, the state is
    neither that before the step nor that after it, and steps on it raise until it is loaded.
    """

    def __init__(
        self, message: str, *, call: str = "", location: object = None, is_torn: bool = False
    ) -> None:
        super().__init__(message)
        self.call = call
        self.location = location
        self.is_torn = is_torn


class RanksDifferError(AmpIrError, RuntimeError):
    """The ranks of a process group have programs that do not fit each other; nothing has changed.

    Each rank raises it. `rank` is one whose program is unlike that of rank 0.
    """

    def __init__(self, message: str, *, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class RankFailedError(AmpIrError, RuntimeError):
    """Another rank failed, or does not answer: the exchange of the step cannot be completed."""


class BrokenPromiseError(AmpIrError, RuntimeError):
    """An op of PyTorch's did otherwise than its schema or its fake implementation says."""


class OutOfMemoryError(AmpIrError, MemoryError):
    """An allocation of a step failed; `nbytes` is the requested size, 0 if unknown."""

    def __init__(self, message: str, nbytes: int = 0) -> None:
        super().__init__(message)
        self.nbytes = nbytes


class StepOutOfMemoryError(StepFailedError, OutOfMemoryError):
    """An allocation failed during a call of a step: both kinds of error at once."""

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
    """The requested device is missing on this machine or unsupported by this build."""


class BuildError(AmpIrError, RuntimeError):
    """A kernel or a library of amp_ir could not be built or loaded."""


class VersionError(AmpIrError, ImportError):
    """The installed PyTorch is older or newer than those that this version works with."""


class BudgetError(AmpIrError, MemoryError):
    """A step does not fit in its memory budget; the message gives the least that it needs.

    `least_bytes` is a budget that works.
    """

    def __init__(self, message: str, least_bytes: int = 0) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


__getattr__ = renamed_in(
    __name__, {"IdError": "IndexOutOfRangeError", "ShapeChanged": "ShapeMismatchError"}
)


# What is refused before anything runs. The text has the user's line and what to do; of the frames
# below the public function, often a hundred of PyTorch's and ours, none tells the user more.
REFUSALS = (
    CaptureError,
    UnsupportedOpError,
    RuleError,
    OptionError,
    ArgumentError,
    PaddingError,
    LossScaleError,
)
