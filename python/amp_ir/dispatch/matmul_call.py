# SPDX-License-Identifier: Apache-2.0
"""Write a matmul as a library call: the memory it reads and writes, and its layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import tvm
import tvm_ffi
from tvm import relax

from amp_ir.host import native
from amp_ir.ir.library_call import Layout, LibraryMatmul
from amp_ir.ir.strided_view import StridedView, dense_strides, permutation, without_idle_strides


@attrs.frozen
class MatmulForm:
    """One form of the call: views of the operands and strides of the result, in elements.

    `is_transposed` says that the result is laid out as its only reader, a transpose, needs it.
    `copies` counts the transposes that this form leaves as separate kernels.
    """

    a: StridedView
    b: StridedView
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_transposed: bool
    copies: int


def matmul_forms(
    call: relax.Call, view: Callable[[relax.Expr], StridedView], transpose: relax.Call | None
) -> Iterator[MatmulForm]:
    """Return the forms of `call`; the first reads and writes everything in place.

    Args:
        call: a relax.matmul of matrices.
        view: sees an operand through the transposes that lead to it.
        transpose: the only reader of the result, if that is a relax.permute_dims.
    """
    operands = []
    for argument in call.args:
        seen, dense = view(argument), StridedView.dense(argument)
        operands.append([seen] if seen.base.same_as(argument) else [seen, dense])
    shape = tuple(int(n) for n in call.ty.shape)
    results = [(dense_strides(shape), False)]
    if transpose is not None:
        order = permutation(transpose)
        outer = dense_strides(tuple(shape[k] for k in order))
        inner = tuple(outer[order.index(k)] for k in range(len(shape)))
        results.insert(0, (without_idle_strides(shape, inner), True))
    for (i, a), (j, b), (k, (strides, is_transposed)) in itertools.product(
        enumerate(operands[0]), enumerate(operands[1]), enumerate(results)
    ):
        yield MatmulForm(a, b, shape, strides, is_transposed, i + j + k)


def choose_form(
    library: str, forms: Iterator[MatmulForm], out_dtype: str, bias_dtype: str | None
) -> MatmulForm | None:
    """Return the form for which `library` needs the fewest kernels; None where it has none.

    oneDNN and PyTorch take everything in place. cuBLASLt takes matrices whose rows or columns are
    dense and one batch dimension a launch: where heads are stored inside of rows, it would take a
    launch for each sample, and one kernel that copies is less. Of forms with as many kernels, the
    one with the fewest copies is chosen.
    """
    if library != "cublaslt":
        # PyTorch's CUDA kernels add no bias.
        return None if bias_dtype and library == "torch_cuda" else next(forms)
    count = native.function("amp_ir.cublaslt.launches")
    best, best_cost = None, (0, 0)
    for form in forms:
        layouts = [form.a.shape, form.a.strides, form.b.shape, form.b.strides]
        layouts += [form.shape, form.strides]
        dtypes = [str(view.base.ty.dtype) for view in (form.a, form.b)]
        shapes = [tvm_ffi.Shape(tuple(numbers)) for numbers in layouts]
        launches = int(count(*shapes, *dtypes, out_dtype, bias_dtype, "none"))
        cost = (launches + form.copies, form.copies)
        if launches and (best is None or cost < best_cost):
            best, best_cost = form, cost
    return best


def library_matmul(
    library: str, form: MatmulForm, type_: relax.TensorType, span: tvm.ir.Span | None, **fields: Any
) -> LibraryMatmul:
    """Return the matmul in this form; `fields` are a bias and the like."""
    out = Layout(form.shape, form.strides)
    return LibraryMatmul(
        library=library, type_=type_, span=span, a=form.a, b=form.b, out=out, **fields
    )
