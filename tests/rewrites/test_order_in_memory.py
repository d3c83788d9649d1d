# SPDX-License-Identifier: Apache-2.0
"""State that is not contiguous is read, updated and written in the order of its memory."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.memory_order import from_memory, in_memory, inverse, memory_order
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.step_module import InputSpec, OutputSpec, Role, Signature
from amp_ir.rewrites.order_in_memory import order_in_memory
from small_programs import program

ORDER = (0, 2, 3, 1)


def signature(orders: list[tuple[int, ...]], updates: list[int | None]) -> Signature:
    """Of inputs with these orders; shapes are not read."""
    inputs = [
        InputSpec(f"a{k}", Role.PARAMETER, (), "float32", one) for k, one in enumerate(orders)
    ]
    outputs = [
        OutputSpec(f"r{k}", Role.RESULT, (), "float32", one) for k, one in enumerate(updates)
    ]
    return Signature(tuple(inputs), tuple(outputs), None, None)  # type: ignore[arg-type]


def written(ir: Any) -> list[str]:
    """The bindings as text: the op, its arguments and its extents."""
    return [
        f"{one.var.name} {list(shape_of(one.var))} = {op_name(one.value)}"
        f"({', '.join(arg.name for arg in one.value.args if isinstance(arg, relax.Var))})"
        for one in Dataflow(ir).bindings
        if op_name(one.value) is not None
    ]


def test_an_update_is_computed_where_the_state_is() -> None:
    def update(e: Any, w: Any, momentum: Any, gradient: Any, rate: Any) -> Any:
        new = e(op.add(momentum, gradient))
        return [e(op.subtract(w, e(op.multiply(new, rate)))), new]

    shape = (4, 2, 3, 3)
    ir = program(update, shape, shape, shape, ())
    moved = order_in_memory(ir, signature([ORDER, ORDER, (), ()], [0, 1]))
    assert [list(shape_of(one)) for one in moved["main"].params] == [
        [4, 3, 3, 2], [4, 3, 3, 2], [4, 2, 3, 3], [],
    ]  # fmt: skip
    assert written(moved) == [
        "a2_moved [4, 3, 3, 2] = relax.permute_dims(a2)",
        "lv_moved [4, 3, 3, 2] = relax.add(a1, a2_moved)",
        "lv1_moved [4, 3, 3, 2] = relax.multiply(lv_moved, a3)",
        "lv2_moved [4, 3, 3, 2] = relax.subtract(a0, lv1_moved)",
    ]


def test_other_ops_read_a_view_of_the_memory() -> None:
    ir = program(lambda e, x, w: e(op.matmul(x, e(op.astype(w, "bfloat16")))), (5, 4), (4, 3),
                 dtypes=["bfloat16", "float32"])  # fmt: skip
    moved = order_in_memory(ir, signature([(), (1, 0)], [None]))
    assert written(moved) == [
        "lv_moved [3, 4] = relax.astype(a1)",
        "lv_view [4, 3] = relax.permute_dims(lv_moved)",
        "lv1 [5, 3] = relax.matmul(a0, lv_view)",
    ]


def test_the_transpose_of_a_gradient_is_undone() -> None:
    def update(e: Any, w: Any, x: Any, y: Any) -> Any:
        return e(op.subtract(w, e(op.permute_dims(e(op.matmul(x, y))))))

    moved = order_in_memory(
        program(update, (4, 3), (3, 5), (5, 4)), signature([(1, 0), (), ()], [0])
    )
    assert written(moved) == [
        "lv [3, 4] = relax.matmul(a1, a2)",
        "lv2_moved [3, 4] = relax.subtract(a0, lv)",
    ]


def test_a_program_without_such_state_stays() -> None:
    ir = program(lambda e, x: e(op.exp(x)), (2, 3))
    assert order_in_memory(ir, signature([()], [None])) is ir


@pytest.mark.parametrize("orders", itertools.product([(), (1, 0), (0, 1)], repeat=3), ids=str)
def test_values_are_those_of_the_usual_order(orders: tuple[tuple[int, ...], ...]) -> None:
    """Also of state in two orders, of rows that repeat, and of a value that is read both ways."""

    def step(e: Any, a: Any, b: Any, c: Any, row: Any) -> Any:
        total = e(op.add(e(op.multiply(a, b)), row))
        chosen = e(op.where(e(op.greater(a, c)), total, b))
        scaled = e(op.multiply(chosen, relax.const(2.0)))
        return [chosen, scaled, e(op.sum(chosen, axis=[0])), e(op.subtract(c, c))]

    ir = program(step, (4, 3), (4, 3), (4, 3), (1, 3))
    wanted = [0, 1, None, 2]
    tensors = [torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3), torch.randn(1, 3)]
    expected = interpret(ir, tensors)
    moved = order_in_memory(ir, signature([*orders, ()], wanted))
    inside = [in_memory(one, order) for one, order in zip(tensors, [*orders, ()], strict=True)]
    found = interpret(moved, inside)
    for one, reference, k in zip(found, expected, wanted, strict=True):
        order = () if k is None else orders[k]
        torch.testing.assert_close(from_memory(one, order), reference, rtol=0, atol=0)


@given(st.lists(st.integers(1, 3), max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_every_permuted_tensor_is_found(shape: list[int], chance: Any) -> None:
    order = list(range(len(shape)))
    chance.shuffle(order)
    tensor = torch.arange(math.prod(shape)).reshape(shape).permute(order)
    found = memory_order(tensor)
    assert found is not None
    assert in_memory(tensor, found).is_contiguous()
    assert in_memory(tensor, found).flatten().tolist() == list(range(tensor.numel()))
    assert torch.equal(from_memory(in_memory(tensor, found), found), tensor)
    assert found == () or [found[k] for k in inverse(found)] == list(range(len(shape)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(4, 6).t()[::2],
        torch.zeros(3, 1).expand(3, 4),
        torch.zeros(9).as_strided((3, 3), (2, 1)),
    ],
    ids=["gaps", "gaps of a transpose", "repeated", "overlapping"],
)
def test_gaps_and_overlaps_have_no_order(tensor: torch.Tensor) -> None:
    assert memory_order(tensor) is None
