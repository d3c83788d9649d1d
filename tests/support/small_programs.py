# SPDX-License-Identifier: Apache-2.0
"""Small programs in Relax, and what is read from them."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from amp_ir.ir.location import Location, to_span

X, W, B = (4, 8), (8, 8), (8,)


def program(build, *shapes, dtypes=None):
    """A module whose outputs are what `build(emit, *inputs)` returns."""
    builder = relax.BlockBuilder()
    dtypes = dtypes or ["float32"] * len(shapes)
    inputs = [
        relax.Var(f"a{i}", relax.TensorType(shape, dtype))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = build(builder.emit, *inputs)
            result = relax.Tuple(list(result)) if isinstance(result, (tuple, list)) else result
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    return builder.get()


def calls(mod, name):
    """The calls of an op in `main`, with the variables they are bound to."""
    return [
        (binding.var, binding.value)
        for binding in mod["main"].body.blocks[0].bindings
        if isinstance(binding.value, relax.Call) and binding.value.op.name == name
    ]


def dtypes_of(mod, name):
    """For each call of an op: dtypes of its arguments, dtype of its result."""
    return [
        ([str(a.ty.dtype) for a in call.args], str(variable.ty.dtype))
        for variable, call in calls(mod, name)
    ]


def at(call, module, phase="forward"):
    span = to_span(Location(module=module, phase=phase))
    return relax.Call(call.op, list(call.args), call.attrs, [], span)


def two_layers():
    """Two matmuls in `layer.0.attention` and `layer.1.mlp`, an optimizer op, a tanh in each."""

    def build(e, x, w, v):
        y = e(at(op.tanh(e(at(op.matmul(x, w), "layer.0.attention"))), "layer.0.attention"))
        z = e(at(op.matmul(y, e(op.permute_dims(v))), "layer.1.mlp"))
        z = e(at(op.matmul(e(at(op.tanh(z), "layer.1.mlp", "backward")), v), "layer.1.mlp"))
        return [z, e(at(op.multiply(w, w), "", "optimizer"))]

    return program(build, X, W, W)
