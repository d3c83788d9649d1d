# SPDX-License-Identifier: Apache-2.0
"""oneDNN's workspace: its size known without computing, its memory provided by the caller."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import amp_ir
from amp_ir.api import lower
from amp_ir.host import native
from native_calls import layout, memory

NAME = "amp_ir.onednn.matmul"
pytestmark = pytest.mark.skipif(not native.has(NAME), reason="this build has no oneDNN")


def arguments(dtype: torch.dtype) -> tuple[list[Any], torch.Tensor]:
    """A product of a repeated matrix, which oneDNN has to copy, and its result."""
    a = torch.randn(1, 48).to(dtype).expand(40, 48)
    b, out = torch.randn(48, 64).to(dtype), torch.full((40, 64), 7.0)
    a_memory = a[:1].contiguous().view(-1)
    given = [a_memory, memory(b), None, *layout(a), *layout(b), *layout(out), "none", memory(out)]
    return given, out


def workspace_nbytes(given: list[Any]) -> int:
    return int(native.function("amp_ir.onednn.scratch_nbytes")(NAME, *given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_asking_computes_nothing(dtype: torch.dtype) -> None:
    given, out = arguments(dtype)
    nbytes = workspace_nbytes(given)
    # At least the copy of the repeated operand.
    assert nbytes >= 40 * 48 * dtype.itemsize
    assert nbytes == workspace_nbytes(given)
    assert torch.equal(out, torch.full((40, 64), 7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [1.0, 2.0, 0.5, 0.0])
def test_the_callers_workspace_changes_no_result(dtype: torch.dtype, share: float) -> None:
    """Less than what is needed is not used: the call takes memory of its own."""
    given, out = arguments(dtype)
    native.function(NAME)(*given)
    expected = out.clone()
    out.fill_(7.0)
    workspace = torch.full((int(share * workspace_nbytes(given)),), 0xAA, dtype=torch.uint8)
    native.function("amp_ir.onednn.with_scratch")(NAME, workspace, *given)
    assert torch.equal(out, expected)
    is_used = bool((workspace != 0xAA).any())
    assert is_used == (share >= 1)


def test_only_the_asking_thread_is_asked() -> None:
    given, out = arguments(torch.float32)
    other, other_out = arguments(torch.float32)
    results: list[bool] = []

    def run() -> None:
        for _ in range(50):
            other_out.fill_(7.0)
            native.function(NAME)(*other)
            results.append(bool((other_out != 7.0).any()))

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(50):
        workspace_nbytes(given)
    thread.join()
    assert all(results) and torch.equal(out, torch.full((40, 64), 7.0))


def test_an_unknown_function_is_named() -> None:
    with pytest.raises(ValueError, match="amp_ir.onednn.nothing"):
        native.function("amp_ir.onednn.scratch_nbytes")("amp_ir.onednn.nothing")


def test_what_gemm_takes_from_the_system_is_in_the_plan_all_the_time() -> None:
    """It is the process's from the first step on, whatever call the peak is at."""
    x = torch.ones(512, 16384)
    weight = torch.nn.Linear(512, 16384, bias=False)  # [16384, 512]
    mod, _ = amp_ir.trace_model(_Product(weight.weight), (x,))
    plan = lower(mod).plan
    assert plan.library_bytes > 0 and plan.calls[0].name == "onednn.matmul"
    (kept,) = (one for one in plan.values if one.name == "gemm workspace")
    assert (kept.nbytes, kept.offset_bytes) == (plan.library_bytes, None)
    assert (kept.first_use, kept.last_use) == (0, len(plan.calls) - 1)
    parts = (plan.arena_bytes, plan.state_bytes, plan.batch_bytes, plan.result_bytes)
    assert plan.peak_bytes == sum(parts) + plan.library_bytes
    short, _ = amp_ir.trace_model(_Product(weight.weight[:4096]), (x[:, :4096],))
    # Without AVX-512 the gemm is the first choice for any number of terms.
    has_avx512 = "avx512" in native.function("amp_ir.onednn.isa")()
    assert (lower(short).plan.library_bytes == 0) == has_avx512


class _Product(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight
