# SPDX-License-Identifier: Apache-2.0
"""TVM's CUDA runtime, loaded where there is a driver and, to cross-compile, where there is none.

TVM makes a module with machine code only while its CUDA runtime is loaded, and that library needs
libcuda.so.1, which comes with a driver, and libcudart.so.13. On a machine without a driver a stub
of ours takes libcuda's place: it returns from every call with "no device".
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import tvm  # noqa: F401  (its own attempt to load the CUDA runtime comes first)
import tvm_ffi
from tvm import libinfo
from tvm_ffi.libinfo import load_lib_ctypes

from amp_ir.cuda import toolkit
from amp_ir.errors import BuildError

_DRIVER = "libcuda.so.1"
_STUB = Path(__file__).parents[1] / "lib" / "libamp_ir_cuda_stub.so"
_RUNTIME = "libcudart.so.13"


def prepare_build() -> None:
    """Make TVM build CUDA modules that hold machine code.

    Raises:
        BuildError: a part is missing; the message says which and how to get it.
    """
    # On demand: a process that only looks for a GPU compiles nothing for it.
    from amp_ir.cuda import compiler

    load_runtime()
    compiler.register()


@functools.cache
def load_runtime() -> None:
    """Load TVM's CUDA runtime, with a stub for the driver where there is none."""
    if _is_loaded():
        return
    # The linker finds a library that is already loaded by its name, wherever it came from.
    if _real_driver() is None:
        _load(_STUB, "rebuild amp_ir (pip install -e .)")
    _load_first(_RUNTIME, toolkit.library("libcudart.so.13"))
    load_lib_ctypes(
        package="tvm",
        target_name="tvm_runtime_cuda",
        mode="RTLD_LOCAL",
        extra_lib_paths=libinfo.package_lib_paths(),
    )
    assert _is_loaded()


def missing_reason() -> str | None:
    """Return why CUDA steps cannot run here, or None."""
    driver = _real_driver()
    if driver is None:
        return f"this machine has no NVIDIA driver ({_DRIVER} was not found)"
    status = driver.cuInit(0)
    if status:
        return f"the NVIDIA driver does not start (cuInit returns {status})"
    count = ctypes.c_int()
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status or not count.value:
        return "the NVIDIA driver sees no GPU (is CUDA_VISIBLE_DEVICES empty?)"
    return None


def _is_loaded() -> bool:
    return tvm_ffi.get_global_func("device_api.cuda", allow_missing=True) is not None


def _real_driver() -> ctypes.CDLL | None:
    """Return the driver's library; our stub, once loaded, has the same name and lacks cuInit."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    return driver if hasattr(driver, "cuInit") else None


def _load_first(name: str, path: Path | None) -> None:
    """Load the library that the linker knows by `name`, else the one at `path`."""
    try:
        ctypes.CDLL(name)
    except OSError:
        if path is None:
            raise BuildError(
                f"{name} was not found, which TVM's CUDA runtime needs; {toolkit.PIP_REMEDY}"
            ) from None
        _load(path, toolkit.PIP_REMEDY)


def _load(path: Path, remedy: str) -> None:
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path.name} cannot be loaded ({error}); {remedy}") from None
