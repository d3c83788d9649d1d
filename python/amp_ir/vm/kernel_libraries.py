# SPDX-License-Identifier: Apache-2.0
"""Compile kernels to machine code on all cores: LLVM and NVRTC do most of it, and hold no lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import tvm
from tvm import tirx

Functions = Mapping[tvm.ir.GlobalVar, tirx.PrimFunc]
T = TypeVar("T")
# Kernels that make a library of their own worth its few milliseconds.
_LEAST_KERNELS = 4


def build_side_by_side(
    kernels: Functions,
    pipeline: str,
    target: tvm.target.Target,
    *,
    opt_level: int,
    of_part: Callable[[int], Functions],
    finish: Callable[[tvm.runtime.Module, int], T],
) -> list[tuple[list[str], T]]:
    """Build libraries of `kernels`, one part per thread of PyTorch's.

    Each library also gets the functions that `of_part` makes for its number. `finish` makes the
    machine code of a library, in the thread that built it; what it makes is returned, with the
    names of the kernels in it.
    """
    count = max(1, min(torch.get_num_threads(), len(kernels) // _LEAST_KERNELS))
    items = list(kernels.items())

    def build(part: int) -> tuple[list[str], T]:
        # Neighbours take the same time, so every count-th is as much work as the next part's.
        own = dict(items[part::count])
        names = [variable.name_hint for variable in own]
        own |= of_part(part)
        # Contexts of TVM are a thread's own.
        with tvm.transform.PassContext(opt_level=opt_level), target:
            library = tvm.tirx.build(tvm.IRModule(own), target=target, pipeline=pipeline)
        return names, finish(library, part)

    if count == 1:
        return [build(0)]
    with ThreadPoolExecutor(count, "amp_ir builds kernels") as pool:
        return list(pool.map(build, range(count)))
