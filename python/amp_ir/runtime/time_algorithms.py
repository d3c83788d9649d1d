# SPDX-License-Identifier: Apache-2.0
"""Timing of oneDNN's algorithms for the matmuls of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import tvm
import tvm_ffi
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tvm import relax

from amp_ir.host import native
from amp_ir.ir.library_call import WRITTEN_OVER, LibraryMatmul, read, write
from amp_ir.ir.tuning_cache import ALGORITHMS, TuningCache

# Algorithms run in turns, so that what slows the machine for a while slows all of them; the minimum
# of each counts, since noise only adds time.
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
_SECONDS_PER_MATMUL = 1.0

Call = Callable[[], object]


def measure_algorithms(matmuls: Mapping[str, relax.Call], cache: TuningCache) -> None:
    """Measure the matmuls that are not in `cache` yet, and store each one there.

    Shows a bar on stderr where that is a terminal. An interruption loses the current matmul.
    """
    missing = {name: call for name, call in matmuls.items() if name not in cache.milliseconds}
    console = Console(stderr=True)
    columns = (
        TextColumn("measuring matmuls"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    is_shown = console.is_terminal and bool(missing)
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        for name, call in progress.track(missing.items(), total=len(missing)):
            cache.add(name, milliseconds_by_algorithm(call))


def milliseconds_by_algorithm(matmul: relax.Call) -> dict[str, float]:
    """Return the best time of each algorithm of a matmul, on random numbers."""
    calls = {algorithm: _call(matmul, algorithm) for algorithm in ALGORITHMS}
    best = dict.fromkeys(ALGORITHMS, math.inf)
    for call in calls.values():
        call()  # makes the plan, and touches the memory
    started = time.perf_counter()
    for turn in range(_MOST_ROUNDS):
        if turn >= _LEAST_ROUNDS and time.perf_counter() - started > _SECONDS_PER_MATMUL:
            break
        for algorithm, call in calls.items():
            begun = time.perf_counter()
            call()
            best[algorithm] = min(best[algorithm], 1e3 * (time.perf_counter() - begun))
    return best


def _call(call: relax.Call, algorithm: str) -> Call:
    """Return the call as a compiled step makes it, with the workspace that it asks for."""
    matmul = read(call)
    assert isinstance(matmul, LibraryMatmul), "matmuls_of found the call"
    symbol, out = matmul.symbol, _numbers(call.ty)
    fields = write(attrs.evolve(matmul, algorithm=algorithm)).args[1].fields
    arguments = [_argument(field) for field in fields]
    if symbol in WRITTEN_OVER:
        arguments[WRITTEN_OVER[symbol]] = out  # as in a step
    arguments.append(out)
    nbytes = native.function("amp_ir.onednn.scratch_nbytes")(symbol, *arguments)
    scratch = torch.empty(max(int(nbytes), 1), dtype=torch.uint8)
    run = native.function("amp_ir.onednn.with_scratch")
    return lambda: run(symbol, scratch, *arguments)


def _argument(field: relax.Expr) -> Any:
    if isinstance(field, relax.ShapeExpr):
        return tvm_ffi.Shape(tuple(int(n) for n in field.values))
    if isinstance(field, tvm.ir.StringImm):
        return field.value
    return _numbers(field.ty) if isinstance(field.ty, relax.TensorType) else None


def _numbers(type_: relax.TensorType) -> torch.Tensor:
    extents: Sequence[int] = [int(n) for n in type_.shape]
    return torch.randn(math.prod(extents)).to(getattr(torch, str(type_.dtype)))
