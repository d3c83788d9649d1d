# SPDX-License-Identifier: Apache-2.0
"""The C++ parts: loads the shared libraries that were built, once, and says what is missing.

The libraries register their functions with tvm-ffi as `amp_ir.<library>.<verb>`. A library that is
missing costs speed, never correctness, except `passes`, without which nothing can be planned.
`cublaslt` and `torch` are part of every build and register what CUDA steps call on every machine,
so that a step for a GPU can be compiled without one; what they call in turn, cuBLASLt and
PyTorch's CUDA kernels, is looked for when it is first needed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

# torch comes before our libraries: they link libgomp.so.1 by name and torch_shim looks into
# libtorch_cpu, and both must find the copies that torch has loaded (one thread pool a process).
import torch
import tvm_ffi

from amp_ir.errors import BuildError, OptionError
from amp_ir.standalone import files_of_wheel

LIBRARY_DIRECTORY = Path(__file__).parents[1] / "lib"

# Libraries to do without, with commas in between: to test or to measure what they are worth.
DISABLE_VARIABLE = "AMP_IR_DISABLE"

# Library -> what the user loses without it.
CONSEQUENCES = {
    "passes": "no program can be compiled, since memory cannot be planned",
    "openmp": "compiled kernels run on a thread pool of their own and compete with PyTorch's",
    "torch": "matmul and convolution have no PyTorch kernels to fall back on",
    "onednn": "matmul and convolution run through PyTorch, whose float32 is slower",
    "cublaslt": "no step can be compiled for a GPU",
}
_REMEDIES = {
    "onednn": "pip install onednn-cpu-gomp==2023.2.0 onednn-devel-cpu-gomp==2023.2.0, then rebuild",
}
# Wheels that hold libcublasLt, newest CUDA first; a CUDA build of PyTorch has loaded its own.
_CUBLASLT_WHEELS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")
_REBUILD = "rebuild amp_ir (pip install -e .)"


@functools.cache
def load() -> dict[str, str]:
    """Load every library that exists; later calls do nothing.

    Returns the reason for each library that is missing, after one warning that names them all with
    their consequences. Where PyTorch has no CUDA, nobody misses `cublaslt`. A library that
    `AMP_IR_DISABLE` names is not loaded, and not warned of.

    Raises:
        OptionError: `AMP_IR_DISABLE` names a library that there is not, or `passes`.
    """
    reasons = {}
    disabled = _disabled()
    for name in CONSEQUENCES:
        if name in disabled:
            continue
        reason = _load_library(name)
        if reason is not None and (name != "cublaslt" or torch.version.cuda is not None):
            reasons[name] = reason
    if reasons:
        warnings.warn(_missing_message(reasons), RuntimeWarning, stacklevel=2)
    return reasons


def has(name: str) -> bool:
    """Return whether the native function `name` (such as "amp_ir.onednn.matmul") can be called."""
    load()
    return tvm_ffi.get_global_func(name, allow_missing=True) is not None


def function(name: str) -> tvm_ffi.Function:
    """Return the native function `name`; raise BuildError where its library is missing."""
    load()
    found = tvm_ffi.get_global_func(name, allow_missing=True)
    if found is None:
        raise BuildError(f"the native function {name} is not in this build; {_REBUILD}")
    return found


def remedy_of(name: str) -> str:
    """Return what to do about a library that is missing."""
    return _REMEDIES.get(name, _REBUILD)


def has_fast_bfloat16() -> bool:
    """Return whether PyTorch computes in bfloat16 with instructions for it.

    The CPU may have them and PyTorch not use them: `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA`
    tell it to do without.
    """
    return (
        torch.backends.mkldnn.is_available()
        and torch.cpu._is_avx512_bf16_supported()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def has_amx() -> bool:
    """Return whether oneDNN multiplies low matrices by AMX.

    The CPU may have it and `ONEDNN_MAX_CPU_ISA` tell oneDNN, and PyTorch's, to do without.
    """
    return has("amp_ir.onednn.isa") and "amx" in function("amp_ir.onednn.isa")()


def _disabled() -> set[str]:
    """Return the libraries that the user disables."""
    value = os.environ.get(DISABLE_VARIABLE, "")
    names = {name.strip() for name in value.split(",")} - {""}
    optional = [name for name in CONSEQUENCES if name != "passes"]
    if not names <= set(optional):
        raise OptionError(
            f"{DISABLE_VARIABLE}={value} names no library that can be done without; expected some "
            f"of {', '.join(optional)}, with commas in between"
        )
    return names


def _load_library(name: str) -> str | None:
    """Load libamp_ir_<name>; return the reason why not, or None."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    path = LIBRARY_DIRECTORY / f"libamp_ir_{name}{suffix}"
    if not path.exists():
        return "not built"
    try:
        for dependency in _wheel_libraries(name):
            ctypes.CDLL(str(dependency))
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error)
    if name == "torch":
        set_fast = tvm_ffi.get_global_func("amp_ir.torch.set_fast_bfloat16", allow_missing=True)
        if set_fast is not None:
            set_fast(has_fast_bfloat16())
    if name == "cublaslt":
        look_at = tvm_ffi.get_global_func("amp_ir.cublaslt.also_look_at")
        for wheel in _CUBLASLT_WHEELS:
            for found in files_of_wheel(wheel, "libcublasLt.so."):
                look_at(str(found))
    return None


def _wheel_libraries(name: str) -> Iterator[Path]:
    """Return the shared library that a wheel puts outside the dynamic linker's search path.

    Loading it by path first lets libamp_ir_onednn find it by its SONAME. The result is empty where
    oneDNN was not installed by pip: the linker may know it.
    """
    if name == "onednn":
        yield from files_of_wheel("onednn-cpu-gomp", "libdnnl.so.3")


def _missing_message(reasons: dict[str, str]) -> str:
    lines = [
        f"  {name} ({reason}): {CONSEQUENCES[name]}; {remedy_of(name)}"
        for name, reason in reasons.items()
    ]
    return "some native libraries of amp_ir are missing:\n" + "\n".join(lines)
