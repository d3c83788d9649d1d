# SPDX-License-Identifier: Apache-2.0
"""What a vector gathers element by element is read once: a kernel holds it between its passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tvm import tirx

import amp_ir
from amp_ir.api import lower

ROWS, COLUMNS = 48, 64
Step = Callable[..., torch.Tensor]


def normalized(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


# name -> the step, its inputs, and how often its kernel reads the first of them.
STEPS: dict[str, tuple[Step, Callable[[], tuple[torch.Tensor, ...]], int]] = {
    "patches of an image": (
        lambda x: normalized(x.flatten(2).transpose(1, 2) + 1.0),
        lambda: (torch.randn(2, COLUMNS, 6, 8),),
        1,
    ),
    "every other": (
        lambda x: normalized(x[:, ::2] + 1.0),
        lambda: (torch.randn(ROWS, 2 * COLUMNS),),
        1,
    ),
    "rows by ids": (
        lambda table, ids: normalized(F.embedding(ids, table)),
        lambda: (torch.randn(100, COLUMNS), torch.randint(0, 100, (ROWS,))),
        1,
    ),
    "elements by ids": (
        lambda table, ids, scores: F.softmax(scores + table[ids], -1),
        lambda: (
            torch.randn(32), torch.randint(0, 32, (ROWS, COLUMNS)), torch.randn(ROWS, COLUMNS)
        ),
        1,
    ),
    # Vectors of memory are read again in each of three passes.
    "a part of each row": (
        lambda x: normalized(x[:, COLUMNS:] + 1.0),
        lambda: (torch.randn(ROWS, 2 * COLUMNS),),
        3,
    ),
    "heads": (
        lambda x: normalized(x.unflatten(-1, (4, COLUMNS)).transpose(1, 2) + 1.0),
        lambda: (torch.randn(2, ROWS, 4 * COLUMNS),),
        3,
    ),
}  # fmt: skip


def reads_of_first(mod: Any) -> int:
    """Return how often the one kernel's text reads the first input."""
    functions = lower(mod).ir.functions.values()
    (kernel,) = [one for one in functions if isinstance(one, tirx.PrimFunc)]
    return int(kernel.script().count("in0["))


@pytest.mark.parametrize("name", STEPS)
def test_a_kernel_gathers_an_element_once(name: str) -> None:
    step, make, reads = STEPS[name]
    torch.manual_seed(0)
    batch = make()
    mod, args = amp_ir.trace_step(step, batch, model=nn.Linear(1, 1))
    assert reads_of_first(mod) == reads
    torch.testing.assert_close(amp_ir.compile(mod)(*args), step(*batch))
