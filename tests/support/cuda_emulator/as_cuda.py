# SPDX-License-Identifier: Apache-2.0
"""Inside the emulating process: all of amp_ir's `device="cuda"`, with graphs and events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tvm

from amp_ir.api import compile as compilation
from amp_ir.api import measure
from amp_ir.demo import workloads
from amp_ir.host import peak_rates
from amp_ir.ir.executable import Executable
from amp_ir.runtime import program
from amp_ir.vm import build as build_stage
from cuda_emulator import device, steps, torch_cuda


class GraphedProgram(steps.EmulatedProgram):
    """Runs as a program on a GPU does: its own batch and results, and a CUDA graph."""

    def __init__(
        self, executable: Any, plan: Any, signature: Any, state: Any, _device: Any, **options: Any
    ) -> None:
        super().__init__(executable, plan, signature, state, **options)

    def _runs_on_gpu(self) -> Any:
        return program._OnGpu(self)

    def synchronise(self) -> None:
        """Wait for the emulated device."""
        device.synchronise()
        super().synchronise()


def _build(planned: Any, target: Any, _device: str, *, opt_level: int) -> Executable:
    built = build_stage.compile_executable(planned, target, opt_level=opt_level)
    vm = tvm.relax.VirtualMachine(built, device.device())
    return Executable(vm, device.device(), 0, built)


@contextlib.contextmanager
def as_cuda() -> Iterator[None]:
    """Make amp_ir's `device="cuda"` the emulated device, graphs and events included.

    Model and batch stay on PyTorch's CPU, whose memory the device shares.
    """
    steps.register_libraries()
    make = workloads.Workload.make

    def made(workload: Any, *, device: str = "cpu", **options: Any) -> Any:
        return make(workload, **options)

    with (
        torch_cuda.installed(),
        mock.patch.object(compilation, "Program", GraphedProgram),
        mock.patch.object(build_stage, "build", _build),
        mock.patch.object(measure, "measure_peaks", lambda _: peak_rates.measure_gpu("cpu", False)),
        mock.patch.object(workloads.Workload, "make", made),
    ):
        yield
