# SPDX-License-Identifier: Apache-2.0
"""Attention decomposed: the ops it becomes, their dtypes and locations, and the numbers."""

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax

from amp_ir.dialect import DECLARATIONS
from amp_ir.dialect.define import dtype_name
from amp_ir.dispatch.decompose_attention import decompose_attention
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.location import Location, from_span, to_span
from dialect_cases import ATTENTION, attention_inputs
from kernel_check import module_of

# Weights and score gradients are rounded to bfloat16 (2^-9) before the matmuls that read them, and
# the results once more.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


def cast_all(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [one.to(dtype) if one.is_floating_point() else one for one in tensors]


def forward_inputs(note: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return cast_all([*attention_inputs(), *ATTENTION[note][1]()], dtype)


def backward_inputs(note: str, dtype: torch.dtype) -> list[torch.Tensor]:
    q, k, v, *rest = forward_inputs(note, dtype)
    out, lse = DECLARATIONS["amp_ir.attention"].reference(q, k, v, *rest, **ATTENTION[note][0])
    return [torch.randn_like(out), q, k, v, out, lse, *rest]


def ops_of(mod: tvm.IRModule) -> list[str]:
    bindings = mod["main"].body.blocks[0].bindings
    return [one.value.op.name for one in bindings if isinstance(one.value, relax.Call)]


def check(op: str, inputs: list[torch.Tensor], note: str, dtype: torch.dtype) -> None:
    mod = module_of(op, inputs, **ATTENTION[note][0])
    decomposed = decompose_attention(mod)
    relax.analysis.well_formed(decomposed)
    for got, expected in zip(interpret(decomposed, inputs), interpret(mod, inputs), strict=True):
        assert got.dtype == expected.dtype
        scale = float(expected.abs().max())
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("note", ATTENTION)
def test_forward_is_the_whole_op(note: str, dtype: torch.dtype):
    check("amp_ir.attention", forward_inputs(note, dtype), note, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("note", ATTENTION)
def test_backward_is_the_whole_op(note: str, dtype: torch.dtype):
    check("amp_ir.attention_backward", backward_inputs(note, dtype), note, dtype)


def test_scores_are_float32_and_weights_low():
    inputs = forward_inputs("plain", torch.bfloat16)
    mod = decompose_attention(module_of("amp_ir.attention", inputs, **ATTENTION["plain"][0]))
    assert ops_of(mod) == [
        "relax.permute_dims",
        "relax.matmul",
        "amp_ir.attention_probabilities",
        "relax.matmul",
    ]
    types = {
        binding.value.op.name: binding.value.ty
        for binding in mod["main"].body.blocks[0].bindings[:3]
        if isinstance(binding.value, relax.Call)
    }
    assert str(types["relax.matmul"].dtype) == "float32"
    weights, lse = types["amp_ir.attention_probabilities"].fields
    assert (str(weights.dtype), str(lse.dtype)) == ("bfloat16", "float32")


def test_backward_computes_the_weights_again():
    inputs = backward_inputs("plain", torch.float32)
    mod = decompose_attention(
        module_of("amp_ir.attention_backward", inputs, **ATTENTION["plain"][0])
    )
    assert ops_of(mod).count("relax.matmul") == 5
    assert ops_of(mod).count("amp_ir.attention_weights") == 1
    assert ops_of(mod).count("amp_ir.attention_score_gradient") == 1


def test_new_ops_carry_the_location_of_the_old_one():
    inputs = forward_inputs("plain", torch.float32)
    mod = module_of("amp_ir.attention", inputs, **ATTENTION["plain"][0])
    place = Location("encoder.layer.0", "backward", "model.py", 12)
    main = mod["main"]
    block = main.body.blocks[0]
    call = block.bindings[0].value
    located = relax.Call(call.op, call.args, call.attrs, call.ty_args, to_span(place))
    relax.expr._update_type(located, call.ty)
    bindings = [relax.VarBinding(block.bindings[0].var, located), *block.bindings[1:]]
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], main.body.body)
    relax.expr._update_type(body, main.body.ty)
    function = relax.Function(main.params, body, main.ret_ty, main.is_pure)
    decomposed = decompose_attention(tvm.IRModule({"main": function}))
    for binding in decomposed["main"].body.blocks[0].bindings:
        if isinstance(binding.value, relax.Call):
            assert from_span(binding.value.span) == place


def test_a_module_without_attention_is_left_alone():
    x = torch.zeros(2, 3)
    assert dtype_name(x) == "float32"
    mod = module_of("amp_ir.cast", [x], dtype="bfloat16")
    assert decompose_attention(mod).same_as(mod)
