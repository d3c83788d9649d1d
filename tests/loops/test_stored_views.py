# SPDX-License-Identifier: Apache-2.0
"""A kernel that stores a transposed tensor and also reduces the tensor that it transposes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import amp_ir


@pytest.mark.parametrize("rounding", ["fast", "strict"])
@pytest.mark.parametrize("size", [8, 64])
def test_a_bias_gradient_beside_the_same_gradient_transposed(size: int, rounding: str) -> None:
    """The one-hot target is made with channels last; oneDNN reads the gradient channels first.

    The sum for the bias once added up the transposed elements, and was wrong by a third.
    """
    torch.manual_seed(0)
    net = torch.nn.Conv2d(2, 3, 3, padding=1)
    images, labels = torch.randn(2, 2, size, size), torch.randint(0, 3, (2, size, size))
    exact, ours = copy.deepcopy(net).double(), copy.deepcopy(net)

    def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer):  # type: ignore[no-untyped-def]
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            target = F.one_hot(y, 3).permute(0, 3, 1, 2).to(x.dtype)
            loss = F.binary_cross_entropy_with_logits(model(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    optimizer = torch.optim.SGD(exact.parameters(), lr=1.0)
    step_of(exact, optimizer)(images.double(), labels)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    train = amp_ir.jit(step_of(ours, optimizer), model=ours, optimizer=optimizer, rounding=rounding)
    train(images, labels)
    for name, expected in exact.named_parameters():
        # Sums of up to 8192 float32 numbers, rounded once a block, and an update of about 0.1.
        torch.testing.assert_close(
            ours.get_parameter(name).double(), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("in_place", [False, True])
def test_a_kernel_of_one_result_beside_a_view_of_the_same_shape(in_place: bool) -> None:
    """The indices are checked by the step, which views them as of one axis, as they are.

    The view once counted as one more result, whose memory nothing wrote.
    """
    torch.manual_seed(0)
    rows = torch.tensor([0, 2, 3])
    results = []
    for is_compiled in (False, True):
        torch.manual_seed(1)
        net = torch.nn.Linear(4, 7)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores, classes = net(x), y.new_zeros(6)  # noqa: B023
            if in_place:
                classes.index_copy_(0, rows, y[rows])
            else:
                classes = classes.index_copy(0, rows, y[rows]).view(6)
            loss = -scores.gather(1, classes.unsqueeze(1)).mean()
            loss.backward()
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            return loss.detach(), classes

        train = amp_ir.jit(step, model=net, optimizer=optimizer) if is_compiled else step
        for k in range(3):
            generator = torch.Generator().manual_seed(k)
            x = torch.randn(6, 4, generator=generator)
            y = torch.randint(0, 7, (6,), generator=generator)
            loss, classes = train(x, y)
            results.append([loss, classes, net.weight.detach().clone()])
    for expected, found in zip(results[:3], results[3:], strict=True):
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one)
