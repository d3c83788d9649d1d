# SPDX-License-Identifier: Apache-2.0
"""Give instructions for whole vectors their vectors, where a CPU kernel names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.target.codegen import llvm_lookup_intrinsic_id

from amp_ir.ir.vector_instructions import LANES, ROUND, SCALE

_EXPONENT, _LEAST_NORMAL = 0x7F800000, 0x00800000
# Arguments of SCALE: all lanes, rounded as everything is.
_ALL, _AS_SET = -1, 4


def whole_vectors(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Complete the instructions of `ir.vector_instructions`, which kernels name for one element.

    Before:  y[0:16] = ROUND(x[0:16]); z[0] = ROUND(x[0])
    After:   y[0:16] = exact(x[0:16]); z[0] = exact(broadcast(x[0], 16))[0]

    ROUND takes a subnormal float32 for 0; see `_nearest_bfloat16`.

    Requires: vectors, of `VectorizeLoop`, with 16 elements.
    Ensures:  each instruction has the arguments that LLVM expects.
    """
    written = {llvm_lookup_intrinsic_id(name): write for name, write in _WRITTEN.items()}

    def complete(call: Call) -> Any:
        is_instruction = getattr(call.op, "name", None) == "tirx.call_llvm_pure_intrin"
        write = written.get(int(call.args[0])) if is_instruction else None
        return call if write is None else _on_vectors(write, list(call.args[1:]))

    return kernel.with_body(tvm_ffi.structural_map(kernel.body, (Call, complete)))


def _on_vectors(write: Callable[..., Any], arguments: list[Any]) -> Any:
    lanes = arguments[0].ty.dtype.lanes
    if lanes == LANES:
        return write(*arguments)
    assert lanes == 1, f"an instruction for vectors of {LANES} has vectors of {lanes}"
    vector = write(*(tirx.Broadcast(one, LANES) for one in arguments))
    return tirx.Shuffle([vector], [tirx.const(0, "int32")])


def _nearest_bfloat16(x: Any) -> Any:
    """Return the bits of x, rounded to nearest even, with ROUND.

    That takes a subnormal number for 0. Its bits are a whole number of units that the least normal
    numbers have too: added to the least one it is normal and rounds to the same place.
    """
    bits = tirx.Var("bits", f"uint32x{LANES}")
    is_subnormal = tirx.EQ(tirx.bitwise_and(bits, _all(_EXPONENT)), _all(0))
    normal = tirx.Select(is_subnormal, tirx.bitwise_or(bits, _all(_LEAST_NORMAL)), bits)
    normal = tirx.reinterpret(f"float32x{LANES}", normal)
    # LLVM's result is a vector of bfloat16, for which TVM (0.27) has no type.
    low = tirx.call_llvm_pure_intrin(f"int16x{LANES}", ROUND, normal)
    rounded = tirx.Var("rounded", f"uint16x{LANES}")
    less = rounded - _all(_LEAST_NORMAL >> 16, "uint16")
    result = tirx.Select(is_subnormal, less, rounded)
    result = tirx.Let(rounded, tirx.reinterpret(f"uint16x{LANES}", low), result)
    return tirx.Let(bits, tirx.reinterpret(f"uint32x{LANES}", x), result)


def _scaled(x: Any, exponent: Any, is_zero: Any) -> Any:
    """Return 0 or x 2^exponent.

    What is rounded to 0, as where a mask is -inf, takes an Intel CPU a hundred times as long. LLVM
    makes a mask of the choice, under which nothing is; the scalars of a vector get the exponent 0.
    """
    zero = _all(0, "float32")
    if isinstance(exponent, tirx.Broadcast):
        exponent = tirx.Select(is_zero, zero, exponent)
    more = (tirx.const(_ALL, "int16"), tirx.const(_AS_SET, "int32"))
    scaled = tirx.call_llvm_pure_intrin(f"float32x{LANES}", SCALE, x, exponent, x, *more)
    return tirx.Select(is_zero, zero, scaled)


def _all(number: int, dtype: str = "uint32") -> Any:
    return tirx.Broadcast(tirx.const(number, dtype), LANES)


_WRITTEN: dict[str, Callable[..., Any]] = {ROUND: _nearest_bfloat16, SCALE: _scaled}
