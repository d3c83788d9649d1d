# SPDX-License-Identifier: Apache-2.0
"""`amp-ir explain`: the plan as a table and as a page."""

from __future__ import annotations

import argparse
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console
from torch import nn

import amp_ir
from amp_ir.report.explain import add_arguments, rows_of, show


@pytest.fixture(scope="module")
def plan():
    class Net(nn.Module):
        """Two named layers."""

        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

    model = Net()

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    mod, args = amp_ir.trace_step(step, (torch.randn(4, 8),), model=model)
    return amp_ir.explain_plan(amp_ir.autocast(mod, args, amp_dtype="bfloat16"))


def arguments(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.set_defaults(training="net")
    return parser.parse_args(words)


def test_the_table_shows_only_the_module_that_is_asked_for(plan):
    console = Console(record=True, width=240)
    assert show(plan, arguments("--module", "head"), console) == 0
    text = console.export_text()
    lines = [line for line in text.splitlines() if line.startswith("  matmul")]
    assert len(lines) == 3  # forward, and the gradients of weight and input
    assert all("bfloat16" in line for line in lines)
    assert text.splitlines()[1].strip() == "head"
    assert "products of two low numbers are exact in float32" in text
    assert "float32 to bfloat16, shared, alone" in text
    assert "body" not in text


def test_every_cast_into_an_op_is_in_exactly_one_row(plan):
    shown = [cast for row in rows_of(plan, views=True) for cast in row.casts]
    assert len(shown) == sum(cast.consumer >= 0 for cast in plan.casts)


def test_a_module_that_is_not_there_is_refused_with_those_that_are(plan):
    message = "no module or op of the step matches 'neck'; modules begin with body, head"
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        rows_of(plan, "neck")
    assert str(caught.value) == message


def test_a_step_that_computes_nothing_has_nothing_to_explain():
    def step(x):
        return x

    mod, args = amp_ir.trace_step(step, (torch.randn(4, 8),), model=nn.Linear(8, 4))
    nothing = amp_ir.autocast(mod, args, amp_dtype="bfloat16").plan
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        rows_of(nothing)
    assert str(caught.value) == (
        "the step computes nothing: it has no op to show; its results and gradients are its "
        "inputs, or are not there"
    )


class _Balance(HTMLParser):
    """Collects tags and addresses; fails on a tag closed out of order."""

    def __init__(self):
        super().__init__()
        self.open, self.rows, self.addresses = [], 0, []

    def handle_starttag(self, tag, attrs):
        self.rows += ("class", "module") not in attrs and tag == "tr"
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(plan, tmp_path):
    path = tmp_path / "plan.html"
    show(plan, arguments("--html", str(path)), Console(quiet=True))
    page = _Balance()
    page.feed(path.read_text())
    assert page.open == []
    assert page.addresses == []
    assert page.rows == 1 + len(rows_of(plan))  # and the head
