# SPDX-License-Identifier: Apache-2.0
"""Loops over LSTM, GRU and RNN cells that users write, beside the same loops in PyTorch."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import amp_ir
from amp_ir.capture.decompositions.cell_ops import CELL_KINDS, cell_of
from cell_loops import (
    KINDS,
    LOOPS,
    OF_INPUT,
    ROWS,
    WIDTH,
    Looped,
    attention_decoder,
    both_ways,
    cut_every_two,
    fed_back_after_three,
    indexed,
    last_only,
    loss_per_step,
    random_loop,
    sequences,
    stacked,
    training,
    two_cells,
    two_cells_and_both_read,
)
from compiled_steps import assert_compiled_alike, compile_training
from step_comparison import Training, assert_trains_alike, normal


def ops_of(captured: Any) -> Counter[str]:
    return Counter(str(node.target) for node in captured.graph.graph.nodes)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_loop_trains_as_in_eager(kind: str, loop: Callable[..., torch.Tensor]) -> None:
    made: list[Any] = []
    assert assert_trains_alike(lambda: training(kind, loop), sequences, seen=made.append) == 1
    ops = ops_of(made[0])
    found = (ops[f"amp_ir.{kind}.default"], ops[f"amp_ir.{kind}_backward.default"])
    assert found == LOOPS[loop]
    assert not [name for name in ops if "amp_ir_cell" in name]


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Random loops: each call is (cell, state it continues, input, what is done to the state)."""
    length = draw(st.integers(2, 9))
    return [
        (
            draw(st.integers(0, 1)),
            draw(st.sampled_from([0, 0, 0, 0, 1, 2])),
            draw(st.sampled_from([0, 0, 0, 0, 0, 1, 2, 3, 4])),
            draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2, 3])),
        )
        for _ in range(length)
    ]


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(list(KINDS)), programs(), st.booleans())
def test_random_loops_train_as_in_eager(
    kind: str, program: list[tuple[int, ...]], bias: bool
) -> None:
    loop = functools.partial(random_loop, program)
    # float64: sums in another order.
    assert_trains_alike(
        lambda: training(kind, loop, torch.float64, bias=bias),
        lambda index: (sequences(index, 4)[0].double(),),
        steps=2,
        rtol=1e-9,
        atol=1e-11,
    )


COMPILED = (
    indexed, two_cells_and_both_read, both_ways, cut_every_two, loss_per_step, fed_back_after_three,
    attention_decoder,
)  # fmt: skip


# The ops of each pair are compared above: here each loop has two kinds, which take turns.
@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        pytest.param(kind, loop, id=f"{kind}-{loop.__name__}")
        for (k, kind), (n, loop) in itertools.product(enumerate(KINDS), enumerate(COMPILED))
        if (k + n) % 2 == 0
    ],
)
def test_a_compiled_loop_trains_as_in_eager(kind: str, loop: Callable[..., torch.Tensor]) -> None:
    assert assert_compiled_alike(lambda: training(kind, loop), sequences, steps=4) == 1


@pytest.mark.parametrize("loop", [stacked, indexed, two_cells, last_only], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_does_not_grow_with_the_number_of_steps(
    kind: str, loop: Callable[..., torch.Tensor]
) -> None:
    short, long = (ops_of(training(kind, loop).capture(sequences(0, steps))) for steps in (8, 24))
    assert short == long
    assert (short[f"amp_ir.{kind}.default"], short[f"amp_ir.{kind}_backward.default"]) == LOOPS[
        loop
    ]


def losses(trained: Training, step: Callable[..., torch.Tensor]) -> list[float]:
    return [float(step(*sequences(0))) for _ in range(6)]


@pytest.mark.parametrize("amp_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_trains_as_torch_amp(kind: str, amp_dtype: str) -> None:
    exact = training(kind, two_cells, torch.float64)
    torch.manual_seed(0)
    low = training(kind, two_cells)
    torch.manual_seed(0)
    eager = training(kind, two_cells)
    for one in (exact, eager):
        one.model.load_state_dict(low.model.state_dict())
    found = losses(low, compile_training(low, sequences(0), amp_dtype))

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", getattr(torch, amp_dtype)):
            return eager.step(x)

    wanted, reference = losses(eager, step), losses(exact, exact.step)
    # Each step rounds states and gates to 2^-9 (2^-12); losses are means of squares of them. One
    # that has become small has the errors of the steps before.
    bits = 6 if amp_dtype == "bfloat16" else 9
    near = {"rel": 2**-bits, "abs": 2 ** -(bits + 3) * reference[0]}
    assert found == pytest.approx(reference, **near)
    assert found == pytest.approx(wanted, rel=2 * near["rel"], abs=2 * near["abs"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_of_the_users_multiplies_low(kind: str) -> None:
    torch.manual_seed(0)
    inside, eager = training(kind, indexed), training(kind, indexed)
    eager.model.load_state_dict(inside.model.state_dict())

    def in_region(one: Training) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            one.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                result = one.model(x)
            loss = result.float().square().mean()
            loss.backward()
            one.optimizer.step()
            return loss.detach()

        return step

    mod, _ = amp_ir.trace_step(
        in_region(inside), sequences(0), model=inside.model, optimizer=inside.optimizer
    )
    bound = [one.value for one in mod.ir["main"].body.blocks[0].bindings]
    layers = [
        one for one in bound if getattr(getattr(one, "op", None), "name", "") == f"amp_ir.{kind}"
    ]
    assert [str(one.ty.dtype) for one in layers[0].args[:3]] == ["bfloat16"] * 3
    found, wanted = losses(inside, amp_ir.compile(mod)), losses(eager, in_region(eager))
    # Three roundings to 2^-9 of gates of ordinary size, over six steps.
    assert found == pytest.approx(wanted, rel=2**-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_leaves_the_dtypes_that_pytorch_leaves(kind: str) -> None:
    cell = KINDS[kind](OF_INPUT, WIDTH)
    state = torch.randn(ROWS, WIDTH)
    state = (state, state) if kind == "lstm" else state
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x, before = torch.utils._pytree.tree_map(
                lambda one, dtype=dtype: one.to(dtype), (sequences(0)[0][:, 0], state)
            )
            given = (x, before, *cell.parameters())
            found = cell_of(getattr(torch, f"{kind}_cell"), given, {})
            assert found is not None
            ours, theirs = found(), cell(x, before)
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_under_a_dynamic_loss_scale_skips_and_trains_as_pytorch(kind: str) -> None:
    results = []
    for make in (amp_ir.GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        one = training(kind, indexed)
        # PyTorch's asks for the device.
        options = {} if make is amp_ir.GradScaler else {"device": "cpu"}
        scaler = make(init_scale=2.0**10, growth_interval=2, **options)

        def step(x: torch.Tensor, one=one, scaler=scaler) -> torch.Tensor:
            one.optimizer.zero_grad()
            loss = one.model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(one.optimizer)
            scaler.update()
            return loss.detach()

        batches = [sequences(k)[0] * (1e30 if k == 2 else 1) for k in range(5)]
        if make is amp_ir.GradScaler:
            mod, _ = amp_ir.trace_step(
                step, (batches[0],), model=one.model, optimizer=one.optimizer, scaler=scaler
            )
            step = amp_ir.compile(mod)
        found = [float(step(x)) for x in batches]
        results.append((found[:2] + found[3:], scaler.get_scale()))
    # float32 sums in another order.
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_penalty_through_a_loop_trains_as_in_eager(kind: str) -> None:
    def build() -> Training:
        one = training(kind, last_only)

        def step(x: torch.Tensor) -> torch.Tensor:
            one.optimizer.zero_grad()
            x = x.detach().requires_grad_()
            total = one.model(x).sum()
            (gradient,) = torch.autograd.grad(total, x, create_graph=True)
            loss = total + gradient.square().mean()
            loss.backward()
            one.optimizer.step()
            return loss.detach()

        return Training(one.model, one.optimizer, step)

    assert assert_trains_alike(build, lambda index: sequences(index, 3), steps=2) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_without_gradients_is_one_layer(kind: str) -> None:
    model = Looped(kind, indexed)
    mod, args = amp_ir.trace_model(model, sequences(0))
    bound = [one.value for one in mod.ir["main"].body.blocks[0].bindings]
    names = [getattr(getattr(one, "op", None), "name", "") for one in bound]
    assert names.count(f"amp_ir.{kind}") == 1
    wanted = model(*args).detach()
    torch.testing.assert_close(amp_ir.compile(mod)(*args), wanted, rtol=1e-4, atol=1e-5)


def test_transforms_and_forward_mode_differentiate_pytorchs_cells() -> None:
    cell = nn.GRUCell(OF_INPUT, WIDTH)
    x, state = torch.randn(ROWS, OF_INPUT), torch.randn(ROWS, WIDTH)
    found = []

    def call(x: torch.Tensor) -> torch.Tensor:
        found.append(cell_of(torch.gru_cell, (x, state, *cell.parameters()), {}))
        return cell(x, state).sum()

    torch.func.grad(call)(x)
    torch.func.jvp(call, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(x, x))
    assert found == [None] * 3
    call(x)
    assert found[-1] is not None


@pytest.mark.parametrize("kind", CELL_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("bias", [True, False])
def test_the_ops_of_a_cell_are_pytorchs(kind: Any, bias: bool) -> None:
    """Results, gradients, and gradients of gradients, by the ops' own implementation."""
    cell = KINDS[kind.name](OF_INPUT, WIDTH, bias=bias).double()
    function = getattr(torch, f"{kind.name}_cell")
    shapes = [(ROWS, OF_INPUT), *[(ROWS, WIDTH)] * kind.state_count]
    x, *states = [torch.randn(one, dtype=torch.float64, requires_grad=True) for one in shapes]
    params = list(cell.parameters())
    biases = params[2:] or [None, None]
    given = (x, tuple(states) if kind.state_count == 2 else states[0], *params[:2], *biases)
    found = cell_of(function, given, {})
    assert found is not None

    def all_of(made: Any) -> list[torch.Tensor]:
        made = list(made) if isinstance(made, tuple) else [made]
        leaves = [x, *states, *params]
        total = sum((one * torch.linspace(-1, 1, WIDTH)).sum() for one in made)
        first = torch.autograd.grad(total, leaves, create_graph=True)
        penalty = sum(one.square().sum() for one in first)
        second = torch.autograd.grad(penalty, leaves, retain_graph=True)
        plain = torch.autograd.grad(total, leaves, retain_graph=True)
        return [*made, *first, *second, *plain]

    # Sums of up to 6 float64 products in another order.
    torch.testing.assert_close(all_of(found()), all_of(function(*given)), rtol=1e-11, atol=1e-11)


def left_to_pytorch() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Calls that PyTorch rejects, or that have no rows."""
    cell = nn.GRUCell(OF_INPUT, WIDTH)
    x, state, params = torch.randn(ROWS, OF_INPUT), torch.randn(ROWS, WIDTH), [*cell.parameters()]
    gru = torch.gru_cell
    return {
        "another function": (torch.relu, (x,)),
        "another dtype": (gru, (x.double(), state, *params)),
        "other rows": (gru, (x[:1], state, *params)),
        "another width": (gru, (x, state[:, :2], *params)),
        "one bias": (gru, (x, state, *params[:3], None)),
        "one axis": (gru, (x[0], state[0], *params)),
        "no rows": (gru, (x[:0], state[:0], *params)),
        "too few": (gru, (x, state)),
        "too many": (gru, (x, state, *params, None)),
    }


@pytest.mark.parametrize("name", left_to_pytorch())
def test_what_is_left_to_pytorch(name: str) -> None:
    function, args = left_to_pytorch()[name]
    assert cell_of(function, args, {}) is None
    cell = nn.GRUCell(OF_INPUT, WIDTH)
    args = (torch.randn(ROWS, OF_INPUT), torch.randn(ROWS, WIDTH), *cell.parameters())
    assert cell_of(torch.gru_cell, args, {}) is not None
    assert cell_of(torch.gru_cell, args, {"b_hh": None}) is None


def test_an_entry_of_a_gradient_that_is_given_twice() -> None:
    def build() -> Training:
        cell = nn.LSTMCell(4, 4)
        optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)

        def step(x: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            first, inner = cell(x[0])
            _, last = cell(x[1], (first, inner))
            given = [above[0], above[0], above[1]]
            torch.autograd.backward([first, first, last], given)
            optimizer.step()
            return first.detach()

        return Training(cell, optimizer, step)

    assert_trains_alike(build, lambda k: (normal(k, 2, 3, 4), normal(k + 9, 2, 3, 4)))
