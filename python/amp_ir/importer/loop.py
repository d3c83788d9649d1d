# SPDX-License-Identifier: Apache-2.0
"""A captured loop becomes one op, whose body is a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from tvm import relax

from amp_ir.dialect.loop import NAME, Loop
from amp_ir.importer.converters import Emitter
from amp_ir.importer.converters.emitter import dtype_name
from amp_ir.ir.captured_loop import CapturedLoop

# Fills a function: (graph, emitter, parameters) -> outputs.
Convert = Callable[[fx.GraphModule, Emitter, Sequence[relax.Var]], list[relax.Expr]]


def convert_loop(
    emitter: Emitter, loop: CapturedLoop, operands: Sequence[relax.Expr], convert: Convert
) -> tuple[relax.Expr, ...]:
    """Emit a loop; return its results."""
    nodes = [node for node in loop.body.graph.nodes if node.op == "placeholder"]
    parameters = [relax.Var(node.name, _type(node.meta["val"])) for node in nodes]
    builder = relax.BlockBuilder()
    inner = Emitter(builder)
    with builder.function("main"):
        with builder.dataflow():
            outputs = convert(loop.body, inner, parameters)
            result = builder.emit_output(relax.Tuple(outputs))
        builder.emit_func_output(result, parameters)
    made = Loop(inner.finish(), loop.length, loop.inputs, loop.outputs)
    results = emitter.call(NAME, *operands, **made.options)
    return results if isinstance(results, tuple) else (results,)


def _type(tensor: torch.Tensor) -> relax.TensorType:
    return relax.TensorType(list(tensor.shape), dtype_name(tensor.dtype))
