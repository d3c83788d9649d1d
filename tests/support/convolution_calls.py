# SPDX-License-Identifier: Apache-2.0
"""Calls of the native convolutions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F

from prepared_process import run_code

DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
]


@attrs.frozen
class Case:
    """One convolution; spatial vectors have one entry a dim."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    samples: int = 2

    @property
    def options(self) -> dict[str, Any]:
        return {"strides": self.strides, "padding": self.padding, "dilation": self.dilation}


CASES = {
    "1d": Case((9,), (3,), (1,), (1,), (1,)),
    "1d strided and dilated": Case((11,), (3,), (2,), (1,), (2,)),
    "2d": Case((7, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
    "2d, one sample": Case((8, 9), (3, 3), (1, 1), (1, 1), (1, 1), samples=1),
    "2d, one column": Case((70, 1), (3, 1), (1, 1), (1, 0), (1, 1), samples=1),
    "2d, one row": Case((1, 70), (1, 3), (1, 1), (0, 1), (1, 1)),
    "2d uneven": Case((9, 7), (3, 2), (2, 1), (0, 1), (1, 2)),
    "2d strided": Case((9, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    "2d pointwise, strided": Case((8, 8), (1, 1), (2, 2), (0, 0), (1, 1)),
    "3d, one slice": Case((1, 8, 9), (1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), samples=1),
    "3d": Case((5, 6, 7), (3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 2)),
}


CHANNELS = {"few": (3, 5, 1), "blocks": (16, 32, 1), "groups": (4, 6, 2), "depthwise": (8, 8, 8)}


def channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def batch_inside(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def positions_outside(t: torch.Tensor) -> torch.Tensor:
    inner = t.movedim(0, -1).movedim(0, -1)
    return inner.contiguous().movedim(-1, 0).movedim(-1, 0)


ORDERS = {
    "plain": lambda t: t,
    "channels last": channels_last,
    "batch inside": batch_inside,
    "positions outside": positions_outside,
}


def operands(case: Case, channels: tuple[int, int, int], dtypes, order):
    """For each verb, its two operands, its result to fill, and the result in float64."""
    inputs, outputs, groups = channels
    low, out = dtypes
    x = torch.randn(case.samples, inputs, *case.size).to(low)
    w = torch.randn(outputs, inputs // groups, *case.kernel).to(low)
    exact_x, exact_w = x.double().requires_grad_(), w.double().requires_grad_()
    forward = (F.conv1d, F.conv2d, F.conv3d)[len(case.size) - 1]
    exact_y = forward(
        exact_x, exact_w, None, case.strides, case.padding, case.dilation, groups=groups
    )
    grad = torch.randn(exact_y.shape).to(low)
    exact_y.backward(grad.double())
    x, w, grad = order(x), order(w), order(grad)

    def empty(like: torch.Tensor) -> torch.Tensor:
        return order(torch.full(like.shape, float("nan"), dtype=out))

    return {
        "conv": (x, w, empty(exact_y), exact_y.detach()),
        "conv_backward_input": (grad, w, empty(x), exact_x.grad),
        "conv_backward_weight": (grad, x, empty(w), exact_w.grad),
    }


def run_with_isa(isa: str, test_file: str, program: str) -> None:
    """Run a program that may import the tests beside `test_file`, on a CPU with this ISA.

    Which instructions are used is decided once a process.
    """
    folders = [str(Path(test_file).parent), *sys.path]
    done = run_code(program, {"ONEDNN_MAX_CPU_ISA": isa}, folders=folders)
    assert done.returncode == 0, done.stderr
