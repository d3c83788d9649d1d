# SPDX-License-Identifier: Apache-2.0
"""Resizing, padding and pooling of infinities and NaN, and their gradients, are as in PyTorch.

PyTorch multiplies some neighbours by a weight of 0, which of an infinity makes NaN; what is no
neighbour takes no part.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import amp_ir

Operation = Callable[[torch.Tensor], torch.Tensor]


def _resized(mode: str, **options: object) -> Operation:
    return functools.partial(F.interpolate, mode=mode, **options)


def _resizings() -> dict[int, dict[str, Operation]]:
    found: dict[int, dict[str, Operation]] = {1: {}, 2: {}, 3: {}}
    modes = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}
    for ndim, names in modes.items():
        for mode, out, aligned in itertools.product(names, (3, 4, 6, 9), (False, True)):
            size = (*(2, 5)[: ndim - 1], out)
            options = {"size": size, "align_corners": aligned}
            found[ndim][f"{mode} to {out} {aligned}"] = _resized(mode, **options)
            if ndim == 2:
                found[ndim][f"antialiased {mode} to {out} {aligned}"] = _resized(
                    mode, antialias=True, **options
                )
    found[2]["bicubic to the same size"] = _resized("bicubic", size=(4, 6))
    for ndim in found:
        scale = (1.7, 0.6, 2.0)[:ndim]
        for mode in ("nearest", "nearest-exact", *modes[ndim]):
            found[ndim][f"{mode} by {scale}"] = _resized(mode, scale_factor=scale)
    return found


def _paddings(ndim: int) -> dict[str, Operation]:
    widths = (2, 3, 1, 0, 2, 1)[: 2 * ndim]
    return {
        mode: functools.partial(F.pad, pad=widths, mode=mode)
        for mode in ("constant", "reflect", "replicate", "circular")
    }


def _poolings(ndim: int) -> dict[str, Operation]:
    average, largest = (getattr(F, f"{kind}_pool{ndim}d") for kind in ("avg", "max"))
    adaptive = {k: getattr(F, f"adaptive_{k}_pool{ndim}d") for k in ("avg", "max")}
    more = {"divisor_override": 3} if ndim > 1 else {}
    return {
        "average": lambda x: average(x, 2, stride=1, **more),
        "average of padded": lambda x: average(x, 3, 2, padding=1, count_include_pad=False),
        "average to the ceiling": lambda x: average(x, 2, stride=3, ceil_mode=True),
        "largest": lambda x: largest(x, 2, stride=1),
        "largest of padded": lambda x: largest(x, 3, stride=2, padding=1),
        "adaptive average": lambda x: adaptive["avg"](x, 3),
        "adaptive largest": lambda x: adaptive["max"](x, 3),
    }


def _lines(extents: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[n, 2, *extents]: ordinary numbers with an infinity, two, or NaN at different places."""
    draw = torch.Generator().manual_seed(0)
    batch = torch.randn(16, 2, *extents, generator=draw)
    lines = batch.flatten(1)
    values = [math.inf, -math.inf, math.nan]
    for row, line in enumerate(lines[1:]):
        line[(7 * row) % len(line)] = values[row % 3]
        line[(5 * row + 1) % len(line)] = values[row % 2] if row > 8 else 1.0
    lines[14, [3, 1]] = math.nan
    return batch.to(dtype)


def _operations(ndim: int) -> dict[str, Operation]:
    return {**_resizings()[ndim], **_paddings(ndim), **_poolings(ndim)}


def _differ(got: torch.Tensor, wanted: torch.Tensor) -> int:
    tolerance = 1e-5 if wanted.dtype == torch.float32 else 1e-12
    return int((~torch.isclose(got, wanted, tolerance, tolerance, equal_nan=True)).sum())


def _differences(op: Operation, x: torch.Tensor, grad: torch.Tensor) -> tuple[int, int]:
    """The numbers of elements of the result and of the gradient that are not as in PyTorch."""

    def step(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.detach().clone().requires_grad_()
        result = op(leaf)
        return result.detach(), torch.autograd.grad(result, leaf, grad)[0]

    mod, args = amp_ir.trace_step(step, (x, grad), model=torch.nn.Linear(1, 1))
    got, wanted = amp_ir.compile(mod)(*args), step(x, grad)
    return _differ(got[0], wanted[0]), _differ(got[1], wanted[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_neighbours_of_infinities(ndim: int, dtype: torch.dtype) -> None:
    operations = _operations(ndim)
    if dtype == torch.float64:
        # The same kernels in another dtype: some of each kind.
        operations = dict([*operations.items()][::3])
    x = _lines((4, 4, 6)[3 - ndim :], dtype)
    # A step for each: merged into few kernels, those of three axes take LLVM seven times as long.
    found = {
        name: _differences(op, x, _lines(tuple(op(x).shape[2:]), dtype))
        for name, op in operations.items()
    }
    assert not {name: counts for name, counts in found.items() if any(counts)}
