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
from amp_ir.vm.build import KERNEL_PIPELINE, LIBRARIES, launch_setter, program_and_kernels
from amp_ir.vm.kernel_libraries import Functions, build_side_by_side

# Every library has its own copies of what LLVM adds, such as conversions of float16: not those of
# another library of the process, whose arguments may be in other registers.
_OPTIONS = ["-Wl,-Bsymbolic"] if sys.platform.startswith("linux") else []


@attrs.frozen(eq=False)
class KernelObjects:
    """Kernels as object files, and a module that has some of them, for TVM's linker."""

    module: tvm.runtime.Module
    objects: tuple[bytes, ...]


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
        builder, kernels = program_and_kernels(step)
        compiled_for = f"{built_for} at opt_level {opt_level}, as object files"
        made: KernelObjects = LIBRARIES.of(
            kernels, compiled_for, lambda: _objects(kernels, built_for, opt_level)
        )
        linked = vm_build._ffi_api.VMLink(builder, built_for, made.module, [], {})
        try:
            return _link(linked, made)
        except (OSError, RuntimeError) as error:
            raise BuildError(
                "the step cannot be linked to a shared library; g++ or clang++ must work, and the "
                f"folder for temporary files must be writable. The linker says: {error}"
            ) from error


def _objects(kernels: tvm.IRModule, target: tvm.target.Target, opt_level: int) -> KernelObjects:
    def of_part(part: int) -> Functions:
        # One library has such a function once.
        return launch_setter() if part == 0 else {}

    with tempfile.TemporaryDirectory() as folder:
        built = build_side_by_side(
            dict(kernels.functions), KERNEL_PIPELINE, target, opt_level=opt_level,
            of_part=of_part, finish=lambda library, part: _object(library, Path(folder, f"{part}")),
        )  # fmt: skip
    return KernelObjects(built[0][0], tuple(content for _, content in built))


def _object(library: tvm.runtime.Module, path: Path) -> tuple[tvm.runtime.Module, bytes]:
    """Return the library and its machine code."""
    path = path.with_suffix(".o")
    library.write_to_file(str(path), "o")
    return library, path.read_bytes()


def _link(executable: tvm.runtime.Module, kernels: KernelObjects) -> bytes:
    """Return a library of the kernels and the virtual machine's program, as TVM loads it."""
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, f"{part}.o") for part in range(len(kernels.objects) + 1)]
        for name, content in zip(files, kernels.objects, strict=False):
            Path(name).write_bytes(content)
        described = kernels.module.get_function("_get_target_string")()
        packed = runtime_api.ModulePackImportsToLLVM(executable, False, described, "")
        packed.write_to_file(files[-1], "o")
        path = os.path.join(folder, "program.so")
        cc.create_shared(path, files, options=_OPTIONS)
        return Path(path).read_bytes()
