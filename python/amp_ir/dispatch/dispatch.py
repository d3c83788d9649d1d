# SPDX-License-Identifier: Apache-2.0
"""Turn matmuls and convolutions into calls of a library."""

from __future__ import annotations

from typing import Any

import attrs
import tvm
from tvm import relax

from amp_ir.dialect.registry import call_op
from amp_ir.dispatch.convolution_call import write_convolution
from amp_ir.dispatch.matmul_call import MatmulForm, choose_form, library_matmul, matmul_forms
from amp_ir.host import native
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.dispatch_log import OWN_KERNEL, DispatchLog
from amp_ir.ir.image_layout import TO_LAST
from amp_ir.ir.library_call import write
from amp_ir.ir.strided_view import StridedView, permutation, view_of

LIBRARIES = ("onednn", "torch")
# Those whose matmul adds a float32 bias, and those whose bias has the dtype of the result.
_BIAS_IN_FULL = ("onednn",)
_BIAS_OF_RESULT = ("cublaslt",)
_LIBRARY_DTYPES = ("float32", "bfloat16", "float16")


def dispatch(
    ir: tvm.IRModule,
    *,
    libraries: tuple[str, ...] = LIBRARIES,
    allow_tf32: bool = False,
    log: DispatchLog | None = None,
) -> tvm.IRModule:
    """Turn matmul and convolution into destination-passing library calls.

    Before:  wt = permute_dims(w); y = matmul(x, wt)
    After:   y = LibraryMatmul("onednn", a=x, b=w with strides [1, k]), as `library_call.write`
             writes it

    Args:
        ir: the step.
        libraries: prefixes of library functions, the preferred one first.
        allow_tf32: whether cuBLASLt may round float32 operands to 11 significant bits.
        log: records the library of each of these ops, and why it is not the preferred one.

    Requires: one function `main`, one dataflow block, static shapes.
    Ensures:  transposes of operands cost nothing (they become strides), and so does a transpose
              of a matmul's only use; a bias is added by the matmul, before its one rounding, which
              is the sum's where that is all that is used of it (cuBLASLt adds a bias of the
              result's dtype: there a bias is rounded to it first, as PyTorch's autocast does); an
              op that no library takes is left for the loops stage; a convolution's stride is 1
              along a dim with a single place. A relu is left to a kernel: cuBLASLt's turns NaN
              into 0.
    """
    return _Dispatcher(ir, libraries, allow_tf32, DispatchLog() if log is None else log).run()


@attrs.frozen
class _Biased:
    """A matmul, the bias added to it, and the variables that the two leave without use.

    `dtype` is that of the result: the call's own, or that to which the sum is rounded.
    """

    call: relax.Call
    bias: relax.Var
    folded: tuple[relax.Var, ...]
    dtype: str


class _Dispatcher:
    def __init__(
        self, ir: tvm.IRModule, libraries: tuple[str, ...], allow_tf32: bool, log: DispatchLog
    ) -> None:
        self.flow = Dataflow(ir)
        self.log = log
        self.libraries = libraries
        self.allow_tf32 = allow_tf32
        self.values = dict(self.flow.values)
        self.only_reader = self.flow.only_readers("relax.permute_dims")
        self.moved_last = {
            call.args[0]
            for call in self.flow.calls("relax.permute_dims").values()
            if tuple(permutation(call)) == TO_LAST
        }
        self.only_cast = self.flow.only_readers("amp_ir.cast")
        self.replaced: dict[relax.Var, relax.Expr] = {}
        self.before: list[relax.Binding] = []
        self.biased = self._find_biased()
        self.folded = {v for biased in self.biased.values() for v in biased.folded}

    def run(self) -> tvm.IRModule:
        bindings: list[relax.Binding] = []
        for binding in self.flow.bindings:
            value = binding.value
            if binding.var in self.folded:
                continue
            if binding.var in self.biased:
                bindings += self._biased_matmul(binding.var, self.biased[binding.var])
                continue
            new = self._dispatched(binding.var, value) if isinstance(value, relax.Call) else None
            new = self.replaced.pop(binding.var, new)
            bindings += self.before
            self.before.clear()
            if new is self:
                continue
            bindings.append(binding if new is None else relax.VarBinding(binding.var, new))
        return self.flow.finish(bindings)

    def _dispatched(self, variable: relax.Var, call: relax.Call) -> Any:
        verb = _VERBS.get(call.op.name)
        if verb is None:
            return None
        passed = [reason] if (reason := _why_unsupported(call)) else []
        for library in () if passed else self.libraries:
            new = None
            if native.has(f"amp_ir.{library}.{verb}"):
                new = self._written(library, verb, variable, call)
            if new is not None:
                self.log.add(call.op.name, library, "; ".join(passed))
                return new
            passed += self._why_not(library, verb, call)
        self.log.add(call.op.name, OWN_KERNEL, "; ".join(passed))
        return None

    def _why_not(self, library: str, verb: str, call: relax.Call) -> list[str]:
        missing = native.load().get(library)
        if missing:
            return [f"{library} is {missing}"]
        if not native.has(f"amp_ir.{library}.{verb}"):
            # A library for matmuls only is not reported as missing elsewhere.
            has_others = native.has(f"amp_ir.{library}.matmul")
            return [] if has_others else [f"{library} has no {verb}"]
        dtypes = [str(one.ty.dtype) for one in (call.args[0], call.args[1], call)]
        return [
            f"{library} does not multiply {dtypes[0]} by {dtypes[1]} to {dtypes[2]} so laid out"
        ]

    def _written(self, library: str, verb: str, variable: relax.Var, call: relax.Call) -> Any:
        """Return the call of the library, the marker that it was bound elsewhere, or None."""
        if verb != "matmul":
            is_moved = variable in self.moved_last
            written = write_convolution(
                library, verb, variable, call, self.operand, is_moved=is_moved
            )
            self.before += written.before
            return written.result
        reader = self.only_reader.get(variable)
        transpose = None if reader is None else self.values[reader]
        forms = matmul_forms(call, self.operand, transpose)
        form = choose_form(library, forms, str(call.ty.dtype), None)
        if form is None:
            return None
        type_ = transpose.ty if form.is_transposed and transpose is not None else call.ty
        tf32 = self._may_use_tf32(library, call)
        new = write(library_matmul(library, form, type_, call.span, allow_tf32=tf32))
        return self.redirect(variable, new) if form.is_transposed else new

    def _may_use_tf32(self, library: str, call: relax.Call) -> bool:
        is_full = str(call.args[0].ty.dtype) == "float32"
        return self.allow_tf32 and is_full and library == "cublaslt"

    def _find_biased(self) -> dict[relax.Var, _Biased]:
        """Return the sums of a sole-use matmul and a bias along its last dimension."""
        first = self.libraries[0] if self.libraries else ""
        adds = first in (*_BIAS_IN_FULL, *_BIAS_OF_RESULT)
        if not adds or not native.has(f"amp_ir.{first}.matmul"):
            return {}
        found = {}
        for binding in self.flow.bindings:
            value = binding.value
            if isinstance(value, relax.Call) and value.op.name == "relax.add":
                for matmul, bias in (value.args, reversed(value.args)):
                    biased = self._as_biased(matmul, bias)
                    if biased is not None and str(value.ty.dtype) == "float32":
                        variable, biased = self._rounded_at_once(binding.var, biased)
                        found[variable] = biased
                        break
        return found

    def _rounded_at_once(self, total: relax.Var, biased: _Biased) -> tuple[relax.Var, _Biased]:
        """Return the rounded sum instead of a float32 one that is used for nothing else."""
        reader = self.only_cast.get(total)
        if reader is None or biased.dtype != "float32":
            return total, biased
        dtype = str(reader.ty.dtype)
        if dtype not in _LIBRARY_DTYPES:
            return total, biased
        folded = (*biased.folded, total)
        rounded = attrs.evolve(biased, dtype=dtype, folded=folded)
        return (reader, rounded) if self._form_of(rounded) else (total, biased)

    def _as_biased(self, matmul: relax.Expr, bias: relax.Expr) -> _Biased | None:
        folded: list[relax.Var] = []
        call = self._sole(matmul, folded)
        if call is not None and call.op.name == "amp_ir.cast":
            call = self._sole(call.args[0], folded)
        if call is None or call.op.name != "relax.matmul" or _why_unsupported(call):
            return None
        if not isinstance(bias, relax.Var) or str(bias.ty.dtype) != "float32":
            return None
        if [int(n) for n in bias.ty.shape] != [int(call.ty.shape[-1])]:
            return None
        biased = _Biased(call, bias, tuple(folded), str(call.ty.dtype))
        return biased if self._form_of(biased) else None

    def _form_of(self, biased: _Biased) -> MatmulForm | None:
        forms = matmul_forms(biased.call, self.operand, None)
        return choose_form(self.libraries[0], forms, biased.dtype, self._bias_dtype(biased))

    def _bias_dtype(self, biased: _Biased) -> str:
        return biased.dtype if self.libraries[0] in _BIAS_OF_RESULT else "float32"

    def _sole(self, expr: relax.Expr, folded: list[relax.Var]) -> relax.Call | None:
        """Return the call bound to `expr`, if the use at hand is its only one."""
        value = self.values.get(expr) if isinstance(expr, relax.Var) else None
        if not isinstance(value, relax.Call) or self.flow.uses.get(expr) != 1:
            return None
        folded.append(expr)
        return value

    def _biased_matmul(self, variable: relax.Var, biased: _Biased) -> list[relax.Binding]:
        library, form = self.libraries[0], self._form_of(biased)
        assert form is not None, "a biased matmul was found for a form of it"
        self.log.add("relax.matmul", library)
        bindings, bias = [], biased.bias
        if self._bias_dtype(biased) != str(bias.ty.dtype):
            cast = call_op("amp_ir.cast", [bias], biased.call.span, dtype=biased.dtype)
            relax.expr._update_type(cast, relax.TensorType(bias.ty.shape, biased.dtype))
            bias = relax.DataflowVar(f"{variable.name}_bias", cast.ty)
            bindings.append(relax.VarBinding(bias, cast))
        ty = relax.TensorType(biased.call.ty.shape, biased.dtype)
        tf32 = self._may_use_tf32(library, biased.call)
        call = write(
            library_matmul(library, form, ty, biased.call.span, bias=bias, allow_tf32=tf32)
        )
        if str(variable.ty.dtype) == biased.dtype:
            return [*bindings, relax.VarBinding(variable, call)]
        matmul = relax.DataflowVar(f"{variable.name}_product", ty)
        wide = call_op("amp_ir.cast", [matmul], biased.call.span, dtype="float32")
        relax.expr._update_type(wide, variable.ty)
        bindings.append(relax.VarBinding(matmul, call))
        return [*bindings, relax.VarBinding(variable, wide)]

    def operand(self, expr: relax.Expr) -> StridedView:
        """Return the memory of an operand, seen through transposes and reshapes."""
        return view_of(expr, self.values)

    def redirect(self, variable: relax.Var, call: relax.Call) -> Any:
        """Bind `call` at the one reader of `variable` instead; the marker to drop `variable`."""
        reader = self.only_reader[variable]
        self.replaced[reader] = call
        # No later lookup may see through it: the source of the view is gone.
        self.values[reader] = call
        return self


def _why_unsupported(call: relax.Call) -> str:
    """Return why no library takes the call, whichever there is; "" where one may."""
    types = [call.ty, *(a.ty for a in call.args[:2])]
    strange = [str(t.dtype) for t in types if str(t.dtype) not in _LIBRARY_DTYPES]
    if strange:
        return f"libraries compute in {', '.join(_LIBRARY_DTYPES)}, not in {strange[0]}"
    if call.op.name == "relax.matmul" and min(len(a.ty.shape) for a in call.args) < 2:
        return "an operand is a vector, and libraries multiply matrices"
    return ""


_VERBS = {
    "relax.matmul": "matmul",
    "amp_ir.conv": "conv",
    "amp_ir.conv_backward_input": "conv_backward_input",
    "amp_ir.conv_backward_weight": "conv_backward_weight",
    # A transposed convolution is the gradient of a convolution to its input.
    "amp_ir.conv_transpose": "conv_backward_input",
}
