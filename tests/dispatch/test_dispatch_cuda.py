# SPDX-License-Identifier: Apache-2.0
"""Which ops of a step for CUDA become library calls, decided on a machine without any CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.relax import op as R

from amp_ir.dialect.registry import call_op
from amp_ir.dispatch.dispatch import dispatch
from amp_ir.ir.dispatch_log import DispatchLog
from library_calls import LIBRARIES, calls_of, library_calls, matmul_of
from relax_functions import build


def on_cuda(mod: tvm.IRModule, **options: Any) -> tvm.IRModule:
    return dispatch(mod, libraries=LIBRARIES, **options)


def name_of(call: relax.Call) -> str:
    return str(call.args[0].global_symbol)


def finish_of(call: relax.Call) -> str:
    return matmul_of(call).epilogue


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_matmuls_go_to_cublaslt_where_there_is_none(dtype: str) -> None:
    mod = build(
        [((4, 8), dtype), ((16, 8), dtype)],
        lambda x, w: R.matmul(x, R.permute_dims(w), out_dtype="float32"),
    )
    (call,) = library_calls(on_cuda(mod))
    assert name_of(call) == "amp_ir.cublaslt.matmul"
    assert matmul_of(call).b.shape == (8, 16) and matmul_of(call).b.strides == (1, 8)
    assert str(call.ty.dtype) == "float32"


def test_tf32_is_said_by_calls_of_float32_only_and_when_allowed() -> None:
    def body(x: Any, y: Any) -> Any:
        emit = relax.BlockBuilder.current().emit
        return emit(R.matmul(x, x)), emit(R.matmul(y, y, out_dtype="float32"))

    mod = build([((4, 4), "float32"), ((4, 4), "bfloat16")], body)
    assert [finish_of(c) for c in library_calls(on_cuda(mod))] == ["none", "none"]
    allowed = library_calls(on_cuda(mod, allow_tf32=True))
    assert [finish_of(c) for c in allowed] == ["none+tf32", "none"]
    on_cpu = library_calls(dispatch(mod, allow_tf32=True))
    assert {finish_of(c) for c in on_cpu} == {"none"}


@pytest.mark.parametrize("result", ["float32", "bfloat16"])
def test_a_bias_has_the_dtype_of_the_result(result: str) -> None:
    def body(x: Any, w: Any, b: Any) -> Any:
        emit = relax.BlockBuilder.current().emit
        total = emit(R.add(emit(R.matmul(x, w, out_dtype="float32")), b))
        return total if result == "float32" else emit(call_op("amp_ir.cast", [total], dtype=result))

    mod = build([((4, 8), "bfloat16"), ((8, 16), "bfloat16"), ((16,), "float32")], body)
    ir = on_cuda(mod)
    (call,) = library_calls(ir)
    bias = matmul_of(call).bias
    assert bias is not None
    assert str(call.ty.dtype) == str(bias.ty.dtype) == result
    assert not [c for c in calls_of(ir) if c.op.name == "relax.add"]
    casts = [c for c in calls_of(ir) if c.op.name == "amp_ir.cast"]
    assert [[int(n) for n in c.ty.shape] for c in casts] == ([] if result == "float32" else [[16]])


def test_a_relu_is_left_to_a_kernel() -> None:
    """cuBLASLt's turns NaN into 0, and a step that overflowed must be seen to."""

    def body(x: Any, w: Any, b: Any) -> Any:
        emit = relax.BlockBuilder.current().emit
        return R.nn.relu(emit(R.add(emit(R.matmul(x, w)), b)))

    ir = on_cuda(build([((4, 8), "float32"), ((8, 16), "float32"), ((16,), "float32")], body))
    assert [finish_of(call) for call in library_calls(ir)] == ["none"]
    assert [c for c in calls_of(ir) if c.op.name == "relax.nn.relu"]


def test_a_float32_product_is_not_rounded_by_the_library() -> None:
    """cuBLASLt has no float32 x float32 -> bfloat16: the sum is rounded by a kernel."""

    def body(x: Any, w: Any, b: Any) -> Any:
        emit = relax.BlockBuilder.current().emit
        return call_op("amp_ir.cast", [emit(R.add(emit(R.matmul(x, w)), b))], dtype="bfloat16")

    mod = build([((4, 8), "float32"), ((8, 16), "float32"), ((16,), "float32")], body)
    ir = on_cuda(mod)
    (call,) = library_calls(ir)
    bias = matmul_of(call).bias
    assert bias is not None and str(call.ty.dtype) == str(bias.ty.dtype) == "float32"
    (call,) = library_calls(dispatch(mod))
    assert str(call.ty.dtype) == "bfloat16"


def heads(samples: int) -> tvm.IRModule:
    """Scores of 12 heads that lie inside of the rows."""

    def body(q: Any, k: Any) -> Any:
        emit = relax.BlockBuilder.current().emit
        q, k = emit(R.permute_dims(q, [0, 2, 1, 3])), emit(R.permute_dims(k, [0, 2, 3, 1]))
        return R.matmul(q, k)

    return build([((samples, 5, 12, 8), "float32"), ((samples, 5, 12, 8), "float32")], body)


def test_heads_inside_of_rows_are_copied_and_multiplied_at_once() -> None:
    """One launch and two copies instead of a launch a sample, and views where they cost less."""
    (call,) = library_calls(on_cuda(heads(8)))
    assert matmul_of(call).a.strides == (480, 40, 8, 1) and matmul_of(call).b.strides == (
        480,
        40,
        5,
        1,
    )
    (call,) = library_calls(on_cuda(heads(2)))
    assert matmul_of(call).a.strides == (480, 8, 96, 1) and matmul_of(call).b.strides == (
        480,
        8,
        1,
        96,
    )
    (call,) = library_calls(dispatch(heads(8)))
    assert matmul_of(call).a.strides == (480, 8, 96, 1)


def test_a_transposed_result_that_needs_more_launches_is_left_to_a_kernel() -> None:
    def body(x: Any, y: Any) -> Any:
        emit = relax.BlockBuilder.current().emit
        return R.permute_dims(emit(R.matmul(x, y)), [0, 2, 1, 3])

    mod = build([((8, 3, 4, 8), "float32"), ((8, 3, 8, 5), "float32")], body)
    ir = on_cuda(mod)
    (call,) = library_calls(ir)
    assert matmul_of(call).out.strides == (60, 20, 5, 1)
    assert [c for c in calls_of(ir) if c.op.name == "relax.permute_dims"]
    assert not [c for c in calls_of(dispatch(mod)) if c.op.name == "relax.permute_dims"]


def notes_of(mod: tvm.IRModule) -> list[str]:
    log = DispatchLog()
    on_cuda(mod, log=log)
    return [str(note) for note in log.notes]


def test_what_cublaslt_lacks_goes_to_pytorch_with_a_reason() -> None:
    mod = build(
        [((4, 8), "float32"), ((8, 4), "float32")],
        lambda x, y: R.matmul(x, y, out_dtype="bfloat16"),
    )
    assert notes_of(mod) == [
        "relax.matmul: 1 call -> torch_cuda, because cublaslt does not multiply float32 by float32 "
        "to bfloat16 so laid out"
    ]


def test_convolutions_go_to_pytorch() -> None:
    options = {"strides": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1}
    data, grad, weight = (2, 8, 6, 6), (2, 16, 6, 6), (16, 8, 3, 3)
    cases = [
        ("amp_ir.conv", "conv", data, weight, {}),
        ("amp_ir.conv_backward_input", "conv_backward_input", grad, weight,
         {"input_shape": list(data)}),
        ("amp_ir.conv_backward_weight", "conv_backward_weight", grad, data,
         {"weight_shape": list(weight)}),
    ]  # fmt: skip
    for op, verb, first, second, more in cases:
        mod = build(
            [(first, "bfloat16"), (second, "bfloat16")],
            lambda a, b, op=op, more=more: call_op(op, [a, b], **options, **more),
        )
        (call,) = library_calls(on_cuda(mod))
        assert name_of(call) == f"amp_ir.torch_cuda.{verb}"
        assert notes_of(mod) == [f"{op}: 1 call -> torch_cuda"]
