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


FULL, PAIR = PrimType("float32"), TupleType([PrimType("float32"), FREE])
HINTS = (
    'returns {} for relax.of; the hints are PrimType("float32"), PrimType("bfloat16"), '
    "PrimType(None), TupleType([...]) and FREE"
)
FIELDS = (
    "; give a tuple a hint for each of its tensors, or one PrimType or FREE for all of them"
)  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            3,
            "returns 3 for relax.of; expected a list with one hint an argument, or RuleResult(...)",
        ),
        (
            [FULL],
            "gives 1 hints for relax.of, which has 2 arguments here; give one hint an argument, "
            "PrimType(None) for one to leave as it is",
        ),
        (["float16", FULL], HINTS.format("'float16'")),
        ([TupleType([PrimType("float64")] * 3), FREE], HINTS.format(repr(PrimType("float64")))),
        (RuleResult([FREE, FREE], result=PrimType("int8")), HINTS.format(repr(PrimType("int8")))),
        (
            [PAIR, FREE],
            "gives a TupleType of 2 hints for argument 0 of relax.of, which is a tuple of 3 "
            f"tensors{FIELDS}",
        ),
        (
            [FREE, PAIR],
            f"gives a TupleType of 2 hints for argument 1 of relax.of, which is no tuple{FIELDS}",
        ),
    ],
    ids=["kind", "count", "hint", "field", "result", "fields", "tensor"],
)
def test_a_wrong_answer_is_explained(answer, message):
    def rule(args, ret_type, amp_dtype):
        return answer

    three = relax.Var("a", relax.TupleType([tensor("float32")] * 3))
    arguments = [three, relax.Var("b", tensor("float32"))]
    with pytest.raises(RuleError) as error:
        apply_rule(rule, "relax.of", arguments, tensor("float32"), "bfloat16")
    name = f"rule {rule.__name__} ({__file__}:{rule.__code__.co_firstlineno})"
    assert str(error.value) == f"{name} {message}"


@pytest.mark.parametrize("hint", [TupleType([FULL, FREE, FREE]), FREE])
def test_a_tuple_takes_a_hint_a_tensor_or_one_for_all(hint):
    arguments = [relax.Var("a", relax.TupleType([tensor("float32")] * 3))]
    result = apply_rule(lambda *_: [hint], "relax.of", arguments, None, "bfloat16")
    assert result == RuleResult([hint])


def test_a_list_is_short_for_hints():
    result = apply_rule(lambda *_: [FREE], "relax.abs", [None], tensor("float32"), "float16")
    assert result == RuleResult([FREE])


@pytest.mark.parametrize(
    ("old", "new"), [("Hints", amp.RuleResult), ("gen_hint_helper", amp.hint_for_floats)]
)
def test_a_name_of_the_last_version_still_works_with_a_warning(old, new):
    with pytest.warns(DeprecationWarning, match=f"amp_ir.amp.{old} is called amp_ir.amp"):
        assert getattr(amp, old) is new
