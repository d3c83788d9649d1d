# SPDX-License-Identifier: Apache-2.0
"""Capture of models on a GPU, without one: PyTorch has other ops there for the same thing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SUPPORT = Path(__file__).parents[1] / "support"

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the stand-in for a GPU is loaded as on Linux"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    library = tmp_path_factory.mktemp("device") / "libfake_cuda_device.so"
    headers = Path(torch.__path__[0]) / "include"
    source = str(SUPPORT / "fake_cuda_device.cc")
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{headers}", source]
    subprocess.run([*command, "-o", str(library)], check=True)
    # Tensors without data are looked at for shared memory, which PyTorch warns of.
    script = [sys.executable, "-W", "ignore", str(SUPPORT / "capture_on_cuda.py"), str(library)]
    names = ["mlp", "gpt2", "resnet50", "lstm", "gru", "rnn", "packed", "lstm cell", "custom op"]
    done = subprocess.run([*script, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "libraries"),
    [
        ("mlp", ["cublaslt"]),
        ("gpt2", ["cublaslt", "torch_cuda"]),
        ("resnet50", ["cublaslt", "torch_cuda"]),
    ],
)
def test_a_step_on_a_gpu_has_the_ops_that_it_has_on_a_cpu(
    found: dict[str, Any], name: str, libraries: list[str]
) -> None:
    assert found[name] == {"more": {}, "fewer": {}, "libraries": libraries}


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn", "packed"])
def test_recurrent_layers_are_one_op_as_on_a_cpu(found: dict[str, Any], name: str) -> None:
    expected = {"more": {}, "fewer": {}, "libraries": ["cublaslt", "matmuls and own kernels"]}
    assert found[name] == expected


def test_recurrent_cells_are_ops_that_are_known(found: dict[str, Any]) -> None:
    """The input is multiplied as on a CPU."""
    assert found["lstm cell"]["libraries"] == ["cublaslt"]
    assert "relax.matmul" not in found["lstm cell"]["more"]


def test_an_op_of_the_gpu_alone_is_an_external_call(found: dict[str, Any]) -> None:
    expected = {"more": {}, "fewer": {}, "libraries": ["PyTorch (external call)", "cublaslt"]}
    assert found["custom op"] == expected


def test_a_batch_of_the_host_is_told_apart_from_what_a_capture_cannot_do(
    found: dict[str, Any],
) -> None:
    assert found["refused"].endswith(
        "The model is on cuda:0, and the batch on cpu; pass it on the model's device, or move it "
        "there in the step with .to(device)"
    )
    assert found["refused"].startswith("the step failed while it was traced, at 0 (forward): ")


def test_a_batch_of_the_host_that_the_step_moves_is_captured(found: dict[str, Any]) -> None:
    assert found["moved"].count("batch") == 2
