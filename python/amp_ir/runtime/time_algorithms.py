# SPDX-License-Identifier: Apache-2.0
"""Measures the ways in which oneDNN can compute the products of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import tvm_ffi
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tvm import relax

from amp_ir.host import native
from amp_ir.ir.tuning_cache import WAYS, MeasuredWays, with_way

# Ways are run in turns, so that what slows the machine for a while slows all of them; the best of
# each counts, since nothing makes a product faster than it is.
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
_SECONDS_A_PRODUCT = 1.0

Call = Callable[[], object]


def measure_ways(products: Mapping[str, relax.Call], known: MeasuredWays) -> None:
    """Measure what is not known yet, and keep it in `known` product by product.

    Shows a bar on stderr where that is a terminal. An interruption loses the product at work.
    """
    missing = {name: call for name, call in products.items() if name not in known.milliseconds}
    console = Console(stderr=True)
    columns = (
        TextColumn("measuring products"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    is_shown = console.is_terminal and bool(missing)
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        for name, call in progress.track(missing.items(), total=len(missing)):
            known.add(name, milliseconds_by_way(call))


def milliseconds_by_way(product: relax.Call) -> dict[str, float]:
    """The best time of each way of a product, on random numbers."""
    calls = {way: _call(product, way) for way in WAYS}
    best = dict.fromkeys(WAYS, math.inf)
    for call in calls.values():
        call()  # makes the plan, and touches the memory
    started = time.perf_counter()
    for turn in range(_MOST_ROUNDS):
        if turn >= _LEAST_ROUNDS and time.perf_counter() - started > _SECONDS_A_PRODUCT:
            break
        for way, call in calls.items():
            begun = time.perf_counter()
            call()
            best[way] = min(best[way], 1e3 * (time.perf_counter() - begun))
    return best


def _call(product: relax.Call, way: str) -> Call:
    """The call as a compiled step makes it: with the memory that it asks for lent to it."""
    symbol = str(product.args[0].global_symbol)
    out = _numbers(product.ty)
    *fields, finish = product.args[1].fields
    arguments = [_argument(field) for field in fields]
    if symbol.endswith("_accumulate"):
        arguments[2] = out  # as in a step, where what is added to is written over
    arguments += [with_way(finish.value, way), out]
    nbytes = native.function("amp_ir.onednn.scratch_nbytes")(symbol, *arguments)
    scratch = torch.empty(max(int(nbytes), 1), dtype=torch.uint8)
    run = native.function("amp_ir.onednn.with_scratch")
    return lambda: run(symbol, scratch, *arguments)


def _argument(field: relax.Expr) -> Any:
    if isinstance(field, relax.ShapeExpr):
        return tvm_ffi.Shape(tuple(int(n) for n in field.values))
    return _numbers(field.ty) if isinstance(field.ty, relax.TensorType) else None


def _numbers(type_: relax.TensorType) -> torch.Tensor:
    extents: Sequence[int] = [int(n) for n in type_.shape]
    return torch.randn(math.prod(extents)).to(getattr(torch, str(type_.dtype)))
