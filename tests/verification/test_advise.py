# SPDX-License-Identifier: Apache-2.0
"""Advice says what limits mixed precision on a machine; rates come from the test, not from here."""

from __future__ import annotations

import json

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import amp_ir
from amp_ir.cli import main
from amp_ir.host import machine_model
from amp_ir.host.machine_model import GPUS, Curve, MachineModel, measured_cpu, published_gpu
from amp_ir.verification import estimated_machine

Captured = tuple[amp_ir.StepModule, tuple[torch.Tensor, ...]]


def machine(**changes: object) -> MachineModel:
    """A machine with flat rates, eight times as fast at low products."""
    flat = {dtype: Curve(((1.0, rate),)) for dtype, rate in (("float32", 1e3), ("bfloat16", 8e3))}
    options: dict = {
        "name": "a test's", "target": "cpu", "rates": flat, "bandwidth": Curve(((1.0, 1e6),)),
        "call_microseconds": 0.0, "units": 0, "multiple": 16, "source": "a test",
    }  # fmt: skip
    return MachineModel(**{**options, **changes})


def captured(widths: tuple[int, int] = (256, 512), rows: int = 512) -> Captured:
    inner, outer = widths
    model = nn.Sequential(nn.Linear(inner, inner), nn.GELU(), nn.Linear(inner, outer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = torch.randn(rows, inner), torch.randn(rows, outer)
    return amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)


@pytest.fixture(scope="module")
def step() -> Captured:
    return captured()


def advised(monkeypatch: pytest.MonkeyPatch, step: Captured, **changes: object) -> amp_ir.Advice:
    monkeypatch.setattr(estimated_machine, "measured_cpu", lambda _threads: machine(**changes))
    return amp_ir.advise(*step)


def test_where_arithmetic_is_all_the_gain_is_that_of_the_rates(monkeypatch, step):
    found = advised(monkeypatch, step)
    # 2 flop a multiply-add: forward, and both gradients of the second layer, one of the first.
    products = 2 * 512 * 256 * (2 * 256 + 3 * 512) / 1e3 / 1e6
    loops = found.full_milliseconds - products
    assert 0.0 < loops < 0.2 * products
    assert found.low_milliseconds == pytest.approx(products / 8 + loops, rel=0.05)
    assert found.gain > 4.0
    assert found.arithmetic_share == pytest.approx(products / found.full_milliseconds, rel=1e-6)
    assert "Mixed precision pays: " in str(found)
    assert [one.kind for one in found.findings if one.kind == "launches"] == []
    mod, _ = step
    assert found.full_peak_nbytes == amp_ir.get_peak_memory(mod, "cpu") * 2**20


def test_where_calls_are_all_nothing_is_gained(monkeypatch, step):
    found = advised(monkeypatch, step, call_microseconds=1e6)
    assert found.gain <= 1.0
    assert found.call_share > 0.9
    assert found.findings[0].kind == "launches"
    assert "Mixed precision costs time: " in str(found)
    assert any(one.kind == "casts" and "Override(module=" in one.text for one in found.findings)


def test_what_is_said_to_be_given_back_is(monkeypatch, step):
    found = advised(monkeypatch, step, call_microseconds=1e6)
    said = {one.text.partition(":")[0]: one for one in found.findings if one.kind == "casts"}
    assert said
    for module, one in said.items():
        override = amp_ir.Override(module=module, to="float32")
        changed = amp_ir.advise(*step, overrides=[override])
        saved = found.low_milliseconds - changed.low_milliseconds
        assert one.milliseconds == pytest.approx(saved)


def test_where_memory_is_all_bytes_decide(monkeypatch, step):
    found = advised(monkeypatch, step, bandwidth=Curve(((1.0, 1.0),)))
    assert found.memory_share > 0.9
    assert found.findings[0].kind == "memory"
    assert 0.8 < found.gain < 2.0


def test_extents_and_small_matmuls_are_named(monkeypatch):
    slow_if_small = {
        dtype: Curve(((1e3, rate / 100), (1e12, rate)))
        for dtype, rate in (("float32", 1e3), ("bfloat16", 8e3))
    }
    found = advised(monkeypatch, captured((250, 512), rows=64), rates=slow_if_small)
    texts = {one.kind: one.text for one in found.findings}
    assert texts["odd extents"].startswith("2: the extents ") or "250 (say 256)" in str(found)
    assert "low matmuls reach less than half of the rate of large ones" in texts["small matmuls"]
    data = json.loads(found.to_json())
    assert data["gain"] == found.gain
    assert {one["kind"] for one in data["findings"]} == set(texts)


def test_a_gpu_that_is_not_here_is_estimated_by_its_published_peaks(step):
    found = {name: amp_ir.advise(*step, gpu=name) for name in ("H100", "L4")}
    assert found["H100"].low_milliseconds < found["L4"].low_milliseconds
    assert "too small for this GPU" in str(found["H100"])
    faster = amp_ir.advise(*step, gpu="h100", allow_tf32=True)
    assert faster.full_milliseconds < found["H100"].full_milliseconds
    assert str(found["L4"]).startswith("bfloat16 on L4 (rates: L4 data sheet, 2023")


def test_every_gpu_has_the_rates_that_its_source_gives():
    for name, gpu in GPUS.items():
        model = published_gpu(name)
        peak = model.rates["bfloat16"].points[-1][1] / 1e3
        assert 0.5 * gpu.bfloat16 < peak < gpu.bfloat16
        assert gpu.bfloat16 >= gpu.tf32 >= gpu.float32
        assert gpu.source


def test_rates_are_interpolated_between_sizes_and_constant_beyond():
    curve = Curve(((1.0, 1.0), (100.0, 10.0)))
    assert [curve.at(size) for size in (0.1, 1.0, 10.0, 100.0, 1e6)] == pytest.approx(
        [1.0, 1.0, 10**0.5, 10.0, 10.0]
    )


def test_wrong_uses_are_refused(step):
    mod, args = step
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        amp_ir.advise(mod, args, gpu="P100")
    assert str(caught.value) == f"gpu='P100' is not known; expected one of {', '.join(GPUS)}"
    low = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        amp_ir.advise(low, args)
    assert str(caught.value) == "the step went through autocast; give advise the one before"


def test_a_step_on_a_gpu_is_estimated_by_its_name(step):
    mod, args = step
    with FakeTensorMode():
        there = {name: torch.empty(1, device="cuda:0") for name in mod.state}
    mod = attrs.evolve(mod, state=there)
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        amp_ir.advise(mod, args)
    assert str(caught.value) == (
        "the step's tensors are on cuda:0, whose rates are not measured; give gpu= the name of one "
        f"whose published peaks are known: {', '.join(GPUS)}"
    )
    assert amp_ir.advise(mod, args, gpu="H100").machine == "H100"


def test_this_cpu_is_measured_once(monkeypatch):
    monkeypatch.setattr(machine_model, "_EXTENTS", (16, 64))
    monkeypatch.setattr(machine_model, "_COPIES", (1 << 14, 1 << 16))
    measured_cpu.cache_clear()
    try:
        model = measured_cpu(1)
        assert model is measured_cpu(1)
    finally:
        measured_cpu.cache_clear()
    assert set(model.rates) == {"float32", "bfloat16", "float16"}
    curves = [*model.rates.values(), model.bandwidth]
    assert all(len(one.points) == 2 and min(rate for _, rate in one.points) > 0 for one in curves)


def test_the_command_advises(tmp_path, capsys):
    file = tmp_path / "advice.json"
    assert main(["advise", "mlp", "--small", "--gpu", "A100", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "bfloat16 on A100 (rates: A100 data sheet" in shown
    assert json.loads(file.read_text())["machine"] == "A100"
