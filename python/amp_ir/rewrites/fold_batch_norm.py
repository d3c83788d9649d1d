# SPDX-License-Identifier: Apache-2.0
"""Fold a batch normalization of inference into the weight of the convolution before it."""

from __future__ import annotations

from collections.abc import Collection

import tvm
from tvm import relax

from amp_ir.ir.dataflow import Dataflow, op_name, with_arguments
from amp_ir.ir.fixed_values import fixed_values
from amp_ir.ir.static_shape import shape_of

_SCALES = ("relax.multiply", "relax.divide")
_CHAIN = (*_SCALES, "relax.add", "relax.subtract")


def fold_batch_norm(ir: tvm.IRModule, inputs: Collection[relax.Var]) -> tvm.IRModule:
    """Scale the weight of a convolution instead of its result.

    Before:  y = conv(x, w); z = (y - mean) * (rsqrt(variance + eps) * weight) + bias
    After:   s = rsqrt(variance + eps) * weight
             z = conv(x, w * s) + ((0 - mean) * s + bias)

    A chain is any additions and multiplications of the result by values per channel that `inputs`,
    which no call changes, determine; so a bias of the convolution is folded too. What the folding
    computes is of `inputs` alone: `fold_parameters` does it once, on the host, in float32.

    Requires: one function `main` of one dataflow block; before autocast, so that the rules and the
              plan speak of the ops that run.
    Ensures:  float32 values that differ by rounding: weights and shifts have some more roundings,
              2^-24 each, and results have fewer. A result that has another reader or dtype, and a
              chain without a scale, are left alone.
    """
    return _Folder(ir, inputs).run()


class _Folder:
    """The bindings with each chain replaced at its last op."""

    def __init__(self, ir: tvm.IRModule, inputs: Collection[relax.Var]) -> None:
        self.flow = Dataflow(ir)
        self.fixed = fixed_values(self.flow, inputs)
        self.builder = relax.BlockBuilder()
        self.bindings: list[relax.VarBinding] = []

    def run(self) -> tvm.IRModule:
        chains = [self.chain_of(conv) for conv in self.flow.calls("amp_ir.conv")]
        by_last = {chain[-1]: chain for chain in chains if chain}
        for binding in self.flow.bindings:
            chain = by_last.get(binding.var)
            value = binding.value if chain is None else self.folded(chain)
            self.bindings.append(relax.VarBinding(binding.var, value))
        return self.flow.finish(self.bindings) if by_last else self.flow.ir

    def chain_of(self, conv: relax.Var) -> list[relax.Var]:
        """Return the convolution and the ops on its channels, to the last that folds; or none."""
        chain, has_scale = [conv], False
        weight = self.flow.values[conv].args[1]
        if str(conv.ty.dtype) != "float32" or weight not in self.fixed:
            return []
        while (following := self.next_of(chain[-1])) is not None:
            chain.append(following)
            has_scale = has_scale or op_name(self.flow.values[following]) in _SCALES
        return chain if has_scale else []

    def next_of(self, variable: relax.Var) -> relax.Var | None:
        """Return the only reader, where it is an op of a chain on this value."""
        if self.flow.uses[variable] != 1 or variable not in self.flow.readers:
            return None
        reader = self.flow.readers[variable][0]
        call = self.flow.values[reader]
        name = op_name(call)
        if name not in _CHAIN or shape_of(reader) != shape_of(variable):
            return None
        is_first = call.args[0] is variable or call.args[0].same_as(variable)
        if not is_first and name in ("relax.divide", "relax.subtract"):
            return None
        other = call.args[1] if is_first else call.args[0]
        return reader if self.is_per_channel(other, shape_of(variable)) else None

    def is_per_channel(self, value: relax.Expr, shape: tuple[int, ...]) -> bool:
        if value not in self.fixed or str(value.ty.dtype) != "float32":
            return False
        return shape_of(value) == (1, shape[1], *[1] * (len(shape) - 2))

    def folded(self, chain: list[relax.Var]) -> relax.Call:
        """Bind the weight, the shift and the convolution; return their sum."""
        conv, *steps = chain
        scale: relax.Expr | None = None
        shift: relax.Expr | None = None
        for step in steps:
            call = self.flow.values[step]
            is_first = call.args[0].same_as(chain[chain.index(step) - 1])
            value = call.args[1] if is_first else call.args[0]
            if op_name(call) in _SCALES:
                scale = self.bind(call, scale, value)
                shift = None if shift is None else self.bind(call, shift, value)
            else:
                shift = self.bind(call, shift, value)
        old, span = self.flow.values[conv], self.flow.values[steps[-1]].span
        weight = old.args[1]
        assert scale is not None
        extents = (shape_of(weight)[0], *[1] * (len(shape_of(weight)) - 1))
        factor = self.emit(relax.op.reshape(scale, extents), span)
        scaled = self.emit(relax.op.multiply(weight, factor), span)
        result = self.emit(with_arguments(old, [old.args[0], scaled]), old.span)
        shift = shift if shift is not None else relax.const(0.0, "float32")
        return self.typed(relax.op.add(result, shift), span)

    def bind(self, call: relax.Call, before: relax.Expr | None, value: relax.Expr) -> relax.Expr:
        """Return what this op of a chain makes of a scale or of a shift; None is 1, or 0."""
        name = op_name(call)
        if before is None and name in ("relax.multiply", "relax.add"):
            return value
        if before is None:
            before = relax.const(1.0 if name == "relax.divide" else 0.0, "float32")
        return self.emit(with_arguments(call, [before, value]), call.span)

    def emit(self, call: relax.Call, span: tvm.ir.Span | None) -> relax.Var:
        call = self.typed(call, span)
        variable = relax.DataflowVar("folded", call.ty)
        self.bindings.append(relax.VarBinding(variable, call))
        return variable

    def typed(self, call: relax.Call, span: tvm.ir.Span | None) -> relax.Call:
        call = relax.Call(call.op, call.args, call.attrs, call.ty_args, span)
        return self.builder.normalize(call)
