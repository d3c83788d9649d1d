# SPDX-License-Identifier: Apache-2.0
"""LSTM, GRU and RNN layers, which the capture keeps as custom ops with the same arguments."""

from __future__ import annotations

from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.registry import Converter, converts


def _as_it_is(name: str) -> Converter:
    def convert(ops: Emitter, *given: relax.Expr | bool) -> relax.Expr | tuple[relax.Expr, ...]:
        *tensors, reverse = given
        results: relax.Expr | tuple[relax.Expr, ...] = ops.call(
            name, *tensors, reverse=bool(reverse)
        )
        return results

    return convert


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    for _one in (_name, f"{_name}_backward"):
        converts(f"amp_ir.{_one}.default")(_as_it_is(f"amp_ir.{_one}"))
