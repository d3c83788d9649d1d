# SPDX-License-Identifier: Apache-2.0
"""Calls that PyTorch's kernels refuse for their dtypes are refused, with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import amp_ir
from amp_ir.errors import CaptureError

Call = Callable[[torch.Tensor], Any]
MASK = torch.tensor([[True, False, True, True], [False, False, True, False]])
NUMBERS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
BYTES = "Cast it: x.to(torch.uint8)"
FLOATS = "Cast it: x.float()"

BOOLEANS: dict[str, Call] = {
    "median": lambda x: x.median(),
    "median of rows": lambda x: x.median(1),
    "kthvalue": lambda x: x.kthvalue(2, 1),
    "topk": lambda x: x.topk(2, 1),
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(),
    "abs": lambda x: x.abs(),
    "abs_": lambda x: x.clone().abs_(),
    "floor": lambda x: x.floor(),
    "ceil": lambda x: x.ceil(),
    "round": lambda x: x.round(),
    "trunc": lambda x: x.trunc(),
    "trace": lambda x: x.trace(),
    "dot": lambda x: x[0].dot(x[1]),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "mm": lambda x: x @ x.T,
    "bmm": lambda x: x[None] @ x.T[None],
    "mv": lambda x: x @ x[0],
    "searchsorted": lambda x: torch.searchsorted(x, x),
}
INTEGERS: dict[str, Call] = {
    "std": lambda x: x.std(),
    "var": lambda x: x.var(1),
    "lerp": lambda x: torch.lerp(x, x, 1),
    "frac": lambda x: x.frac(),
    "glu": lambda x: F.glu(x),
    "hardswish": lambda x: F.hardswish(x),
    "logaddexp": lambda x: torch.logaddexp(x, x),
    "rand_like": lambda x: torch.rand_like(x),
    "uniform_": lambda x: x.clone().uniform_(),
}
# (call of an integer tensor and a mask, what is refused, the advice)
OTHERS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], str, str]] = {
    "a mask from a number": (
        lambda x, m: 1 - m,
        "aten.rsub.Scalar of bool",
        "Write ~mask for 1 - mask, or cast it: mask.float()",
    ),
    "a mask from floats": (
        lambda x, m: x.float() - m,
        "aten.sub.Tensor of bool",
        "Write ~mask for 1 - mask, or cast it: mask.float()",
    ),
    "a product with a number in place": (
        lambda x, m: x.clone().mul_(0.5),
        "aten.mul_.Tensor writes a result of float32 to a tensor of int64",
        "Make a new tensor: x = x * y instead of x *= y",
    ),
    "a product with floats in place": (
        lambda x, m: m.clone().mul_(x.float()),
        "aten.mul_.Tensor writes a result of float32 to a tensor of bool",
        "Make a new tensor: x = x * y instead of x *= y",
    ),
    "a sum with a part": (
        lambda x, m: x.add(x, alpha=0.5),
        "aten.add.Tensor of int64 with alpha=0.5",
        FLOATS,
    ),
    "assigned floats": (
        lambda x, m: x.index_put((x[0, :1] * 0,), x[:1].float()),
        "aten.index_put.default writes float32 to a tensor of int64",
        "Cast it: values.to(torch.int64)",
    ),
}
ALLOWED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sort": lambda x, m: torch.sort(m, stable=True, dim=1),
    "largest": lambda x, m: (m.max(1), m.amin(), m.any()),
    "mode": lambda x, m: m.mode(1).values,
    "bytes": lambda x, m: m.to(torch.uint8).median(),
    "products": lambda x, m: (m.clone().mul_(m), x.clone().mul_(2), x.clone().mul_(m), m * 0.5),
    "differences": lambda x, m: (~m, 1 - x, x.float() - m.float(), m ^ m),
    "sums": lambda x, m: (x.add(x, alpha=2), x.float().add(x, alpha=0.5), m + 1),
    "sums with numbers": lambda x, m: (
        torch.add(0.3333, m, alpha=0.6667),
        m.add(0.5, alpha=0.25),
        x.sub(0.5, alpha=0.5),
        torch.sub(0.5, x, alpha=0.5),
        torch.rsub(x, 0.5, alpha=0.5),
    ),
    "products of three": lambda x, m: (x.addcmul(x, x, value=2), x.float().addcmul(m, x)),
    "drawn": lambda x, m: m.clone().bernoulli_(1.0),
}


def refusal(call: Callable[..., Any], *batch: torch.Tensor) -> str:
    """Return what a step of one call says, without its head; PyTorch has to refuse it, too."""
    with pytest.raises(RuntimeError):
        call(*batch)

    def step(*batch: torch.Tensor) -> Any:
        return call(*batch)

    with pytest.raises(CaptureError) as caught:
        amp_ir.jit(step, model=nn.Linear(1, 1))(*batch)
    head, _, text = str(caught.value).partition(": aten.")
    assert head.startswith("this step cannot be captured, 1 place:\n  1. step (forward), ")
    return f"aten.{text}"


@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans(name: str) -> None:
    text = refusal(BOOLEANS[name], MASK)
    assert text.endswith(f" of bool, which PyTorch refuses too. {BYTES}")


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    for batch in (NUMBERS, NUMBERS.to(torch.uint8)):
        dtype = str(batch.dtype).removeprefix("torch.")
        text = refusal(INTEGERS[name], batch)
        assert text.endswith(f" of {dtype}, which PyTorch refuses too. {FLOATS}")


@pytest.mark.parametrize("name", OTHERS)
def test_mixed_dtypes(name: str) -> None:
    call, what, advice = OTHERS[name]
    assert refusal(call, NUMBERS, MASK) == f"{what}, which PyTorch refuses too. {advice}"


def test_a_factor_that_pytorch_rounds_to_an_integer() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.addcmul(x, x, value=0.5)

    with pytest.raises(CaptureError, match=r"of int64 has value=0.5, which is no integer. Cast"):
        amp_ir.jit(step, model=nn.Linear(1, 1))(NUMBERS)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_pytorch_computes_is_computed(name: str) -> None:
    call = ALLOWED[name]

    def step(x: torch.Tensor, mask: torch.Tensor) -> Any:
        return call(x, mask)

    found = amp_ir.jit(step, model=nn.Linear(1, 1))(NUMBERS, MASK)
    expected = tree_leaves(call(NUMBERS, MASK))
    torch.testing.assert_close(tree_leaves(found), expected, rtol=0, atol=0)
