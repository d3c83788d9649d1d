# SPDX-License-Identifier: Apache-2.0
"""Load a step's shared library into TVM's virtual machine."""

from __future__ import annotations

import ctypes
import os
import tempfile
from typing import Any

import tvm
from tvm import relax

from amp_ir.host import native
from amp_ir.ir.executable import Executable
from amp_ir.ir.target import CompileTarget
from amp_ir.standalone import LAUNCH_ADDRESS, SET_LAUNCH

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def load_library(
    library: bytes, target: CompileTarget, device: Any, kernel_count: int
) -> Executable:
    """Return the program of a shared library, ready to run.

    The linker takes a file: these bytes are written to a folder of this user's, whose name nobody
    knew, so that what was checked is what is loaded.

    Ensures: a CPU's kernels run on OpenMP's threads, the pool that PyTorch and oneDNN use too.

    Raises:
        OSError, RuntimeError: it cannot be written or loaded.
    """
    native.load()
    with tempfile.TemporaryDirectory(prefix="amp_ir-") as folder:
        path = os.path.join(folder, "program.so")
        with open(os.open(path, _NEW, 0o600), "wb") as file:
            file.write(library)
        module = tvm.runtime.load_module(path)
    if not target.is_cuda and native.has(LAUNCH_ADDRESS):
        set_launch = module.get_function(SET_LAUNCH, query_imports=True)
        set_launch(ctypes.c_void_p(native.function(LAUNCH_ADDRESS)()))
    tvm_device = tvm.device(str(device))
    vm = relax.VirtualMachine(module, tvm_device)
    return Executable(vm, tvm_device, kernel_count, relax.VMExecutable(module))
