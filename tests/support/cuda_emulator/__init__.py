# SPDX-License-Identifier: Apache-2.0
"""Runs CUDA kernels without a GPU: generated source compiled by g++, every GPU thread a fiber.

TVM's own CUDA runtime and virtual machine run over stand-ins for libcuda and libcudart, so what is
tested is all but the machine code: source, launches, barriers, shuffles, memory. An access outside
of an allocation or not aligned to its size, a barrier that some threads miss, an allocation while a
stream is captured: each is an error of the launch that names kernel, block and thread. Memory
starts as NaN, and kernels can be run with threads and blocks in reverse order to find races.

Libraries load once a process, so such tests run in a process of their own:

    from cuda_emulator import in_emulator

    @in_emulator
    def test_scaling():              # runs there; plain asserts; its arguments must pickle
        from cuda_emulator.device import run
        (y,) = run(scale_kernel(), [x, np.empty_like(x)], outputs=[1])
"""

from cuda_emulator.client import in_emulator

__all__ = ["in_emulator"]
