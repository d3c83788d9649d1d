# SPDX-License-Identifier: Apache-2.0
"""Measured peak rates of this machine: the roofline against which kernels are compared."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import tvm_ffi

from amp_ir.host import native

# Rows, columns and terms on a CPU, 17 and 9 GFLOP, long beside the start of a call. PyTorch 2.13
# multiplies the first in float32, the second in bfloat16 by AMX, 1.04 and 1.3 times as fast as the
# other one.
_CPU_SHAPES = (2048, 2048, 2048), (4096, 1024, 1024)
# Of square matrices, 1.1 TFLOP.
_GPU_EXTENT = 8192
# Beyond any cache.
_CPU_COPY_BYTES, _GPU_COPY_BYTES = 128 << 20, 512 << 20
_CPU_DTYPES = (torch.float32, torch.bfloat16)
_COPY = "copy"
_TRIALS = 5
# Between two events on a GPU, so that the time of an event does not count.
_CALLS_A_TRIAL = 4
_TFLOP_FROM = 1e4


@attrs.frozen
class MachinePeaks:
    """The best measured rates: GFLOP/s of a large matmul by dtype, and GB/s of a large copy.

    A copy of n bytes counts as 2 n: read and written. `machine` says what computed: "2 threads",
    or a GPU's name.
    """

    gflop_per_second: Mapping[str, float]
    gigabytes_per_second: float
    machine: str

    def speed_of_light_milliseconds(self, flop: float, nbytes: float, dtype: str) -> float:
        """Return the speed-of-light time by arithmetic and memory (Williams et al. 2009)."""
        rate = self.gflop_per_second.get(dtype, self.gflop_per_second["float32"])
        return max(flop / rate, nbytes / self.gigabytes_per_second) / 1e6

    def __str__(self) -> str:
        """Return the rates in one line."""
        divisor, unit = 1.0, "GFLOP/s"
        if max(self.gflop_per_second.values()) >= _TFLOP_FROM:
            divisor, unit = 1e3, "TFLOP/s"
        rates = ", ".join(
            f"{dtype} {rate / divisor:.0f}" for dtype, rate in self.gflop_per_second.items()
        )
        return f"{rates} {unit}, {self.gigabytes_per_second:.1f} GB/s, {self.machine}"


def measure_peaks(device: Any = "cpu") -> MachinePeaks:
    """Measure the peaks of a device, once per process; takes about a second.

    On a CPU they are for PyTorch's number of threads, on a GPU for PyTorch's current setting of
    TF32.
    """
    place = torch.device(device)
    if place.type == "cpu":
        return measure_cpu(torch.get_num_threads())
    index = torch.cuda.current_device() if place.index is None else place.index
    return measure_gpu(f"cuda:{index}", torch.backends.cuda.matmul.fp32_precision == "tf32")


@functools.cache
def measure_cpu(threads: int) -> MachinePeaks:
    """Return the peaks of the CPU; see `measure_peaks`."""
    seconds = {name: best_seconds(call) for name, call in cpu_trials().items()}
    return cpu_peaks(seconds, f"{threads} threads")


def cpu_trials() -> dict[str, Callable[[], object]]:
    """Return the calls that `cpu_peaks` needs the seconds of.

    A dtype that no library multiplies fast here has none.
    """
    trials: dict[str, Callable[[], object]] = {}
    for dtype, shape in itertools.product(_CPU_DTYPES, _CPU_SHAPES):
        matmuls = _matmuls("onednn", dtype, shape, "cpu")
        trials |= {_trial(dtype, library, shape): call for library, call in matmuls}
    return {**trials, _COPY: copy_trial(_CPU_COPY_BYTES, "cpu")}


def cpu_peaks(seconds: Mapping[str, float], machine: str) -> MachinePeaks:
    """Return a CPU's rates from the seconds of its `cpu_trials`; the fastest one counts."""
    rates = {}
    for dtype in _CPU_DTYPES:
        measured = [
            2 * math.prod(shape) / seconds[trial] / 1e9
            for shape in _CPU_SHAPES
            for library in ("torch", "onednn")
            if (trial := _trial(dtype, library, shape)) in seconds
        ]
        if measured:
            rates[_name(dtype)] = max(measured)
    # Without arithmetic for it, a low dtype is computed in float32.
    for low in ("bfloat16", "float16"):
        rates.setdefault(low, rates["float32"])
    return MachinePeaks(rates, 2 * _CPU_COPY_BYTES / seconds[_COPY] / 1e9, machine)


@functools.cache
def measure_gpu(device: str, allow_tf32: bool) -> MachinePeaks:
    """Return the peaks of a GPU; see `measure_peaks`."""
    # Half of what is free holds the matrices in float32; what is measured must not run out.
    free_nbytes, _ = torch.cuda.mem_get_info(device)
    extent, copy_nbytes = _GPU_EXTENT, _GPU_COPY_BYTES
    while 3 * 4 * extent**2 > free_nbytes / 2 or 2 * copy_nbytes > free_nbytes / 2:
        extent, copy_nbytes = extent // 2, copy_nbytes // 4
    rates = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        finish = "none+tf32" if allow_tf32 and dtype is torch.float32 else "none"
        calls = _matmuls("cublaslt", dtype, (extent, extent, extent), device, finish)
        seconds = min(_best_seconds_on_gpu(call, device) for _, call in calls)
        rates[_name(dtype)] = 2 * extent**3 / seconds / 1e9
    seconds = _best_seconds_on_gpu(copy_trial(copy_nbytes, device), device)
    tf32 = "float32 rounded to TF32" if allow_tf32 else "without TF32"
    name = f"{torch.cuda.get_device_name(device)} {tf32}"
    return MachinePeaks(rates, 2 * copy_nbytes / seconds / 1e9, name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def copy_trial(nbytes: int, device: str) -> Callable[[], object]:
    """Return a copy of bytes on a device."""
    source, copy = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: copy.copy_(source)


def matmul_trials(dtype: torch.dtype, extent: int) -> list[Callable[[], object]]:
    """Return the same square matmul on the CPU by each library that is fast at it."""
    return [call for _, call in _matmuls("onednn", dtype, (extent, extent, extent), "cpu")]


def _trial(dtype: torch.dtype, library: str, shape: Sequence[int]) -> str:
    return f"{_name(dtype)} {library} {' x '.join(map(str, shape))}"


def _matmuls(
    library: str, dtype: torch.dtype, shape: tuple[int, int, int], device: str, finish: str = "none"
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Return the same matmul by PyTorch and by the library that steps call, where they are fast.

    `shape`: the rows, columns and terms of the result.
    """
    rows, columns, terms = shape
    dims = ((rows, terms), (terms, columns))
    a, b = (torch.randn(*one, device=device).to(dtype) for one in dims)
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    # Without the instructions PyTorch multiplies bfloat16 in a scalar loop, which takes minutes.
    if device != "cpu" or dtype != torch.bfloat16 or native.has_fast_bfloat16():
        yield "torch", lambda: torch.mm(a, b, out=out)
    if native.has(f"amp_ir.{library}.matmul"):
        multiply = native.function(f"amp_ir.{library}.matmul")
        flat = [one.view(-1) for one in (a, b, out)]
        layouts = [tvm_ffi.Shape(one) for t in (a, b, out) for one in (t.shape, t.stride())]
        yield library, lambda: multiply(*flat[:2], None, *layouts, finish, flat[2])


def best_seconds(call: Callable[[], object], *, trials: int = _TRIALS) -> float:
    """Return the shortest time of several calls; the first one is not timed."""
    call()
    best = float("inf")
    for _ in range(trials):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def _best_seconds_on_gpu(call: Callable[[], object], device: str) -> float:
    """Return the GPU's time of one call; the first calls choose algorithms and are not timed."""
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        best = float("inf")
        for trial in range(1 + _TRIALS):
            begin.record()
            for _ in range(_CALLS_A_TRIAL):
                call()
            end.record()
            torch.cuda.synchronize()
            if trial:
                best = min(best, begin.elapsed_time(end) / _CALLS_A_TRIAL / 1e3)
    return best
