# SPDX-License-Identifier: Apache-2.0
"""The exponentials of a row are computed once: a kernel holds them between its passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tvm import tirx

import amp_ir
from amp_ir.api import lower
from amp_ir.ir.step_module import StepModule
from amp_ir.loops.codegen.held_rows import MOST_HELD

ROWS, CLASSES = 12, 512
# The first coefficient of the series of an exponential, which a kernel's text has for each.
SERIES = "0.00138145987875"


def loss_step(scores: torch.Tensor, target: torch.Tensor, **options: Any) -> Any:
    """A loss and its gradient."""
    leaf = scores.detach().requires_grad_()
    loss = F.cross_entropy(leaf.float(), target, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def traced(step: Callable[..., Any], *batch: torch.Tensor) -> tuple[StepModule, Any]:
    return amp_ir.trace_step(step, batch, model=nn.Linear(1, 1))


def exponentials(mod: StepModule, **options: Any) -> int:
    functions = lower(mod, **options).ir.functions.values()
    return sum(one.script().count(SERIES) for one in functions if isinstance(one, tirx.PrimFunc))


def causal(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


STEPS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "softmax": (lambda x: F.softmax(x, -1), lambda: (torch.randn(ROWS, CLASSES),)),
    "softmax of bfloat16": (
        lambda x: F.softmax(x.float(), -1).bfloat16(),
        lambda: (torch.randn(ROWS, CLASSES).bfloat16(),),
    ),
    "attention": (causal, lambda: (torch.randn(1, 2, 64, 16),)),
    "loss": (loss_step, lambda: (torch.randn(ROWS, CLASSES), torch.arange(ROWS))),
    "loss with smoothed labels": (
        lambda scores, target: loss_step(scores, target, label_smoothing=0.1),
        lambda: (torch.randn(ROWS, CLASSES), torch.arange(ROWS)),
    ),
    "loss of bfloat16": (
        loss_step, lambda: (torch.randn(ROWS, CLASSES).bfloat16(), torch.arange(ROWS))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_a_kernel_computes_the_exponential_of_an_element_once(name: str) -> None:
    step, batch = STEPS[name]
    assert exponentials(traced(step, *batch())[0]) == 1


def test_a_row_too_long_to_hold_is_computed_again() -> None:
    x = torch.randn(2, MOST_HELD + 16)
    mod, args = traced(lambda x: F.softmax(x, -1), x)
    assert exponentials(mod) == 2
    torch.testing.assert_close(amp_ir.compile(mod)(*args), F.softmax(x, -1))


def test_unfused_kernels_have_no_parts_of_other_ops() -> None:
    mod, _ = traced(loss_step, torch.randn(ROWS, CLASSES), torch.arange(ROWS))
    assert all(len(call.ops) == 1 for call in lower(mod, disable_fusion=True).plan.calls)


def test_a_gradient_reads_a_log_softmax_that_is_in_memory_anyway() -> None:
    def step(scores: torch.Tensor, target: torch.Tensor) -> Any:
        leaf = scores.detach().requires_grad_()
        loss = F.ctc_loss(F.log_softmax(leaf, -1), target, (40,) * 8, (10,) * 8)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    scores = torch.randn(40, 8, 100)
    mod, _ = traced(step, scores, torch.randint(1, 100, (8, 10)))
    (first,) = [call for call in lower(mod).plan.calls if "log_softmax" in call.ops]
    assert first.written_nbytes == scores.numel() * 4


@pytest.mark.parametrize("axis", [0, 1])
def test_a_loss_is_over_the_axis_of_classes_whatever_the_softmax_s(axis: int) -> None:
    def step(scores: torch.Tensor, target: torch.Tensor) -> Any:
        leaf = scores.detach().requires_grad_()
        loss = F.nll_loss(F.log_softmax(leaf, axis), target)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    batch = torch.randn(48, 24), torch.randint(0, 24, (48,))
    mod, args = traced(step, *batch)
    torch.testing.assert_close(amp_ir.compile(mod)(*args), step(*batch))


def special_scores(columns: int) -> torch.Tensor:
    """Rows with NaN and infinities at the ends of vectors and in what no vector takes."""
    torch.manual_seed(0)
    ends = (0, 15, 16, columns - 1)
    rows = [torch.randn(columns) for _ in range(3 * len(ends) + 4)]
    for k, column in enumerate(ends):
        for j, number in enumerate((math.nan, math.inf, -math.inf)):
            rows[3 * k + j][column] = number
    rows[-4][:] = -math.inf
    rows[-3][:] = math.nan
    rows[-2][1:] = -math.inf
    rows[-1][columns // 2] = 120.0  # the others' exponentials are subnormal or 0
    return torch.stack(rows)


@pytest.mark.parametrize("columns", [64, 517])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinities_and_nan_are_where_pytorch_has_them(columns: int, dtype: torch.dtype) -> None:
    scores = special_scores(columns).to(dtype)

    def step(x: torch.Tensor) -> Any:
        return F.softmax(x, -1), F.log_softmax(x, -1)

    mod, args = traced(step, scores)
    for ours, theirs in zip(amp_ir.compile(mod)(*args), step(scores), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("columns", [64, 517])
@pytest.mark.parametrize("at", [0, 15, 16, -1])
def test_losses_of_infinities_and_nan_are_pytorch_s(columns: int, at: int) -> None:
    scores = special_scores(columns)
    target = torch.full((len(scores),), at % columns)
    target[1] = -100

    def step(scores: torch.Tensor, target: torch.Tensor) -> Any:
        leaf = scores.detach().requires_grad_()
        losses = F.cross_entropy(leaf, target, reduction="none")
        return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]

    mod, args = traced(step, scores, target)
    for ours, theirs in zip(amp_ir.compile(mod)(*args), step(scores, target), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_rows_that_see_nothing_have_weight_nowhere() -> None:
    x, mask = torch.randn(1, 2, 64, 16), torch.rand(64, 64) > 0.5
    mask[3] = False

    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    mod, args = traced(step, x, mask)
    torch.testing.assert_close(amp_ir.compile(mod)(*args), step(x, mask), equal_nan=True)
