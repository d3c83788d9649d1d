# SPDX-License-Identifier: Apache-2.0
"""IR with planned memory -> a shared library for this CPU, to be stored and loaded.

The kernels are the same as those that `build` compiles in memory, compiled on all cores too. LLVM
writes object files instead of code in memory, in the same time, and the system's linker joins them
in some 30 ms.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import tvm
from tvm.relax import vm_build
from tvm.runtime import _ffi_api as runtime_api
from tvm.support import cc

from amp_ir.errors import BuildError
from amp_ir.host import native
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.target import CompileTarget
from amp_ir.standalone import SET_LAUNCH
from amp_ir.vm.build import KERNEL_PIPELINE, LIBRARIES, launch_setter, program_and_kernels
from amp_ir.vm.kernel_libraries import Functions, build_side_by_side
from amp_ir.vm.open_kernels import open_kernels

# Every library has its own copies of what LLVM adds, such as conversions of float16: not those of
# another library of the process, whose arguments may be in other registers.
_OPTIONS = ["-Wl,-Bsymbolic"] if sys.platform.startswith("linux") else []


@attrs.frozen(eq=False)
class KernelObject:
    """Kernels as an object file, and as a module for TVM's linker."""

    module: tvm.runtime.Module
    content: bytes


@functools.cache
def missing_linker() -> str:
    """Return why there are no shared libraries to be made here; "" where they can be."""
    return "" if cc.get_cc() else "there is no g++, gcc, clang++ or clang on the path"


def build_library(step: PlannedStep, target: CompileTarget, *, opt_level: int = 3) -> bytes:
    """Compile every kernel for this CPU, and return one shared library of all.

    Raises:
        BuildError: it cannot be linked.
    """
    native.load()
    with tvm.transform.PassContext(opt_level=opt_level), target.tvm_target as built_for:
        builder, kernels = program_and_kernels(open_kernels(step))
        # One library has the setter once: an object of its own, beside those of the kernels.
        kernels.update(tvm.IRModule(launch_setter()))
        compiled_for = f"{built_for} at opt_level {opt_level}, as object files"
        made: list[KernelObject] = LIBRARIES.of(
            kernels, compiled_for, lambda missing: _objects(missing, built_for, opt_level)
        )
        linked = vm_build._ffi_api.VMLink(builder, built_for, made[0].module, [], {})
        try:
            return _link(linked, made)
        except (OSError, RuntimeError) as error:
            raise BuildError(
                "the step cannot be linked to a shared library; g++ or clang++ must work, and the "
                f"folder for temporary files must be writable. The linker says: {error}"
            ) from error


def _objects(
    kernels: tvm.IRModule, target: tvm.target.Target, opt_level: int
) -> list[tuple[list[str], KernelObject]]:
    def build(functions: Functions, name: str) -> list[tuple[list[str], KernelObject]]:
        return build_side_by_side(
            functions, KERNEL_PIPELINE, target, opt_level=opt_level,
            of_part=lambda _part: {},
            finish=lambda library, part: _object(library, Path(folder, f"{name}{part}.o")),
        )  # fmt: skip

    others = dict(kernels.functions)
    setter = {one: others.pop(one) for one in list(others) if one.name_hint == SET_LAUNCH}
    with tempfile.TemporaryDirectory() as folder:
        return [
            *(build(setter, "setter") if setter else []),
            *(build(others, "kernels") if others else []),
        ]


def _object(library: tvm.runtime.Module, path: Path) -> KernelObject:
    """Return the library's machine code."""
    library.write_to_file(str(path), "o")
    return KernelObject(library, path.read_bytes())


def _link(executable: tvm.runtime.Module, kernels: Sequence[KernelObject]) -> bytes:
    """Return a library of the kernels and the virtual machine's program, as TVM loads it."""
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, f"{part}.o") for part in range(len(kernels) + 1)]
        for name, one in zip(files, kernels, strict=False):
            Path(name).write_bytes(one.content)
        described = kernels[0].module.get_function("_get_target_string")()
        packed = runtime_api.ModulePackImportsToLLVM(executable, False, described, "")
        packed.write_to_file(files[-1], "o")
        path = os.path.join(folder, "program.so")
        cc.create_shared(path, files, options=_OPTIONS)
        return Path(path).read_bytes()
