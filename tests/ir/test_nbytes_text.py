# SPDX-License-Identifier: Apache-2.0
"""No size but that of nothing is shown as 0."""

from __future__ import annotations

import re

import pytest
import torch

import amp_ir
from amp_ir.ir.nbytes_text import mebibytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 MiB"),
        (1, "1 B"),
        (1536, "1.5 KiB"),
        (1.5 * 2**20, "1.50 MiB"),
        (407 * 2**20, "407.0 MiB"),
        (3 * 2**30, "3072 MiB"),
    ],
)
def test_each_size_has_its_unit(nbytes: float, text: str) -> None:
    assert mebibytes(nbytes) == text


def test_a_small_step_and_a_small_model_are_not_said_to_take_nothing() -> None:
    model = torch.nn.Linear(2, 2)
    train = amp_ir.jit(lambda x: model(x).sum(), model=model)
    train(torch.ones(1, 2))
    assert re.search(r", peak [1-9][0-9.]* (B|KiB), compiled in ", repr(train))
    converted = amp_ir.convert_model(model, torch.ones(1, 2), "bfloat16")
    assert repr(converted) == "ConvertedModel(1 program, parameters 16 B)"
