# SPDX-License-Identifier: Apache-2.0
"""The memory in which the programs of a step hold their values, one program at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_ir.host.fork_safe_lock import ForkSafeLock
from amp_ir.host.huge_pages import empty_in_huge_pages


class Arena:
    """Memory as large as the largest of its programs needs; it holds nothing between two runs.

    `lock` is held by the program that runs: the others wait for it.
    """

    def __init__(self) -> None:
        self.lock = ForkSafeLock("the step was running")
        self._memory: torch.Tensor | None = None
        self._views: dict[int, Any] = {}

    @property
    def nbytes(self) -> int:
        """Return how many bytes it has now."""
        return 0 if self._memory is None else self._memory.numel()

    @property
    def address(self) -> int:
        """Return where its first byte lies."""
        return 0 if self._memory is None else self._memory.data_ptr()

    def forget(self) -> None:
        """Leave the memory to whoever still writes to it; the next view is of new memory."""
        self._views.clear()
        self._memory = None

    def view(self, nbytes: int, device: torch.device, see: Callable[[torch.Tensor], Any]) -> Any:
        """Return `see` of the first `nbytes` bytes, u8[nbytes]; grows to as many before.

        The old memory goes back before the new one is asked for. If there is none, the arena is
        empty, and the next program that needs less asks again.

        Raises:
            RuntimeError: as PyTorch raises it where memory ends.
        """
        if nbytes > self.nbytes:
            self._views.clear()
            self._memory = None
            self._memory = empty_in_huge_pages(nbytes, torch.uint8, device)
        view = self._views.get(nbytes)
        if view is None:
            assert self._memory is not None
            view = self._views[nbytes] = see(self._memory[:nbytes])
        return view
