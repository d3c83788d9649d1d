# SPDX-License-Identifier: Apache-2.0
"""Tensors that a step fills with random numbers, by functions that PyTorch decides by values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_ir

COUNT = 200000
INTEGERS: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]] = {
    "an end": (torch.float32, (10,), 0, 9),
    "two ends": (torch.int64, (-3, 7), -3, 6),
    "bytes": (torch.uint8, (), 0, 255),
    "bfloat16, every integer up to 256": (torch.bfloat16, (), 0, 256),
    "bools": (torch.bool, (), 0, 1),
    "from a number on": (torch.int8, (100, None), 100, 127),
}


def drawn(fill: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    def step() -> torch.Tensor:
        return fill(torch.empty(COUNT, dtype=dtype))

    torch.manual_seed(0)
    result: torch.Tensor = amp_ir.jit(step, model=nn.Linear(1, 1))()
    assert result.dtype is dtype
    return result.double()


@pytest.mark.parametrize("name", INTEGERS)
def test_random_integers(name: str) -> None:
    dtype, arguments, least, most = INTEGERS[name]
    numbers = drawn(lambda x: x.random_(*arguments), dtype)
    assert (numbers.min(), numbers.max()) == (least, most)
    assert len(numbers.unique()) == most - least + 1
    # Five standard errors of the mean of so many uniform numbers.
    spread = (most - least + 1) / 12**0.5
    assert abs(float(numbers.mean()) - (least + most) / 2) < 5 * spread / COUNT**0.5


@pytest.mark.parametrize(
    ("dtype", "most", "standard_error"),
    [(torch.float32, 2**24, 2**24 / 12**0.5), (torch.int32, 2**31 - 1, 2**31 / 12**0.5)],
)
def test_random_integers_up_to_the_largest(
    dtype: torch.dtype, most: int, standard_error: float
) -> None:
    numbers = drawn(lambda x: x.random_(), dtype)
    assert numbers.min() >= 0
    assert most * (1 - 1e-3) < numbers.max() <= most
    assert abs(float(numbers.mean()) - most / 2) < 5 * standard_error / COUNT**0.5
    assert bool((numbers % 2 == 1).any())


# mean, deviation, bounds; and of the result its mean and deviation.
TRUNCATED = {
    "within two deviations": ((0.0, 0.02, -0.04, 0.04), 0.0, 0.0175926),
    "bounds far away": ((1.0, 0.5, -2.0, 4.0), 1.0, 0.5),
    "above the mean": ((0.0, 1.0, 1.0, 9.0), 1.5251353, 0.4461637),
    "far above the mean": ((0.0, 1.0, 6.0, 9.0), 6.1584826, 0.1548735),
    "far below the mean": ((0.0, 1.0, -9.0, -6.0), -6.1584826, 0.1548735),
}


@pytest.mark.parametrize("name", TRUNCATED)
def test_truncated_normal_numbers(name: str) -> None:
    arguments, mean, deviation = TRUNCATED[name]
    numbers = drawn(lambda x: nn.init.trunc_normal_(x, *arguments), torch.float32)
    assert float(numbers.min()) >= arguments[2]
    assert float(numbers.max()) <= arguments[3]
    assert abs(float(numbers.mean()) - mean) < 5 * deviation / COUNT**0.5
    assert abs(float(numbers.std()) - deviation) < 0.02 * deviation
