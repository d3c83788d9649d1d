# SPDX-License-Identifier: Apache-2.0
"""`amp-ir compile` writes a step that TVM's runtime alone can run."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

from amp_ir import cli
from amp_ir.cuda import compiler
from amp_ir.errors import BuildError
from amp_ir.host import native
from amp_ir.vm import export


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


class Executable:
    """Links nothing."""

    def export_library(self, _path: str) -> None:
        raise RuntimeError("Compilation error:\nld: cannot find -lm")


LINKED = (
    "step.so cannot be linked; g++ or clang++ must work, and the folder for temporary files must "
    "be writable. What failed: "
)


def test_what_cannot_be_linked_is_refused_by_its_reason(tmp_path, monkeypatch):
    def refused() -> str:
        with pytest.raises(BuildError) as caught:
            export.linked_library(Executable(), Path("step.so"))
        return str(caught.value)

    assert refused() == f"{LINKED}Compilation error:\nld: cannot find -lm"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert re.fullmatch(
        re.escape(f"{LINKED}[Errno 2] No such file or directory: '{tmp_path}/none/") + r"\w+'",
        refused(),
    )
    monkeypatch.setattr(export, "missing_linker", lambda: "there is no g++ on the path")
    assert refused() == "step.so cannot be linked: there is no g++ on the path; install g++"


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
    runtime, *own = description["libraries"]
    assert runtime["functions"] == ["device_api.cuda"]
    for library in own:
        code = (native.LIBRARY_DIRECTORY / library["file"]).read_bytes()
        assert [one for one in library["functions"] if one.encode() not in code] == []
    functions = {one for library in own for one in library["functions"]}
    assert {"amp_ir.view", *(f"amp_ir.{one}" for one in called)} <= functions
    assert len(description["kernels"]) > 4
    assert all(0 < one["registers"] <= 255 for one in description["kernels"])
    content = out.read_bytes()
    assert b"__global__" not in content
    assert content.count(b"\x7fELF") == 2  # itself, and the machine code in it
    assert f"file {out}," in shown
    for function, count in called.items():
        assert f"amp_ir.{function} x {count}" in shown
    assert "needs libamp_ir_cublaslt.so (libcublasLt.so.13, pip: nvidia-cublas)" in shown
    assert "none spills" in shown
    assert all(f"{stage} " in shown for stage in ("capture", "amp", "memory", "vm", "link"))


@pytest.mark.parametrize(
    ("chosen", "named", "own"),
    [
        ("cublaslt", {"libamp_ir_cublaslt.so"}, False),
        ("none", set(), True),
    ],
)
def test_a_step_may_do_without_pytorch_or_any_library(chosen, named, own, tmp_path, capsys):
    out = tmp_path / "step.so"
    command = ["compile", "bert1", "--small", "--target", "sm_90", "--libraries", chosen]
    assert cli.main([*command, "--out", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    description = json.loads(Path(f"{out}.json").read_text())
    files = {one["file"] for one in description["libraries"]}
    assert files == {"libtvm_runtime_cuda.so", "libamp_ir_openmp.so"} | named
    assert ("by own kernels relax.matmul x " in shown) == own


def train_file(folder: Path, layer: str, optimizer: str, batch: str) -> str:
    """Write a train.py of a user's with one layer; return its path."""
    file = folder / "train.py"
    file.write_text(
        "import torch\n"
        f"model = torch.nn.Linear({layer})\n"
        f"optimizer = torch.optim.{optimizer}\n"
        f"batch = (torch.zeros({batch}),)\n"
        "def step(x):\n"
        "    loss = model(x).square().mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    return loss.detach()\n"
    )
    return str(file)


def test_a_file_of_the_users_own_compiles(tmp_path, capsys):
    file = train_file(tmp_path, "64, 32", "SGD(model.parameters(), lr=0.1)", "8, 64")
    out = tmp_path / "linear.so"
    assert cli.main(["compile", file, "--target", "sm_90", "--out", str(out)]) == 0
    assert out.exists() and Path(f"{out}.json").exists()


@pytest.mark.skipif(not native.has("amp_ir.onednn.matmul"), reason="all matmuls are PyTorch's")
def test_a_file_for_a_cpu_does_without_pytorch_where_that_is_faster(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("amp_ir.host.native.has_amx", lambda: True)
    layer, optimizer = "1024, 1024, bias=False", "AdamW(model.parameters())"
    file, out = train_file(tmp_path, layer, optimizer, "1024, 1024"), tmp_path / "step.so"
    assert cli.main(["compile", file, "--amp-dtype", "float32", "--out", str(out)]) == 0
    files = {one["file"] for one in json.loads(Path(f"{out}.json").read_text())["libraries"]}
    assert "libamp_ir_onednn.so" in files
    assert "libamp_ir_torch.so" not in files


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
        (
            ["--target", "sm_90", "--libraries", "onednn"],
            "--libraries=onednn: for target sm_90 there are cublaslt, torch_cuda; name some of "
            'them, with commas in between, or "none"',
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
