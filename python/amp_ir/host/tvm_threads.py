# SPDX-License-Identifier: Apache-2.0
"""TVM's block builders in several threads; importing this file makes them independent.

TVM 0.27 keeps the builders whose functions are being written in one list of the process: of two
threads that write functions at once, one gets "BlockBuilder.current() must be self".
"""

from __future__ import annotations

import threading
from typing import Any

from tvm import relax


class StackOfThread(threading.local):
    """A list of each thread's own, with what TVM asks of its list of builders."""

    def __init__(self) -> None:
        self._builders: list[Any] = []

    def __bool__(self) -> bool:
        """Return whether this thread writes a function."""
        return bool(self._builders)

    def __getitem__(self, position: int) -> Any:
        """Return a builder of this thread."""
        return self._builders[position]

    def append(self, builder: Any) -> None:
        """Begin a function."""
        self._builders.append(builder)

    def pop(self) -> Any:
        """End the function that this thread began last."""
        return self._builders.pop()


if not isinstance(relax.BlockBuilder._stack, StackOfThread):
    relax.BlockBuilder._stack = StackOfThread()
