# SPDX-License-Identifier: Apache-2.0
"""What a call costs on a machine: rates by size, measured here, or published for a GPU."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping

import attrs
import torch

from amp_ir.errors import OptionError
from amp_ir.host.peak_rates import best_seconds, copy_trial, matmul_trials

# Extents of the square matrices and bytes of the copies that are measured on a CPU.
_EXTENTS = (32, 64, 128, 256, 512, 1024)
_COPIES = (1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 27)
# What kernels are assumed to reach of a GPU's published peaks; not measured.
_MATMUL_SHARE, _COPY_SHARE = 0.7, 0.8
# Assumed for the start of a kernel in a CUDA graph, and the tile that a multiprocessor computes.
_LAUNCH_MICROSECONDS, _TILE = 2.5, 128
# Arithmetic of loops beside that of matmuls in float32: functions take several instructions.
_LOOP_SHARE = 0.25


@attrs.frozen
class Curve:
    """A rate by the size of the work, from a few points; constant beyond them."""

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        """Return the rate, interpolated in the logarithms."""
        sizes = [one for one, _ in self.points]
        k = bisect.bisect_left(sizes, size)
        if k in (0, len(sizes)):
            return self.points[min(k, len(sizes) - 1)][1]
        (x0, y0), (x1, y1) = self.points[k - 1], self.points[k]
        share = math.log(size / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + share * math.log(y1 / y0))


@attrs.frozen
class MachineModel:
    """Rates of a machine: GFLOP/s of a matmul by its arithmetic, GB/s by the bytes of a call.

    Attributes:
        name: of the machine.
        target: what to plan a step for.
        rates: by dtype.
        bandwidth: of what a call reads and writes.
        call_microseconds: what a call takes beside its work.
        units: multiprocessors of a GPU; 0 for a CPU.
        multiple: extents of a low matmul that are no multiple of it are slower; 0 where a library
            copies its operands into blocks anyway, as those of CPUs do.
        source: where the numbers are from.
        times_library_calls: whether the machine is this one, and a library call's own time counts,
            measured, instead of the rate of a square matmul of as much arithmetic.
    """

    name: str
    target: str
    rates: Mapping[str, Curve]
    bandwidth: Curve
    call_microseconds: float
    units: int
    multiple: int
    source: str
    times_library_calls: bool = False

    def copy_milliseconds(self, nbytes: float) -> float:
        """Return the time in which a call reads and writes so many bytes."""
        return nbytes / self.bandwidth.at(nbytes) / 1e6

    def work_milliseconds(
        self, flop: float, nbytes: float, dtype: str, *, is_library: bool, pieces: int = 1
    ) -> tuple[float, float]:
        """Return the time of a call's arithmetic and that of its bytes; the longer one counts.

        `pieces` are the equal matmuls of a library call: of a batch, or of a recurrent layer's
        steps.
        """
        memory = self.copy_milliseconds(nbytes)
        if not flop:
            return 0.0, memory
        rate = self.rates.get(dtype, self.rates["float32"])
        if not is_library:
            loops = self.rates["float32"].points[-1][1] * _LOOP_SHARE
            return flop / loops / 1e6, memory
        # A GPU computes the pieces at once, a CPU one after the other.
        size = flop if self.units else flop / pieces
        return flop / rate.at(size) / 1e6, memory


@functools.cache
def measured_cpu(threads: int) -> MachineModel:
    """Measure this CPU, once a process; takes some seconds."""
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        points = []
        for extent in _EXTENTS:
            seconds = [best_seconds(call) for call in matmul_trials(dtype, extent)]
            if seconds:
                points.append((2.0 * extent**3, 2 * extent**3 / min(seconds) / 1e9))
        if points:
            rates[str(dtype).removeprefix("torch.")] = Curve(tuple(points))
    for low in ("bfloat16", "float16"):
        rates.setdefault(low, rates["float32"])
    copies = tuple((2.0 * nbytes, 2 * nbytes / _copy_seconds(nbytes) / 1e9) for nbytes in _COPIES)
    return MachineModel(
        f"this CPU, {threads} threads", "cpu", rates, Curve(copies),
        call_microseconds=2.0, units=0, multiple=0, source="measured",
        times_library_calls=True,
    )  # fmt: skip


def _copy_seconds(nbytes: int) -> float:
    copy = copy_trial(nbytes, "cpu")
    times = max(1, (1 << 22) // nbytes)

    def repeat() -> None:
        for _ in range(times):
            copy()

    return best_seconds(repeat) / times


@attrs.frozen
class _Published:
    """A GPU's published peaks, dense: TFLOP/s by dtype, GB/s, multiprocessors, architecture."""

    float32: float
    tf32: float
    bfloat16: float
    float16: float
    gigabytes: float
    units: int
    architecture: str
    source: str


GPUS: Mapping[str, _Published] = {
    "A10": _Published(31.2, 62.5, 125.0, 125.0, 600.0, 72, "sm_86", "A10 data sheet, 2021"),
    "A100": _Published(19.5, 156.0, 312.0, 312.0, 2039.0, 108, "sm_80",
                       "A100 data sheet, 80 GB SXM, 2021"),
    "L4": _Published(30.3, 60.0, 121.0, 121.0, 300.0, 58, "sm_89",
                     "L4 data sheet, 2023, without sparsity"),
    "L40S": _Published(91.6, 183.0, 362.0, 362.0, 864.0, 142, "sm_89", "L40S data sheet, 2023"),
    "H100": _Published(67.0, 494.7, 989.4, 989.4, 3350.0, 132, "sm_90",
                       "H100 data sheet, SXM, 2023, without sparsity"),
    "H100 PCIe": _Published(51.0, 378.0, 756.0, 756.0, 2000.0, 114, "sm_90",
                            "H100 data sheet, PCIe, 2023, without sparsity"),
    "H200": _Published(67.0, 494.7, 989.4, 989.4, 4800.0, 132, "sm_90",
                       "H200 data sheet, SXM, 2024, without sparsity"),
}  # fmt: skip


def published_gpu(name: str, *, allow_tf32: bool = False) -> MachineModel:
    """Return the model of a GPU by its published peaks.

    Raises:
        OptionError: there is none of this name; the message lists those there are.
    """
    known = {one.lower(): one for one in GPUS}
    if name.lower() not in known:
        raise OptionError(f"gpu={name!r} is not known; expected one of {', '.join(GPUS)}")
    gpu = GPUS[known[name.lower()]]
    peaks = {
        "float32": gpu.tf32 if allow_tf32 else gpu.float32,
        "bfloat16": gpu.bfloat16,
        "float16": gpu.float16,
    }
    rates = {
        dtype: Curve(_saturating(peak * 1e3 * _MATMUL_SHARE, gpu.units))
        for dtype, peak in peaks.items()
    }
    bandwidth = Curve(((1.0, gpu.gigabytes * _COPY_SHARE),))
    return MachineModel(
        known[name.lower()], gpu.architecture, rates, bandwidth,
        call_microseconds=_LAUNCH_MICROSECONDS, units=gpu.units, multiple=8, source=gpu.source,
    )  # fmt: skip


def _saturating(peak: float, units: int) -> tuple[tuple[float, float], ...]:
    """Return rates that grow with the number of tiles, until each multiprocessor has one.

    A tile of 128 x 128 over 1024 terms; smaller matmuls leave multiprocessors without work.
    """
    tile = 2.0 * _TILE * _TILE * 1024
    return (tile, peak / units), (tile * units, peak)
