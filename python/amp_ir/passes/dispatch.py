# SPDX-License-Identifier: Apache-2.0
"""Matmuls and convolutions become calls of a library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import tvm
from tvm import relax

from amp_ir import native
from amp_ir.dialect.registry import call_op, options_of
from amp_ir.dispatch_note import OWN_KERNEL, DispatchLog
from amp_ir.passes.strided_view import StridedView, dense_strides, permutation, view_of

LIBRARIES = ("onednn", "torch")
_LIBRARY_DTYPES = ("float32", "bfloat16", "float16")


def dispatch(ir: tvm.IRModule, *, log: DispatchLog | None = None) -> tvm.IRModule:
    """Turn matmul and convolution into destination-passing library calls.

    Before:  wt = permute_dims(w); y = matmul(x, wt)
    After:   y = call_dps_packed("amp_ir.onednn.matmul", (x, w, dims and strides ...))

    Requires: one function `main`, one dataflow block, static shapes.
    Ensures:  transposes of operands cost nothing (they become strides), and so does a transpose
              of a matmul's only use; a bias is added by the matmul, before its one rounding, which
              is the sum's where that is all that is used of it; an op that no library takes is
              left for the loops stage; a convolution's stride that leads nowhere is 1. `log` is
              told where each of these ops went, and why not to the preferred library.
    """
    return _Dispatcher(ir, DispatchLog() if log is None else log).run()


@attrs.frozen
class _Biased:
    """A matmul, the bias added to it, and the variables that the two leave without use.

    `dtype` is that of the result: the call's own, or that to which the sum is rounded.
    """

    call: relax.Call
    bias: relax.Var
    absorbed: tuple[relax.Var, ...]
    dtype: str


class _Dispatcher:
    def __init__(self, ir: tvm.IRModule, log: DispatchLog) -> None:
        self.ir = ir
        self.log = log
        self.libraries = LIBRARIES
        self.main: relax.Function = ir["main"]
        self.bindings = [b for block in self.main.body.blocks for b in block.bindings]
        self.values = {binding.var: binding.value for binding in self.bindings}
        self.uses = count_uses(self.bindings, self.main.body.body)
        self.only_reader = _only_readers(self.bindings, self.uses, "relax.permute_dims")
        self.only_cast = _only_readers(self.bindings, self.uses, "amp_ir.cast")
        self.replaced: dict[relax.Var, relax.Expr] = {}
        self.biased = self._find_biased()
        self.absorbed = {v for biased in self.biased.values() for v in biased.absorbed}

    def run(self) -> tvm.IRModule:
        bindings: list[relax.Binding] = []
        for binding in self.bindings:
            value = binding.value
            if binding.var in self.absorbed:
                continue
            if binding.var in self.biased:
                bindings += self._biased_matmul(binding.var, self.biased[binding.var])
                continue
            new = self._dispatched(binding.var, value) if isinstance(value, relax.Call) else None
            new = self.replaced.pop(binding.var, new)
            if new is self:
                continue
            bindings.append(binding if new is None else relax.VarBinding(binding.var, new))
        block = relax.DataflowBlock(bindings)
        function = relax.Function(
            self.main.params,
            relax.SeqExpr([block], self.main.body.body),
            self.main.ret_ty,
            is_pure=True,
            attrs=self.main.attrs,
        )
        return tvm.IRModule({**self.ir.functions, self.ir.get_global_var("main"): function})

    def _dispatched(self, variable: relax.Var, call: relax.Call) -> Any:
        convert = _CONVERSIONS.get(call.op.name)
        if convert is None:
            return None
        refusal = _refusal(call)
        verb = _VERBS[call.op.name]
        library, reason = (None, refusal) if refusal else self._choose(verb)
        self.log.add(call.op.name, library or OWN_KERNEL, reason)
        return convert(self, variable, call, f"amp_ir.{library}.{verb}") if library else None

    def _choose(self, verb: str) -> tuple[str | None, str]:
        """The first library that has the function, and why it is not the preferred one."""
        passed = []
        for library in self.libraries:
            if native.has(f"amp_ir.{library}.{verb}"):
                return library, "; ".join(passed)
            missing = native.load().get(library)
            passed.append(f"{library} {f'is {missing}' if missing else f'has no {verb}'}")
        return None, "; ".join(passed)

    def _find_biased(self) -> dict[relax.Var, _Biased]:
        """The sums of a matmul, used for nothing else, and a bias along its last dimension."""
        if not native.has("amp_ir.onednn.matmul"):
            return {}
        found = {}
        for binding in self.bindings:
            value = binding.value
            if isinstance(value, relax.Call) and value.op.name == "relax.add":
                for product, bias in (value.args, reversed(value.args)):
                    biased = self._as_biased(product, bias)
                    if biased is not None and str(value.ty.dtype) == "float32":
                        variable, biased = self._rounded_at_once(binding.var, biased)
                        found[variable] = biased
                        break
        return found

    def _rounded_at_once(self, total: relax.Var, biased: _Biased) -> tuple[relax.Var, _Biased]:
        """The rounded sum in place of a float32 one that is used for nothing else."""
        reader = self.only_cast.get(total)
        if reader is None or biased.dtype != "float32":
            return total, biased
        dtype = str(reader.ty.dtype)
        if dtype not in _LIBRARY_DTYPES:
            return total, biased
        absorbed = (*biased.absorbed, total)
        return reader, attrs.evolve(biased, dtype=dtype, absorbed=absorbed)

    def _as_biased(self, product: relax.Expr, bias: relax.Expr) -> _Biased | None:
        absorbed: list[relax.Var] = []
        call = self._sole(product, absorbed)
        if call is not None and call.op.name == "amp_ir.cast":
            call = self._sole(call.args[0], absorbed)
        if call is None or call.op.name != "relax.matmul" or _refusal(call):
            return None
        if not isinstance(bias, relax.Var) or str(bias.ty.dtype) != "float32":
            return None
        if [int(n) for n in bias.ty.shape] != [int(call.ty.shape[-1])]:
            return None
        return _Biased(call, bias, tuple(absorbed), str(call.ty.dtype))

    def _sole(self, expr: relax.Expr, absorbed: list[relax.Var]) -> relax.Call | None:
        """The call bound to `expr`, if its only use is the one looked at."""
        value = self.values.get(expr) if isinstance(expr, relax.Var) else None
        if not isinstance(value, relax.Call) or self.uses.get(expr) != 1:
            return None
        absorbed.append(expr)
        return value

    def _biased_matmul(self, variable: relax.Var, biased: _Biased) -> list[relax.Binding]:
        self.log.add("relax.matmul", "onednn")
        ty = relax.TensorType(biased.call.ty.shape, biased.dtype)
        product = relax.DataflowVar(f"{variable.name}_product", ty)
        call = _matmul(self, product, biased.call, "amp_ir.onednn.matmul", biased.bias, ty)
        if str(variable.ty.dtype) == biased.dtype:
            return [relax.VarBinding(variable, call)]
        wide = call_op("amp_ir.cast", [product], biased.call.span, dtype="float32")
        relax.expr._update_type(wide, variable.ty)
        return [relax.VarBinding(product, call), relax.VarBinding(variable, wide)]

    def operand(self, expr: relax.Expr) -> StridedView:
        """The memory of an operand, seen through transposes and reshapes."""
        return view_of(expr, self.values)

    def redirect(self, variable: relax.Var, call: relax.Call) -> Any:
        """Bind `call` at the one reader of `variable` instead; the marker to drop `variable`."""
        self.replaced[self.only_reader[variable]] = call
        return self


def count_uses(bindings: list[relax.Binding], result: relax.Expr) -> dict[relax.Var, int]:
    """How often each variable is used by the bindings and by the result."""
    uses: dict[relax.Var, int] = {}

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Var):
            uses[expr] = uses.get(expr, 0) + 1
        elif isinstance(expr, relax.Call):
            for argument in expr.args:
                visit(argument)
        elif isinstance(expr, relax.Tuple):
            for field in expr.fields:
                visit(field)
        elif isinstance(expr, relax.TupleGetItem):
            visit(expr.tuple_value)

    for binding in bindings:
        visit(binding.value)
    visit(result)
    return uses


def _only_readers(
    bindings: list[relax.Binding], uses: dict[relax.Var, int], op_name: str
) -> dict[relax.Var, relax.Var]:
    """For each variable with a single use, which is by this op, the variable bound to that."""
    readers = {}
    for binding in bindings:
        value = binding.value
        if isinstance(value, relax.Call) and value.op.name == op_name:
            source = value.args[0]
            if isinstance(source, relax.Var) and uses.get(source) == 1:
                readers[source] = binding.var
    return readers


def _refusal(call: relax.Call) -> str:
    """Why no library takes the call, whichever there is; "" where one may."""
    types = [call.ty, *(a.ty for a in call.args[:2])]
    strange = [str(t.dtype) for t in types if str(t.dtype) not in _LIBRARY_DTYPES]
    if strange:
        return f"libraries compute in {', '.join(_LIBRARY_DTYPES)}, not in {strange[0]}"
    if call.op.name == "relax.matmul" and min(len(a.ty.shape) for a in call.args) < 2:
        return "an operand is a vector, and libraries multiply matrices"
    return ""


def _shape(numbers: tuple[int, ...] | list[int]) -> relax.ShapeExpr:
    return relax.ShapeExpr([int(n) for n in numbers])


def _library_call(
    name: str, arguments: list[relax.Expr], type_: relax.Type, span: tvm.ir.Span | None
) -> relax.Call:
    call = relax.Call(
        tvm.ir.Op.get("relax.call_dps_packed"),
        [relax.ExternFunc(name), relax.Tuple(arguments)],
        None,
        [type_],
        span,
    )
    relax.expr._update_type(call, type_)
    return call


def _matmul(
    d: _Dispatcher,
    variable: relax.Var,
    call: relax.Call,
    name: str,
    bias: relax.Expr | None = None,
    type_: relax.TensorType | None = None,
) -> Any:
    a, b = d.operand(call.args[0]), d.operand(call.args[1])
    shape = tuple(int(n) for n in call.ty.shape)
    strides = dense_strides(shape)
    type_ = type_ or call.ty
    reader = d.only_reader.get(variable)
    if reader is not None:
        transpose = d.values[reader]
        type_ = transpose.ty
        order = permutation(transpose)
        outer = dense_strides(tuple(shape[k] for k in order))
        strides = tuple(outer[order.index(k)] for k in range(len(shape)))
    new = _library_call(
        name,
        [
            a.base,
            b.base,
            relax.op.null_value() if bias is None else bias,
            _shape(a.shape),
            _shape(a.strides),
            _shape(b.shape),
            _shape(b.strides),
            _shape(shape),
            _shape(strides),
            tvm.ir.StringImm("none"),
        ],
        type_,
        call.span,
    )
    return new if reader is None else d.redirect(variable, new)


def _conv(d: _Dispatcher, _variable: relax.Var, call: relax.Call, name: str) -> Any:
    """A convolution or one of its gradients: two operands, a dense result, the same options."""
    a, b = d.operand(call.args[0]), d.operand(call.args[1])
    out = tuple(int(n) for n in call.ty.shape)
    arguments = [a.base, b.base]
    for shape, strides in ((a.shape, a.strides), (b.shape, b.strides), (out, dense_strides(out))):
        arguments += [_shape(shape), _shape(strides)]
    options = options_of(call)
    arguments.append(_shape(_strides_taken(call, options)))
    arguments += [_shape(options[key]) for key in ("padding", "dilation")]
    arguments.append(relax.prim_value(int(options["groups"])))
    return _library_call(name, arguments, call.ty, call.span)


def _strides_taken(call: relax.Call, options: dict[str, Any]) -> list[int]:
    """The strides of a convolution, 1 where the window has a single place along a dim.

    oneDNN 2023.2's bfloat16 gradient of the weights reads memory that is not its own where an input
    of 1 x 1 pixels, padded by 1, meets a window of 3 x 3 with stride 2; with stride 1 it does not.
    """
    shapes = [[int(n) for n in one.ty.shape] for one in (call.args[0], call.args[1], call)]
    # Which of the two operands and the result are the data and the window.
    data, window = _DATA_AND_WINDOW[_VERBS[call.op.name]]
    strides = [int(n) for n in options["strides"]]
    for k, padding in enumerate(options["padding"]):
        reach = int(options["dilation"][k]) * (shapes[window][2 + k] - 1) + 1
        if shapes[data][2 + k] + 2 * int(padding) == reach:
            strides[k] = 1
    return strides


Conversion = Callable[[_Dispatcher, relax.Var, relax.Call, str], Any]
_CONVERSIONS: dict[str, Conversion] = {
    "relax.matmul": _matmul,
    "amp_ir.conv": _conv,
    "amp_ir.conv_backward_input": _conv,
    "amp_ir.conv_backward_weight": _conv,
    # A transposed convolution is the gradient of a convolution to its input.
    "amp_ir.conv_transpose": _conv,
}
_VERBS = {
    "relax.matmul": "matmul",
    "amp_ir.conv": "conv",
    "amp_ir.conv_backward_input": "conv_backward_input",
    "amp_ir.conv_backward_weight": "conv_backward_weight",
    "amp_ir.conv_transpose": "conv_backward_input",
}
_DATA_AND_WINDOW = {
    "conv": (0, 1),
    "conv_backward_input": (2, 1),
    "conv_backward_weight": (1, 2),
}
