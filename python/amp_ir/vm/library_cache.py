# SPDX-License-Identifier: Apache-2.0
"""Library cache: a step with the kernels of one that was compiled before takes its machine code.

LLVM takes a large part of a compilation. The same kernels come again when a cell of a notebook
is run again, a model is rebuilt, or a step is planned within another memory budget. Kernels keep
nothing between calls, so several executables may share their code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import tvm
import tvm_ffi

from amp_ir.host.fork_safe_lock import ForkSafeLock

T = TypeVar("T")
# Steps whose code is kept: with its IR, that of a small one is some 200 KiB.
_MOST_STEPS = 16


@attrs.define(eq=False)
class LibraryCache:
    """The libraries of the steps that were compiled or found last."""

    most_steps: int = _MOST_STEPS
    _lock: ForkSafeLock = attrs.field(
        factory=lambda: ForkSafeLock("a compiled step was looked up"), init=False
    )
    _libraries: OrderedDict[tvm_ffi.StructuralKey, Any] = attrs.field(
        factory=OrderedDict, init=False
    )

    def of(self, kernels: tvm.IRModule, target: str, build: Callable[[], T]) -> T:
        """Return the library of these kernels for a target and form, built unless it is here.

        Two sets are the same where the kernels of each name are structurally equal: literals are
        compared by their bits but for NaN's, names of variables and locations are not compared.
        Threads that ask for the same kernels at once may both build them.
        """
        # Its stub declares the fields, one of which the constructor computes.
        key = tvm_ffi.StructuralKey([target, kernels])  # type: ignore[call-arg]
        with self._lock:
            found = self._libraries.get(key)
            if found is not None:
                self._libraries.move_to_end(key)
                made: T = found  # what `build` makes depends on the target and form alone
                return made
        library = build()
        with self._lock:
            self._libraries[key] = library
            while len(self._libraries) > self.most_steps:
                self._libraries.popitem(last=False)
        return library

    def clear(self) -> None:
        """Forget every library, so that the next step is compiled in full."""
        with self._lock:
            self._libraries.clear()
