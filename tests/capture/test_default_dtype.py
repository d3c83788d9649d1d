# SPDX-License-Identifier: Apache-2.0
"""The default dtype, set inside of a step: refused where it decides the dtype of a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError

REFUSED = """\
this step cannot be captured, 1 place:
  1. step (forward), {file}:{line}: {op} makes torch.float64, to which the step sets the default dtype. \
Leave torch.set_default_dtype out: give dtype= where a tensor is made, and convert integers before arithmetic, \
.to(torch.float64)"""  # noqa: E501


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def step_of(make: Callable[[], torch.Tensor]) -> tuple[Callable[..., torch.Tensor], nn.Module]:
    model = nn.Linear(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        with in_float64():
            made = make()
        return model(x).detach() * made

    return step, model


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda: torch.ones(3), "aten.ones.default"),
        (lambda: torch.arange(3) / torch.full((3,), 7), "aten.div.Tensor"),
        (lambda: torch.arange(3).sin(), "aten.sin.default"),
        (lambda: torch.rand(3), "aten.rand.default"),
    ],
)
def test_a_dtype_that_it_decides_is_refused(make: Callable[[], torch.Tensor], op: str) -> None:
    step, model = step_of(make)
    with pytest.raises(CaptureError) as caught:
        amp_ir.jit(step, model=model)(torch.ones(2, 3))
    line = make.__code__.co_firstlineno
    expected = " ".join(REFUSED.format(file=__file__, line=line, op=op).split())
    assert " ".join(str(caught.value).split()) == expected
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, dtype=torch.float64),
        lambda: torch.arange(3).to(torch.float64) / 7,
        lambda: torch.tensor([0.1, 0.2, 0.3]),
        lambda: torch.tensor(0.1, dtype=torch.float32).exp(),
    ],
)
def test_a_dtype_that_is_given_is_followed(make: Callable[[], torch.Tensor]) -> None:
    step, model = step_of(make)
    x = torch.ones(2, 3)
    found, expected = amp_ir.jit(step, model=model)(x), step(x)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected)
