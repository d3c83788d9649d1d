# SPDX-License-Identifier: Apache-2.0
"""What each op refuses, word for word; and that inference and reference agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tvm import relax

from amp_ir.dialect import DECLARATIONS, call_op, options_of
from amp_ir.dialect.registry import declare
from amp_ir.errors import ArgumentError, OptionError
from dialect_cases import CASES, Case
from kernel_check import module_of


def f32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def i64(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


WINDOW = {"kernel": (2, 2), "strides": (2, 2), "padding": (0, 0), "dilation": (1, 1)}
CONV = {"strides": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
ATTENTION = {"has_mask": False, "dropout_p": 0.0, "index": 0, "is_causal": False, "scale": 1.0}

REFUSED: list[tuple[str, list[torch.Tensor], dict[str, Any], type[Exception], str]] = [
    (
        "conv", [f32(1, 3), f32(2, 3)], {"strides": (), "padding": (), "dilation": ()},
        OptionError, "amp_ir.conv has 0 spatial axes, expected 1 to 3",
    ),
    (
        "all_finite", [f32()], {}, OptionError,
        "amp_ir.all_finite has no gradients, only a scale",
    ),
    (
        "nll_loss", [f32(), i64()],
        {"reduction": "mean", "ignore_index": -100, "has_weight": False}, ArgumentError,
        "amp_ir.nll_loss: log-probabilities have shape (), expected an axis of classes",
    ),
    (
        "layer_norm", [f32(2, 3)],
        {"ndim_normalized": 3, "eps": 1e-5, "has_weight": False, "has_bias": False}, OptionError,
        "option ndim_normalized is 3 for argument 0 (x) of amp_ir.layer_norm of shape (2, 3), "
        "expected 1 to 2",
    ),
    (
        "max_pool", [f32(1, 2, 4)],
        {"kernel": (), "strides": (), "padding": (), "dilation": (), "ceil_mode": False},
        OptionError,
        "amp_ir.max_pool: option kernel is (), expected 1 to 3 numbers, one a spatial axis",
    ),
    (
        "avg_pool", [f32(1, 2, 4)],
        {"kernel": (2,), "strides": (2,), "padding": (0,), "divisor": 0}, OptionError,
        "amp_ir.avg_pool: option divisor is 0, expected None or >= 1",
    ),
    (
        "adaptive_avg_pool", [f32(1, 2, 4)], {"output_size": (0,)}, OptionError,
        "amp_ir.adaptive_avg_pool: option output_size is (0,), expected 1 to 3 positive numbers, "
        "one a spatial axis",
    ),
    (
        "adaptive_avg_pool_backward", [f32(1, 2, 2)], {"input_shape": (1, 2, 4), "ndim_space": 0},
        OptionError, "amp_ir.adaptive_avg_pool_backward: option ndim_space is 0, expected 1 to 3",
    ),
    (
        "random_uniform", [i64(2)], {"shape": (2,), "index": -1}, OptionError,
        "amp_ir.random_uniform: option index is -1, expected 0 to 2^32 - 1",
    ),
    (
        "random_uniform", [i64(2)], {"shape": (2**16, 2**16), "index": 0}, OptionError,
        "amp_ir.random_uniform: shape (65536, 65536) has more than 2^32 - 1 elements",
    ),
    (
        "all_reduce_start", [f32(2), f32(2).half()], {"ranks": 2, "group": 0, "bucket": 0},
        ArgumentError,
        "argument 1 (tensors) of amp_ir.all_reduce_start has dtype float16, expected float32, as "
        "the first tensor of its bucket has",
    ),
    (
        "silu_backward", [f32(2, 3), f32(3, 2)], {}, ArgumentError,
        "argument 1 (x) of amp_ir.silu_backward has shape (3, 2), expected (2, 3)",
    ),
    (
        "silu_backward", [f32(2), i64(2)], {}, ArgumentError,
        "argument 1 (x) of amp_ir.silu_backward has dtype int64, expected one of float16, "
        "bfloat16, float32, float64",
    ),
    (
        "silu_backward", [f32(2)], {}, ArgumentError,
        "amp_ir.silu_backward has 1 tensor arguments, expected grad, x",
    ),
    (
        "gelu_backward", [f32(2), f32(2)], {"approximate": "fast"}, OptionError,
        "amp_ir.gelu_backward: option approximate is 'fast', expected one of 'none', 'tanh'",
    ),
    (
        "softmax_backward", [f32(2, 3), f32(2, 3)], {"axis": 2}, OptionError,
        "axis 2 is out of range for argument 0 (grad) of amp_ir.softmax_backward of shape (2, 3), "
        "expected -2 to 1",
    ),
    (
        "softmax_backward", [f32(2, 3), f32(2, 3)], {"dim": 1}, OptionError,
        "amp_ir.softmax_backward: missing a required argument: 'axis'; got 2 tensors and the "
        "options ['dim'], expected the options (axis: 'int')",
    ),
    (
        "cast", [f32(2)], {"dtype": "fp16"}, OptionError,
        "amp_ir.cast: option dtype is 'fp16', expected one of 'float16', 'bfloat16', 'float32', "
        "'float64'",
    ),
    (
        "layer_norm", [f32(2, 3), f32(2), f32(3)], {"ndim_normalized": 1, "eps": 1e-5},
        ArgumentError, "argument 1 (weight) of amp_ir.layer_norm has shape (2,), expected (3,)",
    ),
    (
        "layer_norm", [f32(2, 3)], {"ndim_normalized": 1, "eps": 1e-5}, OptionError,
        "amp_ir.layer_norm has 0 optional tensors but has_weight=True, has_bias=True",
    ),
    (
        "layer_norm_backward_weight", [f32(2, 3), f32(2, 3), f32(2), f32(2)],
        {"ndim_normalized": 1}, ArgumentError,
        "argument 2 (mean) of amp_ir.layer_norm_backward_weight has shape (2,), expected (2, 1)",
    ),
    (
        "group_norm", [f32(2, 6, 4), f32(6), f32(6)], {"groups": 4, "eps": 1e-5}, OptionError,
        "option groups is 4 for argument 0 (x) of amp_ir.group_norm of shape (2, 6, 4), "
        "expected a divisor of 6 channels",
    ),
    (
        "conv", [f32(1, 4, 5, 5), f32(6, 3, 3, 3)], CONV, ArgumentError,
        "argument 1 (weight) of amp_ir.conv has shape (6, 3, 3, 3), expected 4 / 1 input channels "
        "a group on axis 1 (groups=1)",
    ),
    (
        "conv", [f32(1, 4, 2, 2), f32(6, 4, 3, 3)], CONV, ArgumentError,
        "argument 0 (x) of amp_ir.conv has shape (1, 4, 2, 2), expected space no smaller than the "
        "window (3, 3) (with padding)",
    ),
    (
        "conv", [f32(1, 4, 5, 5), f32(6, 4, 3, 3).bfloat16()], CONV, ArgumentError,
        "argument 1 (weight) of amp_ir.conv has dtype bfloat16, expected float32",
    ),
    (
        "conv", [f32(1, 4, 5), f32(6, 4, 3)], CONV, OptionError,
        "amp_ir.conv: option strides is (1, 1), expected 1 numbers, one a spatial axis",
    ),
    (
        "max_pool", [f32(1, 1, 4, 4)], {**WINDOW, "padding": (2, 0)}, OptionError,
        "amp_ir.max_pool: option padding is (2, 0), expected at most half of kernel (2, 2)",
    ),
    (
        "max_pool_backward", [f32(1, 1, 3, 2), i64(1, 1, 3, 2)],
        {**WINDOW, "input_shape": (1, 1, 4, 4)}, ArgumentError,
        "argument 0 (grad) of amp_ir.max_pool_backward has shape (1, 1, 3, 2), expected "
        "(1, 1, 2, 2)",
    ),
    (
        "embedding", [f32(5, 2), f32(3)], {}, ArgumentError,
        "argument 1 (ids) of amp_ir.embedding has dtype float32, expected int32 or int64",
    ),
    (
        "embedding_backward", [f32(3, 2), i64(3)], {"num_embeddings": 5, "padding_idx": -1},
        OptionError,
        "amp_ir.embedding_backward: option padding_idx is -1, expected None or a row below 5",
    ),
    (
        "mse_loss", [f32(2), f32(2)], {"reduction": 1}, OptionError,
        "amp_ir.mse_loss: option reduction is 1, expected one of 'none', 'mean', 'sum'",
    ),
    (
        "nll_loss", [f32(2, 5), i64(3)], {"reduction": "mean"}, ArgumentError,
        "argument 1 (target) of amp_ir.nll_loss has shape (3,), expected (2,)",
    ),
    (
        "dropout", [f32(2), i64(2)], {"p": 1.5, "index": 0}, OptionError,
        "amp_ir.dropout: option p is 1.5, expected a probability in [0, 1]",
    ),
    (
        "random_uniform", [i64(1)], {"shape": (2,), "index": 0}, ArgumentError,
        "argument 0 (random_state) of amp_ir.random_uniform has shape (1,), expected (2,)",
    ),
    (
        "attention", [f32(2, 3, 4), f32(2, 5, 4), f32(2, 6, 4)], ATTENTION, ArgumentError,
        "argument 2 (v) of amp_ir.attention has shape (2, 6, 4), expected (2, 5, 4)",
    ),
    (
        "lstm", [f32(3, 2, 20), f32(20, 5), f32(2, 4), f32(2, 5)], {"reverse": False},
        ArgumentError,
        "argument 0 (gates) of amp_ir.lstm has shape (3, 2, 20), expected (3, 2, 16)",
    ),
    (
        "gru_backward", [f32(3, 2, 5), f32(2, 5), f32(3, 2, 20), f32(3, 2, 5), f32(15, 5)],
        {"reverse": True}, ArgumentError,
        "argument 3 (states) of amp_ir.gru_backward has shape (3, 2, 5), expected (4, 2, 5)",
    ),
    (
        "rnn_tanh", [f32(3, 2, 5), f32(5, 4), f32(2, 5)], {"reverse": True}, ArgumentError,
        "argument 1 (weight) of amp_ir.rnn_tanh has shape (5, 4), expected (5, 5)",
    ),
    (
        "rnn_relu_backward", [f32(3, 2, 5), f32(2, 5), f32(3, 2, 5), f32(5, 5)],
        {"reverse": False}, ArgumentError,
        "argument 2 (states) of amp_ir.rnn_relu_backward has shape (3, 2, 5), expected (4, 2, 5)",
    ),
    (
        "gru", [f32(3, 2, 15), f32(15, 5), f32(15), f32(2, 5)], {}, OptionError,
        "amp_ir.gru: missing a required argument: 'reverse'; got 4 tensors and the options [], "
        "expected the options (reverse: 'bool')",
    ),
    (
        "attention", [f32(2, 3, 4)] * 3, {**ATTENTION, "dropout_p": 0.5}, OptionError,
        "amp_ir.attention has 0 optional tensors but has_mask=False and dropout_p=0.5, expected a "
        "mask if has_mask and a random_state if dropout_p > 0",
    ),
    (
        "index", [f32(2, 3), i64(4), i64(4)], {"axes": (1, 0)}, OptionError,
        "amp_ir.index: option axes is (1, 0) for 2 index tensors and argument 0 (x) of "
        "amp_ir.index of shape (2, 3), expected one axis for each index tensor, ascending, "
        "counted from 0",
    ),
    (
        "index", [f32(2, 3), i64(4), i64(5)], {"axes": (0, 1)}, ArgumentError,
        "amp_ir.index: index tensors of shapes (4,), (5,) do not broadcast",
    ),
    (
        "index_put", [f32(2, 3), f32(2), i64(4)], {"axes": (0,)}, ArgumentError,
        "argument 1 (values) of amp_ir.index_put has shape (2,), expected one that broadcasts to "
        "(4, 3)",
    ),
    (
        "scatter_add", [f32(2, 3), i64(4, 3), f32(4, 3)], {"axis": 1}, ArgumentError,
        "argument 1 (ids) of amp_ir.scatter_add has shape (4, 3), expected extents within src "
        "(4, 3) and, off the axis, x (2, 3)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "inputs", "options", "error", "message"),
    REFUSED,
    ids=[f"{op}-{k}" for k, (op, *_) in enumerate(REFUSED)],
)
def test_a_wrong_call_says_what_it_got_and_what_was_expected(
    op: str,
    inputs: list[torch.Tensor],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
):
    with pytest.raises(error) as in_ir:
        module_of(f"amp_ir.{op}", inputs, **options)
    assert str(in_ir.value) == message
    with pytest.raises(error) as in_reference:
        DECLARATIONS[f"amp_ir.{op}"].reference(*inputs, **options)
    assert str(in_reference.value) == message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_inferred_types_are_those_of_the_reference(case: Case, dtype: torch.dtype):
    inputs = case.tensors(dtype)
    ty = module_of(case.op, inputs, **case.options)["main"].ret_ty
    results = DECLARATIONS[case.op].reference(*inputs, **case.options)
    several = isinstance(results, tuple)
    for one, value in zip(
        ty.fields if several else [ty], results if several else [results], strict=True
    ):
        assert tuple(int(n) for n in one.shape) == tuple(value.shape)
        assert str(one.dtype) == str(value.dtype).removeprefix("torch.")


def test_a_call_holds_all_options_as_plain_values():
    case = next(one for one in CASES if one.op == "amp_ir.conv")
    mod = module_of(case.op, case.tensors(), **case.options)
    call = mod["main"].body.blocks[0].bindings[0].value
    assert options_of(call) == {**case.options, "out_dtype": None}


def test_out_dtype_widens_a_low_result():
    case = next(one for one in CASES if one.op == "amp_ir.conv")
    inputs = case.tensors(torch.bfloat16)
    reference: Callable[..., torch.Tensor] = DECLARATIONS[case.op].reference
    wide = reference(*inputs, **case.options, out_dtype="float32")
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), reference(*inputs, **case.options))


def test_declaring_an_op_twice_is_refused():
    with pytest.raises(ValueError, match=r"amp_ir\.cast is declared twice; first as "):
        declare("amp_ir.cast", "x", reference=lambda x: x)(lambda x: x)


def test_an_unknown_op_is_refused():
    with pytest.raises(KeyError, match=r"amp_ir\.nothing"):
        call_op("amp_ir.nothing", [])


@pytest.mark.parametrize(
    "ty",
    [
        relax.TensorType(dtype="float32", ndim=2),
        relax.ShapeType([2, 3]),
        relax.TupleType([relax.TensorType((2, 3), "float32")]),
    ],
    ids=["unknown", "shape", "tuple"],
)
def test_an_argument_that_is_no_tensor_of_static_shape_is_refused(ty):
    with pytest.raises(ArgumentError) as caught:
        DECLARATIONS["amp_ir.cast"].infer(ty, dtype="float16")
    assert str(caught.value) == (
        f"argument 0 (x) of amp_ir.cast has type {ty}, expected a tensor of static shape"
    )
