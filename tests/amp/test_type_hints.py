# SPDX-License-Identifier: Apache-2.0
"""Every op has one rule, and the rules say what the numerics policy says, in both dtypes."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax

import amp_ir.amp.type_hints  # noqa: F401
import amp_ir.dialect  # noqa: F401
from amp_ir.amp.hints import FREE, RULES, PrimType, RuleResult, reason_of
from amp_ir.dialect.registry import DECLARATIONS
from amp_ir.ir.relax_reference import RELAX_OPS

LOW = ("float16", "bfloat16")
FULL = PrimType("float32")


def hints(op: str, amp_dtype: str, arity: int) -> list:
    args = [relax.Var(f"a{i}", relax.TensorType((4, 4), "float32")) for i in range(arity)]
    result = RULES[op](args, args[0].ty, amp_dtype)
    return list(result.args) if isinstance(result, RuleResult) else list(result)


def test_every_op_of_the_dialect_has_a_rule():
    assert not sorted(set(DECLARATIONS) - set(RULES))


def test_every_relax_op_that_the_importer_emits_has_a_rule():
    assert not sorted(set(RELAX_OPS) - set(RULES))


def test_every_rule_is_for_an_op_that_exists():
    assert all(tvm.ir.Op.get(name) is not None for name in RULES)  # get raises on an unknown name


def test_every_rule_states_its_reason_in_a_sentence():
    assert all(20 <= len(reason_of(rule)) <= 110 for rule in RULES.values())


@pytest.mark.parametrize("amp_dtype", LOW)
@pytest.mark.parametrize(
    ("op", "arity"),
    [("relax.matmul", 2), ("amp_ir.conv", 2), ("amp_ir.conv_backward_weight", 2)],
)
def test_products_read_low_accumulate_float32_and_keep_gradients(op, arity, amp_dtype):
    args = [relax.Var("a", relax.TensorType((4, 4), "float32"))] * arity
    result = RULES[op](args, args[0].ty, amp_dtype)
    assert isinstance(result, RuleResult)
    assert list(result.args) == [PrimType(amp_dtype)] * arity
    assert (result.accumulate, result.gradient, result.result) == ("float32", FULL, FREE)


@pytest.mark.parametrize("amp_dtype", LOW)
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("relax.nn.softmax", [FULL]),
        ("relax.nn.log_softmax", [FULL]),
        ("relax.exp", [PrimType("float32", exact=True)]),
        ("relax.power", [FULL, FULL]),
        ("relax.sum", [FULL]),
        ("relax.cumsum", [FULL]),
        ("relax.sin", [PrimType("float32", exact=True)]),
        ("relax.add", [FULL, FULL]),
        ("relax.multiply", [FREE, FREE]),
        ("relax.nn.gelu", [FREE]),
        ("relax.reshape", [FREE]),
        ("relax.astype", [PrimType(None)]),
        ("amp_ir.softmax_backward", [FULL, FREE]),
        ("amp_ir.log_softmax_backward", [FULL, FULL]),
        ("amp_ir.layer_norm", [FULL, FULL, FULL]),
    ],
)
def test_the_policy(op, expected, amp_dtype):
    assert hints(op, amp_dtype, len(expected)) == expected


@pytest.mark.parametrize(
    ("shapes", "hint"),
    [
        (((4, 8), (8,)), FREE),  # a bias
        (((1, 8, 1, 1), (2, 8, 4, 4)), FREE),  # of a convolution
        (((8,), ()), FREE),
        (((8,), (8,)), FULL),  # two losses, one a row
        (((1, 8), (8,)), FULL),  # a stream in a batch of one
        (((4, 8), (4, 8)), FULL),
    ],
)
def test_only_what_is_broadcast_is_a_bias(shapes, hint):
    args = [relax.Var("a", relax.TensorType(shape, "float32")) for shape in shapes]
    assert list(RULES["relax.add"](args, args[0].ty, "bfloat16")) == [hint, hint]
