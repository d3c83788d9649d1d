# SPDX-License-Identifier: Apache-2.0
"""Constants that the user's own override makes infinite or zero are named; others are silent."""

from __future__ import annotations

import warnings

import pytest
import torch

import amp_ir

MODEL = torch.nn.Linear(4, 4)


def forward(x):
    scores = MODEL(x).masked_fill(x > 0, -1e9)
    return (scores + 3e38) * 1e-9


@pytest.fixture(scope="module")
def mod():
    return amp_ir.trace_step(forward, (torch.randn(3, 4),), model=MODEL)[0]


def test_a_constant_that_an_override_loses_is_named_with_its_value_and_place(mod):
    with pytest.warns(UserWarning) as caught:
        low = amp_ir.autocast(mod, overrides=[amp_ir.Override(op="relax.*", to="low")])
        # Folding casts of constants says nothing more.
        amp_ir.compile(low)
    (said,) = caught
    assert said.filename == __file__
    first = forward.__code__.co_firstlineno
    by = "Selected by Override(to='low', op='relax.*') [override]"
    assert str(said.message) == (
        "float16 cannot hold constants that are to be read low: "
        f"-1e+09 becomes -inf in relax.where of step (forward), {__file__}:{first + 1}: {by}; "
        f"3e+38 becomes inf in relax.add of step (forward), {__file__}:{first + 2}: {by}; "
        f"1e-09 becomes 0 in relax.multiply of step (forward), {__file__}:{first + 2}: {by}. "
        "An infinity makes NaN of a difference or of a product with 0; to keep such an op in "
        'float32, add Override(op="relax.where", to="float32") as the last one'
    )


def test_its_hint_leads_to_a_step_without_the_warning(mod):
    names = ("relax.where", "relax.add", "relax.multiply")
    kept = [amp_ir.Override(op=one, to="float32") for one in names]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp_ir.autocast(mod, overrides=[amp_ir.Override(op="relax.*", to="low"), *kept])


def test_without_the_users_doing_nothing_is_lost(mod):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp_ir.autocast(mod)
        # bfloat16 has the range of float32.
        amp_ir.autocast(
            mod, amp_dtype="bfloat16", overrides=[amp_ir.Override(op="relax.*", to="low")]
        )


def test_a_cast_of_a_constant_that_the_user_wrote_is_silent_as_in_pytorch():
    def narrow(x):
        return x.half() + torch.full((4,), 1e9).half()

    mod, _ = amp_ir.trace_step(narrow, (torch.zeros(3, 4),), model=MODEL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = amp_ir.compile(mod)
    assert compiled(torch.zeros(3, 4)).isinf().all()
