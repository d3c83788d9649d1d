# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.tune`: ways of a matmul, what is measured and kept, what a compiled step makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from tvm.script import ir as I
from tvm.script import relax as R

import amp_ir
from amp_ir import cli
from amp_ir.dispatch.choose_algorithms import choose_algorithms, matmul_label, matmuls_of
from amp_ir.dispatch.dispatch import dispatch
from amp_ir.host import native
from amp_ir.ir import tuning_cache
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import RULES
from amp_ir.ir.tuning_cache import ALGORITHMS, TuningCache, fastest_algorithm
from amp_ir.runtime import time_algorithms
from library_calls import lines_of
from matmul_calls import LAYOUTS, check, nan, random
from native_calls import layout, matmul, memory, relative_error

pytestmark = pytest.mark.skipif(
    not native.has("amp_ir.onednn.matmul"), reason="oneDNN is not in this build"
)
OTHERS = ALGORITHMS[1:]


# What a way computes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", OTHERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_way_computes_every_layout(name: str, way: str, dtype: torch.dtype) -> None:
    a, b, out = LAYOUTS[name](
        lambda *dims: random(*dims, dtype=dtype), lambda *dims: nan(*dims, dtype=dtype)
    )
    matmul("onednn", a, b, out, epilogue=f"none+{way}")
    # As tests of the product without a way: one rounding of the result.
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    assert relative_error(out, a.double() @ b.double()) <= tolerance


@pytest.mark.parametrize("way", OTHERS)
def test_every_way_has_the_bias_the_epilogue_and_the_sum(way: str) -> None:
    a, b, bias = random(40, 33), random(21, 33).mT, random(21)
    out = nan(40, 21)
    matmul("onednn", a, b, out, bias=bias, epilogue=f"relu+{way}")
    check_relu = (a.double() @ b.double() + bias.double()).relu()
    assert relative_error(out, check_relu) <= 2e-6
    total = random(40, 21)
    expected = 0.5 * total.double() - 2 * (a.double() @ b.double())
    native.function("amp_ir.onednn.matmul_accumulate")(
        memory(a), memory(b), memory(total), None, torch.tensor(-2.0), torch.tensor(0.5),
        *layout(a), *layout(b), *layout(total), f"none+{way}", memory(total),
    )  # fmt: skip
    assert relative_error(total, expected) <= 3e-6


@pytest.mark.parametrize(
    ("way", "implementation"), [("gemm", "gemm:jit"), ("copy_b", "pack+"), ("copy_a", "pack+")]
)
def test_a_way_is_what_it_says(way: str, implementation: str) -> None:
    native.function("amp_ir.onednn.clear_cache")()
    matmul("onednn", random(64, 64).mT, random(64, 96), nan(64, 96), epilogue=f"none+{way}")
    (used,) = (str(one) for one in native.function("amp_ir.onednn.implementations")())
    # A CPU whose oneDNN keeps plain layouts has nothing to copy.
    assert implementation in used or (way != "gemm" and "brg" not in used), used


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError) as refused:
        check("onednn", random(2, 2), random(2, 2), nan(2, 2), epilogue="none+best")
    assert str(refused.value).splitlines()[0] == (
        'amp_ir.onednn.matmul: way "best"; expected plain, gemm, copy_a, copy_b or copy_both'
    )


# Which way is taken.


@given(st.fixed_dictionaries({way: st.floats(1e-3, 1e3) for way in ALGORITHMS}))
def test_the_best_way_is_faster_by_three_percent_or_none(times: dict[str, float]) -> None:
    best = fastest_algorithm(times)
    assert times[best] <= times[RULES]
    if best == RULES:
        assert min(times.values()) >= 0.97 * times[RULES]
    else:
        assert times[best] == min(times.values()) < 0.97 * times[RULES]


@I.ir_module
class TwoProducts:
    @R.function
    def main(
        x: R.Tensor((2, 8), "bfloat16"),
        w: R.Tensor((4, 8), "bfloat16"),
        v: R.Tensor((4, 8), "float32"),
    ):
        with R.dataflow():
            t = R.permute_dims(w, axes=[1, 0])
            y = R.matmul(x, t, out_dtype="bfloat16")
            z = R.matmul(v, R.permute_dims(v, axes=[1, 0]))
            out = (y, z)
            R.output(out)
        return out


def test_the_way_stands_behind_the_epilogue() -> None:
    calls = dispatch(TwoProducts)
    names = list(matmuls_of(calls))
    assert [matmul_label(call) for call in matmuls_of(calls).values()] == [
        "2 x 8 x 4, bfloat16, b transposed",
        "4 x 8 x 4, float32, b transposed",
    ]
    log = DispatchLog()
    chosen = choose_algorithms(calls, {names[0]: "gemm", names[1]: RULES}.__getitem__, log=log)
    before, after = lines_of(calls), lines_of(chosen)
    assert [a.replace('"none+gemm"', '"none"') for a in after] == before
    assert ["+gemm" in line for line in after if "onednn.matmul" in line] == [True, False]
    assert [str(note) for note in log.notes] == [
        "matmul: 1 call -> onednn, because measured: gemm is the fastest algorithm"
    ]


# What is measured and kept.


def captured() -> amp_ir.StepModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return amp_ir.trace_step(step, (torch.ones(16, 24),), model=model, optimizer=optimizer)[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every way measured once, and gemm the best; what was measured."""
    asked: list[str] = []

    def times(product: object) -> dict[str, float]:
        real = measure(product)
        assert set(real) == set(ALGORITHMS) and all(0 < one < 1e4 for one in real.values())
        asked.append(matmul_label(product))
        return dict.fromkeys(ALGORITHMS, 2.0) | {"gemm": 1.0}

    measure = time_algorithms.milliseconds_by_algorithm
    monkeypatch.setattr(time_algorithms, "_SECONDS_PER_MATMUL", 0.0)
    monkeypatch.setattr(time_algorithms, "milliseconds_by_algorithm", times)
    return asked


def test_what_is_known_is_not_measured_again(quick: list[str]) -> None:
    first = amp_ir.tune(captured())
    assert len(quick) == len(first.by_matmul) == 5  # two forward, two of weights, one of an input
    assert amp_ir.tune(captured()) == first and len(quick) == 5
    assert list(json.loads(first.file.read_text())["milliseconds"].values()) == list(
        first.by_matmul.values()
    )
    assert first.saved_share == 0.5
    assert str(first).splitlines()[0].split() == [
        *"milliseconds of rows x sum x columns".split(), *ALGORITHMS, "taken",
    ]  # fmt: skip
    assert "16 x 24 x 40, float32, b transposed, with bias" in str(first)
    assert str(first).splitlines()[-1] == str(first.file)


def test_an_interruption_loses_one_matmul(
    quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = TuningCache.add

    def interrupted(self: TuningCache, product: str, times: dict[str, float]) -> None:
        if len(self.milliseconds) == 3:
            raise KeyboardInterrupt
        add(self, product, times)

    monkeypatch.setattr(TuningCache, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        amp_ir.tune(captured())
    monkeypatch.setattr(TuningCache, "add", add)
    quick.clear()
    assert len(amp_ir.tune(captured()).by_matmul) == 5
    assert len(quick) == 2


def test_steps_compiled_afterwards_take_what_is_best(quick: list[str]) -> None:
    def trained() -> tuple[list[str], torch.Tensor]:
        mod = captured()
        train = amp_ir.compile(mod)
        losses = torch.stack([train(torch.ones(16, 24)) for _ in range(4)])
        return [str(note) for note in train.report.dispatched], losses

    notes, losses = trained()
    assert not [note for note in notes if "measured" in note]
    amp_ir.tune(captured())
    notes, tuned = trained()
    assert "matmul: 5 calls -> onednn, because measured: gemm is the fastest algorithm" in notes
    # The same products with their terms in another order, over four steps.
    torch.testing.assert_close(tuned, losses, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"a": 3}', '{"a": {"rules": null, "plain": 1.0}}']
)
def test_a_file_that_makes_no_sense_is_an_empty_one(content: str) -> None:
    file = tuning_cache.default_directory() / "here.json"
    file.parent.mkdir()
    file.write_text(content)
    cache = TuningCache.read("here")
    assert cache.milliseconds == {} and cache.best("a") == RULES
    cache.add("a", dict.fromkeys(ALGORITHMS, 1.0))
    assert TuningCache.read("here").milliseconds == cache.milliseconds


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tuning_cache, "default_directory", lambda: tmp_path / "file" / "no")
    cache = TuningCache.read("here")
    cache.add("a", dict.fromkeys(ALGORITHMS, 1.0))
    assert list(cache.milliseconds) == ["a"]


def test_wrong_uses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(amp_ir.errors.OptionError, match="tune takes a StepModule and got int"):
        amp_ir.tune(3)
    monkeypatch.setattr(native, "has", lambda name: False)
    with pytest.raises(amp_ir.errors.OptionError) as refused:
        amp_ir.tune(captured())
    assert str(refused.value) == "tune measures oneDNN's matmuls, and this build has no oneDNN"


def test_the_command_prints_the_table(quick: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "mlp", "--small", "--amp-dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "8 x 32 x 32, float32, b transposed, with bias" in printed and "gemm" in printed
