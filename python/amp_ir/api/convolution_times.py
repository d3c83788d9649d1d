# SPDX-License-Identifier: Apache-2.0
"""Measured times of single convolutions on this CPU.

The rate of a convolution depends on its window, channels, groups and image, and differs between its
gradients by a factor of several, so that no curve over its arithmetic holds. Each convolution of a
step is timed at its own shape instead, once a process: a step has some dozens of different ones.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import tvm_ffi
from tvm import relax

from amp_ir.host import native
from amp_ir.host.peak_rates import best_seconds
from amp_ir.ir.library_call import ARGUMENTS, LibraryConvolution

_TRIALS = 3
# A tensor among the arguments: its shape and dtype.
_Tensor = tuple[tuple[int, ...], str]


def convolution_milliseconds(call: LibraryConvolution, out: relax.Expr) -> float:
    """Return the shortest time of a convolution or one of its gradients here.

    `out` is the buffer that it fills.

    Requires: the call's library is one of the CPU's.
    """
    operands, rest = [], []
    for name in ARGUMENTS[call.verb]:
        value = call.argument(name)
        if isinstance(value, relax.Expr):
            operands.append(_tensor(value.ty))
        else:
            rest.append(value)
    threads = torch.get_num_threads()
    return _milliseconds(call.symbol, tuple(operands), tuple(rest), _tensor(out.ty), threads)


def _tensor(type_: relax.TensorType) -> _Tensor:
    return tuple(int(n) for n in type_.shape), str(type_.dtype)


@functools.cache
def _milliseconds(
    symbol: str,
    operands: tuple[_Tensor, ...],
    rest: tuple[tuple[int, ...] | int, ...],
    out: _Tensor,
    threads: int,
) -> float:
    """Call `symbol` as a step does: operands, dims and options in order, the result."""
    del threads  # a part of the key alone
    tensors = [_filled(one) for one in (*operands, out)]
    options: list[Any] = [tvm_ffi.Shape(one) if isinstance(one, tuple) else one for one in rest]
    function = native.function(symbol)

    def convolve() -> None:
        function(*tensors[:-1], *options, tensors[-1])

    return best_seconds(convolve, trials=_TRIALS) * 1e3


def _filled(tensor: _Tensor) -> torch.Tensor:
    """Return memory full of ones, as flat as a library takes it."""
    shape, dtype = tensor
    return torch.ones(shape, dtype=getattr(torch, dtype)).view(-1)
