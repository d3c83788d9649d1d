# SPDX-License-Identifier: Apache-2.0
"""Write attention and its gradient as one library call each, where a library has them fused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import relax

from amp_ir.host import native
from amp_ir.ir.library_call import LibraryAttention, write
from amp_ir.ir.strided_view import StridedView, view_of

_LOW = ("bfloat16", "float16")
# PyTorch's flash attention on CUDA: the width of a head is a multiple of the first, up to the
# second.
_WIDTH_STEP, _WIDTH_MOST = 8, 256
# From so many columns on, PyTorch's flash attention for CPUs is faster than matmuls and a kernel,
# and it holds no scores. Forward and backward beside ours, 2 threads of an Emerald Rapids, heads of
# 64, bfloat16 and float32: 512 columns 1.0 to 1.4 of the time, 768 0.6 to 0.8, 2048 0.4 to 0.7.
_CPU_COLUMNS_LEAST = 768


def attention_library(verb: str, libraries: tuple[str, ...]) -> str | None:
    """Return the first library that has "attention" or "attention_backward"."""
    return next((one for one in libraries if native.has(f"amp_ir.{one}.{verb}")), None)


def unsupported_attention_reason(library: str, call: relax.Call, options: Mapping[str, Any]) -> str:
    """Return why `library` does not do this call of attention or of its gradient; "" if it does.

    `options` are those of the call, except for a mask that was found to be causal.
    """
    # The gradient takes (grad, q, k, v, out, lse), the forward (q, k, v).
    tensors = list(call.args[1:4]) if _is_backward(call) else list(call.args[:3])
    dtypes = {str(one.ty.dtype) for one in tensors}
    if _is_backward(call):
        dtypes |= {str(call.args[k].ty.dtype) for k in (0, 4)}
    q, k, v = ([int(n) for n in one.ty.shape] for one in tensors)
    if options["has_mask"]:
        return "flash attention takes no mask but the causal one"
    if options["dropout_p"] > 0:
        return "flash attention would drop by other random numbers"
    if len(q) != 4:
        return f"flash attention takes samples and heads, [n, h, s, d], not {q}"
    if options["is_causal"] and q[2] != k[2]:
        return f"flash attention's causal mask would end at column {k[2]}, not at {q[2]}"
    reason = _cpu_unsupported_reason if library == "torch" else _cuda_unsupported_reason
    return reason(dtypes, q[3], v[3], k[2])


def _cuda_unsupported_reason(
    dtypes: set[str], width: int, width_of_values: int, _columns: int
) -> str:
    if len(dtypes) > 1 or dtypes.isdisjoint(_LOW):
        found = " and ".join(sorted(dtypes))
        return f"flash attention computes in bfloat16 or float16, not in {found}"
    if width != width_of_values or width % _WIDTH_STEP or width > _WIDTH_MOST:
        return (
            f"flash attention takes heads of a width that {_WIDTH_STEP} divides, up to "
            f"{_WIDTH_MOST}, not of {width} and {width_of_values}"
        )
    return ""


def _cpu_unsupported_reason(
    dtypes: set[str], width: int, width_of_values: int, columns: int
) -> str:
    # In a dtype without arithmetic of its own PyTorch multiplies number by number.
    fast = [one for one in ("float32", "bfloat16") if one == "float32" or _is_native(one)]
    if len(dtypes) > 1 or dtypes.isdisjoint(fast):
        found = " and ".join(sorted(dtypes))
        return f"flash attention computes in {' or '.join(fast)} on this CPU, not in {found}"
    if width != width_of_values:
        return f"flash attention takes heads of one width, not of {width} and {width_of_values}"
    if columns < _CPU_COLUMNS_LEAST:
        return f"matmuls are faster than flash attention for {columns} columns"
    return ""


def _is_native(dtype: str) -> bool:
    name = "amp_ir.onednn.is_native"
    return native.has(name) and bool(native.function(name)(dtype))


def call_attention(
    library: str,
    call: relax.Call,
    options: Mapping[str, Any],
    values: Mapping[relax.Var, relax.Expr],
) -> tuple[relax.Call, list[bool]]:
    """Return the library's call, and which of its results are dense as [n, s, h, d].

    Before:  out, lse = amp_ir.attention(q, k, v)                   # out [n, h, s, d]
    After:   o, lse = LibraryAttention("torch_cuda", q, k, v, is_causal, scale)
             out = permute_dims(o, [0, 2, 1, 3])                    # o [n, s, h, d]

    A model makes heads of rows and rows of heads, so that these transposes meet their inverses and
    nothing is copied.

    Requires: `unsupported_attention_reason` finds nothing.
    """
    backward = _is_backward(call)
    names = ("grad", "q", "k", "v", "out") if backward else ("q", "k", "v")
    operands = dict(zip(names, call.args, strict=False))
    views = {name: _rows_dense(view_of(one, values), one) for name, one in operands.items()}
    fields = list(call.ty.fields)
    rows_outside = [len(field.shape) == 4 for field in fields]
    types = [
        _rows_outside(field) if outside else field
        for field, outside in zip(fields, rows_outside, strict=True)
    ]
    new = LibraryAttention(
        library=library,
        type_=relax.TupleType(types),
        span=call.span,
        is_causal=bool(options["is_causal"]),
        scale=float(options["scale"]),
        lse=call.args[5] if backward else None,
        **views,
    )
    return write(new), rows_outside


def _is_backward(call: relax.Call) -> bool:
    return str(call.op.name).endswith("_backward")


def _rows_dense(view: StridedView, expr: relax.Expr) -> StridedView:
    """Return a view where heads are dense along their width, else a copy of `expr` by a kernel."""
    return view if view.strides[-1] == 1 else StridedView.dense(expr)


def _rows_outside(type_: Any) -> relax.TensorType:
    n, h, s, d = (int(extent) for extent in type_.shape)
    return relax.TensorType([n, s, h, d], str(type_.dtype))
