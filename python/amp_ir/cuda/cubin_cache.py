# SPDX-License-Identifier: Apache-2.0
"""Machine code on disk by what it was made from, so that the same step compiles once a machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import attrs

from amp_ir.cache_directory import cache_directory

# A step's machine code has 0.1 to 3 MB, so this holds the last hundreds.
LIMIT_NBYTES = 256 << 20


def key(parts: Iterable[str]) -> str:
    """A name for what `parts` decide."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(f"{len(encoded)}:".encode() + encoded)
    return digest.hexdigest()


def default_directory() -> Path:
    """Where a user's machine code is kept."""
    return cache_directory("cubin")


@attrs.frozen
class CubinCache:
    """A directory of cubins. Several processes may use it at once; none sees half a file.

    A cache never makes a build fail: a directory that cannot be read or written is an empty one.
    """

    directory: Path = attrs.field(factory=default_directory)
    limit_nbytes: int = LIMIT_NBYTES

    def get(self, name: str) -> bytes | None:
        """The cubin of that name, or None."""
        path = self.directory / name
        try:
            content = path.read_bytes()
            os.utime(path)  # the oldest goes first: see `_shrink`
        except OSError:
            return None
        return content

    def put(self, name: str, cubin: bytes) -> None:
        """Keep a cubin, and drop those unused for longest while there are too many bytes."""
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.directory, suffix=".part")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(cubin)
                os.replace(temporary, self.directory / name)
            except OSError:
                os.unlink(temporary)
                raise
            self._shrink()

    def _shrink(self) -> None:
        entries = []
        for path in self.directory.iterdir():
            # Another process may have dropped it since.
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(nbytes for _, nbytes, _ in entries) - self.limit_nbytes
        for _, nbytes, path in sorted(entries):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= nbytes
