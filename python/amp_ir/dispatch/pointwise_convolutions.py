# SPDX-License-Identifier: Apache-2.0
"""Turn convolutions with a window of one pixel into matmuls of images with their channels last."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Span

from amp_ir.dialect.registry import options_of
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.image_layout import TO_FIRST, TO_LAST
from amp_ir.ir.static_shape import shape_of

_LOW = ("bfloat16", "float16")
# Rows of a matrix begin at multiples of 16 bytes, as the fastest kernels want them.
_ALIGNED_CHANNELS = 8


def pointwise_convolutions(ir: tvm.IRModule) -> tvm.IRModule:
    """Turn low-precision convolutions of single pixels, and their gradients, into matmuls.

    Before:  y [n, o, h, w] = amp_ir.conv(x [n, c, h, w], weight [o, c, 1, 1])
    After:   x2 [n * h * w, c] = reshape(permute_dims(x, [0, 2, 3, 1]))
             y2 = matmul(x2, reshape(weight, [o, c])^T)
             y = permute_dims(reshape(y2, [n, h, w, o]), [0, 3, 1, 2])

    and likewise for dx = dy w and dw = dy^T x. Images have their channels last in memory anyway:
    the transposes cost nothing there. Where the convolution has a stride, x is every so many-th
    pixel of the image, and dx has zeros between them.

    PyTorch's convolutions return new tensors, which are copied to where the step wants them; a
    matmul writes there. cuDNN takes cuBLASLt's kernels for these convolutions too.

    Requires: one function `main`, one dataflow block, static shapes; a library of matmuls that is
              as fast as that of convolutions, as on a GPU.
    Ensures:  float32 convolutions, which PyTorch computes in TF32 unless told otherwise, stay; the
              new ops have the location of the one that they replace.
    """
    flow = Dataflow(ir)
    if not flow.calls(*_WRITERS):
        return ir
    bindings: list[relax.Binding] = []
    for binding in flow.bindings:
        call = binding.value
        write = _WRITERS.get(op_name(call))
        if write is None or not _is_pointwise(call):
            bindings.append(binding)
            continue
        writer = _Writer(binding.var.name, bindings, call.span)
        result = write(writer, call)
        bindings.append(relax.VarBinding(binding.var, result))
    return flow.finish(bindings)


def _is_pointwise(call: relax.Call) -> bool:
    options = options_of(call)
    window = options.get("weight_shape") or shape_of(call.args[1])
    image = options.get("input_shape") or shape_of(call.args[_IMAGE.get(op_name(call), 0)])
    low = {str(one.ty.dtype) for one in call.args}
    return (
        len(window) == len(TO_LAST)
        and math.prod(window[2:]) == 1
        and int(options["groups"]) == 1
        and not any(int(n) for n in options["padding"])
        and not any(int(n) % int(s) for n, s in zip(image[2:], options["strides"], strict=True))
        and len(low) == 1
        and low <= set(_LOW)
        and all(int(n) % _ALIGNED_CHANNELS == 0 for n in window[:2])
    )


# Which argument is the image that the stride goes over.
_IMAGE = {"amp_ir.conv": 0, "amp_ir.conv_backward_weight": 1}


class _Writer:
    """Collects the ops that replace one, at its location."""

    def __init__(self, name: str, bindings: list[relax.Binding], span: Span | None) -> None:
        self._name = name
        self._bindings = bindings
        self._span = span
        self._builder = relax.BlockBuilder()

    def forward(self, call: relax.Call) -> relax.Call:
        x, weight = call.args
        rows = self._rows(x, _strides_of(call))
        product = self._matmul(rows, self._transposed(self._matrix(weight)), call)
        return self._image(product, call)

    def of_input(self, call: relax.Call) -> relax.Call:
        grad, weight = call.args
        product = self._matmul(self._rows(grad), self._matrix(weight), call)
        return self._image(product, call, _strides_of(call))

    def of_weight(self, call: relax.Call) -> relax.Call:
        grad, x = call.args
        rows = self._rows(x, _strides_of(call))
        product = self._matmul(self._transposed(self._rows(grad)), rows, call)
        return self._typed(relax.op.reshape(product, call.ty.shape))

    def _rows(self, image: relax.Expr, strides: tuple[int, int] = (1, 1)) -> relax.Var:
        """Return every so many-th pixel of an image as rows of a matrix."""
        n, channels, *space = shape_of(image)
        last = self._emit(relax.op.permute_dims(image, list(TO_LAST)))
        if strides != (1, 1):
            sliced = relax.op.strided_slice(last, [1, 2], [0, 0], space, list(strides))
            last = self._emit(sliced)
        pixels = math.prod(k // s for k, s in zip(space, strides, strict=True))
        return self._emit(relax.op.reshape(last, [n * pixels, channels]))

    def _matrix(self, weight: relax.Expr) -> relax.Var:
        return self._emit(relax.op.reshape(weight, list(shape_of(weight)[:2])))

    def _transposed(self, matrix: relax.Var) -> relax.Var:
        return self._emit(relax.op.permute_dims(matrix, [1, 0]))

    def _matmul(self, a: relax.Var, b: relax.Var, call: relax.Call) -> relax.Var:
        return self._emit(relax.op.matmul(a, b, out_dtype=str(call.ty.dtype)))

    def _image(
        self, rows: relax.Var, call: relax.Call, strides: tuple[int, int] = (1, 1)
    ) -> relax.Call:
        """Return the image whose every so many-th pixels the rows are, and the others zero."""
        n, channels, height, width = shape_of(call)
        if strides != (1, 1):
            down, right = strides
            spread = [n, height // down, down, width // right, right, channels]
            apart = self._emit(
                relax.op.reshape(rows, [1 if k in (2, 4) else spread[k] for k in range(6)])
            )
            repeated = self._emit(relax.op.broadcast_to(apart, spread))
            first = np.zeros((1, 1, down, 1, right, 1), "bool")
            first[:, :, 0, :, 0] = True
            zero = self._emit(relax.op.zeros(spread, str(rows.ty.dtype)))
            rows = self._emit(relax.op.where(relax.const(first), repeated, zero))
        last = self._emit(relax.op.reshape(rows, [n, height, width, channels]))
        return self._typed(relax.op.permute_dims(last, list(TO_FIRST)))

    def _emit(self, call: relax.Call) -> relax.Var:
        value = self._typed(call)
        var = relax.DataflowVar(f"{self._name}_{len(self._bindings)}", value.ty)
        self._bindings.append(relax.VarBinding(var, value))
        return var

    def _typed(self, call: relax.Call) -> Any:
        located = relax.Call(call.op, call.args, call.attrs, call.ty_args, self._span)
        return self._builder.normalize(located)


def _strides_of(call: relax.Call) -> tuple[int, int]:
    down, right = options_of(call)["strides"]
    return int(down), int(right)


_WRITERS: dict[str, Callable[[_Writer, relax.Call], relax.Call]] = {
    "amp_ir.conv": _Writer.forward,
    "amp_ir.conv_backward_input": _Writer.of_input,
    "amp_ir.conv_backward_weight": _Writer.of_weight,
}
