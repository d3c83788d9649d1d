# SPDX-License-Identifier: Apache-2.0
"""Compile kernels to machine code on all cores: LLVM and NVRTC do most of it, and hold no lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import tvm
from tvm import tirx

Functions = Mapping[tvm.ir.GlobalVar, tirx.PrimFunc]
T = TypeVar("T")
# Kernels that make a library of their own worth its few milliseconds.
LEAST_KERNELS = 4


def build_side_by_side(
    parts: Sequence[Functions],
    pipeline: str,
    target: tvm.target.Target,
    *,
    opt_level: int,
    finish: Callable[[tvm.runtime.Module, int], T],
    beside: Callable[[], Functions] = dict,
) -> list[tuple[list[str], T]]:
    """Build a library of each part, on as many threads as PyTorch has.

    Each library also gets the functions that `beside` makes. `finish` makes the machine code of a
    library, in the thread that built it; what it makes is returned, with the names of the kernels
    in it.
    """

    def build(part: int) -> tuple[list[str], T]:
        own = parts[part]
        # Contexts of TVM are a thread's own.
        with tvm.transform.PassContext(opt_level=opt_level), target:
            module = tvm.IRModule({**own, **beside()})
            library = tvm.tirx.build(module, target=target, pipeline=pipeline)
        return [variable.name_hint for variable in own], finish(library, part)

    count = min(torch.get_num_threads(), len(parts))
    if count <= 1:
        return [build(part) for part in range(len(parts))]
    with ThreadPoolExecutor(count, "amp_ir builds kernels") as pool:
        return list(pool.map(build, range(len(parts))))


def one_part_a_thread(kernels: Functions) -> list[Functions]:
    """Divide kernels among PyTorch's threads, into parts of about the same work."""
    count = max(1, min(torch.get_num_threads(), len(kernels) // LEAST_KERNELS))
    items = list(kernels.items())
    # Neighbours take the same time, so every count-th is as much work as the next part's.
    return [dict(items[part::count]) for part in range(count)]
