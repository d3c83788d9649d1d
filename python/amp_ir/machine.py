# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at best, measured: the roof that kernels are held against."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

import attrs
import torch
import tvm_ffi

from amp_ir import native

_EXTENT = 2048  # of the square matrices: 17 GFLOP, long beside the start of a call
_COPY_BYTES = 128 << 20  # beyond any cache
_TRIALS = 5


@attrs.frozen
class MachinePeaks:
    """The best rates met: GFLOP/s of a large matmul by dtype, and GB/s of a large copy.

    A copy of n bytes counts as 2 n: read and written.
    """

    gflop_per_second: Mapping[str, float]
    gigabytes_per_second: float
    threads: int

    def floor_milliseconds(self, flop: float, nbytes: float, dtype: str) -> float:
        """The time that neither arithmetic nor memory can beat (Williams et al. 2009, roofline)."""
        rate = self.gflop_per_second.get(dtype, self.gflop_per_second["float32"])
        return max(flop / rate, nbytes / self.gigabytes_per_second) / 1e6

    def __str__(self) -> str:
        """Say the rates in one line."""
        rates = ", ".join(f"{dtype} {rate:.0f}" for dtype, rate in self.gflop_per_second.items())
        return f"{rates} GFLOP/s, {self.gigabytes_per_second:.1f} GB/s, {self.threads} threads"


def measure_peaks() -> MachinePeaks:
    """Measure the peaks, once for each number of threads in a process; takes about a second."""
    return _measure(torch.get_num_threads())


@functools.cache
def _measure(threads: int) -> MachinePeaks:
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        seconds = min(_best_seconds(call) for call in _matmuls(dtype))
        rates[str(dtype).removeprefix("torch.")] = 2 * _EXTENT**3 / seconds / 1e9
    # Without arithmetic for it, float16 is computed in float32.
    rates["float16"] = rates["float32"]
    source, copy = (torch.ones(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    seconds = _best_seconds(lambda: copy.copy_(source))
    return MachinePeaks(rates, 2 * _COPY_BYTES / seconds / 1e9, threads)


def _matmuls(dtype: torch.dtype) -> list[Callable[[], object]]:
    """The same product by PyTorch and, where it is there, by oneDNN."""
    a, b = (torch.randn(_EXTENT, _EXTENT).to(dtype) for _ in range(2))
    out = torch.empty(_EXTENT, _EXTENT, dtype=dtype)
    calls: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out)]
    if native.has("amp_ir.onednn.matmul"):
        shape, strides = tvm_ffi.Shape((_EXTENT, _EXTENT)), tvm_ffi.Shape((_EXTENT, 1))
        multiply = native.function("amp_ir.onednn.matmul")
        flat = [one.view(-1) for one in (a, b, out)]
        layouts = [shape, strides] * 3
        calls.append(lambda: multiply(*flat[:2], None, *layouts, "none", flat[2]))
    return calls


def _best_seconds(call: Callable[[], object]) -> float:
    call()
    best = float("inf")
    for _ in range(_TRIALS):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best
