# SPDX-License-Identifier: Apache-2.0
"""What the system says where memory ends, said as an error that tells what to do."""

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
    """Whether an error of PyTorch, of a library or of Python says that memory has ended."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None


def asked_nbytes(error: BaseException) -> int:
    """The bytes that could not be had, where the error names them; else 0."""
    found = _NBYTES.search(str(error))
    return int(found[1]) if found else 0


def out_of_memory(doing: str, error: BaseException, nbytes: int = 0) -> OutOfMemoryError:
    """The error to raise: `doing` is as in "the capture needs".

    `nbytes` is what was asked for where the system's error does not say.
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
    """Say what `doing` could not have; for work that leaves the user's state alone.

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
