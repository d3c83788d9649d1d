# SPDX-License-Identifier: Apache-2.0
"""Library cache: kernels that were compiled before are taken from where they are.

LLVM takes a large part of a compilation. The same kernels come again when a cell of a notebook
is run again, a model is rebuilt, a step is planned within another memory budget, or comes with
another batch, see open_kernels.py. Kernels keep nothing between calls, so several executables may
share their code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import attrs
import tvm
import tvm_ffi

from amp_ir.host.fork_safe_lock import ForkSafeLock

T = TypeVar("T")
# Libraries that are kept: with the IR of its kernels, that of a small step is some 200 KiB.
_MOST_LIBRARIES = 32


@attrs.frozen(eq=False)
class _Library:
    content: Any
    keys: tuple[tvm_ffi.StructuralKey, ...]


@attrs.define(eq=False)
class LibraryCache:
    """The libraries of the kernels that were compiled or found last.

    Each kernel is in one library, so that any of them can be linked together.
    """

    most_libraries: int = _MOST_LIBRARIES
    _lock: ForkSafeLock = attrs.field(
        factory=lambda: ForkSafeLock("a compiled step was looked up"), init=False
    )
    _by_kernel: dict[tvm_ffi.StructuralKey, _Library] = attrs.field(factory=dict, init=False)
    _latest: OrderedDict[int, _Library] = attrs.field(factory=OrderedDict, init=False)

    def of(
        self,
        kernels: tvm.IRModule,
        target: str,
        build: Callable[[tvm.IRModule, Sequence[T]], Sequence[tuple[Iterable[str], T]]],
    ) -> list[T]:
        """Return libraries that have these kernels, for a target and form.

        `build` makes those of the kernels that are in none, and returns each new library with the
        names of its kernels. It is told the libraries that have the others, too. Two kernels are
        the same where names and functions are equal: literals are compared by their bits but for
        NaN's, names of variables and locations are not compared.
        Threads that ask for the same kernels at once may both build them.
        """
        # Its stub declares the fields, one of which the constructor computes.
        keys = {
            variable.name_hint: tvm_ffi.StructuralKey([target, function])  # type: ignore[call-arg]
            for variable, function in kernels.functions.items()
        }
        found: dict[int, T] = {}
        missing = {}
        with self._lock:
            for variable, function in kernels.functions.items():
                library = self._by_kernel.get(keys[variable.name_hint])
                if library is None:
                    missing[variable] = function
                    continue
                self._latest.move_to_end(id(library))
                found[id(library)] = library.content
        if not missing:
            return list(found.values())
        made = build(tvm.IRModule(missing, attrs=kernels.attrs), list(found.values()))
        with self._lock:
            for names, content in made:
                self._keep(_Library(content, tuple(keys[name] for name in names)))
        return [*found.values(), *(content for _, content in made)]

    def _keep(self, library: _Library) -> None:
        if any(key in self._by_kernel for key in library.keys):
            return  # another thread was first, and a kernel would be in two libraries
        self._by_kernel |= dict.fromkeys(library.keys, library)
        self._latest[id(library)] = library
        while len(self._latest) > self.most_libraries:
            _, oldest = self._latest.popitem(last=False)
            for key in oldest.keys:
                del self._by_kernel[key]

    def clear(self) -> None:
        """Forget every library, so that the next step is compiled in full."""
        with self._lock:
            self._by_kernel.clear()
            self._latest.clear()
