# SPDX-License-Identifier: Apache-2.0
"""Losses over a slice of the rows: computed on all rows, with the numbers of the slice."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.capture import trace
from amp_ir.importer import import_step as importer
from amp_ir.ir.interpreter import interpret
from amp_ir.rewrites.unslice_loss import unslice_loss

CLASSES = 6
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def shifted(logits: torch.Tensor, ids: torch.Tensor, **options: object) -> torch.Tensor:
    """The loss of a language model, as it is usually written."""
    rows = logits[:, :-1, :].reshape(-1, CLASSES)
    return functional.cross_entropy(rows, ids[:, 1:].flatten(), **options)  # type: ignore[arg-type]


def gradient_step(loss: Loss, batch: int = 2, length: int = 4) -> tuple[tvm.IRModule, list[int]]:
    """The IR of a loss and the gradient of its logits, without rewrites; how many values leave."""
    example = (torch.zeros(batch, length, CLASSES), torch.zeros(batch, length, dtype=torch.int64))

    def step(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logits.detach().requires_grad_()
        value = loss(leaf, ids)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), gradient

    captured = trace.capture_step(step, example, model=nn.Linear(1, 1), optimizer=None)
    mod = importer.import_step(captured)
    return mod.ir, [k for k, spec in enumerate(mod.signature.inputs) if not spec.is_state]


def ops(ir: tvm.IRModule) -> list[str]:
    bindings = [b for block in ir["main"].body.blocks for b in block.bindings]
    return [b.value.op.name for b in bindings if hasattr(b.value, "op")]


def values_of(ir: tvm.IRModule, positions: list[int], *batch: torch.Tensor) -> list[torch.Tensor]:
    parameters = ir["main"].params
    inputs = [torch.zeros([int(n) for n in p.ty.shape]) for p in parameters]
    for position, tensor in zip(positions, batch, strict=True):
        inputs[position] = tensor
    return interpret(ir, inputs)


def assert_rewritten_with_equal_numbers(loss: Loss, *batch: torch.Tensor) -> None:
    before, positions = gradient_step(loss, *batch[1].shape)
    after = unslice_loss(before)
    assert "relax.concat" in ops(before) and ops(after) != ops(before)
    wanted, got = values_of(before, positions, *batch), values_of(after, positions, *batch)
    # The loss is a sum in another order of at most 60 terms, each rounded to 24 bits.
    torch.testing.assert_close(got[0], wanted[0], rtol=60 * 2**-24, atol=0, equal_nan=True)
    assert torch.equal(got[1].nan_to_num(7), wanted[1].nan_to_num(7))


def test_what_it_becomes() -> None:
    before, _ = gradient_step(shifted)
    after = unslice_loss(before)
    assert ops(before) == [
        "relax.strided_slice", "relax.reshape", "relax.strided_slice", "relax.reshape",
        "relax.nn.log_softmax", "amp_ir.nll_loss", "amp_ir.nll_loss_backward",
        "amp_ir.log_softmax_backward", "relax.reshape", "relax.full", "relax.concat",
    ]  # fmt: skip
    assert ops(after) == [
        # The labels of the positions that stay, and the logits of all.
        "relax.strided_slice", "relax.reshape", "relax.reshape", "relax.nn.log_softmax",
        # Ignored labels for the others.
        "relax.reshape", "relax.full", "relax.concat", "relax.reshape",
        "amp_ir.nll_loss", "amp_ir.nll_loss_backward", "amp_ir.log_softmax_backward",
        # Which rows stay.
        "relax.full", "relax.full", "relax.concat", "relax.reshape", "relax.reshape",
        "relax.where", "relax.reshape",
    ]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(2, 5),
    dropped=st.tuples(st.integers(0, 2), st.integers(0, 2)).filter(any),
    reduction=st.sampled_from(["mean", "sum"]),
    ignore_index=st.sampled_from([-100, 0, 3]),
    has_weight=st.booleans(),
    casts=st.booleans(),
    seed=st.integers(0, 9),
)
def test_numbers_are_those_of_the_slice(
    batch: int,
    length: int,
    dropped: tuple[int, int],
    reduction: str,
    ignore_index: int,
    has_weight: bool,
    casts: bool,
    seed: int,
) -> None:
    first, last = dropped[0], length - dropped[1]
    if last <= first:
        first, last = 0, length - 1
    torch.manual_seed(seed)
    weight = torch.rand(CLASSES) + 0.1 if has_weight else None

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        kept = logits[:, first:last]
        kept = kept.double() if casts else kept
        return functional.cross_entropy(
            kept.reshape(-1, CLASSES),
            ids[:, first:last].flatten(),
            weight=weight.to(kept.dtype) if weight is not None else None,
            reduction=reduction,
            ignore_index=ignore_index,
        )

    logits = torch.randn(batch, length, CLASSES)
    ids = torch.randint(0, CLASSES, (batch, length))
    assert_rewritten_with_equal_numbers(loss, logits, ids)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_dropped_does_not_count_whatever_it_is(odd: float) -> None:
    logits, ids = torch.randn(2, 4, CLASSES), torch.randint(0, CLASSES, (2, 4))
    logits[:, -1] = odd
    assert_rewritten_with_equal_numbers(shifted, logits, ids)
    before, positions = gradient_step(shifted)
    loss, gradient = values_of(unslice_loss(before), positions, logits, ids)
    assert loss.isfinite() and gradient.isfinite().all() and (gradient[:, -1] == 0).all()


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_kernels_do_not_count_it_either(odd: float) -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = torch.randn(2, 4, CLASSES, generator=torch.Generator().manual_seed(0))
            values[:, -1] = odd
            self.logits = nn.Parameter(values)

    ids = torch.randint(0, CLASSES, (2, 4))
    trained = []
    for compiles in (True, False):
        model = Logits()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(
            ids: torch.Tensor, model: Logits = model, optimizer: torch.optim.SGD = optimizer
        ) -> torch.Tensor:
            loss = shifted(model.logits, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        train = amp_ir.jit(step, model=model, optimizer=optimizer) if compiles else step
        loss = train(ids)
        assert loss.isfinite()
        trained.append(model.logits.detach())
    torch.testing.assert_close(*trained, rtol=1e-6, atol=1e-7, equal_nan=True)  # one float32 step


def test_a_loss_of_ignored_labels_only_is_not_a_number_as_before() -> None:
    logits, ids = torch.randn(2, 4, CLASSES), torch.full((2, 4), -100)
    assert_rewritten_with_equal_numbers(shifted, logits, ids)


def _smoothed(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return shifted(logits, ids, label_smoothing=0.1)


def _not_reduced(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return shifted(logits, ids, reduction="none")


def _read_elsewhere(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    kept = logits[:, :-1].reshape(-1, CLASSES)
    return functional.cross_entropy(kept, ids[:, 1:].flatten()) + kept.square().mean()


def _all_rows(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _every_second(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, ::2].flatten(0, 1), ids[:, ::2].flatten())


def _some_classes(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[..., :-1].flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    "loss", [_smoothed, _not_reduced, _read_elsewhere, _all_rows, _every_second, _some_classes]
)
def test_others_are_left_alone(loss: Loss) -> None:
    before, _ = gradient_step(loss)
    assert unslice_loss(before) is before


class _Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(ids)).cumsum(1))


def _trainer(compiles: bool) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    torch.manual_seed(0)
    model = _Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids)[..., :-1, :].contiguous()
        loss = functional.cross_entropy(logits.view(-1, 11), ids[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if not compiles:
        return model, step
    return model, amp_ir.jit(step, model=model, optimizer=optimizer)


def test_a_language_model_trains_as_in_pytorch_and_holds_its_logits_once() -> None:
    ours, compiled = _trainer(compiles=True)
    model, eager = _trainer(compiles=False)
    torch.manual_seed(1)
    for _ in range(6):
        ids = torch.randint(0, 11, (3, 7))
        # Six steps of AdamW, whose first divides rounding errors by rounding errors.
        torch.testing.assert_close(compiled(ids), eager(ids), rtol=1e-4, atol=1e-6)
    for one, other in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_gradient_of_the_logits_takes_their_place() -> None:
    model = _Language()

    def step(ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    ids = torch.zeros(64, 32, dtype=torch.int64)
    mod, args = amp_ir.trace_step(step, (ids,), model=model)
    report = amp_ir.memory_report(mod, args)
    logits_nbytes = 64 * 32 * 11 * 4
    alive = [v for v in report.live_at_peak if v.nbytes >= 31 / 32 * logits_nbytes]
    assert len(alive) == 1, alive


def test_labels_are_still_checked() -> None:
    _, train = _trainer(compiles=True)
    with pytest.raises(
        amp_ir.errors.IndexOutOfRangeError, match="holds the index 11, expected 0 to 10"
    ):
        train(torch.full((3, 7), 11))
