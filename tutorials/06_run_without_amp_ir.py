# SPDX-License-Identifier: Apache-2.0
"""Lesson 6: run a compiled step with TVM's runtime alone, without PyTorch and amp_ir."""

# %% [markdown]
# # A step as a file
#
# `amp-ir compile` writes a training step as a shared library with a JSON description beside it, and
# with `--state` the weights and optimizer state to begin with. It takes a workload's name or a file
# of yours that defines `model`, `optimizer`, `batch` and `step`:

# %%
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import amp_ir
from amp_ir import cli, standalone

Path("train.py").write_text(
    """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batch = torch.randn(32, 16), torch.randn(32, 4)

def step(inputs, targets):
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
"""
)
command = ["compile", "train.py", "--target", "cpu", "--out", "step.so", "--state", "state.npz"]
assert cli.main(command) == 0

# %% [markdown]
# ## What the description says
#
# `main` lists the arguments of the compiled function: the batch and the results have names of
# their own, state has that of the model and the optimizer. A learning rate is an argument as well.

# %%
description = json.loads(Path("step.so.json").read_text())
for one in description["main"]:
    print(f"{one['role']:16} {one['name']:32} {one['dtype']}{one['shape']}")
for one in description["libraries"]:
    print(f"{one['file']} needs {', '.join(need['file'] for need in one['needs']) or 'nothing'}")

# %% [markdown]
# ## Run it elsewhere
#
# One file of amp_ir, `standalone.py`, does all of this with numpy and TVM's runtime; it is made to
# be copied. Put it, the step and the libraries of amp_ir that the description names into a folder:

# %%
away = Path("away")
away.mkdir()
shutil.copy(standalone.__file__, away)
for name in ("step.so", "step.so.json", "state.npz"):
    shutil.copy(name, away)
for one in description["libraries"]:
    shutil.copy(Path(amp_ir.__file__).parent / "lib" / one["file"], away)
rng = np.random.default_rng(0)
x = rng.standard_normal((32, 16), dtype=np.float32)
names = [one["name"] for one in description["main"] if one["role"] == "batch"]
np.savez(away / "batch.npz", **dict(zip(names, (x, x[:, :4]), strict=True)))

program = """
import sys
sys.modules["torch"] = None  # as if PyTorch were not installed
import numpy as np
from standalone import LoadedStep

step = LoadedStep("step.so", state="state.npz")
batch = dict(np.load("batch.npz"))
losses = [float(loss) for _ in range(30) for loss in step.run(batch).values()]
(rate,) = [one["name"] for one in step.description["main"] if one["name"].endswith("lr")]
step.write(rate, 0.0)  # a schedule writes its rates so
rested = [float(loss) for _ in range(2) for loss in step.run(batch).values()]
np.savez("trained.npz", **step.state())
print(losses[0], losses[-1], *rested, "amp_ir" in sys.modules)
"""
command = [sys.executable, "-c", program]
done = subprocess.run(command, cwd=away, capture_output=True, text=True, check=True)
first, last, *rested, has_amp_ir = done.stdout.split()
print(f"loss {float(first):.4f}, after 30 steps {float(last):.4f}")
assert float(last) < 0.5 * float(first) and has_amp_ir == "False"
# With a learning rate of 0, the second of two steps finds the weights of the first.
assert rested[0] == rested[1]

# %% [markdown]
# For a GPU it is the same with `--target sm_90`: `LoadedStep` then puts everything on the GPU, and
# the description names cuBLASLt, and PyTorch's CUDA library where convolutions or flash attention
# are taken from it. `--libraries cublaslt` does without PyTorch: attention becomes matmuls and
# kernels of our own; convolutions do, too, and are slow so.
