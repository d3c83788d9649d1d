# SPDX-License-Identifier: Apache-2.0
"""Interpreter: evaluates a module op by op with PyTorch; slow, and the oracle for all else.

A Relax op is an entry of `relax_reference.RELAX_OPS`, an `amp_ir` op the reference of its
declaration.
bfloat16 and float16 arguments are computed in float32, and each op's results are rounded once, to
the dtype that the IR declares: the best that a kernel of one op can do. An op that is several
kernels (attention) also rounds what one of them stores for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import attrs
import torch
import tvm
from tvm import relax

from amp_ir.dialect import DECLARATIONS, options_of
from amp_ir.dialect.define import LOW_DTYPES, dtype_name
from amp_ir.dialect.loop import CARRIED, ENTRY, loop_of
from amp_ir.dialect.loop import NAME as LOOP
from amp_ir.errors import ArgumentError, UnsupportedOpError
from amp_ir.ir.dataflow import Dataflow, op_name, variables_of
from amp_ir.ir.index_check import IndexCheck, error_of
from amp_ir.ir.index_uses import index_uses
from amp_ir.ir.location import from_span
from amp_ir.ir.relax_reference import RELAX_OPS
from amp_ir.ir.step_module import StepModule

# The cast that the user wrote, and the one that autocast inserts.
_OWN_CAST, _INSERTED_CAST = "relax.astype", "amp_ir.cast"
OnValue = Callable[[relax.Var, torch.Tensor], torch.Tensor]


def interpret(
    mod: StepModule | tvm.IRModule,
    inputs: Sequence[torch.Tensor],
    *,
    on_value: OnValue | None = None,
    float_dtype: torch.dtype | None = None,
    unrounded: Set[relax.Var] = frozenset(),
) -> list[torch.Tensor]:
    """Evaluate `main` on `inputs`, in the order of its parameters; inputs are not written to.

    Args:
        mod: `main` holds straight-line blocks and returns a tensor or a tuple of tensors.
        inputs: one tensor a parameter, of its shape and dtype (any float with `float_dtype`).
        on_value: called for every binding of a tensor, gives the tensor to go on with: to watch,
            to inject a fault, or to emulate another precision.
        float_dtype: evaluate every floating value in this dtype, whatever the IR declares, casts
            included. torch.float64 makes the reference that rounding errors are measured against.
        unrounded: variables that stay in float32 where the IR declares a low dtype, as values do
            that a fused kernel does not store. Casts that the user wrote round even so.

    Raises:
        ArgumentError: number, shape or dtype of the inputs do not fit the parameters.
        UnsupportedOpError: ops without an entry; the message lists all of them.
        IndexOutOfRangeError: an op reads or writes by an index out of range; names index and op.
    """
    ir = mod.ir if isinstance(mod, StepModule) else mod
    flow = Dataflow(ir)
    check_ops(flow.bindings)
    run = _Run(on_value, float_dtype, unrounded)
    _bind_inputs(run, flow.main.params, inputs)
    uses = flow.uses.copy()
    for binding in flow.bindings:
        run.bind(binding.var, run.evaluate_binding(binding))
        for var in variables_of(binding.value):
            uses[var] -= 1
            if not uses[var]:
                run.values.pop(var, None)  # dead: a step's peak is what is alive, not all of it
    result = run.evaluate(flow.result)
    return list(result) if isinstance(result, tuple) else [result]


def can_evaluate(op_name: str) -> bool:
    """Return whether the interpreter computes an op."""
    return op_name in DECLARATIONS or op_name in RELAX_OPS


def evaluate(
    expr: relax.Expr,
    bindings: Sequence[relax.Binding],
    values: Mapping[relax.Var, Any],
    *,
    float_dtype: torch.dtype | None = None,
) -> Any:
    """Evaluate `expr` after `bindings`; `values` holds all of their other variables.

    Values are tensors, or tuples of them that were evaluated in `float_dtype`, which is as for
    `interpret`.
    """
    run = _Run(None, float_dtype)
    for var, one in values.items():
        run.values[var] = one if isinstance(one, tuple) else run.to_dtype(one, dtype_name(one))
    for binding in bindings:
        run.bind(binding.var, run.evaluate(binding.value))
    return run.evaluate(expr)


@attrs.frozen(eq=False)
class _Run:
    """The values of one evaluation."""

    on_value: OnValue | None
    float_dtype: torch.dtype | None
    unrounded: Set[relax.Var] = frozenset()
    values: dict[relax.Var, Any] = attrs.field(factory=dict)

    def bind(self, var: relax.Var, value: Any) -> None:
        if self.on_value is not None and isinstance(value, torch.Tensor):
            value = self.on_value(var, value)
        self.values[var] = value

    def evaluate_binding(self, binding: relax.VarBinding) -> Any:
        """Evaluate what a variable is bound to, rounded unless it is one of `unrounded`."""
        call = binding.value
        name = op_name(call) if binding.var in self.unrounded else ""
        if name in ("", LOOP, _OWN_CAST):
            return self.evaluate(call)
        arguments = [_widen(self.evaluate(argument)) for argument in call.args]
        if name == _INSERTED_CAST:
            return arguments[0]
        if name in DECLARATIONS:
            return DECLARATIONS[name].reference(*arguments, **options_of(call))
        return RELAX_OPS[name](call.attrs, *arguments)

    def evaluate(self, expr: Any) -> Any:
        """Evaluate an expression to a tensor, a tuple of values, a shape or a number."""
        if isinstance(expr, relax.Var):
            return self.values[expr]
        if isinstance(expr, relax.Call):
            return self._call(expr)
        if isinstance(expr, relax.Tuple):
            return tuple(self.evaluate(field) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self.evaluate(expr.tuple_value)[int(expr.index)]
        if isinstance(expr, relax.ShapeExpr):
            return tuple(int(extent) for extent in expr.values)
        return self._literal(expr.value)

    def _literal(self, value: Any) -> Any:
        if not isinstance(value, tvm.runtime.Tensor):
            return value
        return self.to_dtype(_from_tvm(value), str(value.dtype))

    def _call(self, call: relax.Call) -> Any:
        arguments = [self.evaluate(argument) for argument in call.args]
        name = call.op.name
        for use in index_uses(call):
            _check_index(use.check, arguments[use.position])
        if name == LOOP:
            return self._loop(call, arguments)
        if self.unrounded:
            # Of one dtype, where one is unrounded; they hold the same numbers.
            arguments = list(map(_widen, arguments))
        if name in DECLARATIONS:
            op = DECLARATIONS[name]
            compute = op.reference if self.float_dtype is None else op.unrounded
            value = compute(*arguments, **options_of(call))
        else:
            value = RELAX_OPS[name](call.attrs, *map(_widen, arguments))
        return self._round(value, call.ty)

    def _loop(self, call: relax.Call, operands: Sequence[torch.Tensor]) -> Any:
        loop = loop_of(call)
        check_ops(Dataflow(loop.body).bindings)
        stacked: list[dict[int, torch.Tensor]] = [{} for _ in loop.outputs]
        now: list[torch.Tensor] = []
        for step in range(loop.length):
            given = []
            for operand, (kind, first, stride) in zip(operands, loop.inputs, strict=True):
                one = operand[first + stride * step] if kind == ENTRY else operand
                given.append(now[first] if kind == CARRIED and step else one)
            now = interpret(loop.body, given, on_value=self.on_value, float_dtype=self.float_dtype)
            for made, one, (_, first, stride) in zip(stacked, now, loop.outputs, strict=True):
                made[first + stride * step] = one
        found = tuple(
            torch.stack([made[k] for k in range(loop.length)]) if kind == ENTRY else last
            for made, last, (kind, _, _) in zip(stacked, now, loop.outputs, strict=True)
        )
        return found[0] if len(found) == 1 else found

    def _round(self, value: Any, ty: relax.Type) -> Any:
        if isinstance(ty, relax.TupleType):
            return tuple(
                self._round(field, field_ty)
                for field, field_ty in zip(value, ty.fields, strict=True)
            )
        return self.to_dtype(value, str(ty.dtype))

    def to_dtype(self, value: torch.Tensor, dtype: str) -> torch.Tensor:
        """Convert `value` to the declared dtype, or to `float_dtype` where that is floating."""
        target: torch.dtype = getattr(torch, dtype)
        if self.float_dtype is not None and target.is_floating_point:
            target = self.float_dtype
        return value.to(target)


def _check_index(check: IndexCheck, indices: torch.Tensor) -> None:
    wrong = check.wrong_value(check.extremes_of(indices))
    if wrong is not None:
        raise error_of([check], check.describe("the step computed the index", wrong))


def _bind_inputs(run: _Run, params: Sequence[relax.Var], inputs: Sequence[torch.Tensor]) -> None:
    if len(params) != len(inputs):
        raise ArgumentError(f"main has {len(params)} parameters, got {len(inputs)} inputs")
    for param, tensor in zip(params, inputs, strict=True):
        shape, dtype = tuple(int(extent) for extent in param.ty.shape), str(param.ty.dtype)
        fits = dtype_name(tensor) == dtype or (
            run.float_dtype is not None
            and tensor.is_floating_point()
            and getattr(torch, dtype).is_floating_point
        )
        if tuple(tensor.shape) != shape or not fits:
            raise ArgumentError(
                f"input {param.name} has shape {tuple(tensor.shape)} and dtype "
                f"{dtype_name(tensor)}, expected {shape} and {dtype}"
            )
        run.values[param] = run.to_dtype(tensor.detach(), dtype)


def check_ops(bindings: Sequence[Any]) -> None:
    """Refuse bindings of ops that the interpreter cannot evaluate, all of them at once."""
    missing: dict[str, str] = {}
    for binding in bindings:
        call = binding.value
        if not isinstance(call, relax.Call):
            continue
        name = call.op.name if isinstance(call.op, tvm.ir.Op) else str(call.op)
        if not can_evaluate(name):
            place = f"{binding.var.name} at {from_span(call.span)}"
            missing.setdefault(name, place)
    if missing:
        listed = ", ".join(f"{name} (first: {place})" for name, place in sorted(missing.items()))
        raise UnsupportedOpError(
            f"the interpreter cannot evaluate {listed}; give a Relax op an entry in RELAX_OPS, "
            "declare any other in amp_ir.dialect"
        )


def _from_tvm(value: tvm.runtime.Tensor) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(value).clone()


def _widen(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_widen(field) for field in value)
    if isinstance(value, torch.Tensor) and dtype_name(value) in LOW_DTYPES:
        return value.float()
    return value
