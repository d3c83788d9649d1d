# SPDX-License-Identifier: Apache-2.0
"""Count the arithmetic of each call of a planned step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import tvm
from tvm import tirx
from tvm.sym import Analyzer

from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.library_call import (
    LibraryAttention,
    LibraryCall,
    LibraryConvolution,
    LibraryMatmul,
    LibraryRecurrence,
    read,
)
from amp_ir.ir.loop_call import planned_loop
from amp_ir.ir.memory_plan import PlannedStep

# Matmuls of [s, d] by [d, t] or as large; the gradient makes the scores once more.
_ATTENTION_MATMULS = {"attention": 2, "attention_backward": 5}
# A layer's gates, each a matmul of [n, h] by [h, h] at every step.
_RECURRENT_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)


def flop_of_calls(step: PlannedStep) -> tuple[int, ...]:
    """Return the floating-point operations of each call, in the order of `step.plan.calls`.

    Those of a matmul or convolution follow from its shapes, 2 for a multiply-add. Those of a
    kernel are counted in its loops: an addition, multiplication, division, maximum or function such
    as exp is 1 a lane; index arithmetic, casts, comparisons and selections are none. A loop's are
    those of all its steps.
    """
    return tuple(_flop_of_calls(step.ir))


def _flop_of_calls(ir: tvm.IRModule) -> list[int]:
    counted: dict[Any, int] = {}
    found = []
    for call in Dataflow(ir).values.values():
        callee = call.op
        loop = planned_loop(ir, call)
        if loop is not None:
            found.append(loop.length * sum(_flop_of_calls(loop.body)))
        elif isinstance(callee, tvm.ir.GlobalVar):
            if callee not in counted:
                counted[callee] = kernel_flop(ir[callee])
            found.append(counted[callee])
        elif str(callee.global_symbol) != "amp_ir.view":
            found.append(library_flop(read(call)))
    return found


def library_flop(call: LibraryCall | None) -> int:
    """Return the flop of a library call, from its shapes; see `flop_of_calls`."""
    if isinstance(call, LibraryMatmul):
        return 2 * math.prod(call.out.shape) * call.a.shape[-1]
    if isinstance(call, LibraryRecurrence):
        steps, rows, hidden = call.dims
        gates = _RECURRENT_GATES[call.verb.removesuffix("_backward")]
        return 2 * gates * steps * rows * hidden**2
    if isinstance(call, LibraryAttention):
        # q is [n, h, s, d] and k [n, h, t, d].
        return 2 * _ATTENTION_MATMULS[call.verb] * math.prod(call.q.shape) * call.k.shape[-2]
    if isinstance(call, LibraryConvolution):
        # Each output of the forward convolution is a sum over the weights of one output channel.
        weight, result = call.w or call.out, call.grad or call.out
        return 2 * math.prod(result.shape) * math.prod(weight.shape[1:])
    return 0


def kernel_flop(function: tirx.PrimFunc) -> int:
    """Return the floating-point operations of one run of a kernel; see `flop_of_calls`."""
    return round(_Count().statement(function.body))


# No tile is as long; a share of what may be read from memory is.
_UNBOUNDED = 1 << 24


class _Count:
    """Walk a kernel, its GPU threads as loops; one that ends where the data say counts once.

    A branch on an index counts for its share of the index's values, as a launch over the blocks of
    several kernels and the last block of a tensor have it; of others the costlier one counts.
    """

    def __init__(self) -> None:
        self.analyzer = Analyzer()

    def statement(self, node: Any) -> Fraction:
        if node is None:
            return Fraction(0)
        if isinstance(node, tirx.SeqStmt):
            return sum((self.statement(one) for one in node.seq), Fraction(0))
        if isinstance(node, tirx.For):
            extent = self._extent(node.extent)
            self.analyzer.bind(node.loop_var, tvm.ir.Range.from_min_extent(node.min, node.extent))
            return extent * self.statement(node.body)
        if isinstance(node, tirx.IfThenElse):
            return self._branch(node)
        if isinstance(node, tirx.AttrStmt) and node.attr_key == "thread_extent":
            self.analyzer.bind(node.node.var, tvm.ir.Range(0, node.value))
            return self._extent(node.value) * self.statement(node.body)
        if isinstance(node, (tirx.AttrStmt, tirx.While)):
            return self.statement(node.body)
        if isinstance(node, tirx.Bind) and _is_index(node.var):
            self.analyzer.bind(node.var, node.value)
            return Fraction(0)
        if isinstance(node, (tirx.BufferStore, tirx.Bind, tirx.Evaluate)):
            return Fraction(_expression_flop(node.value))
        return Fraction(0)

    def _branch(self, node: tirx.IfThenElse) -> Fraction:
        share = self._share(node.condition)
        if share is None:
            return max(self.statement(node.then_case), self.statement(node.else_case))
        with self.analyzer.constraint_scope(node.condition):
            taken = self.statement(node.then_case)
        is_order = isinstance(node.condition, tirx.LT)
        opposite = node.condition.a >= node.condition.b if is_order else tirx.const(True)
        with self.analyzer.constraint_scope(opposite):
            other = self.statement(node.else_case)
        return share * taken + (1 - share) * other

    def _share(self, condition: Any) -> Fraction | None:
        """Return how often a condition on indices holds, with all their values equally likely."""
        if isinstance(condition, tirx.And):
            known = [one for one in map(self._share, (condition.a, condition.b)) if one is not None]
            return math.prod(known, start=Fraction(1)) if known else None
        is_known = isinstance(condition, (tirx.LT, tirx.EQ))
        if not is_known or not isinstance(condition.b, tirx.IntImm):
            return None
        bound = self.analyzer.const_int_bound(condition.a)
        count = bound.max_value - bound.min_value + 1
        if isinstance(condition, tirx.EQ):
            return Fraction(1, count)
        below = int(condition.b) - bound.min_value
        return Fraction(min(max(below, 0), count), count)

    def _extent(self, extent: Any) -> int:
        if isinstance(extent, tirx.IntImm):
            return int(extent)
        # A tile at the border: as long as the longest. What the data decide has no bound.
        bound = self.analyzer.const_int_bound(extent).max_value
        return int(bound) if bound < _UNBOUNDED else 1


def _expression_flop(expression: Any) -> int:
    """Count without recursion: the norm of all gradients is a chain of as many sums."""
    found, waiting = 0, [expression]
    while waiting:
        node = waiting.pop()
        if (isinstance(node, _ARITHMETIC) and _is_float(node)) or _is_function(node):
            found += _lanes(node)
        waiting += _parts(node)
    return found


def _parts(node: Any) -> Sequence[Any]:
    """Return the operands of an expression; those of an index are integers and do not matter."""
    if isinstance(node, tirx.Select):
        return node.true_value, node.false_value
    if isinstance(node, (tirx.Cast, tirx.Broadcast)):
        return (node.value,)
    if isinstance(node, tirx.Let):
        return node.value, node.body
    if isinstance(node, tvm.ir.Call):
        return tuple(node.args)
    return (node.a, node.b) if hasattr(node, "a") and hasattr(node, "b") else ()


def _is_function(node: Any) -> bool:
    """Return whether it is a call such as exp; reinterpreting bits is not arithmetic."""
    if not isinstance(node, tvm.ir.Call) or not _is_float(node):
        return False
    name = getattr(node.op, "name", "")
    return not any(word in name for word in ("reinterpret", "if_then_else", "shuffle"))


def _is_float(node: Any) -> bool:
    text = str(getattr(node, "dtype", "") or getattr(node, "ty", ""))
    return text.startswith(("float", "bfloat"))


def _is_index(variable: tirx.Var) -> bool:
    return str(variable.ty) in ("int32", "int64")


def _lanes(node: Any) -> int:
    text = str(getattr(node, "dtype", "") or getattr(node, "ty", ""))
    _, _, lanes = text.partition("x")
    return int(lanes) if lanes.isdecimal() else 1
