# SPDX-License-Identifier: Apache-2.0
"""A few programs of the coverage list, and the page that is made of its rows."""

from __future__ import annotations

import pytest
import torch
from benchmarks.programs.listed import PROGRAMS
from benchmarks.programs.measure import DTYPES, RIGHT, Row, measure
from benchmarks.programs.peer_modes import FilledWithinRange, in_double
from benchmarks.programs.table import page


def test_the_list_is_long_and_has_every_kind() -> None:
    assert len(PROGRAMS) >= 180
    kinds = {one.kind for one in PROGRAMS.values()}
    assert {"text encoder", "decoder", "encoder-decoder", "images", "sound", "generative"} <= kinds


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("VAE", "float32"),
        ("VAE", "bfloat16"),
        ("EMA by AveragedModel", "float32"),
        ("checks of the loss", "bfloat16"),
        ("optimizer in backward", "float32"),
        ("MAML", "bfloat16"),
    ],
)
def test_a_sample_runs_and_is_right(name: str, dtype: str) -> None:
    row = measure(PROGRAMS[name], dtype)
    assert (row.status, row.note) == (RIGHT, "") and row.seconds > 0


def test_a_program_that_is_refused_is_a_row_with_the_reason() -> None:
    row = measure(PROGRAMS["DebertaV2: sequence classes"], "float32")
    assert row.status == "refused" and "calls size on what a mask selects" in row.note


def test_what_asks_for_float32_is_float64_where_all_is_compared_with_it() -> None:
    x = torch.tensor([1.0, 1e-12], dtype=torch.float64)
    with in_double():
        sums = (
            x.float().sum(),
            x.to(torch.float32).sum(),
            x.sum(dtype=torch.float32),
            x.softmax(0, dtype=torch.bfloat16).log().logsumexp(0) + 1e-12 + 1,
            torch.full((), 1.0) + torch.full((), 1e-12),
        )
    assert [float(one - 1) for one in sums] == pytest.approx([1e-12] * 5, rel=1e-3)
    assert torch.zeros(1).dtype is torch.float32


def test_a_mask_of_float32_is_filled_with_what_bfloat16_holds() -> None:
    x, mask = torch.zeros(2, dtype=torch.bfloat16), torch.tensor([True, False])
    least = torch.finfo(torch.float32).min
    with pytest.raises(RuntimeError):
        x.masked_fill(mask, least)
    with FilledWithinRange():
        filled = x.masked_fill(mask, least)
    assert filled.tolist() == [torch.finfo(torch.bfloat16).min, 0]


def test_the_page_counts_and_says_what_is_not_right() -> None:
    errors = (1e-7, 2e-7, 1e-7, 3e-7)
    good = [Row("VAE", "generative", dtype, RIGHT, 1.5, *errors) for dtype in DTYPES]
    note = "CaptureError:  at /a/site-packages/b.py: no|t"
    bad = Row("GAN", "generative", "float32", "refused", note=note)
    text = page([*good, bad], "a machine")
    assert "1 of 2 programs run and are right in float32 and in bfloat16 (1 in float32, 1" in text
    assert "| VAE | right | 2.0e-07 / 3.0e-07 | 1.5 | right | 2.0e-07 / 3.0e-07 | 1.5 |  |" in text
    assert "- GAN (float32): refused: CaptureError: at b.py: no/t" in text
