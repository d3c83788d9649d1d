# SPDX-License-Identifier: Apache-2.0
"""Tables fit into 80 and 140 columns: what is cut, what is folded, and what is counted."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import amp_ir
from amp_ir.report.explain import add_arguments, show
from amp_ir.report.short_places import cut, short_dtype, short_nbytes, short_path, short_place


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection_with_a_long_name_for_a_narrow_table = nn.Linear(8, 8)

    def forward(self, x):
        y = self.projection_with_a_long_name_for_a_narrow_table(x)
        return torch.relu(torch.cat([y[:, :4], y[:, 4:]], 1))


MODEL = nn.Sequential(*[Layer() for _ in range(4)])
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9)
BATCH = (torch.randn(4, 8),)
OWNERS = {"model": MODEL, "optimizer": OPTIMIZER}


def step(x):
    loss = MODEL(x).square().mean()
    loss.backward()
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()
    return loss.detach()


@pytest.fixture(scope="module")
def plan():
    mod, args = amp_ir.trace_step(step, BATCH, **OWNERS)
    return amp_ir.autocast(mod, args, amp_dtype="bfloat16").plan


def printed(columns: int, printing) -> list[str]:
    console = Console(width=columns, force_terminal=True, color_system=None)
    with console.capture() as capture:
        printing(console)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert max(map(len, lines)) <= columns
    return lines


def explained(plan, columns: int, *words: str) -> list[str]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(words)
    arguments.training = "train.py"
    return printed(columns, lambda console: show(plan, arguments, console))


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_a_plan_folds_layers_and_counts_what_it_hides(plan, columns):
    lines = explained(plan, columns)
    assert any(re.search(r"^\d.* and \d alike$", line) for line in lines)
    assert not any(" optimizer " in line for line in lines if " -> " in line)
    text = " ".join(lines)
    count = sum(op.phase == "optimizer" for op in plan.ops if op.reads or op.results)
    assert f"not shown: {count} ops of the optimizer, whose dtypes stay" in text
    assert "that only move data (--views); --all shows every op of every layer" in text
    dtypes = "bfloat16 -> float32" if columns == 140 else "bf16 -> f32"
    assert any("matmul" in line and dtypes in line for line in lines)


def test_all_shows_every_op_once(plan):
    lines = explained(plan, 140, "--all")
    rows = [line for line in lines if " -> " in line and line.startswith("  ")]
    assert len(rows) == len(plan.ops)
    assert "alike" not in " ".join(lines) and "not shown" not in " ".join(lines)


@pytest.mark.parametrize("columns", [80, 140])
def test_an_examination_is_a_line_an_op(columns):
    found = amp_ir.examine(step, BATCH, **OWNERS)
    lines = printed(columns, found.show)
    shown = [line for line in lines if line.startswith(("relax.", "amp_ir."))]
    assert any("relax.matmul" in line and "functional.py" not in line for line in shown)
    assert not any(line.startswith("relax.concat") for line in shown)
    assert "which move data or few bytes; --all shows them" in " ".join(lines)
    whole = printed(columns, lambda console: found.show(console, everything=True))
    assert len([x for x in whole if x.startswith(("relax.", "amp_ir."))]) == len(found.ops)
    assert len(str(found).splitlines()) < len(whole) + 5


def test_names_and_places_are_cut_in_the_middle(monkeypatch, tmp_path):
    assert cut("encoder.layer.0.attention.self", 16) == "encod\u2026ntion.self"
    assert cut("short", 5) == "short" and cut("longer", 1) == "\u2026"
    monkeypatch.chdir(tmp_path)
    assert short_path(str(tmp_path / "nets" / "a.py")) == str(Path("nets") / "a.py")
    installed = "/env/lib/python3.11/site-packages/transformers/models/bert/modeling_bert.py:12"
    assert short_path(installed) == "transformers/models/bert/modeling_bert.py:12"
    assert short_path("/env/lib/python3.11/contextlib.py:8") == "contextlib.py:8"
    place = f"bert.encoder (backward), {installed}"
    assert short_place(place, 80) == "bert.encoder, transformers/models/bert/modeling_bert.py:12"
    assert short_place(place, 40) == "bert.encoder, modeling_bert.py:12"
    assert short_place(place, 24) == "modeling_bert.py:12"
    assert short_place("step (forward)", 24) == "step"
    assert [short_dtype(one) for one in ("bfloat16", "float32", "int64", "uint8", "bool")] == [
        "bf16", "f32", "i64", "u8", "bool",
    ]  # fmt: skip
    assert (short_nbytes(3 * 2**19), short_nbytes(1536)) == ("1.5 MiB", "1.5 KiB")
    assert (short_nbytes(512), short_nbytes(1), short_nbytes(0)) == ("512 B", "1 B", "0 B")
