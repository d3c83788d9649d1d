# SPDX-License-Identifier: Apache-2.0
"""A new optimizer's state: the zeros that PyTorch makes, in memory that is not touched yet."""

from __future__ import annotations

import copy
import mmap

import pytest
import torch

import amp_ir
from amp_ir.capture.state import initial_state
from amp_ir.capture.untouched_zeros import UntouchedZeros

LARGE = (5, 128, 32, 32)


def is_in_whole_pages(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % mmap.PAGESIZE == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize(
    "like",
    [
        torch.empty(LARGE),
        torch.empty(LARGE).to(memory_format=torch.channels_last),
        torch.empty(LARGE).permute(1, 3, 0, 2),
        torch.nn.Parameter(torch.empty(1024, 1024)),
        torch.empty(1024, 1).expand(1024, 1024),
    ],
    ids=["contiguous", "channels last", "permuted", "parameter", "expanded"],
)
@pytest.mark.parametrize("options", [{}, {"memory_format": torch.contiguous_format}], ids=str)
def test_large_zeros_are_pytorchs_in_whole_pages(dtype, like, options):
    like = like.detach().to(dtype) if like.dtype != dtype else like
    wanted = torch.zeros_like(like, **options)
    with UntouchedZeros():
        made = torch.zeros_like(like, **options)
    assert type(made) is torch.Tensor and not made.requires_grad and made._base is None
    assert (made.dtype, made.shape, made.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    assert torch.equal(made, wanted) and is_in_whole_pages(made)
    made.add_(1)
    assert made.sum() == made.numel() and torch.equal(copy.deepcopy(made), made)


@pytest.mark.parametrize(
    ("like", "options"),
    [
        (torch.empty(4), {}),
        (torch.empty(LARGE, device="meta"), {}),
        (torch.empty(LARGE), {"dtype": torch.float64}),
    ],
    ids=["small", "meta", "another dtype"],
)
def test_other_zeros_are_left_to_pytorch(like, options):
    with UntouchedZeros():
        made = torch.zeros_like(like, **options)
    wanted = torch.zeros_like(like, **options)
    assert (made.dtype, made.device, made.shape) == (wanted.dtype, wanted.device, wanted.shape)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_step_trains_with_state_from_untouched_memory(kind):
    options = {"momentum": 0.9} if kind == "SGD" else {}
    model = torch.nn.Linear(1024, 512)
    wanted = copy.deepcopy(model)
    made = getattr(torch.optim, kind)
    optimizers = [made(one.parameters(), 0.1, **options) for one in (model, wanted)]
    assert all(
        is_in_whole_pages(one)
        for values in initial_state(optimizers[0]).values()
        for one in values.values()
        if one.numel() * one.element_size() >= 1 << 20
    )

    def step(x, model=model, optimizer=optimizers[0]):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    train = amp_ir.jit(step, model=model, optimizer=optimizers[0])
    x = torch.ones(2, 1024)
    train(x)
    step(x, wanted, optimizers[1])
    state, expected = (one.state_dict()["state"] for one in optimizers)
    # Sums of 1024 products in another order, in gradients.
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-7)
