# SPDX-License-Identifier: Apache-2.0
"""IR with planned memory -> a shared library for this CPU, to be stored and loaded.

The kernels are the same as those that `build` compiles in memory, compiled on all cores too. LLVM
writes object files instead of code in memory, in the same time, and the system's linker joins them
in some 30 ms. Objects have a few kernels each, so that those of one step serve another.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import tvm
from tvm import relax
from tvm.relax import vm_build
from tvm.runtime import _ffi_api as runtime_api
from tvm.support import cc

from amp_ir.errors import BuildError
from amp_ir.host import native
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.target import CompileTarget
from amp_ir.standalone import SET_LAUNCH
from amp_ir.vm.build import KERNEL_PIPELINE, LIBRARIES, launch_setter, program_and_kernels
from amp_ir.vm.kernel_libraries import LEAST_KERNELS, Functions, build_side_by_side
from amp_ir.vm.open_kernels import open_kernels

# Every library has its own copies of what LLVM adds, such as conversions of float16: not those of
# another library of the process, whose arguments may be in other registers.
_OPTIONS = ["-Wl,-Bsymbolic"] if sys.platform.startswith("linux") else []


@attrs.frozen(eq=False)
class KernelObject:
    """Machine code of kernels as an object file.

    `key_by_name` has what tells each of them from any other; "" where nothing is kept.
    """

    key_by_name: Mapping[str, str]
    content: bytes = attrs.field(repr=False)


class KernelStore(Protocol):
    """Keeps the machine code of kernels for other steps and for later processes."""

    def keys(self, kernels: Functions, compiled_for: str) -> dict[str, str]:
        """Return a key of each kernel, by its name; those with one key have one machine code."""

    def find(self, keys: Mapping[str, str], linked: Sequence[KernelObject]) -> list[KernelObject]:
        """Return objects with some of the kernels.

        Ensures: no kernel's name is in two of those and `linked`.
        """

    def put(self, made: Sequence[KernelObject]) -> None:
        """Keep objects."""


@functools.cache
def missing_linker() -> str:
    """Return why there are no shared libraries to be made here; "" where they can be."""
    return "" if cc.get_cc() else "there is no g++, gcc, clang++ or clang on the path"


def build_library(
    step: PlannedStep,
    target: CompileTarget,
    *,
    opt_level: int = 3,
    store: KernelStore | None = None,
) -> bytes:
    """Compile every kernel for this CPU, and return one shared library of all.

    Machine code that `store` has is taken from there, and what is new is put there.

    Raises:
        BuildError: it cannot be linked.
    """
    native.load()
    with tvm.transform.PassContext(opt_level=opt_level), target.tvm_target as built_for:
        builder, kernels = program_and_kernels(open_kernels(step))
        # One library has the setter once: an object of its own, beside those of the kernels.
        kernels.update(tvm.IRModule(launch_setter()))
        compiler = _Compiler(built_for, opt_level, store)
        made = LIBRARIES.of(kernels, compiler.description, compiler.objects)
        made = list({one.content: one for one in made}.values())
        if len({name for one in made for name in one.key_by_name}) < sum(
            len(one.key_by_name) for one in made
        ):
            # A kernel that an object has beside those that it was taken for is in another one.
            made = compiler.made(dict(kernels.functions), {})
        try:
            return _link(builder, built_for, made)
        except (OSError, RuntimeError) as error:
            raise BuildError(
                "the step cannot be linked to a shared library; g++ or clang++ must work, and the "
                f"folder for temporary files must be writable. The linker says: {error}"
            ) from error


@attrs.frozen
class _Compiler:
    """Makes objects of kernels, or takes them from where they are kept."""

    target: tvm.target.Target
    opt_level: int
    store: KernelStore | None

    @property
    def description(self) -> str:
        """Return what the machine code of a kernel depends on, beside the kernel."""
        return f"{self.target} at opt_level {self.opt_level}, as object files"

    def objects(
        self, kernels: tvm.IRModule, linked: Sequence[KernelObject]
    ) -> list[tuple[list[str], KernelObject]]:
        """Return objects with the kernels that are in none of `linked`, and which each has."""
        functions = dict(kernels.functions)
        keys: dict[str, str] = {}
        found: list[KernelObject] = []
        if self.store is not None:
            keys = self.store.keys(functions, self.description)
            found = self.store.find(keys, linked)
        has = {item for one in (*linked, *found) for item in one.key_by_name.items() if item[1]}
        new = {
            variable: function
            for variable, function in functions.items()
            if (variable.name_hint, keys.get(variable.name_hint)) not in has
        }
        made = self.made(new, keys)
        if self.store is not None:
            self.store.put(made)
        names = {variable.name_hint for variable in functions}
        return [(sorted(names & one.key_by_name.keys()), one) for one in (*found, *made)]

    def made(self, kernels: Functions, keys: Mapping[str, str]) -> list[KernelObject]:
        """Compile kernels, a few to an object."""
        items = list(kernels.items())
        setter = dict(item for item in items if item[0].name_hint == SET_LAUNCH)
        others = [item for item in items if item[0].name_hint != SET_LAUNCH]
        starts = range(0, len(others), LEAST_KERNELS)
        parts = [setter, *(dict(others[start : start + LEAST_KERNELS]) for start in starts)]
        with tempfile.TemporaryDirectory() as folder:

            def content(library: tvm.runtime.Module, part: int) -> bytes:
                path = Path(folder, f"{part}.o")
                library.write_to_file(str(path), "o")
                return path.read_bytes()

            built = build_side_by_side(
                [part for part in parts if part], KERNEL_PIPELINE, self.target,
                opt_level=self.opt_level, finish=content,
            )  # fmt: skip
        return [
            KernelObject({name: keys.get(name, "") for name in names}, code)
            for names, code in built
        ]


def _link(
    builder: relax.ExecBuilder, target: tvm.target.Target, kernels: Sequence[KernelObject]
) -> bytes:
    """Return a library of the kernels and the virtual machine's program, as TVM loads it."""
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, f"{part}.o") for part in range(len(kernels) + 1)]
        for name, one in zip(files, kernels, strict=False):
            Path(name).write_bytes(one.content)
        # The program looks for its kernels in a library that it imports: the one that it is in.
        library = tvm.runtime.load_static_library(files[0], [*kernels[0].key_by_name])
        executable = vm_build._ffi_api.VMLink(builder, target, library, [], {})
        packed = runtime_api.ModulePackImportsToLLVM(executable, False, str(target), "")
        packed.write_to_file(files[-1], "o")
        path = os.path.join(folder, "program.so")
        cc.create_shared(path, files, options=_OPTIONS)
        return Path(path).read_bytes()
