# SPDX-License-Identifier: Apache-2.0
"""Out-of-memory errors of the system, converted to an error that says what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from amp_ir.errors import AmpIrError, OutOfMemoryError

# PyTorch's allocator for CPUs, our libraries, and the C++ library.
_WORDS = re.compile(r"can't allocate memory|not enough memory|out of memory|std::bad_alloc")
_NBYTES = re.compile(r"(\d+) bytes")
ADVICE = (
    "pass memory_budget= to compute values again instead of holding them, make the batch smaller, "
    "or free memory of the process"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of PyTorch, of a library or of Python means out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None


def asked_nbytes(error: BaseException) -> int:
    """Return the bytes that could not be allocated, where the error names them; else 0."""
    found = _NBYTES.search(str(error))
    return int(found[1]) if found else 0


def out_of_memory(doing: str, error: BaseException, nbytes: int = 0) -> OutOfMemoryError:
    """Return the error to raise: `doing` is as in "the capture needs".

    `nbytes` is the requested size where the system's error does not say.
    """
    nbytes = asked_nbytes(error) or nbytes
    size = f" of {nbytes} bytes ({nbytes / 2**20:.1f} MiB)" if nbytes else ""
    return OutOfMemoryError(
        f"{doing} memory{size} that the system does not have; {ADVICE}. Model, optimizer, scaler "
        "and random state are unchanged",
        nbytes,
    )


@contextlib.contextmanager
def memory_for(doing: str, nbytes: int = 0) -> Iterator[None]:
    """Convert out-of-memory errors inside; for work that does not touch the user's state.

    The arguments are as for `out_of_memory`.

    Raises:
        OutOfMemoryError: memory ended inside.
    """
    try:
        yield
    except AmpIrError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(doing, error, nbytes) from error
