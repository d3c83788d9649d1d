# SPDX-License-Identifier: Apache-2.0
"""Diagnostics of a capture: collected during tracing, and raised together."""

from __future__ import annotations

import attrs

from amp_ir.errors import CaptureError
from amp_ir.ir.location import Location
from amp_ir.ir.short_list import short_list

_MOST_SHOWN = 20


@attrs.frozen
class Diagnostic:
    """One thing that a compiled step cannot do, its location, and what to do about it.

    `tensor` describes the tensor that it is about, where many are likely to be of one kind.
    """

    what: str
    location: Location
    advice: str
    tensor: str = ""


class Diagnostics:
    """The diagnostics of one capture, each location once."""

    def __init__(self) -> None:
        self._found: dict[Diagnostic, None] = {}

    def __bool__(self) -> bool:
        """Return whether there are diagnostics."""
        return bool(self._found)

    def __len__(self) -> int:
        """Return the number of different diagnostics."""
        return len(self._found)

    def add(self, what: str, location: Location, advice: str, tensor: str = "") -> None:
        """Add a diagnostic; the same one twice counts once."""
        self._found.setdefault(Diagnostic(what, location, advice, tensor))

    def error(self) -> CaptureError:
        """Return the error that lists all, in the order of the step, equal ones together."""
        found = list(self._found)
        alike: dict[tuple[str, str], list[Diagnostic]] = {}
        for one in found:
            alike.setdefault((one.what, one.advice), []).append(one)
        lines = [
            f"  {number}. {short_list(_places(group))}: {what}{_tensors_in(group)}. {advice}"
            for number, ((what, advice), group) in enumerate(alike.items(), 1)
        ]
        if len(lines) > _MOST_SHOWN:
            lines[_MOST_SHOWN:] = [f"  ... and {len(lines) - _MOST_SHOWN} more"]
        total = sum(len(_places(group)) for group in alike.values())
        count = "1 place" if total == 1 else f"{total} places"
        text = "\n".join([f"this step cannot be captured, {count}:", *lines])
        return CaptureError(text, tuple(found))


def _places(group: list[Diagnostic]) -> list[Location]:
    return list(dict.fromkeys(one.location for one in group))


def _tensors_in(group: list[Diagnostic]) -> str:
    tensors = list(dict.fromkeys(one.tensor for one in group if one.tensor))
    if len(tensors) < 2:
        return "".join(f": {one}" for one in tensors)
    return f": {short_list(tensors)}"


class TracingStopped(BaseException):
    """Tracing cannot continue after a diagnostic; never leaves the capture.

    No `Exception`: logging, and many a program, catches those and goes on.
    """


class UnsupportedCall(Exception):
    """A call of PyTorch's cannot be captured with these arguments; never leaves the capture."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice
