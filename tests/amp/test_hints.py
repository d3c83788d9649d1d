# SPDX-License-Identifier: Apache-2.0
"""The hints of a rule, its registration and the errors of a wrong one."""

from __future__ import annotations

import pytest
from tvm import relax

from amp_ir import amp
from amp_ir.amp.hints import (
    FREE,
    RULES,
    PrimType,
    RuleResult,
    TupleType,
    apply_rule,
    check_dtype,
    hint_for_floats,
    reason_of,
    type_hint,
)
from amp_ir.errors import RuleError


def tensor(dtype: str) -> relax.TensorType:
    return relax.TensorType((2, 3), dtype)


def test_check_dtype_looks_into_tuples():
    assert check_dtype(tensor("float16"), "float16")
    assert not check_dtype(tensor("float32"), "float16")
    assert check_dtype(relax.TupleType([tensor("float16")] * 2), "float16")
    assert not check_dtype(relax.TupleType([tensor("float16"), tensor("float32")]), "float16")


@pytest.mark.parametrize("dtype", ["bool", "int64", "float64"])
def test_the_helper_leaves_what_autocast_may_not_touch(dtype):
    assert hint_for_floats(tensor(dtype), "float16") == PrimType(None)


def test_the_helper_asks_for_floats_one_by_one():
    both = relax.TupleType([tensor("float32"), tensor("int32")])
    assert hint_for_floats(both, "bfloat16") == TupleType([PrimType("bfloat16"), PrimType(None)])


def test_leave_as_it_was_and_float32_are_different_words():
    assert PrimType(None) != PrimType("float32")


def test_a_second_rule_names_the_first():
    def again(args, ret_type, amp_dtype):
        """Because."""
        return [FREE]

    with pytest.raises(RuleError, match=r"relax\.matmul has a rule already: matmul .*type_hints"):
        type_hint("relax.matmul")(again)


def test_a_rule_without_a_reason_is_refused():
    with pytest.raises(RuleError, match="has no docstring"):
        type_hint("relax.nothing")(lambda args, ret_type, amp_dtype: [FREE])
    assert "relax.nothing" not in RULES


def test_the_reason_is_the_first_sentence():
    def rule(args, ret_type, amp_dtype):
        """One reason, that
        spans lines. More.

        And more.
        """

    assert reason_of(rule) == "One reason, that spans lines"


def short(args, ret_type, amp_dtype):
    return [PrimType("float32")]


def odd(args, ret_type, amp_dtype):
    return ["float16", PrimType("float64")]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (short, "gives 1 hints for relax.add, which has 2 arguments here; give one hint"),
        (odd, r"returns 'float16' for relax.add; the hints are PrimType\(\"float32\"\)"),
    ],
)
def test_a_wrong_answer_is_explained(rule, message):
    with pytest.raises(RuleError, match=message):
        apply_rule(rule, "relax.add", [None, None], tensor("float32"), "bfloat16")


def test_a_list_is_short_for_hints():
    result = apply_rule(lambda *_: [FREE], "relax.abs", [None], tensor("float32"), "float16")
    assert result == RuleResult([FREE])


@pytest.mark.parametrize(
    ("old", "new"), [("Hints", amp.RuleResult), ("gen_hint_helper", amp.hint_for_floats)]
)
def test_a_name_of_the_last_version_still_works_with_a_warning(old, new):
    with pytest.warns(DeprecationWarning, match=f"amp_ir.amp.{old} is called amp_ir.amp"):
        assert getattr(amp, old) is new
