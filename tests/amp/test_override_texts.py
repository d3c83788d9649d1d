# SPDX-License-Identifier: Apache-2.0
"""What is said of overrides and rules that select nothing, or change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import Override
from amp_ir.amp import PrimType
from amp_ir.errors import OptionError

INSIDE = (
    "amp_ir.attention does softmax inside: its scores and its softmax are float32 already, and "
    'only what its matmuls read is low; Override(op="amp_ir.attention*", to="float32") keeps all '
    "of it in float32"
)
WITHOUT = "for which the rules or a later override decide the same without it"


class Attention(nn.Module):
    """Attention, a normalization and a projection."""

    def __init__(self):
        super().__init__()
        self.qkv, self.norm, self.head = nn.Linear(16, 48), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.reshape(2, 6, 2, 8).transpose(1, 2) for part in parts)
        context = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(self.norm(x + context.transpose(1, 2).reshape(2, 6, 16)))


@pytest.fixture(scope="module")
def mod():
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = torch.randn(2, 6, 16), torch.randint(0, 5, (2, 6))
    return amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)[0]


def cast(mod, *overrides):
    return amp_ir.autocast(mod, amp_dtype="bfloat16", overrides=list(overrides))


@pytest.mark.parametrize(
    ("override", "why"),
    [
        (
            Override(op="relax.nn.softmax", to="float32"),
            "no op matches 'relax.nn.softmax'; near: 'relax.nn.log_softmax', 'relax.sum', "
            f"'relax.matmul'. {INSIDE}",
        ),
        (
            Override(op="softmax", to="float32"),
            "no op matches 'softmax'; near: 'relax.nn.log_softmax', "
            f"'amp_ir.log_softmax_backward'. {INSIDE}",
        ),
        (
            Override(op="linear", to="low"),
            "no op matches 'linear'; near: 'relax.matmul'",
        ),
        (
            Override(op="relax.reshape", to="low"),
            "relax.reshape is a view, which has the dtype of what it looks at",
        ),
    ],
    ids=lambda one: one.op if isinstance(one, Override) else "",
)
def test_an_override_that_selects_nothing_says_what_is_there(mod, override, why):
    with pytest.raises(OptionError) as caught:
        cast(mod, override)
    assert str(caught.value) == (
        f"Override(to={override.to!r}, op={override.op!r}) selects nothing: {why}"
    )


def test_an_override_that_changes_nothing_says_so_at_the_users_line(mod):
    with pytest.warns(UserWarning) as caught:
        cast(mod, Override(op="*softmax*", to="float32"))
    (said,) = caught
    assert said.filename == __file__
    text = str(said.message)
    assert text.startswith(
        "Override(to='float32', op='*softmax*') changes nothing: it selects 2 calls of "
        f"relax.nn.log_softmax, amp_ir.log_softmax_backward, {WITHOUT} (step (forward), {__file__}:"
    )
    assert text.endswith(f"). {INSIDE}")


def test_an_override_all_of_whose_calls_a_later_one_decides_says_so(mod):
    first = Override(op="relax.matmul", argument=0, to="float32")
    with pytest.warns(UserWarning, match=f"argument=0\\) changes nothing: .* {WITHOUT}"):
        cast(mod, first, Override(op="relax.matmul", to="float32"))
    # One that decides some of its calls is not spoken of.
    cast(mod, Override(op="relax.matmul", to="float32"), Override(module="head", to="low"))


def test_what_the_hint_about_attention_says_is_true(mod):
    low = {op.name: op for op in cast(mod).plan.ops}["amp_ir.attention"]
    assert set(low.reads) == {"bfloat16"} and "float32 inside" in low.reason
    full = cast(mod, Override(op="amp_ir.attention*", to="float32")).plan
    touched = [op for op in full.ops if op.name.startswith("amp_ir.attention")]
    assert {dtype for op in touched for dtype in op.reads + op.results} == {"float32"}


def test_explain_names_what_is_near(mod):
    plan = cast(mod).plan
    for what, expected in {
        "nrom": "no op or module of the step matches 'nrom'; near: 'norm'",
        "rsqrt": (
            "no op or module of the step matches 'rsqrt'. amp_ir.layer_norm does rsqrt inside: "
            "its mean and its variance are computed in float32 already; "
            'Override(op="amp_ir.layer_norm*", to="float32") keeps all of it in float32'
        ),
    }.items():
        with pytest.raises(OptionError) as caught:
            plan.explain(what)
        assert str(caught.value) == expected
    lines = plan.explain("*softmax*").splitlines()
    assert lines[0].startswith("lv") and lines[-1] == INSIDE


def test_a_rule_of_no_op_of_the_step_says_so(mod):
    def never(args, ret_type, amp_dtype):
        return [PrimType("float32") for _ in args]

    with amp_ir.CustomTypeHint({"relax.nn.softmax": never, "relax.matmul": never}):
        with pytest.warns(UserWarning) as caught:
            cast(mod)
    (said,) = caught
    assert str(said.message) == (
        "CustomTypeHint has a rule for 'relax.nn.softmax', and the step has no such op; near: "
        f"'relax.nn.log_softmax', 'relax.sum', 'relax.matmul'. {INSIDE}"
    )
