# SPDX-License-Identifier: Apache-2.0
"""Equal refusals are listed once, with their first places; what only initializes is no refusal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.errors import CaptureError
from amp_ir.ir.location import Location

READ = "a tensor's value is read in Python, by .item(), float(), int(), bool(), if or while. Keep"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return -y if y.max() > 0 else y


class Config:
    """As transformers' configuration, whose model decides what it is at the first call."""

    kind = None
    calls = 0


class Initializing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), Config()

    def forward(self, x):
        if self.config.kind is None:
            self.config.kind = "single_label_classification"
        self.config.calls += 1
        return self.linear(x) * self.config.calls


def refused(model):
    with pytest.raises(CaptureError) as caught:
        amp_ir.trace_step(lambda x: model(x), (torch.randn(2, 4),), model=model)
    return caught.value


def test_equal_refusals_are_one_line_with_their_first_places():
    error = refused(nn.Sequential(*[Layer() for _ in range(5)]))
    line = Layer.forward.__code__.co_firstlineno + 2
    places = "; ".join(f"{n} (forward), {__file__}:{line}" for n in range(3))
    lines = str(error).splitlines()
    assert lines[0] == "this step cannot be captured, 5 places:"
    assert lines[1].startswith(f"  1. {places}; and 2 more: {READ}") and len(lines) == 2
    # Programs get all of them.
    assert [one.location.module for one in error.places] == list("01234")


def test_an_examination_lists_them_together_too():
    model = nn.Sequential(*[Layer() for _ in range(5)])
    found = amp_ir.examine(lambda x: model(x), (torch.randn(2, 4),), model=model)
    assert len(found.refused) == 5
    assert str(found).count("a tensor's value is read") == 1 and "; and 2 more: " in str(found)
    assert found.issue_text().count("- refused: ") == 1


def test_many_kinds_of_refusals_are_cut():
    found = Diagnostics()
    for number in range(25):
        found.add(f"what {number}", Location(f"m{number}"), "Do")
    lines = str(found.error()).splitlines()
    assert lines[0] == "this step cannot be captured, 25 places:"
    assert lines[-2:] == ["  20. m19 (forward): what 19. Do", "  ... and 5 more"]


def test_what_a_step_only_initializes_is_not_listed_with_what_it_changes():
    error = refused(Initializing())
    (place,) = error.places
    assert "'calls'" in place.what and place.what.endswith("becomes 1")
    assert "'kind'" not in str(error)
