# SPDX-License-Identifier: Apache-2.0
"""Turns on the GPU: processes set up side by side, and are measured one after the other."""

from __future__ import annotations

import time
from pathlib import Path

import attrs

_POLL_SECONDS = 0.02


@attrs.frozen
class Turn:
    """One process's turn, agreed on by two files whose names begin with `path`."""

    path: Path

    @property
    def is_ready(self) -> bool:
        """Return whether the process has nothing left to do but what its turn is for."""
        return self._ready.exists()

    def give(self) -> None:
        """Let the process go on."""
        self._given.touch()

    def take(self) -> None:
        """Say that this process is ready, and return when its turn has come."""
        self._ready.touch()
        while not self._given.exists():
            time.sleep(_POLL_SECONDS)

    @property
    def _ready(self) -> Path:
        return self.path.with_name(f"{self.path.name}.ready")

    @property
    def _given(self) -> Path:
        return self.path.with_name(f"{self.path.name}.given")
