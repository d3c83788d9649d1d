# SPDX-License-Identifier: Apache-2.0
"""The kernels that the placement counts bytes for are those that fusion makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tvm import relax
from tvm.relax import op

import amp_ir
from amp_ir.amp.kernels import COMPUTED_BY_READERS, kernels_from, places_of
from amp_ir.amp.real_kernels import without_optimizer
from amp_ir.host import native
from amp_ir.ir.step_graph import read_step
from small_programs import program


def captured(model, batch, optimizer=None):
    def step(x):
        if optimizer is not None:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss

    return amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)


def test_an_op_without_a_kernel_is_in_those_of_its_readers():
    def build(e, x):
        cheap = e(op.negative(x))
        return [e(op.exp(cheap)), e(op.tanh(cheap))]

    graph = read_step(program(build, (4, 8)))
    names = {one.name: one.variable for one in graph.ops}
    kernels = kernels_from(graph, {names["relax.exp"]: 3, names["relax.tanh"]: 5})
    assert kernels == [COMPUTED_BY_READERS, 3, 5]
    assert places_of(graph, kernels) == [{3, 5}, {3}, {5}]


def test_what_fusion_takes_apart_gets_a_number_of_its_own():
    model = nn.MultiheadAttention(8, 2, batch_first=True)

    def step(x):
        loss = model(x, x, x, need_weights=False)[0].sum()
        loss.backward()
        return loss

    mod, _ = amp_ir.trace_step(step, (torch.randn(2, 4, 8),), model=model)
    graph = read_step(mod.ir)
    kernels = kernels_from(graph, {})
    found = [kernels[one.position] for one in graph.ops if one.name.startswith("amp_ir.attention")]
    assert len(set(found)) == len(found) == 2
    assert COMPUTED_BY_READERS not in found


def test_the_optimizer_is_left_out_and_what_it_reads_stays():
    model = nn.Linear(4, 3)
    mod, _ = captured(model, (torch.randn(5, 4),), torch.optim.AdamW(model.parameters()))
    short = without_optimizer(mod.ir)
    relax.analysis.well_formed(short)
    phases = [one.location.phase for one in read_step(short).ops]
    assert phases and "optimizer" not in phases
    before = [one for one in read_step(mod.ir).ops if one.location.phase != "optimizer"]
    assert len(phases) == len(before)


def test_a_matmul_is_in_the_call_that_adds_its_bias_and_stays_float32():
    mod, args = captured(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (torch.randn(4, 8),))
    plan = amp_ir.autocast(mod, args, amp_dtype="bfloat16").plan
    forward = [one for one in plan.ops if one.phase == "forward"]
    (matmul,) = [one for one in forward if one.name == "relax.matmul"]
    # PyTorch's matmul is a call without the bias, whose result is stored low.
    is_one_call = native.has("amp_ir.onednn.matmul")
    assert (matmul.kernel == COMPUTED_BY_READERS) == is_one_call
    assert matmul.results == ("float32" if is_one_call else "bfloat16",)


@pytest.mark.parametrize(("side", "left"), [(4, "float32"), (32, "bfloat16")])
def test_a_convolution_before_a_normalization_over_few_elements_is_rounded_once(side, left):
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    mod, args = captured(model, (torch.randn(2, 3, side, side),))
    plan = amp_ir.autocast(mod, args, amp_dtype="bfloat16").plan
    (conv,) = [one for one in plan.ops if one.name == "amp_ir.conv"]
    assert conv.results == (left,)


def test_a_convolution_is_rounded_after_its_bias():
    mod, args = captured(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (torch.randn(2, 3, 8, 8),))
    plan = amp_ir.autocast(mod, args, amp_dtype="bfloat16").plan
    (conv,) = [one for one in plan.ops if one.name == "amp_ir.conv"]
    assert conv.results == ("float32",)
    assert conv.reason.startswith("The bias is added before")


def test_a_plan_gives_the_same_program_without_asking_fusion():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    mod, args = captured(model, (torch.randn(4, 8),))
    low = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    again = amp_ir.amp.autocast.autocast(mod, args, amp_dtype="bfloat16", plan=low.plan)
    assert again.ir.script() == low.ir.script()
