# SPDX-License-Identifier: Apache-2.0
"""Measured times of single library calls on this CPU.

The rate of a convolution depends on its window, channels, groups and image, that of a batch of
small matmuls on how the library shares them out, and gradients differ from both by a factor of
several: no curve over the arithmetic holds. Each call of a step is timed at its own shape instead,
once a process: a step has some dozens of different ones.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import attrs
import torch
import tvm_ffi
from tvm import relax

from amp_ir.host import native
from amp_ir.host.peak_rates import best_seconds
from amp_ir.ir.library_call import ARGUMENTS, LibraryCall

_TRIALS = 3


@attrs.frozen
class _Tensor:
    """The number of elements and the dtype of a tensor among the arguments."""

    count: int
    dtype: str


_Argument = _Tensor | tuple[int, ...] | int | float | str | None


def library_milliseconds(call: LibraryCall, results: list[relax.Expr]) -> float:
    """Return the shortest time of a library call here; `results` are the buffers that it fills.

    Requires: the call's library is one of the CPU's.
    """
    values = [call.argument(name) for name in ARGUMENTS[call.verb]]
    arguments = tuple(_tensor(one) if isinstance(one, relax.Expr) else one for one in values)
    filled = tuple(map(_tensor, results))
    return _milliseconds(call.symbol, arguments, filled, torch.get_num_threads())


def _tensor(value: relax.Expr) -> _Tensor:
    return _Tensor(math.prod(int(n) for n in value.ty.shape), str(value.ty.dtype))


@functools.cache
def _milliseconds(
    symbol: str, arguments: tuple[_Argument, ...], results: tuple[_Tensor, ...], threads: int
) -> float:
    """Call `symbol` as a step does."""
    del threads  # a part of the key alone
    given = [_given(one) for one in (*arguments, *results)]
    function = native.function(symbol)
    return best_seconds(lambda: function(*given), trials=_TRIALS) * 1e3


def _given(argument: _Argument) -> Any:
    """Return memory full of ones, as flat as a library takes it, or what the argument is."""
    if isinstance(argument, _Tensor):
        return torch.ones(argument.count, dtype=getattr(torch, argument.dtype))
    return tvm_ffi.Shape(argument) if isinstance(argument, tuple) else argument
