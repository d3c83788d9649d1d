# SPDX-License-Identifier: Apache-2.0
"""Inside the emulating process: run kernels and modules on the emulated device, and watch it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import tvm
import tvm_ffi
from tvm.tirx import compilation_pipeline

from cuda_emulator import libraries

ARCH = "sm_90"
_PIPELINE = "cuda_emulator"
_standins: _StandIns | None = None
_kept: list[Any] = []


@attrs.frozen
class _StandIns:
    driver: ctypes.CDLL
    runtime: ctypes.CDLL
    folder: Path


@attrs.frozen
class Counters:
    """How often the host asked the device for something."""

    launches: int
    allocations: int
    frees: int
    copies: int
    synchronisations: int
    graph_launches: int


def start(folder: Path, driver: ctypes.CDLL, runtime: ctypes.CDLL) -> None:
    """Make TVM compile kernels for the stand-ins, which `libraries.load` has loaded."""
    global _standins
    driver.emulator_last_error.restype = ctypes.c_char_p
    driver.emulator_peak_nbytes.restype = ctypes.c_size_t
    _standins = _StandIns(driver, runtime, folder)

    from amp_ir.cuda.driver import prepare_build

    prepare_build()

    def compile_for_emulator(source: str) -> bytes:
        path = libraries.compile_kernels(source, folder)
        return b"emulated:" + str(path).encode() + b"\0"

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_for_emulator, override=True)
    compilation_pipeline.register_tir_pipeline(_PIPELINE, _kernel_pipeline)


def stand_ins() -> Path:
    """The folder of the stand-ins, for another process to look for libraries in."""
    return _loaded().folder


def target() -> tvm.target.Target:
    """What to build for."""
    return tvm.target.Target({"kind": "cuda", "arch": ARCH}, host="llvm")


def device() -> tvm.runtime.Device:
    """The emulated device."""
    return tvm.cuda(0)


def to_device(array: np.ndarray) -> tvm.runtime.Tensor:
    """A copy of `array` in the device's memory, exactly as large: the next byte is a fault."""
    return tvm.runtime.tensor(np.ascontiguousarray(array), device())


def share(tensor: torch.Tensor) -> tvm.runtime.Tensor:
    """A tensor of the host as one of the device, in the same memory."""
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # A DLTensor begins with its address, then the kind and the number of its device.
    kind = ctypes.c_int32.from_address(pointer_of(capsule, b"dltensor") + 8)
    kind.value = tvm.cuda(0).dlpack_device_type()
    # Not tvm.runtime.from_dlpack, which refuses what is not aligned to 64 bytes.
    return tvm_ffi.from_dlpack(capsule)


def view(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """A tensor's memory itself, which the host can reach: for stand-ins of libraries, and tests."""
    dtype = np.dtype(str(tensor.dtype))
    count = int(np.prod(tensor.shape))
    address = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
    flat = np.ctypeslib.as_array(address, (count * dtype.itemsize,))
    return flat.view(dtype).reshape(tuple(tensor.shape))


def poison(tensor: tvm.runtime.Tensor) -> None:
    """Make a tensor's memory what a new allocation is: NaN in every dtype of floats."""
    view(tensor).reshape(-1).view(np.uint8)[:] = 0xFF


def counters() -> Counters:
    """What was asked for since the last call."""
    values = (ctypes.c_long * len(attrs.fields(Counters)))()
    _loaded().driver.emulator_counters(values)
    return Counters(*values)


def peak_nbytes() -> int:
    """The most bytes that were allocated at once, since the process began."""
    return int(_loaded().driver.emulator_peak_nbytes())


@contextlib.contextmanager
def reversed_order() -> Iterator[None]:
    """Run the last block and the last thread first."""
    order = ctypes.c_int.in_dll(_loaded().driver, "emulator_reverse_order")
    order.value = 1
    try:
        yield
    finally:
        order.value = 0


def enqueue(work: Callable[[], None]) -> None:
    """Do a library's work on the host in the order of the stream: now, or in each graph launch."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

    def answer(_data: Any) -> int:
        work()
        return 0

    callback = kind(answer)
    _kept.append(callback)
    _loaded().driver.emulator_enqueue(callback, None)


@attrs.define
class Graph:
    """What a captured stream was asked to do."""

    _executable: ctypes.c_void_p = attrs.field(factory=ctypes.c_void_p)

    def launch(self) -> None:
        """Do it, with what is in memory now; raises RuntimeError where a kernel fails."""
        _answered(_loaded().runtime.cudaGraphLaunch(self._executable, None))


class Event:
    """A CUDA event of the emulated runtime, with what is used of torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "PyTorch's events have no time unless they are asked for it"
        self._handle = ctypes.c_void_p()
        _answered(_loaded().runtime.cudaEventCreate(ctypes.byref(self._handle)))

    def record(self) -> None:
        """Note the time when the work before it is done."""
        _answered(_loaded().runtime.cudaEventRecord(self._handle, None))

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from here to `end`; an error before the host has waited for both."""
        found = ctypes.c_float()
        runtime = _loaded().runtime
        _answered(runtime.cudaEventElapsedTime(ctypes.byref(found), self._handle, end._handle))
        return found.value

    def __del__(self) -> None:
        _loaded().runtime.cudaEventDestroy(self._handle)


def synchronise() -> None:
    """Wait for the device."""
    _answered(_loaded().runtime.cudaDeviceSynchronize())


@contextlib.contextmanager
def captured() -> Iterator[Graph]:
    """Keep what the device is asked for, in a graph to launch afterwards, instead of doing it."""
    runtime = _loaded().runtime
    _answered(runtime.cudaStreamBeginCapture(None, 0))
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        yield Graph(executable)
    finally:
        _answered(runtime.cudaStreamEndCapture(None, ctypes.byref(graph)))
    _answered(runtime.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0)))
    _answered(runtime.cudaGraphDestroy(graph))


def build(functions: tvm.tirx.PrimFunc | tvm.IRModule) -> tvm.runtime.Module:
    """Compile thread-bound PrimFuncs; a single one is called "main"."""
    if isinstance(functions, tvm.tirx.PrimFunc):
        functions = tvm.IRModule({"main": functions.with_attr("global_symbol", "main")})
    with target():
        return tvm.compile(functions, target=target(), tir_pipeline=_PIPELINE)


def build_program(program: tvm.IRModule) -> Any:
    """Compile a lowered Relax module and its thread-bound PrimFuncs for the virtual machine."""
    transform = tvm.relax.transform
    lowering = tvm.transform.Sequential(
        [
            transform.LowerRuntimeBuiltin(),
            transform.ComputePrimValue(),
            transform.VMShapeLower(),
            transform.AttachGlobalSymbol(),
        ]
    )
    with target():
        return tvm.relax.build(program, target(), relax_pipeline=lowering, tir_pipeline=_PIPELINE)


def run(
    function: tvm.tirx.PrimFunc, arrays: Sequence[np.ndarray], *, outputs: Sequence[int]
) -> list[np.ndarray]:
    """Run a kernel on arrays in the order of its parameters, in both orders of threads.

    Returns the arrays at `outputs` (parameter positions), whose memory starts as NaN. They must
    not depend on the order of threads and blocks.
    """
    module = build(function)
    results = []
    for order in (contextlib.nullcontext(), reversed_order()):
        tensors = [to_device(array) for array in arrays]
        for k in outputs:
            poison(tensors[k])
        with order:
            module["main"](*tensors)
        results.append([tensors[k].numpy() for k in outputs])
    for k, forward, backward in zip(outputs, *results, strict=True):
        same = forward.tobytes() == backward.tobytes()
        assert same, f"parameter {k} depends on the order of threads or blocks"
    return results[0]


def _loaded() -> _StandIns:
    assert _standins is not None, "not the emulating process: decorate the test with @in_emulator"
    return _standins


def _answered(status: int) -> None:
    if status:
        raise RuntimeError(_loaded().driver.emulator_last_error().decode())


def _kernel_pipeline() -> tuple[Any, Any, Any]:
    from amp_ir.vm.build import cuda_passes

    # Tests of the emulator have kernels with dynamic shared memory.
    passes = cuda_passes(tvm.s_tir.transform.MergeSharedMemoryAllocations())
    finish_host = compilation_pipeline.finalize_host_passes
    return (
        tvm.transform.Sequential(passes),
        finish_host,
        compilation_pipeline.finalize_device_passes,
    )
