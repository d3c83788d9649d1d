# SPDX-License-Identifier: Apache-2.0
"""An element of one of several parts, by where it is along their axis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from tvm import tirx

from amp_ir.loops.body_context import assigned
from amp_ir.loops.elements import clamp, select

# Takes the number of a part and a position along it.
Element = Callable[[int, Any], Any]
Choose = Callable[[Any, Sequence[int], Element], Any]
_choose: ContextVar[Choose | None] = ContextVar("choose", default=None)


def choosing(choose: Choose) -> AbstractContextManager[None]:
    """Evaluate `element_of_part` by `choose` inside the block."""
    return assigned(_choose, choose)


def element_of_part(at: Any, ends: Sequence[int], element: Element) -> Any:
    """Return `element(k, at - start of part k)` for the part `k` that `at` is in.

    Part k begins where the one before it ends, and has elements. Unless the kernel's writer
    chooses in its own way, all parts are evaluated, each at a position that it has.
    """
    choose = _choose.get()
    return (_all_of_them if choose is None else choose)(at, ends, element)


def _all_of_them(at: Any, ends: Sequence[int], element: Element) -> Any:
    chosen = None
    for k, (start, end) in reversed(list(enumerate(itertools.pairwise([0, *ends])))):
        one = element(k, clamp(at - start, end - start))
        chosen = one if chosen is None else select(at >= tirx.const(end, "int32"), chosen, one)
    return chosen
