# SPDX-License-Identifier: Apache-2.0
"""What is said of wrong uses that only a GPU can see, and that they change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amp_ir
from amp_ir import cli, pipeline
from amp_ir.errors import DeviceError, OptionError, StateError
from amp_ir.ir import target
from amp_ir.runtime.program import Program
from amp_ir.vm import build
from cuda_emulator import in_emulator


def training() -> tuple[torch.nn.Module, Any, torch.Tensor, amp_ir.StepModule]:
    """A model whose step holds 1 MiB of activations."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = torch.randn(256, 4)
    mod, _ = amp_ir.trace_step(step, (batch,), model=model, optimizer=optimizer)
    return model, optimizer, batch, mod


def contents(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    states = [one for state in optimizer.state.values() for one in state.values()]
    return [one.detach().clone() for one in (*model.parameters(), *states)]


@in_emulator
def test_a_gpu_without_room_for_the_step_says_what_it_needs_and_the_model_is_unchanged():
    from cuda_emulator import as_cuda, torch_cuda

    model, optimizer, batch, mod = training()
    before = contents(model, optimizer)
    with as_cuda.as_cuda():
        with torch_cuda.free_memory(1 << 20), pytest.raises(DeviceError) as caught:
            amp_ir.compile(mod, device="cuda")
        plan = pipeline.lower(mod, target=target.cuda("sm_90")).plan
        assert plan.arena_bytes > 1 << 20
        needed = plan.arena_bytes + plan.batch_bytes + plan.result_bytes
        assert str(caught.value) == (
            f"the step needs {needed / 2**20:.0f} MiB of cpu beside its state, and 1 MiB are free; "
            "pass memory_budget= to compute values again instead of holding them, or make the "
            "batch smaller. Model and optimizer are unchanged"
        )
        after = contents(model, optimizer)
        assert len(before) == len(after)
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        # And it can be trained where there is room.
        assert amp_ir.compile(mod, device="cuda")(batch).isfinite()


class Scaled(torch.nn.Module):
    """Holds next to nothing beside its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.factor).sum()


@in_emulator
def test_a_gpu_without_room_for_the_batch_says_the_same():
    from cuda_emulator import as_cuda, torch_cuda

    mod, _ = amp_ir.trace_model(Scaled(), (torch.randn(2048, 256),))
    with as_cuda.as_cuda():
        plan = pipeline.lower(mod, target=target.cuda("sm_90")).plan
        assert plan.arena_bytes < 1 << 20 < plan.batch_bytes
        with torch_cuda.free_memory(1 << 20), pytest.raises(DeviceError) as caught:
            amp_ir.compile(mod, device="cuda")
    assert str(caught.value).startswith(
        "the step needs 2 MiB of cpu beside its state, and 1 MiB are free; pass memory_budget= to "
    )


def test_a_model_of_the_host_is_refused_for_a_gpu():
    *_, mod = training()
    planned = pipeline.lower(mod)
    with pytest.raises(StateError) as caught:
        Program(build.build(planned), planned.plan, mod.signature, mod.state, "cuda:0")
    assert str(caught.value) == (
        "parameter 0.weight is on cpu, and the step was compiled for cuda:0; move the model with "
        '.to("cuda:0") before the optimizer is made and the step is captured'
    )


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "Tesla T4")
    # Optimizers ask a GPU that is available, where this PyTorch has CUDA.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


OLD = (
    "device='cuda' is a Tesla T4 of architecture sm_75, and amp_ir compiles for sm_80 (A100) and "
    'newer; train on such a GPU, or on device="cpu"'
)


def test_a_gpu_that_is_too_old_is_refused(old_gpu: None, capsys: Any) -> None:
    *_, mod = training()
    for call in (
        lambda: amp_ir.compile(mod, device="cuda"),
        lambda: amp_ir.profile_kernels(mod, "cuda", (torch.randn(256, 4),)),
    ):
        with pytest.raises(DeviceError) as caught:
            call()
        assert str(caught.value) == OLD
    assert cli.main(["profile", "mlp", "--small", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == f"amp-ir profile: {OLD}\n"


@pytest.mark.parametrize("name", ["sm_75", "sm_9", "h100"])
def test_an_architecture_that_is_none_or_too_old_is_refused(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        target.cuda(name)
    assert str(caught.value) == (
        f"target={name!r} is not a CUDA architecture that amp_ir compiles for; expected sm_80 or "
        "newer, such as sm_80 (A100), sm_89 (L4, RTX 40) or sm_90 (H100, H200)"
    )


def test_a_gpu_that_is_not_there_is_refused(old_gpu: None) -> None:
    with pytest.raises(DeviceError) as caught:
        target.target_of("cuda:1")
    assert str(caught.value) == "device='cuda:1' is not here: this machine has 1 GPU(s)"
