# SPDX-License-Identifier: Apache-2.0
"""A captured loop becomes one op, whose body is a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from tvm import relax

from amp_ir.dialect.loop import ENTRY, NAME, Loop
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
    inner = Emitter(builder, state_words=3)
    operands, inputs = list(operands), list(loop.inputs)
    with builder.function("main"):
        with builder.dataflow():
            outputs = convert(loop.body, inner, parameters)
            result = builder.emit_output(relax.Tuple(outputs))
        if inner.random_state is not None:
            parameters.append(inner.random_state)
            operands.append(_random_states(emitter, loop))
            inputs.append((ENTRY, 0, 1))
        builder.emit_func_output(result, parameters)
    made = Loop(inner.finish(), loop.length, tuple(inputs), loop.outputs)
    results = emitter.call(NAME, *operands, **made.options)
    return results if isinstance(results, tuple) else (results,)


def _random_states(emitter: Emitter, loop: CapturedLoop) -> relax.Expr:
    """Return int64[steps, 3]: the step's random state, and what each step of the loop adds."""
    state = emitter.state_to_draw_from()
    both = emitter.broadcast(emitter.reshape(state, (1, 2)), (loop.length, 2))
    added = loop.draw_stride * torch.arange(loop.length)
    return emitter.concat([both, emitter.tensor(added.view(-1, 1))], 1)


def _type(tensor: torch.Tensor) -> relax.TensorType:
    return relax.TensorType(list(tensor.shape), dtype_name(tensor.dtype))
