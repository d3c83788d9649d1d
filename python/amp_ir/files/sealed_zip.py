# SPDX-License-Identifier: Apache-2.0
"""Zip files sealed with a digest of all their bytes, which is checked before anything is read.

The seal is the comment at the end of the file, which zip tools ignore:

    amp_ir checkpoint format 2 sha256 5f1c...

and the SHA-256 is of every byte before it.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import BinaryIO

import attrs

from amp_ir.errors import FileFormatError

_HEX_BYTES = 64
_LONGEST_SEAL_BYTES = 128
_CHUNK_BYTES = 1 << 20


@attrs.frozen
class Seal:
    """The seal of one kind of file; `kind` is one word, `remedy` what to do about a damaged one."""

    kind: str
    format: int
    remedy: str

    def append(self, file: BinaryIO) -> None:
        """Append the comment, after its length in the last two bytes of the zip file."""
        head = f"amp_ir {self.kind} format {self.format} sha256 ".encode()
        file.seek(-2, os.SEEK_END)
        file.write((len(head) + _HEX_BYTES).to_bytes(2, "little") + head)
        digest = _digest(file, file.tell())
        file.seek(0, os.SEEK_END)
        file.write(digest.encode())

    def check(self, file: BinaryIO, path: str | os.PathLike[str]) -> bool:
        """Return whether the file has a seal.

        Raises:
            FileFormatError: the seal is broken, or of another format.
        """
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - _LONGEST_SEAL_BYTES, 0))
        tail = file.read()
        pattern = rb"amp_ir %s format (\d{1,9}) sha256 \Z" % self.kind.encode()
        found = re.search(pattern, tail[:-_HEX_BYTES])
        if found is None:
            return False
        if int(found[1]) > self.format:
            raise FileFormatError(
                f"{path} has format {int(found[1])}, and this version of amp_ir reads up to "
                f"{self.format}; it was written by a newer one: use that to load it"
            )
        actual, stored = _digest(file, end - _HEX_BYTES), tail[-_HEX_BYTES:].decode("latin-1")
        if actual != stored:
            raise FileFormatError(
                f"{path} is damaged: the SHA-256 of its content is {actual}, and its seal says "
                f"{stored!r}; {self.remedy}"
            )
        return True


def _digest(file: BinaryIO, nbytes: int) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while nbytes:
        chunk = file.read(min(nbytes, _CHUNK_BYTES))
        if not chunk:
            break  # truncated meanwhile: the digest will differ
        digest.update(chunk)
        nbytes -= len(chunk)
    return digest.hexdigest()
