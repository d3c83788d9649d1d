# SPDX-License-Identifier: Apache-2.0
"""Python's random numbers, kept while libraries are imported."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator


@contextlib.contextmanager
def kept_random() -> Iterator[None]:
    """Put the state of Python's `random` back at the end.

    Rich draws a number for each of its styles when it is imported: what a user seeded would go on
    elsewhere after the first use of a name that needs it.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
