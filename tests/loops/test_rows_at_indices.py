# SPDX-License-Identifier: Apache-2.0
"""Sums of rows at indices: gradients of look-ups, messages of graphs, tokens of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.api import lower

Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

IDS = torch.tensor([3, 3, 0, 29, 3, 7, 7, 0, 0, 1, 2, 3])


def expanded(ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return ids.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


# What is added to a table at `ids`, as users write it.
SUMS: dict[str, Sum] = {
    "index_add": lambda table, ids, rows: table.index_add(0, ids, rows),
    "scaled": lambda table, ids, rows: table.index_add(0, ids, rows, alpha=0.5),
    "scatter_add": lambda table, ids, rows: table.scatter_add(0, expanded(ids, rows), rows),
    "index_put": lambda table, ids, rows: table.index_put((ids,), rows, accumulate=True),
    "negative": lambda table, ids, rows: table.index_put((ids - 30,), rows, accumulate=True),
    "onto zeros": lambda table, ids, rows: torch.zeros_like(table).index_add(0, ids, rows) + table,
    "scattered onto zeros": lambda table, ids, rows: (
        torch.zeros_like(table).scatter_add(0, expanded(ids, rows), rows) + table
    ),
}
# What is written to rows, or combined with them, one after the other.
WRITES: dict[str, Sum] = {
    "index_copy": lambda table, ids, rows: table.index_copy(0, ids, rows),
    "assigned": lambda table, ids, rows: table.index_put((ids - 30,), rows),
    **{
        f"{kind} {include_self}": lambda table, ids, rows, kind=kind, include_self=include_self: (
            table.scatter_reduce(0, expanded(ids, rows), rows, kind, include_self=include_self)
        )
        for kind in ("amax", "amin", "prod", "mean")
        for include_self in (True, False)
    },
}


def compared(
    step: Callable[..., torch.Tensor], *arguments: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a compiled function and PyTorch return."""
    mod, args = amp_ir.trace_step(step, arguments, model=nn.Identity())
    compiled = amp_ir.compile(mod)
    found = compiled(*args)
    return (found[0] if isinstance(found, tuple) else found), step(*arguments)


def kernels_with_lists(mod: Any) -> list[str]:
    """The kernels that go along the items of each index, whose rows they take as vectors."""
    functions = lower(mod).ir.functions.items()
    return [key.name_hint for key, function in functions if "while" in str(function)]


@pytest.mark.parametrize("shape", [(30, 64), (30, 7), (30,), (30, 3, 16), (30, 200)], ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_rows_are_added_in_order_to_the_bit(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    table, rows = torch.randn(shape), torch.randn(len(IDS), *shape[1:])
    found, right = compared(SUMS[name], table, IDS, rows)
    torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("name", ["index_add", "scatter_add"])
def test_rows_of_other_dtypes_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    table, rows = ((10 * torch.randn(n, 40)).to(dtype) for n in (30, len(IDS)))
    found, _ = compared(SUMS[name], table, IDS, rows)
    wide = dtype if dtype in (torch.float64, torch.int64) else torch.float32
    right = SUMS[name](table.to(wide), IDS, rows.to(wide)).to(dtype)
    torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("width", [64, 48, 7])
@pytest.mark.parametrize("name", WRITES)
def test_rows_are_written_in_order(name: str, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    table, rows = ((4 * torch.randn(n, width)).to(dtype) for n in (30, len(IDS)))
    found, right = compared(WRITES[name], table, IDS, rows)
    if dtype is torch.bfloat16 and name.startswith(("mean", "prod")):
        # PyTorch rounds after each row, the kernels once.
        wide = WRITES[name](table.float(), IDS, rows.float())
        torch.testing.assert_close(found.float(), wide, rtol=0.01, atol=0.01)
    else:
        torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_two_indices_and_an_index_of_two_dimensions_name_rows() -> None:
    torch.manual_seed(3)
    table, rows = torch.randn(4, 5, 32), torch.randn(2, 6, 32)
    first, second = torch.randint(0, 4, (2, 6)), torch.randint(-5, 5, (2, 6))

    def step(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return table.index_put((first, second), rows, accumulate=True)

    found, right = compared(step, table, rows)
    torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_no_index_adds_nothing() -> None:
    table = torch.randn(6, 16)
    found, right = compared(SUMS["index_add"], table, IDS[:0], torch.randn(0, 16))
    torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [30, 4000])
@pytest.mark.parametrize("look_up", ["weight[ids]", "index_select", "embedding", "expanded gather"])
def test_the_gradient_of_a_look_up_trains_as_in_eager(look_up: str, rows: int) -> None:
    """Four steps with clipping and AdamW, whose updates need the whole gradient."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.weight = nn.Parameter(torch.randn(rows, 24))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if look_up == "weight[ids]":
                return self.weight[ids]
            if look_up == "index_select":
                return self.weight.index_select(0, ids)
            if look_up == "embedding":
                return nn.functional.embedding(ids, self.weight)
            return self.weight.gather(0, ids[:, None].expand(-1, 24))

    def losses(compile_it: bool) -> tuple[list[float], torch.Tensor]:
        model = Table()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

        def step(ids: torch.Tensor) -> torch.Tensor:
            loss = model(ids).tanh().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run: Any = amp_ir.jit(step, model=model, optimizer=optimizer) if compile_it else step
        return [run(IDS.roll(k)).item() for k in range(4)], model.weight.detach()

    (found, weight), (right, expected) = losses(True), losses(False)
    # Norms are summed in another order.
    torch.testing.assert_close(found, right, rtol=1e-6, atol=0)
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SUMS)
def test_whole_rows_are_taken_as_vectors(name: str) -> None:
    mod, _ = amp_ir.trace_step(
        SUMS[name], (torch.randn(30, 64), IDS, torch.randn(len(IDS), 64)), model=nn.Identity()
    )
    assert len(kernels_with_lists(mod)) == 1


def test_columns_are_added_as_before() -> None:
    """Along another axis than the first there are no rows to take."""
    torch.manual_seed(5)
    table, rows = torch.randn(16, 30), torch.randn(16, len(IDS))

    def step(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return table.index_add(1, IDS, rows)

    mod, _ = amp_ir.trace_step(step, (table, rows), model=nn.Identity())
    assert not kernels_with_lists(mod)
    found, right = compared(step, table, rows)
    torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_rows_that_are_the_table_are_read_before_they_are_written() -> None:
    """The sum may not be in the memory of a tensor whose rows are added to it."""
    torch.manual_seed(6)
    table = torch.randn(6, 64)
    ids = torch.tensor([1, 2, 3, 1, 5, 2])  # row 0 goes to row 1, and the old row 1 to row 2

    def step(table: torch.Tensor) -> torch.Tensor:
        doubled = table * 2
        return doubled.index_add(0, ids, doubled)

    found, right = compared(step, table)
    torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize("height", [6, 3000])
@pytest.mark.parametrize("name", ["index_add", "scatter_add", "index_put", "embedding"])
def test_a_negative_zero_that_is_added_to_zero_is_zero(name: str, height: int) -> None:
    ids, rows = torch.tensor([1, 1, 3]), torch.full((3, 70), -0.0)

    def step(table: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if name == "embedding":
            return torch.ops.aten.embedding_dense_backward(rows, ids, height, -1, False)
        return SUMS[name](torch.zeros_like(table), ids, rows)

    found, right = compared(step, torch.randn(height, 70), ids, rows)
    assert not torch.signbit(right).any()
    assert not torch.signbit(found).any()


@pytest.mark.parametrize("width", [3, 16])
@pytest.mark.parametrize(
    "name", ["index_add", "scatter_add", "index_put", "assigned", "amax True", "prod True"]
)
def test_sums_of_booleans_are_true_where_a_term_is(name: str, width: int) -> None:
    torch.manual_seed(7)
    table, rows = torch.rand(30, width) < 0.3, torch.rand(len(IDS), width) < 0.5
    found, right = compared((SUMS | WRITES)[name], table, IDS, rows)
    assert found.dtype == torch.bool
    assert torch.equal(found, right)
