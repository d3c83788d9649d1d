# SPDX-License-Identifier: Apache-2.0
"""Write LSTM, GRU and RNN layers and their gradients as one library call each."""

from __future__ import annotations

import tvm
from tvm import relax

from amp_ir.dialect import options_of
from amp_ir.host import native
from amp_ir.ir.library_call import LibraryRecurrence, operands_of, write

_DTYPES = ("float32", "bfloat16", "float16")
# What is float32 whatever the rest is, by position: cells and their gradients.
_FULL = {"lstm": (3,), "lstm_backward": (2, 4)}


def recurrence_library(verb: str, libraries: tuple[str, ...]) -> str | None:
    """Return the first library that has the function: "lstm", "gru_backward" and so on."""
    return next((one for one in libraries if native.has(f"amp_ir.{one}.{verb}")), None)


def unsupported_recurrence_reason(library: str, call: relax.Call) -> str:
    """Return why `library` does not do this call of a recurrent layer; "" if it does."""
    full = _FULL.get(_verb(call), ())
    dtypes = {str(one.ty.dtype) for k, one in enumerate(call.args) if k not in full}
    if len(dtypes) > 1 or dtypes.isdisjoint(_DTYPES):
        found = " and ".join(sorted(dtypes))
        return (
            f"{library}'s recurrent layers compute in one of {', '.join(_DTYPES)}, not in {found}"
        )
    wide = [str(call.args[k].ty.dtype) for k in full]
    strange = next((one for one in wide if one != "float32"), None)
    if strange is not None:
        return f"{library}'s recurrent layers keep cells in float32, not in {strange}"
    return ""


def call_recurrence(library: str, call: relax.Call) -> relax.Call:
    """Return the library's call, with the same results.

    Before:  states, cells, activated = amp_ir.lstm(gates, weight, hidden, cell, reverse=False)
    After:   states, cells, activated = LibraryRecurrence("onednn", "lstm",
                 operands=(gates, weight, hidden, cell), dims=(t, n, h), reverse=False)

    Requires: `unsupported_recurrence_reason` finds nothing.
    """
    verb = _verb(call)
    steps, rows, _ = (int(extent) for extent in call.args[0].ty.shape)
    operands = dict(zip(operands_of(verb), call.args, strict=True))
    # A weight is [gates * h, h].
    hidden = int(operands["weight"].ty.shape[1])
    new = LibraryRecurrence(
        library=library,
        type_=call.ty,
        span=call.span,
        verb=verb,
        operands=operands,
        dims=(steps, rows, hidden),
        reverse=bool(options_of(call)["reverse"]),
    )
    return write(new)


def _verb(call: relax.Call) -> str:
    assert isinstance(call.op, tvm.ir.Op), "recurrent layers are ops of the dialect"
    return str(call.op.name).removeprefix("amp_ir.")
