# SPDX-License-Identifier: Apache-2.0
"""Regions in which the user switches torch.autocast off are left alone, backward included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.amp import custom_bwd, custom_fwd

import amp_ir
from amp_ir.ir.step_graph import read_step

Region = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _InFloat32(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return gradient @ b.t(), a.t() @ gradient


def _switched_off(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return h.float() @ x.t()


@torch.autocast("cpu", enabled=False)
def _decorated(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return h.float() @ x.t()


def _around_one_that_is_on(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        product = h.float() @ x.t()
        with torch.autocast("cpu", enabled=True, dtype=torch.bfloat16):
            square = product @ product.t()
        return product + square.float() * 1e-12


def _custom(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _InFloat32.apply(h, x.t().contiguous())


REGIONS = [_switched_off, _decorated, _around_one_that_is_on, _custom]


def _step(model: torch.nn.Module, region: Region, dtype: torch.dtype | None) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            inside = region(model(x), x)
        loss = (inside.float() / 1e3).square().mean()
        loss.backward()
        return inside, loss

    def captured(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inside = region(model(x), x)
        loss = (inside.float() / 1e3).square().mean()
        loss.backward()
        return inside, loss

    return captured if dtype is None else step


@pytest.mark.parametrize("region", REGIONS)
def test_a_region_without_autocast_computes_as_in_pytorch(region: Region):
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32, bias=False)
    torch.nn.init.eye_(model.weight)
    x = torch.full((4, 32), 200.0) + torch.randn(4, 32)
    ours = copy.deepcopy(model)
    inside, loss = _step(model, region, torch.float16)(x)
    mod, _ = amp_ir.trace_step(_step(ours, region, None), (x,), model=ours)
    found, found_loss = amp_ir.compile(amp_ir.autocast(mod, amp_dtype="float16"))(x)
    # 32 * 200^2 = 1.3e6 is beyond float16; PyTorch rounds the layer's result by 2^-11, and a
    # bfloat16 product inside of the region by 2^-8 of what is added there, 1e-12 * 1.6e12 * 32.
    rounding = 2.0**-8 if region is _around_one_that_is_on else 2.0**-10
    assert torch.isfinite(inside).all() and inside.min() > 1e6
    assert (found - inside).norm() <= rounding * inside.norm()
    assert (found_loss - loss).abs() <= 2 * rounding * loss.abs()
    gradient, expected = ours.weight.grad, model.weight.grad
    assert gradient is not None and expected is not None
    assert (gradient - expected).norm() <= 4 * rounding * expected.norm()


def test_nothing_of_a_region_without_autocast_is_low():
    model = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8)
    mod, _ = amp_ir.trace_step(_step(model, _switched_off, None), (x,), model=model)
    graph = read_step(amp_ir.autocast(mod, amp_dtype="bfloat16").ir)
    products = [op for op in graph.ops if op.name == "relax.matmul"]
    dtypes = {op.location.precision: set[str]() for op in products}
    for op in products:
        dtypes[op.location.precision].update(graph.values[leaf].dtype for leaf in op.reads)
    # Forward, whose result the region casts, and backward of the layer, and two of the region.
    assert dtypes == {"widened": {"bfloat16"}, "rules": {"bfloat16"}, "off": {"float32"}}


def test_a_region_of_another_device_changes_nothing():
    def region(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return h @ x.t()

    model = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8)
    mod, _ = amp_ir.trace_step(_step(model, region, None), (x,), model=model)
    assert all(op.location.precision != "off" for op in read_step(mod.ir).ops)
