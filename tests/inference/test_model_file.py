# SPDX-License-Identifier: Apache-2.0
"""Files of converted models and compiled steps: what comes back, and 200 damaged files."""

from __future__ import annotations

import copy
import io
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import amp_ir
from amp_ir.errors import FileFormatError, OptionError, ShapeMismatchError, StateError
from amp_ir.files.sealed_zip import Seal
from damage import damaged_bytes, damaged_zip
from dataflow_graph import nodes_of

DAMAGED = 200


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        hidden = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return {"scores": self.head(hidden), "pair": (hidden, "text", 3)}


def net() -> Net:
    torch.manual_seed(5)
    made = Net()
    made.norm.running_mean.normal_()
    return made


def image(rows: int = 2) -> torch.Tensor:
    return torch.linspace(-2, 2, rows * 3 * 36).sin().reshape(rows, 3, 6, 6)


@pytest.fixture(scope="module")
def converted() -> amp_ir.ConvertedModel:
    made = amp_ir.convert_model(net(), image(), "bfloat16")
    made(image(3))
    return made


@pytest.fixture(scope="module")
def saved(converted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.amp"
    amp_ir.save(converted, path)
    return path


def training() -> tuple[nn.Module, torch.optim.Optimizer, amp_ir.CompiledStep]:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    mod, args = amp_ir.trace_step(step, (torch.ones(3, 6),), model=model, optimizer=optimizer)
    return model, optimizer, amp_ir.compile(amp_ir.autocast(mod, args, amp_dtype="bfloat16"))


def test_a_converted_model_comes_back(converted, saved):
    loaded = amp_ir.load(saved)
    assert loaded.shapes == converted.shapes
    assert loaded.plan.hash == converted.programs[0].module.plan.hash
    assert {name: one.dtype for name, one in loaded.parameters.items()} == {
        name: one.dtype for name, one in converted.parameters.items()
    }
    for rows in (2, 3):
        got, wanted = loaded(image(rows)), converted(image(rows))
        assert torch.equal(got["scores"], wanted["scores"])
        assert torch.equal(got["pair"][0], wanted["pair"][0]) and got["pair"][1:] == ("text", 3)
    # Machine code of the file; nothing was compiled.
    assert all(not one.report.seconds for one in loaded.programs)
    with pytest.raises(ShapeMismatchError) as refused:
        loaded(image(4))
    assert str(refused.value) == (
        "the model was loaded from a file, which has programs for inputs of the shapes "
        "[(2, 3, 6, 6)]; [(3, 3, 6, 6)]; these inputs differ in shape, dtype or structure. Call "
        "the converted model with such inputs before it is saved"
    )


def test_the_ir_comes_back(converted, saved):
    for one, other in zip(amp_ir.load(saved).programs, converted.programs, strict=True):
        assert nodes_of(one.module.ir) == nodes_of(other.module.ir)
        assert one.module.signature.inputs == other.module.signature.inputs
        again = amp_ir.compile(one.module)
        assert torch.equal(again(image(2))["scores"], converted(image(2))["scores"])
        assert "conv" in one.ir("memory")
        break


def test_a_loaded_model_is_saved_again(saved, tmp_path):
    amp_ir.save(amp_ir.load(saved), tmp_path / "again.amp")
    got = amp_ir.load(tmp_path / "again.amp")(image())["scores"]
    assert torch.equal(got, amp_ir.load(saved)(image())["scores"])
    with pytest.raises(OptionError) as refused:
        amp_ir.save(amp_ir.load(saved), tmp_path / "again.amp", remove_amp_cast=True)
    assert str(refused.value) == (
        "the model was loaded from a file, which has its weights as they were stored; "
        "remove_amp_cast=True needs the model that amp_ir.convert_model returned"
    )


def test_removed_casts_leave_the_float32_model(tmp_path):
    model = net()
    converted = amp_ir.convert_model(model, image(), "bfloat16")
    amp_ir.save(converted, tmp_path / "full.amp", remove_amp_cast=True)
    loaded = amp_ir.load(tmp_path / "full.amp")
    assert {one.dtype for one in loaded.parameters.values()} == {torch.float32}
    assert "cast" not in " ".join(nodes_of(loaded.compiled.module.ir)) and loaded.plan is None
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(image())["scores"]
    # Sums of 27 float32 terms in another order, with weights that were rounded once more.
    torch.testing.assert_close(loaded(image())["scores"], expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        model.head.bias.add_(1)
    with pytest.raises(StateError, match="the model's head.bias changed after"):
        amp_ir.save(converted, tmp_path / "full.amp", remove_amp_cast=True)


def test_weights_are_a_safetensors_file(converted, saved):
    with zipfile.ZipFile(saved) as archive:
        tensors = safetensors.torch.load(archive.read("weights.safetensors"))
    for name, one in converted.parameters.items():
        assert torch.equal(tensors[name], one) and tensors[name].dtype is one.dtype


@pytest.mark.parametrize("remove", [False, True])
def test_a_compiled_step_goes_on(remove, tmp_path):
    _, _, train = training()
    train(torch.ones(3, 6))
    amp_ir.save(train, tmp_path / "step.amp", remove_amp_cast=remove)
    loaded = amp_ir.load(tmp_path / "step.amp")
    assert isinstance(loaded, amp_ir.CompiledStep)
    assert (loaded.module.plan is None) == remove
    for k in range(3):
        got, wanted = loaded(torch.full((3, 6), 1.0 + k)), train(torch.full((3, 6), 1.0 + k))
        # Without casts the same step in float32: five roundings of bfloat16 apart.
        assert abs(float(got - wanted)) <= (5 * 2**-8 * abs(float(wanted)) if remove else 0)


def test_steps_that_leave_gradients_are_refused(tmp_path):
    model = nn.Linear(3, 2)

    def step(x):
        model(x).sum().backward()

    mod, _ = amp_ir.trace_step(step, (torch.ones(2, 3),), model=model)
    with pytest.raises(OptionError) as refused:
        amp_ir.save(amp_ir.compile(mod), tmp_path / "step.amp")
    assert str(refused.value) == (
        "the step reads or leaves the gradients bias.grad, weight.grad, which belong to a model, "
        "and a file has none; clear them at the end of the step"
    )
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError) as refused:
        amp_ir.save(model, tmp_path / "step.amp")  # type: ignore[arg-type]
    assert str(refused.value) == (
        "save takes what amp_ir.convert_model or amp_ir.compile returns, and got a Linear"
    )


def test_a_value_that_a_file_cannot_hold_is_refused(tmp_path):
    def step(x):
        return x.sum(), 1 + 2j

    mod, _ = amp_ir.trace_step(step, (torch.ones(2, 3),), model=nn.Linear(3, 2))
    with pytest.raises(OptionError) as refused:
        amp_ir.save(amp_ir.compile(mod), tmp_path / "step.amp")
    assert str(refused.value) == (
        "the program takes or returns a complex, (1+2j), which a file cannot hold; give tensors, "
        "and values of the types bool, int, float, str and None"
    )
    assert not list(tmp_path.iterdir())


# Damage.


def rewritten(path: Path, name: str, change) -> bytes:
    """The file with one entry changed, and sealed again."""
    made = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(made, "w") as new:
        for entry in archive.namelist():
            content = archive.read(entry)
            new.writestr(entry, change(content) if entry == name else content)
    Seal("model", 1, "").append(made)
    return made.getvalue()


def test_damaged_files_are_refused(converted, saved, tmp_path):
    rng, content = random.Random(90), saved.read_bytes()
    other = rewritten(saved, "model.json", lambda text: text + b" ")[:-1]
    path, refused = tmp_path / "damaged.amp", 0
    for k in range(DAMAGED):
        damaged = damaged_zip(content, rng) if k % 4 == 0 else damaged_bytes(content, other, rng)
        path.write_bytes(damaged)
        try:
            loaded = amp_ir.load(path)
        except FileFormatError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert damaged == content
            assert torch.equal(loaded(image())["scores"], converted(image())["scores"])
    assert refused >= 0.95 * DAMAGED


def test_other_versions_are_named(saved, tmp_path):
    path = tmp_path / "other.amp"

    def older(text: bytes) -> bytes:
        return json.dumps({**json.loads(text), "amp_ir": "0.0.9", "tvm": "0.26.0"}).encode()

    path.write_bytes(rewritten(saved, "model.json", older))
    with pytest.raises(FileFormatError) as refused:
        amp_ir.load(path)
    import tvm

    assert str(refused.value) == (
        f"{path} was written by amp_ir 0.0.9 with TVM 0.26.0, and this is amp_ir "
        f"{amp_ir.__version__} with TVM {tvm.__version__}; use those versions, or convert the "
        "model again and save it"
    )
    path.write_bytes(saved.read_bytes().replace(b"amp_ir model format 1", b"amp_ir model format 7"))
    with pytest.raises(FileFormatError) as refused:
        amp_ir.load(path)
    assert str(refused.value) == (
        f"{path} has format 7, and this version of amp_ir reads up to 1; it was written by a newer "
        "one: use that to load it"
    )
    path.write_bytes(b"PK")
    with pytest.raises(FileFormatError) as refused:
        amp_ir.load(path)
    assert str(refused.value) == (
        f"{path} is not a model of amp_ir, or damaged: it has no seal at its end; save the model "
        "again, or take another copy of the file; nothing was loaded"
    )


def test_on_another_cpu_programs_are_compiled_from_their_ir(converted, saved, tmp_path):
    def elsewhere(text: bytes) -> bytes:
        document = json.loads(text)
        for one in document["programs"]:
            one["machine"] = "a CPU of another kind"
        return json.dumps(document).encode()

    path = tmp_path / "elsewhere.amp"
    path.write_bytes(rewritten(saved, "model.json", elsewhere))
    loaded = amp_ir.load(path)
    assert all(one.report.seconds for one in loaded.programs)
    assert torch.equal(loaded(image())["scores"], converted(image())["scores"])


def test_another_process_loads_it(converted, saved, tmp_path):
    program = (
        "import sys, torch, amp_ir\n"
        "loaded = amp_ir.load(sys.argv[1])\n"
        "x = torch.linspace(-2, 2, 216).sin().reshape(2, 3, 6, 6)\n"
        "torch.save(loaded(x)['scores'], sys.argv[2])\n"
    )
    command = [sys.executable, "-c", program, str(saved), str(tmp_path / "scores.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "scores.pt", weights_only=True)
    assert torch.equal(got, converted(image())["scores"])


@pytest.mark.parametrize("entry", ["model.json", "weights.safetensors", "program0.ir.json"])
def test_entries_that_are_no_such_thing_are_refused(entry, saved, tmp_path):
    path = tmp_path / "altered.amp"
    path.write_bytes(rewritten(saved, entry, lambda _: b"{}"))
    with pytest.raises(FileFormatError) as refused:
        amp_ir.load(path)
    expected = "was written by amp_ir None" if entry == "model.json" else "cannot be read: "
    assert str(refused.value).startswith(f"{path} {expected}")
