# SPDX-License-Identifier: Apache-2.0
"""Cache of machine code on disk by its inputs, so that a step compiles once per machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import attrs

from amp_ir.files.atomic_file import write_bytes
from amp_ir.files.cache_directory import cache_directory, drop_damaged

# A step's machine code has 0.1 to 3 MB, so this holds the last hundreds.
LIMIT_NBYTES = 256 << 20
# An entry is this, the digest of its name and its machine code in hexadecimal digits, a line end,
# and the machine code. A newer format has another first line, so that each drops the other's.
_HEAD = b"amp_ir cubin 2 sha256 "
_HEAD_NBYTES = len(_HEAD) + 64 + 1


def key(parts: Iterable[str]) -> str:
    """Return a name for the content of `parts`."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(f"{len(encoded)}:".encode() + encoded)
    return digest.hexdigest()


def default_directory() -> Path | None:
    """Return the directory of a user's machine code; None where nothing can be stored."""
    return cache_directory("cubin")


@attrs.frozen
class CubinCache:
    """A directory of cubins. Several processes may use it at once; none sees half a file.

    A cache never makes a build fail: a directory that cannot be read or written counts as empty,
    and a damaged entry is removed. A returned cubin is the one stored under that name.
    """

    directory: Path | None = attrs.field(factory=default_directory)
    limit_nbytes: int = LIMIT_NBYTES

    def get(self, name: str) -> bytes | None:
        """Return the cubin of that name, or None."""
        if self.directory is None:
            return None
        path = self.directory / name
        try:
            content = path.read_bytes()
        except OSError:
            return None
        cubin = content[_HEAD_NBYTES:]
        if content[:_HEAD_NBYTES] != _head(name, cubin):
            drop_damaged(path, "the digest of its content is another than it says")
            return None
        with contextlib.suppress(OSError):  # it may be another user's, or read-only
            os.utime(path)  # the oldest goes first: see `_shrink`
        return cubin

    def put(self, name: str, cubin: bytes) -> None:
        """Store a cubin, and remove those unused for longest while there are too many bytes."""
        if self.directory is None:
            return
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            write_bytes(self.directory / name, _head(name, cubin) + cubin)
            self._shrink()

    def _shrink(self) -> None:
        assert self.directory is not None
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


def _head(name: str, cubin: bytes) -> bytes:
    digest = hashlib.sha256(f"{name}:".encode() + cubin).hexdigest()
    return _HEAD + digest.encode() + b"\n"
