# SPDX-License-Identifier: Apache-2.0
"""What stands in a trace for a number that the call before has kept: it tells whether it is read.

One value would not show what decides by the number, as `if self.loss > 10:` does.
"""

from __future__ import annotations

from typing import Any

_OPERATIONS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and",
    "or", "xor",
)  # fmt: skip
_READS = (
    *_OPERATIONS, *(f"r{name}" for name in _OPERATIONS),
    "lt", "le", "gt", "ge", "eq", "ne", "hash", "bool", "float", "int", "index", "complex", "neg",
    "pos", "abs", "invert", "round", "trunc", "floor", "ceil", "bytes",
)  # fmt: skip


class UnreadNumber:
    """A float to `isinstance`, which nothing can read; `was_read` says that something tried."""

    __class__: Any = property(lambda _self: float)

    def __init__(self) -> None:
        self.was_read = False

    def __repr__(self) -> str:
        """Note that its text is asked for, and say what it is."""
        self.was_read = True
        return "a number that the call before has kept"

    def __format__(self, specification: str) -> str:
        """Note that its text is asked for, and say what it is."""
        return repr(self)

    def __getattr__(self, name: str) -> Any:
        """Note a method of a float that is asked for.

        Raises:
            AttributeError: always.
        """
        self.was_read = True
        raise AttributeError(name)


def _read(self: UnreadNumber, *_others: Any) -> Any:
    self.was_read = True
    raise TypeError("a number that the call before has kept is read while the step is traced")


for _name in _READS:
    setattr(UnreadNumber, f"__{_name}__", _read)
