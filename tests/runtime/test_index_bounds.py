# SPDX-License-Identifier: Apache-2.0
"""Ids outside of a table are refused before anything runs."""

from __future__ import annotations

import re

import pytest
import torch

import amp_ir


def compiled() -> tuple[amp_ir.CompiledStep, torch.nn.Module]:
    model = torch.nn.Sequential(
        torch.nn.Embedding(7, 4), torch.nn.Flatten(), torch.nn.Linear(12, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    mod, _ = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    return amp_ir.compile(mod), model


def test_ids_and_classes_outside_of_their_tables_are_named_at_once() -> None:
    train, model = compiled()
    before = [p.detach().clone() for p in model.parameters()]
    ids, labels = torch.full((2, 3), 7), torch.tensor([0, -2])
    with pytest.raises(amp_ir.errors.IndexOutOfRangeError) as refused:
        train(ids, labels)
    message = re.sub(r", \S+\.py:\d+", "", str(refused.value))
    assert message == (
        "batch0 holds the index 7, expected 0 to 6, for amp_ir.embedding in 0 (forward); "
        "batch1 holds the index -2, expected 0 to 4 (or -100, which is ignored), for "
        "amp_ir.nll_loss in step (forward). Nothing was run and nothing has changed"
    )
    assert isinstance(refused.value, IndexError)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_ignored_classes_are_allowed() -> None:
    train, _ = compiled()
    assert train(torch.full((2, 3), 6), torch.tensor([4, -100])).isfinite()
