# SPDX-License-Identifier: Apache-2.0
"""Which ops become library calls, and what those calls read in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op as R

from amp_ir.dialect.registry import call_op
from amp_ir.dispatch.dispatch import dispatch
from amp_ir.host import native
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import LibraryConvolution, read
from amp_ir.ir.strided_view import StridedView, dense_strides, view_of
from library_calls import calls_of, library_calls, matmul_of
from relax_functions import build

pytestmark = pytest.mark.skipif(
    not native.has("amp_ir.onednn.matmul"), reason="dispatch is tested with the oneDNN library"
)


def test_transposes_of_operands_become_strides() -> None:
    mod = build(
        [((4, 8), "float32"), ((16, 8), "float32")],
        lambda x, w: R.matmul(x, R.permute_dims(w)),
    )
    (call,) = library_calls(dispatch(mod))
    assert str(call.args[0].global_symbol) == "amp_ir.onednn.matmul"
    assert matmul_of(call).b.shape == (8, 16) and matmul_of(call).b.strides == (1, 8)


def test_a_transpose_of_the_only_use_is_written_by_the_matmul() -> None:
    mod = build(
        [((2, 4, 8), "float32"), ((2, 8, 3), "float32")],
        lambda x, y: R.permute_dims(R.matmul(x, y), [1, 0, 2]),
    )
    ir = dispatch(mod)
    (call,) = library_calls(ir)
    assert matmul_of(call).out.shape == (2, 4, 3) and matmul_of(call).out.strides == (3, 6, 1)
    assert not [c for c in calls_of(ir) if c.op.name == "relax.permute_dims"]


def test_a_matmul_reads_the_transpose_that_another_one_wrote() -> None:
    """As the gradients of two linear layers without anything in between: (x @ y).T @ z."""
    mod = build(
        [((4, 8), "float32"), ((8, 3), "float32"), ((4, 5), "float32")],
        lambda x, y, z: R.matmul(
            R.permute_dims(relax.BlockBuilder.current().emit(R.matmul(x, y))), z
        ),
    )
    ir = dispatch(mod)
    first, second = library_calls(ir)
    assert matmul_of(first).out.shape == (4, 3) and matmul_of(first).out.strides == (1, 4)
    bound = {b.value: b.var for block in ir["main"].body.blocks for b in block.bindings}
    assert matmul_of(second).a.base.same_as(bound[first])
    assert matmul_of(second).a.shape == (3, 4) and matmul_of(second).a.strides == (4, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_is_added_before_the_one_rounding(dtype: str) -> None:
    def body(x: Any, w: Any, b: Any) -> Any:
        product = R.matmul(x, w, out_dtype=dtype)
        if dtype != "float32":
            builder_value = relax.BlockBuilder.current().emit(product)
            product = relax.BlockBuilder.current().emit(
                call_op("amp_ir.cast", [builder_value], dtype="float32")
            )
        return R.nn.relu(R.add(product, b))

    mod = build([((4, 8), dtype), ((8, 16), dtype), ((16,), "float32")], body)
    ir = dispatch(mod)
    (call,) = library_calls(ir)
    assert ir["main"].params[2].same_as(matmul_of(call).bias)
    assert not [c for c in calls_of(ir) if c.op.name == "relax.add"]


@pytest.mark.parametrize("is_used_wide", [False, True])
def test_a_sum_that_is_used_low_only_is_rounded_by_the_library(is_used_wide: bool) -> None:
    def body(x: Any, w: Any, b: Any) -> Any:
        emit = relax.BlockBuilder.current().emit
        total = emit(R.add(emit(R.matmul(x, w, out_dtype="float32")), b))
        low = emit(call_op("amp_ir.cast", [total], dtype="bfloat16"))
        return (R.nn.relu(low), R.exp(total)) if is_used_wide else R.nn.relu(low)

    mod = build([((4, 8), "bfloat16"), ((8, 16), "bfloat16"), ((16,), "float32")], body)
    ir = dispatch(mod)
    (call,) = library_calls(ir)
    assert str(call.ty.dtype) == ("float32" if is_used_wide else "bfloat16")
    casts = [c for c in calls_of(ir) if c.op.name == "amp_ir.cast"]
    assert len(casts) == is_used_wide


def test_a_product_used_elsewhere_keeps_its_bias_apart() -> None:
    def body(x: Any, w: Any, b: Any) -> Any:
        product = relax.BlockBuilder.current().emit(R.matmul(x, w))
        return R.add(product, b), R.exp(product)

    mod = build([((4, 8), "float32"), ((8, 16), "float32"), ((16,), "float32")], body)
    assert [c for c in calls_of(dispatch(mod)) if c.op.name == "relax.add"]


def test_integers_and_float64_stay_for_the_loops() -> None:
    for dtype in ("int64", "float64"):
        mod = build([((4, 8), dtype), ((8, 16), dtype)], R.matmul)
        assert not library_calls(dispatch(mod))


def notes_of(mod: tvm.IRModule) -> list[str]:
    log = DispatchLog()
    dispatch(mod, log=log)
    return [str(note) for note in log.notes]


def test_the_log_says_where_each_op_went_and_why_not_to_the_preferred_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(x: Any, w: Any, v: Any, k: Any) -> Any:
        emit = relax.BlockBuilder.current().emit
        low = emit(R.matmul(x, w))
        return emit(R.matmul(low, w)), emit(R.matmul(x, v)), emit(R.matmul(k, k))

    shapes = [((8, 8), "float32"), ((8, 8), "float32"), ((8,), "float32"), ((8, 8), "int64")]
    mod = build(shapes, body)
    refused = [
        "relax.matmul: 1 call -> own kernel, because an operand is a vector, and libraries "
        "multiply matrices",
        "relax.matmul: 1 call -> own kernel, because libraries compute in float32, bfloat16, "
        "float16, not in int64",
    ]
    assert notes_of(mod) == ["relax.matmul: 2 calls -> onednn", *refused]
    has = native.has
    monkeypatch.setattr(native, "has", lambda name: "onednn" not in name and has(name))
    monkeypatch.setattr(native, "load", lambda: {"onednn": "not built"})
    second = "relax.matmul: 2 calls -> torch, because onednn is not built"
    assert notes_of(mod) == [second, *refused]
    monkeypatch.setattr(native, "has", lambda name: False)
    monkeypatch.setattr(native, "load", lambda: {"onednn": "not built"})
    own = "relax.matmul: 2 calls -> own kernel, because onednn is not built; torch has no matmul"
    assert notes_of(mod) == [own, *refused]


@pytest.mark.parametrize(("side", "expected"), [(1, 1), (2, 2), (4, 2)])
def test_a_stride_that_leads_nowhere_is_one(side: int, expected: int) -> None:
    """One window fits: oneDNN is not asked for the stride that it gets wrong."""
    out = (side + 1) // 2
    options = {"strides": [2, 2], "padding": [1, 1], "dilation": [1, 1], "groups": 1}
    data, grad, weight = (2, 8, side, side), (2, 16, out, out), (16, 8, 3, 3)
    calls = [
        ("amp_ir.conv", data, weight, {}),
        ("amp_ir.conv_backward_input", grad, weight, {"input_shape": list(data)}),
        ("amp_ir.conv_backward_weight", grad, data, {"weight_shape": list(weight)}),
    ]
    for op, first, second, more in calls:
        mod = build(
            [(first, "bfloat16"), (second, "bfloat16")],
            lambda a, b, op=op, more=more: call_op(op, [a, b], **options, **more),
        )
        (call,) = library_calls(dispatch(mod))
        found = read(call)
        assert isinstance(found, LibraryConvolution) and found.strides == (expected, expected)


@given(
    st.permutations(range(4)),
    st.sampled_from([(2, 3, 4, 5), (6, 20), (2, 12, 5), (120,), (3, 2, 20), (2, 1, 3, 20)]),
)
def test_reshaped_views_are_pytorchs(order: list[int], shape: tuple[int, ...]) -> None:
    base = relax.Var("x", relax.TensorType([2, 3, 4, 5], "float32"))
    view = StridedView.dense(base).permuted(list(order)).reshaped(shape)
    tensor = torch.empty(2, 3, 4, 5).permute(*order)
    try:
        expected = tensor.view(shape)
    except RuntimeError:
        assert view is None
        return
    assert view is not None
    pairs = zip(view.shape, view.strides, expected.stride(), strict=True)
    assert all(n == 1 or ours == theirs for n, ours, theirs in pairs)


def test_view_of_stops_where_a_copy_is_needed() -> None:
    mod = build(
        [((4, 6), "float32"), ((6, 5), "float32")],
        lambda x, w: R.matmul(R.reshape(R.permute_dims(x), (4, 6)), w),
    )
    bindings = mod["main"].body.blocks[0].bindings
    values = {b.var: b.value for b in bindings}
    product = next(b for b in bindings if getattr(b.value, "op", None) == R.matmul(
        mod["main"].params[0], mod["main"].params[1]).op)  # fmt: skip
    view = view_of(product.value.args[0], values)
    assert view.strides == dense_strides((4, 6))
