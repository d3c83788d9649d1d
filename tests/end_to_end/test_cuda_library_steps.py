# SPDX-License-Identifier: Apache-2.0
"""Whole steps whose heavy ops make the calls of a CUDA step, to stand-ins that compute on the CPU.

Kernels are the CPU's: what is tested is which calls a step makes, with which memory, and that they
give the step's results.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import amp_ir
import fake_cublaslt
import fake_torch_cuda
from amp_ir import pipeline
from amp_ir.api import compile as compilation
from amp_ir.host import native
from amp_ir.ir.step_module import StepModule
from amp_ir.ir.target import cpu
from library_calls import LIBRARIES

AMP = ["float32", "bfloat16", "float16"]


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("cuda_libraries")
    return fake_cublaslt.build(folder), fake_torch_cuda.build(folder)


@pytest.fixture
def fakes(
    stand_ins: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[fake_cublaslt.Fake, fake_torch_cuda.Fake]]:
    """The stand-ins; `amp_ir.compile` makes CUDA's library calls while they are installed."""
    target = attrs.evolve(cpu(), libraries=LIBRARIES)
    monkeypatch.setattr(compilation, "target_of", lambda device: target)
    with (
        fake_cublaslt.installed(stand_ins[0]) as cublaslt,
        fake_torch_cuda.installed(stand_ins[1]) as torch_cuda,
    ):
        yield cublaslt, torch_cuda
        assert cublaslt.misuses() == []


class Attention(torch.nn.Module):
    """Two heads of 16; `is_causal` in the second of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into = torch.nn.ModuleList(torch.nn.Linear(32, 96) for _ in range(2))
        self.out = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, (into, out) in enumerate(zip(self.into, self.out, strict=True)):
            heads = into(x).view(3, 6, 3, 2, 16).permute(2, 0, 3, 1, 4)
            q, key, value = heads.unbind(0)
            seen = torch.nn.functional.scaled_dot_product_attention(q, key, value, is_causal=k == 1)
            x = x + out(seen.transpose(1, 2).reshape(3, 6, 32))
        return x


def convolutions() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, stride=2, groups=2),
        torch.nn.ConvTranspose2d(8, 4, 2, dilation=2),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 5 * 5, 10),
    )


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "attention": (Attention, (3, 6, 32)),
    "convolutions": (convolutions, (2, 3, 8, 8)),
}


def module_of(model: torch.nn.Module, batch: torch.Tensor, amp_dtype: str) -> StepModule:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    mod, args = amp_ir.trace_step(step, (batch,), model=model, optimizer=optimizer)
    return amp_ir.autocast(mod, args, amp_dtype=amp_dtype)


@pytest.mark.parametrize("amp_dtype", AMP)
@pytest.mark.parametrize("name", CASES)
def test_steps_train_as_on_the_cpu(fakes, monkeypatch, name, amp_dtype):
    torch.manual_seed(0)
    make, shape = CASES[name]
    model, batch = make(), torch.randn(*shape)
    twin = copy.deepcopy(model)
    ours = amp_ir.compile(module_of(model, batch, amp_dtype))
    monkeypatch.setattr(compilation, "target_of", lambda device: cpu())
    theirs = amp_ir.compile(module_of(twin, batch, amp_dtype))
    rtol = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[amp_dtype]
    for _ in range(3):
        torch.testing.assert_close(ours(batch), theirs(batch), rtol=rtol, atol=rtol)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        difference = float((mine - other).detach().abs().max())
        assert difference <= rtol * float(other.detach().abs().max())
    cublaslt, torch_cuda = fakes
    assert cublaslt.counts().launches > 0 and cublaslt.counts().workspace > 0
    assert (torch_cuda.state().calls > 0) == (name == "convolutions" or amp_dtype != "float32")


def calls_of(mod: StepModule) -> list[str]:
    target = attrs.evolve(cpu(), libraries=LIBRARIES)
    return [call.name for call in pipeline.lower(mod, target=target).plan.calls]


def test_low_attention_is_two_calls_and_copies_nothing():
    mod = module_of(Attention(), torch.randn(3, 6, 32), "bfloat16")
    names = calls_of(mod)
    assert names.count("torch_cuda.attention") == names.count("torch_cuda.attention_backward") == 2
    # Into and out of attention: forward, and two gradients but for the batch's; a layer's first
    # matmul has nothing to give a gradient to in the first layer.
    assert names.count("cublaslt.matmul") == 4 + 4 + 3
    full = calls_of(module_of(Attention(), torch.randn(3, 6, 32), "float32"))
    assert not [n for n in full if "attention" in n and n.startswith("torch_cuda")]


def test_notes_say_why_attention_is_not_a_call():
    target = attrs.evolve(cpu(), libraries=LIBRARIES)
    mod = module_of(Attention(), torch.randn(3, 6, 32), "float32")
    notes = [str(n) for n in pipeline.lower(mod, target=target).dispatched if "attention" in n.op]
    reason = "because flash attention computes in bfloat16 or float16, not in float32"
    assert notes == [
        f"amp_ir.attention: 2 calls -> matmuls and own kernels, {reason}",
        f"amp_ir.attention_backward: 2 calls -> matmuls and own kernels, {reason}",
    ]


def test_workspace_for_cublaslt_is_in_the_arena():
    mod = module_of(Attention(), torch.randn(3, 6, 32), "bfloat16")
    target = attrs.evolve(cpu(), libraries=LIBRARIES)
    plan = pipeline.lower(mod, target=target).plan
    workspace = [one for one in plan.values if one.role.value == "library workspace"]
    matmuls = [one for one in plan.calls if one.name == "cublaslt.matmul"]
    assert len(workspace) == len(matmuls) > 0
    assert {one.symbol for one in matmuls} == {"amp_ir.cublaslt.with_scratch"}
    assert all(one.nbytes > 0 and one.offset_bytes is not None for one in workspace)
    assert native.has("amp_ir.cublaslt.with_scratch")
