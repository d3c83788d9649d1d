# SPDX-License-Identifier: Apache-2.0
"""The memory of PyTorch's calls on a CPU: asked for without computing, and given by the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_ir.host import native
from convolution_calls import CASES, CHANNELS, ORDERS, operands
from native_calls import layout, memory, shape

MATMUL = "amp_ir.torch.matmul"
pytestmark = pytest.mark.skipif(not native.has(MATMUL), reason="this PyTorch has no C interface")


def nbytes_of(name: str, given: list[Any]) -> int:
    return int(native.function("amp_ir.torch.scratch_nbytes")(name, *given))


def matmul_arguments() -> tuple[list[Any], torch.Tensor]:
    """A float16 matmul, which PyTorch computes in float32 on any CPU, and its result."""
    a, b = torch.randn(40, 48).half(), torch.randn(48, 64).half()
    bias, out = torch.randn(64), torch.full((40, 64), 7.0).half()
    views = [*layout(a), *layout(b), *layout(out)]
    return [memory(a), memory(b), bias, *views, "relu", memory(out)], out


def convolution_arguments(verb: str) -> tuple[list[Any], torch.Tensor]:
    dtypes = (torch.float16, torch.float16)
    case, channels = CASES["2d strided"], CHANNELS["blocks"]
    first, second, out, _ = operands(case, channels, dtypes, ORDERS["plain"])[verb]
    views = [*layout(first), *layout(second), *layout(out)]
    options = [shape(case.strides), shape(case.padding), shape(case.dilation), channels[2]]
    return [memory(first), memory(second), *views, *options, memory(out)], out.fill_(7.0)


CALLS = {MATMUL: matmul_arguments} | {
    f"amp_ir.torch.{verb}": lambda verb=verb: convolution_arguments(verb)
    for verb in ("conv", "conv_backward_input", "conv_backward_weight")
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("share", [1.0, 2.0, 0.5, 0.0])
def test_given_memory_changes_no_result(name: str, share: float) -> None:
    """Less than what is needed is not used: the call takes memory of its own."""
    given, out = CALLS[name]()
    nbytes = nbytes_of(name, given)
    assert bool((out == 7.0).all()), "asking computed something"
    native.function(name)(*given)
    expected = out.clone()
    out.fill_(7.0)
    workspace = torch.full((int(share * nbytes),), 0xAA, dtype=torch.uint8)
    native.function("amp_ir.torch.with_scratch")(name, workspace, *given)
    assert torch.equal(out, expected)
    assert bool((workspace != 0xAA).any()) == (share >= 1)


def test_a_matmul_asks_for_its_copies() -> None:
    given, _ = matmul_arguments()
    # Of a, b and the result; the bias is float32 as it is.
    assert nbytes_of(MATMUL, given) == 4 * (40 * 48 + 48 * 64 + 40 * 64)


def test_a_float32_matmul_asks_for_nothing_and_keeps_what_it_packs() -> None:
    a, b, out = torch.ones(8, 16), torch.ones(16, 4), torch.full((8, 4), 7.0)
    views = [*layout(a), *layout(b), *layout(out)]
    given = [memory(a), memory(b), None, *views, "none", memory(out)]
    assert nbytes_of(MATMUL, given) == 0
    kept = int(native.function("amp_ir.torch.kept_nbytes")(MATMUL, *given))
    assert kept > 0 and kept % (4 * (8 * 16 + 16 * 4)) == 0  # once a thread
    assert torch.equal(out, torch.full((8, 4), 7.0))
