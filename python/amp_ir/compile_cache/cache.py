# SPDX-License-Identifier: Apache-2.0
"""The user's compile cache: where it is, and what is taken from it and put there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import attrs

from amp_ir.compile_cache.entry import CacheEntry, entry_from_bytes, entry_to_bytes
from amp_ir.errors import FileFormatError, OptionError
from amp_ir.files.cache_directory import cache_directory, say_once
from amp_ir.files.private_cache import PrivateCache

CACHE_VARIABLE = "AMP_IR_CACHE"
NBYTES_VARIABLE = "AMP_IR_CACHE_NBYTES"
# A step of BERT or GPT-2 has 0.3 to 2 MB, so this holds the last thousand.
DEFAULT_LIMIT_NBYTES = 2 << 30
# The folder of kernels within that of steps, and how many times less it may hold.
_KERNELS = "kernels"
_KERNELS_SHARE = 16
_OFF = ("0", "off")


@attrs.frozen
class CompileCache:
    """Built steps by their keys."""

    files: PrivateCache

    @property
    def kernels(self) -> PrivateCache:
        """Return the folder of machine code that new steps take kernels from."""
        whole = self.files
        limit_nbytes = whole.limit_nbytes // _KERNELS_SHARE
        return PrivateCache(whole.directory / _KERNELS, limit_nbytes, whole.directory)

    def get(self, key: str) -> CacheEntry | None:
        """Return the entry of a key, checked; a damaged one is removed, logged once, and None."""
        content = self.files.get(key)
        if content is None:
            return None
        try:
            return entry_from_bytes(content, key, self.files.directory / key)
        except FileFormatError as error:
            self.files.drop(key, str(error))
            return None

    def put(self, entry: CacheEntry) -> None:
        """Store an entry; where it cannot be stored, that is logged once."""
        self.files.put(entry.key, entry_to_bytes(entry))


def compile_cache() -> CompileCache | None:
    """Return the cache that the environment names; None where it is off, or there is no home.

    Raises:
        OptionError: `AMP_IR_CACHE` or `AMP_IR_CACHE_NBYTES` is nothing that can be used.
    """
    given = os.environ.get(CACHE_VARIABLE, "")
    if given.lower() in _OFF:
        return None
    directory = Path(given) if given else cache_directory("programs")
    if directory is None:
        say_once(
            CACHE_VARIABLE,
            logging.INFO,
            "there is no home directory, so compiled steps are not kept; name a folder in "
            f"{CACHE_VARIABLE}",
        )
        return None
    if not directory.is_absolute():
        raise OptionError(
            f'{CACHE_VARIABLE}={given} is not an absolute path; expected a folder, or "off"'
        )
    return CompileCache(PrivateCache(directory, _limit_nbytes()))


def _limit_nbytes() -> int:
    given = os.environ.get(NBYTES_VARIABLE, "")
    if not given:
        return DEFAULT_LIMIT_NBYTES
    if not given.isdecimal() or int(given) < 1:
        raise OptionError(
            f"{NBYTES_VARIABLE}={given} is not a number of bytes; expected one such as 2147483648"
        )
    return int(given)
