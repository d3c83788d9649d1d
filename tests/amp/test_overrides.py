# SPDX-License-Identifier: Apache-2.0
"""Selectors, their precedence and their errors; the ready-made policies."""

from __future__ import annotations

import pytest
from tvm import relax
from tvm.relax import op

from amp_ir.amp.autocast import autocast
from amp_ir.amp.overrides import Override
from amp_ir.amp.policies import KINDS, POLICIES, list_ops
from amp_ir.errors import OptionError
from small_programs import at, dtypes_of, program, two_layers


def matmul_inputs(*overrides, **options):
    mod = autocast(two_layers(), amp_dtype="bfloat16", overrides=overrides, **options)
    relax.analysis.well_formed(mod)
    return [args[0] for args, _ in dtypes_of(mod, "relax.matmul")]


LOW, FULL = "bfloat16", "float32"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (Override(op="relax.matmul", to="float32"), [FULL, FULL, FULL]),
        (Override(module="layer.0", to="float32"), [FULL, LOW, LOW]),
        (Override(module="layer.*", op="*.matmul", to="float32"), [FULL, FULL, FULL]),
        (Override(module="layer.1.mlp", to="float32"), [LOW, FULL, FULL]),
        (Override(parameter="a2", to="float32"), [LOW, FULL, FULL]),
        (Override(op="relax.matmul", argument=0, to="float32"), [FULL, FULL, FULL]),
        (Override(phase="backward", to="float32"), [LOW, LOW, LOW]),
    ],
)
def test_a_selector_selects(override, expected):
    assert matmul_inputs(override) == expected


def test_the_last_override_that_matches_decides():
    everything = Override(op="relax.matmul", to="float32")
    but_this = Override(module="layer.1", op="relax.matmul", to="low")
    assert matmul_inputs(everything, but_this) == [FULL, LOW, LOW]
    with pytest.warns(UserWarning, match="module='layer.1'.* changes nothing: "):
        assert matmul_inputs(but_this, everything) == [FULL, FULL, FULL]


def test_low_reaches_the_result_and_free_gives_it_back_to_the_placement():
    for target, result in (("low", LOW), ("float32", FULL)):
        override = Override(op="relax.tanh", phase="forward", to=target)
        mod = autocast(two_layers(), amp_dtype="bfloat16", overrides=[override])
        assert dtypes_of(mod, "relax.tanh")[0] == ([result], result)


def test_a_result_alone_may_be_float32():
    override = Override(op="relax.*", phase="forward", to="float32_result")
    mod = autocast(two_layers(), amp_dtype="bfloat16", overrides=[override])
    assert dtypes_of(mod, "relax.matmul") == [([LOW, LOW], FULL)] * 3
    assert dtypes_of(mod, "relax.tanh")[0] == ([FULL], FULL)


def test_the_optimizer_is_selected_by_its_phase_only():
    mod = autocast(two_layers(), overrides=[Override(phase="optimizer", to="low")])
    assert dtypes_of(mod, "relax.multiply")[0][0] == ["float16", "float16"]
    with pytest.raises(OptionError, match="selects nothing"):
        autocast(two_layers(), overrides=[Override(op="relax.multiply", to="low")])


def test_an_op_may_be_named_without_what_precedes_its_last_dot():
    short, full = (
        autocast(two_layers(), amp_dtype="bfloat16", overrides=[Override(op=op, to="float32")])
        for op in ("matmul", "relax.matmul")
    )
    assert dtypes_of(short, "relax.matmul") == dtypes_of(full, "relax.matmul")
    assert dtypes_of(short, "relax.matmul") == [([FULL, FULL], FULL)] * 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"op": "relax.matmull"}, "no op matches 'relax.matmull'; near: 'relax.matmul'"),
        ({"module": "layers.0"}, r"no module matches 'layers.0'; near: .*'layer.0'"),
        ({"parameter": "b"}, "no parameter matches 'b'"),
        ({"op": "relax.tanh", "parameter": "a2"}, "no call matches them all"),
    ],
)
def test_a_selector_that_selects_nothing_names_what_is_near(words, message):
    with pytest.raises(OptionError, match=message):
        autocast(two_layers(), overrides=[Override(**words, to="float32")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"op": "relax.tanh", "to": "fp16"}, r"to='fp16'\); expected one of 'float32', 'low'"),
        (
            {"phase": "update", "to": "low"},
            r"^Override\(phase='update'\); expected one of 'forward', 'backward', 'optimizer'$",
        ),
        ({"to": "low"}, "would select every call"),
    ],
)
def test_a_wrong_override_is_refused_at_once(words, message):
    with pytest.raises(OptionError, match=message):
        Override(**words)


def test_an_argument_out_of_range_is_refused():
    told = (
        r"^Override\(to='low', op='relax.matmul', argument=2\) selects argument 2 of relax.matmul "
        r"in .*, which has 2, counted from 0$"
    )
    with pytest.raises(OptionError, match=told):
        matmul_inputs(Override(op="relax.matmul", argument=2, to="low"))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_lists_of_a_policy_hold_every_op_once(policy):
    lists = list_ops(policy)
    assert set(lists) == set(KINDS)
    names = sorted(name for ops in lists.values() for name in ops)
    assert len(names) == len(set(names)) > 150
    assert "relax.matmul" in lists["low"]
    assert list_ops(policy, "low") == lists["low"]


@pytest.mark.parametrize(
    ("policy", "op_name", "kind"),
    [
        ("default", "relax.mean", "float32"),
        ("torch", "relax.mean", "free"),
        ("torch", "relax.nn.softmax", "float32"),
        ("aggressive", "relax.nn.softmax", "free"),
        ("aggressive", "relax.exp", "float32"),
        ("conservative", "relax.nn.gelu", "float32"),
        ("conservative", "relax.reshape", "free"),
    ],
)
def test_where_the_policies_differ(policy, op_name, kind):
    assert op_name in list_ops(policy, kind)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_gives_a_well_formed_step(policy):
    assert matmul_inputs(policy=policy) == [LOW, LOW, LOW]


def test_unknown_names_are_refused():
    with pytest.raises(OptionError, match="policy is 'O2'; expected one of \"default\""):
        autocast(two_layers(), policy="O2")
    with pytest.raises(OptionError, match="kind is 'fp16'; expected one of 'low'"):
        list_ops("default", "fp16")


def test_an_override_selects_by_options_and_types():
    def build(e, x, w):
        first = e(at(op.nn.softmax(x, axis=0), "a"))
        second = e(at(op.nn.softmax(first, axis=1), "b"))
        return e(at(op.matmul(second, w), "c"))

    mod = program(build, (4, 8), (8, 8))

    def dtypes(**attributes):
        override = Override(op="relax.nn.softmax", to="low", attributes=attributes)
        low = autocast(mod, amp_dtype="bfloat16", overrides=[override])
        return [result for _, result in dtypes_of(low, "relax.nn.softmax")]

    assert dtypes(axis=[0]) == ["bfloat16", "float32"]
    assert dtypes(axis=["1"]) == ["float32", "bfloat16"]
    assert dtypes(axis=[0, 1], input_ndim=[2]) == ["bfloat16", "bfloat16"]
    assert dtypes(axis=[0], input_shape=[(4, 8)], input_dtype=["float32"])[0] == "bfloat16"
    with pytest.raises(OptionError, match="each word matches some call, but no call matches"):
        dtypes(axis=[0], input_ndim=[3])
