# SPDX-License-Identifier: Apache-2.0
"""`amp-ir compile` writes a step that TVM's runtime alone can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import amp_ir
from amp_ir import cli, native
from amp_ir.cuda import compiler
from amp_ir.demo.workloads import WORKLOADS

STEPS = 3
# Runs a step as its description says, with no more than TVM's runtime, and prints the losses.
RUNNER = """
import ctypes, json, sys
import numpy as np
sys.modules["torch"] = None  # tvm-ffi would import it for its own use
import tvm

path, state, folder, dependencies, steps = sys.argv[1:]
description = json.load(open(path + ".json"))
for file in [*dependencies.split(":"), *(one["file"] for one in description["libraries"])]:
    if file:
        ctypes.CDLL(file if "/" in file else folder + "/" + file, mode=ctypes.RTLD_GLOBAL)
values = np.load(state)
tensors = {}
for one in description["main"]:
    data = values[one["name"]] if one["name"] in values else np.zeros(one["count"])
    tensors[one["name"]] = tvm.runtime.tensor(data.reshape(-1).astype(one["stored_dtype"]))
vm = tvm.runtime.load_module(path)["vm_load_executable"]()
vm["vm_initialization"](1, 0, 2)
(result,) = [one["name"] for one in description["main"] if one["role"] == "result"]
for _ in range(int(steps)):
    vm["main"](*(tensors[one["name"]] for one in description["main"]))
    print(float(tensors[result].numpy()[0]))
print("tvm.relax" in sys.modules, "amp_ir" in sys.modules)
maps = open("/proc/self/maps").read()
print([name for name in ("libtvm_compiler", "libtorch") if name in maps])
"""


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def traced(name: str):
    training = WORKLOADS[name].make(small=True)
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    return training, amp_ir.autocast(mod, args, amp_dtype="bfloat16")


def initial_values(training, mod) -> dict[str, np.ndarray]:
    """Every input of the step, as it is before the first run."""
    batch = iter(mod.signature.flatten_batch(training.batch))
    values = {}
    for spec in mod.signature.inputs:
        value = mod.state[spec.name] if spec.is_state else next(batch)
        value = value if isinstance(value, torch.Tensor) else value()
        values[spec.name] = value.detach().clone().numpy()
    return values


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_step_for_the_cpu_runs_with_the_runtime_alone(tmp_path, capsys):
    out = tmp_path / "step.so"
    command = ["compile", "mlp", "--small", "--target", "cpu", "--amp-dtype", "bfloat16"]
    assert cli.main([*command, "--out", str(out)]) == 0
    training, mod = traced("mlp")
    np.savez(tmp_path / "state.npz", **initial_values(training, mod))
    compiled = amp_ir.compile(mod)
    expected = [float(compiled(*training.batch)) for _ in range(STEPS)]

    dependencies = [str(path) for path in native._wheel_libraries("onednn")]
    done = subprocess.run(
        [
            *(sys.executable, "-c", RUNNER, str(out), str(tmp_path / "state.npz")),
            *(str(native.LIBRARY_DIRECTORY), ":".join(dependencies), str(STEPS)),
        ],
        env={**os.environ, "TVM_USE_RUNTIME_LIB": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *losses, modules, loaded = done.stdout.splitlines()
    # The same kernels on the same numbers; only the number of threads may differ.
    np.testing.assert_allclose([float(one) for one in losses], expected, rtol=1e-6)
    assert modules == "False False"
    assert loaded == "[]"


@pytest.mark.parametrize(
    ("name", "arch", "called"),
    [
        ("mlp", "sm_80", {"cublaslt.matmul": 8}),
        ("bert1", "sm_90", {"torch_cuda.attention": 1, "torch_cuda.attention_backward": 1}),
    ],
)
def test_a_step_for_a_gpu_is_written_without_one(name, arch, called, tmp_path, capsys):
    out = tmp_path / "step.so"
    command = ["compile", name, "--small", "--target", arch, "--amp-dtype", "bfloat16"]
    assert cli.main([*command, "--out", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    description = json.loads(Path(f"{out}.json").read_text())
    assert description["target"] == arch
    arena, *arguments = description["main"]
    assert arena["name"] == "arena" and arena["stored_dtype"] == "uint8"
    roles = {one["role"] for one in arguments}
    assert {"parameter", "batch", "result", "hyper_parameter"} <= roles
    updated = {one["role"] for one in arguments if one["is_updated"]}
    assert "parameter" in updated and not updated & {"batch", "hyper_parameter"}
    for library in description["libraries"]:
        code = (native.LIBRARY_DIRECTORY / library["file"]).read_bytes()
        assert [one for one in library["functions"] if one.encode() not in code] == []
    functions = {one for library in description["libraries"] for one in library["functions"]}
    assert {"amp_ir.view", *(f"amp_ir.{one}" for one in called)} <= functions
    assert len(description["kernels"]) > 4
    assert all(0 < one["registers"] <= 255 for one in description["kernels"])
    content = out.read_bytes()
    assert b"__global__" not in content
    assert content.count(b"\x7fELF") == 2  # itself, and the machine code in it
    assert f"file {out}," in shown
    for function, count in called.items():
        assert f"amp_ir.{function} x {count}" in shown
    assert "needs libamp_ir_cublaslt.so (libcublasLt.so (pip: nvidia-cublas)" in shown
    assert "none spills" in shown
    assert all(f"{stage} " in shown for stage in ("capture", "autocast", "plan", "build", "link"))


def test_a_file_of_the_users_own_compiles(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(
        "import torch\n"
        "model = torch.nn.Linear(64, 32)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "batch = (torch.zeros(8, 64),)\n"
        "def step(x):\n"
        "    loss = model(x).square().mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    return loss.detach()\n"
    )
    out = tmp_path / "linear.so"
    assert cli.main(["compile", str(file), "--target", "sm_90", "--out", str(out)]) == 0
    assert out.exists() and Path(f"{out}.json").exists()


def test_wrong_uses_are_told_before_anything_is_captured(tmp_path, capsys):
    known = ", ".join(compiler.architectures())
    out = str(tmp_path / "step.so")
    for options, message in [
        (
            ["--target", "sm_85"],
            f"'sm_85' is not an architecture that {compiler.find_compiler().identity} compiles "
            f"for; expected one of {known}",
        ),
        (
            ["--target", "tpu"],
            'target=\'tpu\' is not known; expected "cpu", "cuda" or an architecture such as '
            '"sm_90"',
        ),
    ]:
        assert cli.main(["compile", "mlp", "--out", out, *options]) == cli.WRONG_USE
        assert capsys.readouterr().err == f"amp-ir compile: {message}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_told(tmp_path, capsys):
    out = tmp_path / "nowhere" / "step.so"
    assert cli.main(["compile", "mlp", "--small", "--out", str(out)]) == cli.WRONG_USE
    assert capsys.readouterr().err == (
        f"amp-ir compile: --out={out}: there is no such folder; make it\n"
    )
