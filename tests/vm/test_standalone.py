# SPDX-License-Identifier: Apache-2.0
"""A compiled file runs with TVM's runtime, numpy and the libraries that its description names."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import amp_ir
import fake_cublaslt
import fake_torch_cuda
from amp_ir import cli, pipeline, standalone
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.files.sealed_json import sealed
from amp_ir.host import native
from amp_ir.ir import target as targets
from amp_ir.vm import build, export
from cuda_emulator import in_emulator
from standalone_runs import STEPS, run_alone, try_alone, write_batch


def traced(name: str, amp_dtype: str) -> tuple[Any, amp_ir.StepModule]:
    training = WORKLOADS[name].make(small=True)
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    return training, amp_ir.autocast(mod, args, amp_dtype=amp_dtype)


@functools.cache
def fake_of(library: ModuleType) -> Path:
    """A fake library, compiled once a process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return library.build(folder)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_step_for_the_cpu_runs_with_the_runtime_alone(tmp_path):
    command = ["compile", "mlp", "--small", "--target", "cpu", "--amp-dtype", "bfloat16"]
    files = ["--out", str(tmp_path / "step.so"), "--state", str(tmp_path / "state.npz")]
    assert cli.main([*command, *files]) == 0
    training, mod = traced("mlp", "bfloat16")
    write_batch(training, mod, tmp_path)
    compiled = amp_ir.compile(mod)
    expected = [[float(compiled(*training.batch))] for _ in range(STEPS)]
    losses, modules, loaded = run_alone(tmp_path)
    # The same kernels on the same numbers, on the same number of OpenMP's threads.
    assert losses == expected
    assert modules == [] and loaded == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_step_finds_the_libraries_of_an_installed_amp_ir_of_the_same_build(tmp_path):
    # An installed package that must not be imported.
    package = tmp_path / "site" / "amp_ir"
    shutil.copytree(native.LIBRARY_DIRECTORY, package / "lib")
    (package / "__init__.py").write_text("raise ImportError('imported')")
    path = f"{tmp_path}{os.pathsep}{package.parent}"
    command = ["compile", "mlp", "--small", "--target", "cpu", "--out", str(tmp_path / "step.so")]
    assert cli.main([*command, "--state", str(tmp_path / "state.npz")]) == 0
    training, mod = traced("mlp", "float32")
    write_batch(training, mod, tmp_path)
    losses, modules, _ = run_alone(tmp_path, libraries=None, PYTHONPATH=path)
    assert losses == run_alone(tmp_path)[0] and modules == []
    for library in (package / "lib").glob("*.so"):
        with library.open("ab") as file:
            file.write(b"another build")
    done = try_alone(tmp_path, PYTHONPATH=path)
    assert done.returncode == 1
    description = json.loads((tmp_path / "step.so.json").read_text())
    expected = "".join(
        f"\n  {file}: {package / 'lib' / file} is another build than the one that the step was "
        f"compiled with; install that amp_ir, or copy its {file} into {tmp_path}"
        for file in (one["file"] for one in description["libraries"])
    )
    assert f"the step cannot run without these libraries:{expected}\n" in done.stderr


# In bfloat16 bert1 has PyTorch's flash attention.
@pytest.mark.parametrize(
    ("name", "amp_dtype"),
    [("mlp", "bfloat16"), ("bert1", "float32"), ("bert1", "bfloat16")],
)
@in_emulator
def test_a_step_for_a_gpu_runs_with_the_runtime_alone(name, amp_dtype):
    from cuda_emulator import device, steps

    steps.restore_libraries()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        training, mod = traced(name, amp_dtype)
        write_batch(training, mod, folder)
        target = targets.cuda(device.ARCH)
        planned = pipeline.lower(mod, target=target)
        executable = build.compile_executable(planned, target)
        # The code of its kernels is the emulator's; nothing is there to be told of it.
        with mock.patch.object(export.machine_code, "cubins_of", lambda *_: ()):
            written = export.export_step(executable, planned, mod, target, folder / "step.so")
        export.save_state(mod, folder / "state.npz")
        needs_torch = any("torch_cuda" in one for one in written.library_calls)
        assert needs_torch == ((name, amp_dtype) == ("bert1", "bfloat16"))
        cublaslt = fake_of(fake_cublaslt)
        torch_cuda = fake_of(fake_torch_cuda) if needs_torch else None
        losses, modules, loaded = run_alone(
            folder,
            use=str(torch_cuda or ""),
            LD_LIBRARY_PATH=str(device.stand_ins()),
            AMP_IR_CUBLASLT=str(cublaslt),
        )
        assert modules == [] and loaded == (["libtorch_cpu"] if needs_torch else [])
        in_process = steps.load_step(mod, planned, executable)
        with fake_cublaslt.installed(cublaslt) as fake:
            native.function("amp_ir.torch_cuda.use")(str(torch_cuda or ""))
            expected = [[in_process(*training.batch).item()] for _ in range(STEPS)]
            assert fake.misuses() == [] and fake.counts().launches > 0
            native.function("amp_ir.torch_cuda.use")("")
        assert losses == expected
        assert len({loss for (loss,) in losses}) == STEPS
        after = np.load(folder / "after.npz")
        updated = [one.updates for one in mod.signature.outputs if one.updates is not None]
        assert sorted(after) == sorted({mod.signature.inputs[k].name for k in updated})
        for key, value in after.items():
            held = mod.state[key]
            assert isinstance(held, torch.Tensor)
            np.testing.assert_array_equal(value, held.detach().numpy(), err_msg=key)


def test_what_is_missing_is_told_all_at_once(tmp_path):
    needs = [{"file": "libnowhere.so.9", "wheel": "nothing-on-pypi"}]
    own: dict[str, Any] = {"wheel": None, "needs": []}
    libraries = [
        {**own, "file": "libamp_ir_one.so", "functions": ["amp_ir.one.matmul"], "needs": needs},
        {**own, "file": "libamp_ir_openmp.so", "functions": ["amp_ir.view"]},
        {**own, "file": "libamp_ir_two.so", "functions": ["amp_ir.two.view"]},
    ]
    (tmp_path / "step.so").write_bytes(b"")
    description = {
        "kind": standalone.KIND,
        "format": standalone.FORMAT,
        "file": {"nbytes": 0, "sha256": hashlib.sha256().hexdigest()},
        "target": "cpu",
        "main": [],
        "libraries": libraries,
        "kernels": [],
    }
    (tmp_path / "step.so.json").write_text(json.dumps(sealed(description)))
    with pytest.raises(RuntimeError) as caught:
        standalone.LoadedStep(tmp_path / "step.so", libraries=tmp_path)

    def not_opened(file: str) -> str:
        return f"{file}: cannot open shared object file: No such file or directory"

    # What it sets to import TVM is not for the processes that this one starts.
    assert "TVM_USE_RUNTIME_LIB" not in os.environ
    one, two = (tmp_path / f"libamp_ir_{name}.so" for name in ("one", "two"))
    assert str(caught.value) == (
        "the step cannot run without these libraries:\n"
        f"  libamp_ir_one.so: {not_opened(str(one))}\n"
        f"  {not_opened('libnowhere.so.9')} (pip install nothing-on-pypi)\n"
        f"  libamp_ir_two.so: {not_opened(str(two))}"
    )


def test_a_file_of_another_format_is_refused(tmp_path):
    (tmp_path / "step.so.json").write_text('{"format": 7}')
    with pytest.raises(RuntimeError) as caught:
        standalone.LoadedStep(tmp_path / "step.so")
    assert str(caught.value) == (
        "step.so.json has format 7, and this file reads 2; take standalone.py of the amp_ir that "
        "compiled the step"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_library_for_cublaslt_loads_without_pytorch():
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import ctypes, tvm_ffi\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "print(tvm_ffi.get_global_func('amp_ir.cublaslt.matmul') is not None)\n"
        "print('libtorch' in open('/proc/self/maps').read())\n"
    )
    library = native.LIBRARY_DIRECTORY / "libamp_ir_cublaslt.so"
    done = subprocess.run(
        [sys.executable, "-c", code, str(library)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]


def test_the_old_name_of_the_module_warns_and_works():
    with pytest.warns(DeprecationWarning, match="loaded_step is now amp_ir.standalone"):
        old = importlib.import_module("amp_ir.loaded_step")
    assert old.LoadedStep is standalone.LoadedStep
