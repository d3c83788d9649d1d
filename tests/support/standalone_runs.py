# SPDX-License-Identifier: Apache-2.0
"""Runs a compiled step in a process with TVM's runtime alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import amp_ir
from amp_ir import standalone
from amp_ir.host import native

STEPS = 3


# Runs a step in a process that has neither amp_ir nor Python's torch.
RUNNER = """
import json, sys
sys.modules["torch"] = None  # tvm-ffi would import it for its own use
import numpy as np

path, steps, use, libraries = sys.argv[1:]
from standalone import LoadedStep

batch = dict(np.load("batch.npz"))
step = LoadedStep(path, state="state.npz", libraries=libraries or None)
if use:
    import tvm_ffi
    tvm_ffi.get_global_func("amp_ir.torch_cuda.use")(use)
losses = [[float(one) for one in step.run(batch).values()] for _ in range(int(steps))]
np.savez("after.npz", **step.state())
maps = open("/proc/self/maps").read()
loaded = [name for name in ("libtvm_compiler", "libtorch_python", "libtorch_cpu") if name in maps]
print(json.dumps([losses, [one for one in ("amp_ir", "tvm.relax") if one in sys.modules], loaded]))
"""


def write_batch(training: Any, mod: amp_ir.StepModule, folder: Path) -> None:
    names = [one.name for one in mod.signature.inputs if not one.is_state]
    tensors = mod.signature.flatten_batch(training.batch)
    values = {name: one.numpy() for name, one in zip(names, tensors, strict=True)}
    np.savez(folder / "batch.npz", **values)


def try_alone(
    folder: Path, *, use: str = "", libraries: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a step alone, on the libraries of that folder; None: those that the step finds itself."""
    shutil.copy(standalone.__file__, folder)
    arguments = ["step.so", str(STEPS), use, str(libraries or "")]
    return subprocess.run(
        [sys.executable, "-c", RUNNER, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
    )


def run_alone(
    folder: Path, *, libraries: Path | None = native.LIBRARY_DIRECTORY, **options: str
) -> tuple[list[list[float]], list[str], list[str]]:
    """The results of each step, and what of amp_ir, TVM and PyTorch was loaded."""
    done = try_alone(folder, libraries=libraries, **options)
    assert done.returncode == 0, done.stderr
    losses, modules, loaded = json.loads(done.stdout.splitlines()[-1])
    return losses, modules, loaded
