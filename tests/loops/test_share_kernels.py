# SPDX-License-Identifier: Apache-2.0
"""Kernels that differ only by where they start to read: one of them, and the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tvm
from tvm import tirx
from tvm.relax import op

import amp_ir
from amp_ir.loops import write_kernels
from amp_ir.loops.fusion.fuse import fuse_loops
from amp_ir.loops.fusion.share_kernels import share_kernels
from own_recurrence import UnrolledLstm
from small_programs import program

ROWS, COLUMNS = 16, 32


def row_of(x: Any, row: int) -> Any:
    return op.strided_slice(x, axes=[0], begin=[row], end=[row + 1])


def fused(*rows: int, build: Any) -> tvm.IRModule:
    """A kernel for each row of a matrix."""

    def body(e: Any, x: Any) -> Any:
        return e(op.concat([e(build(e, e(row_of(x, row)))) for row in rows], 0))

    return fuse_loops(program(body, (ROWS, COLUMNS)))


def kernels(ir: tvm.IRModule) -> list[tirx.PrimFunc]:
    return [one for one in ir.functions.values() if isinstance(one, tirx.PrimFunc)]


def offsets(ir: tvm.IRModule) -> list[list[int]]:
    """The numbers that each kernel call passes, in order; calls that pass none are left out."""
    values = [one.value for one in ir["main"].body.blocks[0].bindings]
    calls = [one for one in values if isinstance(one, tvm.ir.Call)]
    found = [
        [int(field) for field in call.args[1].fields if isinstance(field, tirx.IntImm)]
        for call in calls
    ]
    return [numbers for numbers in found if numbers]


def summed(e: Any, x: Any) -> Any:
    # A reduction has a kernel of its own, which concat cannot draw in.
    return op.sum(e(op.tanh(x)), [1], keepdims=True)


def test_kernels_that_read_other_rows_are_one_with_a_number():
    ir = fused(3, 5, 9, build=summed)
    assert len(kernels(ir)) == 4
    shared = share_kernels(ir)
    assert len(kernels(shared)) == 2
    assert offsets(shared) == [[row * COLUMNS] for row in (3, 5, 9)]


def test_a_kernel_of_which_there_is_one_and_the_first_row_stay_as_they_are():
    # Reading from row 0 adds nothing, so that there is no number to replace.
    ir = fused(0, 7, build=summed)
    assert share_kernels(ir).functions.keys() == ir.functions.keys()
    assert offsets(share_kernels(ir)) == []


def test_a_kernel_written_twice_is_written_once_and_takes_no_number():
    ir = fused(3, 5, build=summed)
    third, fifth = (binding.value.args[0] for binding in ir["main"].body.blocks[0].bindings[:2])
    twice = tvm.IRModule({**ir.functions, fifth: ir[third]})
    shared = share_kernels(twice)
    assert len(kernels(shared)) == 2
    assert offsets(shared) == []


def test_numbers_that_all_kernels_share_stay_literals():
    def shifted(e: Any, x: Any) -> Any:
        left = op.strided_slice(x, axes=[1], begin=[4], end=[12])
        return op.sum(e(op.tanh(e(left))), [1], keepdims=True)

    shared = share_kernels(fused(3, 5, build=shifted))
    assert offsets(shared) == [[row * COLUMNS] for row in (3, 5)]
    (text,) = [str(one) for one in kernels(shared) if "start" in str(one)]
    assert "+ 4" in text or "4 +" in text


def losses(hidden: int) -> list[float]:
    """Three steps of a small LSTM that is unrolled."""
    torch.manual_seed(0)
    model = UnrolledLstm(hidden, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype="bfloat16")
    x = torch.randn(4, 15, hidden)
    found = [float(train(x)) for _ in range(3)]
    assert train.compiled is not None
    found.append(float(train.compiled.report.kernel_count))
    return found


def test_a_recurrence_gives_the_same_bits_with_fewer_kernels(monkeypatch: pytest.MonkeyPatch):
    *together, few = losses(16)
    monkeypatch.setattr(write_kernels, "share_kernels", lambda ir: ir)
    *apart, many = losses(16)
    assert together == apart
    assert few < many


def test_kernels_that_nothing_calls_are_not_written():
    """Of rows of a mask that the step makes itself, fusion leaves kernels without a call."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        state, loss = x.new_zeros(2, 8), torch.zeros(())
        for t in range(4):
            query = (state + x[:, t])[:, None]
            seen = torch.nn.functional.scaled_dot_product_attention(
                query, x, x, attn_mask=mask[t][None]
            )
            state = torch.tanh(model(seen[:, 0]))
            loss = loss + state.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    x = torch.randn(2, 4, 8)
    torch.manual_seed(0)
    start = {name: one.clone() for name, one in model.state_dict().items()}
    got = [train(x).item() for _ in range(3)]
    model.load_state_dict(start)
    torch.testing.assert_close(got, [step(x).item() for _ in range(3)], rtol=1e-5, atol=1e-6)
