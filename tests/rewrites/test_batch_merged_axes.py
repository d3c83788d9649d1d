# SPDX-License-Identifier: Apache-2.0
"""Matmuls of merged copies as batches: what they become, what is left alone, and the numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from tvm.relax import op

import amp_ir
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.strided_view import view_of
from amp_ir.rewrites.batch_merged_axes import batch_merged_axes
from relax_functions import assert_ir_equal
from small_programs import calls, program

T, E, D, F = 128, 3, 160, 192


def merged(emit, x, order, shape):
    return emit(op.reshape(emit(op.permute_dims(x, list(order))), list(shape)))


def is_same(ir, tolerance=2e-5):
    """Whether the rewritten program has the numbers of `ir`; the rewritten program."""
    torch.manual_seed(0)
    parameters = ir["main"].params
    inputs = [torch.randn([int(n) for n in one.ty.shape]) for one in parameters]
    new = batch_merged_axes(ir)
    before, after = (interpret(one, inputs) for one in (ir, new))
    for left, right in zip(before, after, strict=True):
        torch.testing.assert_close(right, left, rtol=tolerance, atol=tolerance * left.abs().max())
    return new


def copies(ir):
    """How many reshapes change the order in memory."""
    flow = Dataflow(ir)
    return sum(
        view_of(variable, flow.values).base.same_as(variable)
        for variable in flow.calls("relax.reshape")
    )


@pytest.mark.parametrize("order", list(itertools.permutations((0, 1, 2))))
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_merged_free_axis_is_a_batch(order, side, transposed):
    """Every order in memory, as either operand, merged in either order."""
    extents = (E, D, F)
    stored = [extents[order.index(k)] for k in range(3)]
    matrix = (D, E * F) if side else (E * F, D)

    def build(emit, x, w):
        # From memory to [E, D, F], then to the axes of the matrix.
        axes = [order[k] for k in ((1, 0, 2) if side else (0, 2, 1))]
        shape = matrix[::-1] if transposed else matrix
        if transposed:
            axes = [order[k] for k in ((0, 2, 1) if side else (1, 0, 2))]
        copy = merged(emit, w, axes, shape)
        if transposed:
            copy = emit(op.permute_dims(copy))
        return [emit(op.matmul(x, copy) if side else op.matmul(copy, x))]

    ir = program(build, (T, D) if side else (D, T), stored)
    # Matrices of F come one after another in memory only where E is the outer axis of the two.
    is_better = copies(ir) > 0 and [d for d in stored if d != D] == [E, F]
    new = is_same(ir)
    if is_better:
        (matmul,) = calls(new, "relax.matmul")
        assert len(matmul[1].ty.shape) == 3
    else:
        assert_ir_equal(new, ir)


def test_a_result_in_the_order_of_the_batch_is_the_batch():
    def build(emit, x, w):
        y = emit(op.matmul(x, merged(emit, w, (1, 0, 2), (D, E * F))))
        return [merged(emit, emit(op.reshape(y, [T, E, F])), (1, 0, 2), (E, T, F))]

    ir = program(build, (T, D), (E, D, F))
    new = is_same(ir)
    assert [value.op.name for value in Dataflow(new).values.values() if hasattr(value, "op")] == [
        "relax.matmul"
    ]


@pytest.mark.parametrize("left_is_copy", [True, False])
@pytest.mark.parametrize("right_is_copy", [True, False])
def test_a_merged_summed_axis_is_a_sum_over_the_batch(left_is_copy, right_is_copy):
    def build(emit, a, b):
        if left_is_copy:
            a = merged(emit, a, (1, 0, 2), (T, E * F))
        if right_is_copy:
            b = merged(emit, b, (0, 2, 1), (E * F, D))
        return [emit(op.matmul(a, b))]

    ir = program(
        build,
        (E, T, F) if left_is_copy else (T, E * F),
        (E, D, F) if right_is_copy else (E * F, D),
    )
    new = is_same(ir)
    assert copies(new) == 0
    assert len(calls(new, "relax.sum")) == (left_is_copy or right_is_copy)


def test_a_summed_axis_merged_with_the_batch_inside():
    def build(emit, a, b):
        return [emit(op.matmul(merged(emit, a, (1, 2, 0), (T, F * E)), b))]

    new = is_same(program(build, (E, T, F), (F * E, D)))
    assert len(calls(new, "relax.sum")) == 1


@pytest.mark.parametrize(
    ("tokens", "experts", "depth", "width"),
    [(64, 3, 160, 192), (128, 3, 160, 64), (128, 65, 128, 128)],
)
def test_small_or_many_matrices_are_left_alone(tokens, experts, depth, width):
    def build(emit, x, w):
        return [emit(op.matmul(x, merged(emit, w, (1, 0, 2), (depth, experts * width))))]

    ir = program(build, (tokens, depth), (experts, depth, width))
    assert_ir_equal(batch_merged_axes(ir), ir)


def test_terms_larger_than_the_copy_are_not_written():
    def build(emit, a, b):
        return [emit(op.matmul(merged(emit, a, (1, 0, 2), (T, E * F)), b))]

    ir = program(build, (E, T, F), (E * F, 2 * F))
    assert_ir_equal(batch_merged_axes(ir), ir)


def test_what_a_matmul_can_write_merged_is_left_alone():
    """Heads of attention: their product is written as the next matmul reads it."""

    def build(emit, p, v, w):
        heads = emit(op.matmul(p, v))
        return [emit(op.matmul(merged(emit, heads, (1, 0, 2), (T, E * F)), w))]

    ir = program(build, (E, T, T), (E, T, F), (E * F, D))
    assert_ir_equal(batch_merged_axes(ir), ir)


class Experts(nn.Module):
    def __init__(self, equation):
        super().__init__()
        self.equation = equation
        self.up = nn.Parameter(torch.randn(E, D, F) / D**0.5)
        self.down = nn.Parameter(torch.randn(E, F, D) / F**0.5)

    def forward(self, x):
        if self.equation is None:
            hidden = torch.matmul(x, self.up)
        else:
            hidden = torch.einsum(self.equation, x, self.up)
        return torch.einsum("etf,efd->td", nn.functional.silu(hidden), self.down)


@pytest.mark.parametrize("equation", [None, "td,edf->etf"])
def test_experts_copy_nothing_and_train_as_pytorch_does(equation):
    torch.manual_seed(0)
    ours, theirs = Experts(equation), Experts(equation)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(T, D)

    def step_of(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(x):
            loss = (x + model(x)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, optimizer

    step, optimizer = step_of(ours)
    mod, _ = amp_ir.trace_step(step, (x,), model=ours, optimizer=optimizer)
    assert copies(mod.ir) == 0
    train = amp_ir.jit(step, model=ours, optimizer=optimizer)
    eager, _ = step_of(theirs)
    for _ in range(3):
        torch.testing.assert_close(train(x), eager(x), rtol=1e-5, atol=1e-6)
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
