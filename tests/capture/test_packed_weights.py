# SPDX-License-Identifier: Apache-2.0
"""Parameters side by side in one block: as `.to("cuda")` packs an LSTM's, and as users do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import ArgumentError
from square_steps import square_step


def packed(module: nn.Module) -> nn.Module:
    """The module with its parameters in one block without gaps, as cuDNN wants them."""
    parameters = list(module.parameters())
    block = torch.empty(sum(one.numel() for one in parameters))
    at = 0
    for one in parameters:
        part = block[at : at + one.numel()].view_as(one)
        one.data = part.copy_(one.data)
        at += one.numel()
    return module


def pair(ours: nn.Module, theirs: nn.Module) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The eager step of one, the compiled one of the other."""
    sgd, other = (torch.optim.SGD(one.parameters(), 0.1) for one in (ours, theirs))
    train = amp_ir.jit(square_step(ours, sgd), model=ours, optimizer=sgd)
    return square_step(theirs, other), train


class First(nn.Module):
    """The outputs of a recurrent layer, without its last state."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


NOTE = (
    "The weights of layer lay packed for cuDNN at addresses where no vector may begin, and were "
    "given memory of their own. Eager calls pack them again at each call; after training, "
    "flatten_parameters() packs them for good."
)


# Biases of 4 * 16 floats are multiples of 64 bytes; those of 4 * 5 are not.
@pytest.mark.parametrize(("width", "moves"), [(16, False), (5, True)])
def test_a_packed_lstm_trains_as_an_unpacked_one(width: int, moves: bool) -> None:
    theirs = First(nn.LSTM(width, width, 2))
    ours = packed(copy.deepcopy(theirs))
    addresses = [one.data_ptr() for one in ours.parameters()]
    step, train = pair(ours, theirs)
    x = torch.randn(4, 2, width)
    for _ in range(3):
        torch.testing.assert_close(train(x), step(x), rtol=1e-5, atol=1e-7)
    assert ([one.data_ptr() for one in ours.parameters()] != addresses) == moves
    assert (NOTE in train.notes) == moves


def test_a_converted_model_takes_packed_weights() -> None:
    model = First(nn.LSTM(5, 5)).eval()
    x = torch.randn(4, 2, 5)
    expected = model(x)
    converted = amp_ir.convert_model(packed(model), (x,), target_dtype="bfloat16")
    # Values below 1 in bfloat16.
    torch.testing.assert_close(converted(x).float(), expected, rtol=0, atol=1e-2)


def test_parameters_in_one_block_train() -> None:
    theirs = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    ours = packed(copy.deepcopy(theirs))
    step, train = pair(ours, theirs)
    x = torch.randn(4, 16)
    for _ in range(3):
        torch.testing.assert_close(train(x), step(x), rtol=1e-5, atol=1e-7)


def test_parameters_that_overlap_by_a_row_are_refused() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    block = torch.randn(31, 16)
    model[0].weight.data, model[1].weight.data = block[:16], block[15:]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(
        ArgumentError,
        match=r"^1\.weight and 0\.weight share memory but are two tensors; tie them by assigning "
        r"the same Parameter to both$",
    ):
        amp_ir.trace_step(
            square_step(model, optimizer), (torch.randn(4, 16),), model=model, optimizer=optimizer
        )


def test_no_weights_are_packed_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU PyTorch looks at their addresses for it, which do not exist in a capture."""
    packs: list[nn.Module] = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda layer: packs.append(layer))
    model = First(nn.LSTM(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    packs.clear()
    step = square_step(model, optimizer)
    amp_ir.trace_step(step, (torch.randn(4, 2, 5),), model=model, optimizer=optimizer)
    assert packs == []
    model.layer.flatten_parameters()
    assert packs == [model.layer]
