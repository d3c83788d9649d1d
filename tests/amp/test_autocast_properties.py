# SPDX-License-Identifier: Apache-2.0
"""Properties of autocast over random programs: what it must never do."""

from __future__ import annotations

import warnings

import pytest
import torch
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from amp_ir.amp.autocast import autocast
from amp_ir.amp.overrides import Override
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.uncast import uncast
from random_steps import random_inputs, random_step

DRAWS = st.lists(st.integers(0, 999), min_size=20, max_size=80)
DTYPES = st.sampled_from(["float16", "bfloat16"])
PLACEMENTS = st.sampled_from(["cut", "greedy"])


@settings(max_examples=60, deadline=None)
@given(DRAWS, DTYPES, PLACEMENTS)
def test_erasing_the_casts_gives_the_original_bit_for_bit(draws, amp_dtype, placement):
    mod = random_step(draws)
    plain = uncast(autocast(mod, amp_dtype=amp_dtype, placement=placement))
    relax.analysis.well_formed(plain)
    inputs = random_inputs()
    for got, expected in zip(interpret(plain, inputs), interpret(mod, inputs), strict=True):
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))


@settings(max_examples=60, deadline=None)
@given(DRAWS, DTYPES, PLACEMENTS)
def test_the_result_is_well_formed_keeps_its_interface_and_is_close(draws, amp_dtype, placement):
    mod = random_step(draws)
    low = autocast(mod, amp_dtype=amp_dtype, placement=placement)
    relax.analysis.well_formed(low)
    assert low["main"].ret_ty == mod["main"].ret_ty
    inputs = random_inputs()
    for got, expected in zip(interpret(low, inputs), interpret(mod, inputs), strict=True):
        assert got.dtype == expected.dtype


@settings(max_examples=20, deadline=None)
@given(DRAWS, DTYPES)
def test_a_second_autocast_changes_nothing(draws, amp_dtype):
    once = autocast(random_step(draws), amp_dtype=amp_dtype)
    twice = autocast(once, amp_dtype=amp_dtype)
    assert tvm_ffi.structural_equal(once, twice, map_free_vars=True)


def test_float32_is_the_identity():
    mod = random_step(list(range(60)))
    assert tvm_ffi.structural_equal(autocast(mod, amp_dtype="float32"), mod)


@pytest.mark.parametrize("seed", range(3))
def test_the_result_does_not_depend_on_hashing_or_history(seed):
    mod = random_step([seed * 31 + 7 * i * i for i in range(60)])
    first, second = (autocast(mod, amp_dtype="bfloat16") for _ in range(2))
    assert tvm_ffi.structural_equal(first, second, map_free_vars=True)


@settings(max_examples=30, deadline=None)
@given(DRAWS)
def test_with_every_op_overridden_to_float32_nothing_is_cast(draws):
    mod = random_step(draws)
    with warnings.catch_warnings():
        # Of a step that has no low op anyway.
        warnings.filterwarnings("ignore", "Override.* changes nothing")
        full = autocast(mod, overrides=[Override(op="*", to="float32")])
    values = [binding.value for binding in full["main"].body.blocks[0].bindings]
    assert not [v for v in values if isinstance(v, relax.Call) and v.op.name == "amp_ir.cast"]
    inputs = random_inputs()
    for got, expected in zip(interpret(full, inputs), interpret(mod, inputs), strict=True):
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))
