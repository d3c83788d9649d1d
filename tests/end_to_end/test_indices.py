# SPDX-License-Identifier: Apache-2.0
"""Indices out of range are errors where PyTorch's are, for every op, and leave no trace."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import amp_ir
from amp_ir.errors import IndexOutOfRangeError
from indexed_step import INDEXED, Training, same

OPS = [one.name for one in INDEXED]


@functools.cache
def trainings(*, is_computed: bool) -> tuple[Training, Training, amp_ir.CompiledStep]:
    """The step of all ops in eager PyTorch, and compiled; both after two steps."""
    eager, ours = Training(is_computed), Training(is_computed)
    mod, _ = amp_ir.trace_step(ours.step, ours.batch(), model=ours.model, optimizer=ours.optimizer)
    compiled = amp_ir.compile(mod)
    for _ in range(2):
        eager.step(*eager.batch())
        compiled(*ours.batch())
    return eager, ours, compiled


def eager_refuses(training: Training, batch: tuple[torch.Tensor, ...]) -> bool:
    """Whether PyTorch raises, on a copy of the weights: it may have written half of a result."""
    trial = Training(training.is_computed)
    trial.model.load_state_dict(training.model.state_dict())
    try:
        trial.step(*batch)
    except (IndexError, RuntimeError):
        return True
    return False


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for float32 sums in another order, over many steps."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("is_computed", [False, True], ids=["of the batch", "computed"])
@pytest.mark.parametrize("name", OPS)
def test_an_index_is_refused_exactly_where_pytorch_refuses_it(name: str, is_computed: bool) -> None:
    eager, ours, compiled = trainings(is_computed=is_computed)
    at = OPS.index(name)
    extent, ignored = INDEXED[at].extent, INDEXED[at].ignored
    # 2**32 is 0 for a kernel that counts in int32.
    tried = {extent - 1, extent, -1, -extent, -extent - 1, 2**32}
    tried |= {ignored} if ignored is not None else set()
    refused = []
    for first in sorted(tried):
        batch = ours.batch(at, first)
        before = ours.state()
        if eager_refuses(eager, batch):
            refused.append(first)
            with pytest.raises(IndexOutOfRangeError) as caught:
                compiled(*batch)
            # At one op, and at no other.
            assert len(set(re.findall(r"indexed_step.py:(\d+)", str(caught.value)))) == 1
            assert same(before, ours.state())
        else:
            expected = torch.stack(eager.step(*batch))
            near(torch.stack(compiled(*batch)), expected)
    # remainder() makes any index good for take_along_dim, and nothing else does.
    assert (extent in refused) == (name != "take_along_dim")
    # Several good steps later weights, momenta and gradients are still PyTorch's.
    for _ in range(2):
        eager.step(*eager.batch())
        compiled(*ours.batch())
    for one, other in zip(eager.state(), ours.state(), strict=True):
        near(other, one)


def test_classes_in_bytes_train_as_in_pytorch():
    eager = torch.nn.Linear(4, 3)
    model = copy.deepcopy(eager)

    def step_of(trained: torch.nn.Module) -> tuple[Callable[..., torch.Tensor], Any]:
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)

        def step(x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            loss = torch.nn.functional.cross_entropy(trained(x), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, optimizer

    step, optimizer = step_of(model)
    compiled = amp_ir.jit(step, model=model, optimizer=optimizer)
    plain, _ = step_of(eager)
    for _ in range(3):
        x, classes = torch.randn(6, 4), torch.randint(3, (6,), dtype=torch.uint8)
        near(compiled(x, classes), plain(x, classes))
    near(model.weight, eager.weight)
    message = "batch1 holds the index 202, expected 0 to 2"
    with pytest.raises(IndexOutOfRangeError, match=message):
        compiled(x, classes * 0 + 202)
