# SPDX-License-Identifier: Apache-2.0
"""Lesson 4: the same step for a GPU, with one at hand or without."""

# %% [markdown]
# # The same step for a GPU
#
# Nothing changes in what you write. Move the model with `.to("cuda")` before you make the
# optimizer, and pass `device="cuda"`:
#
#     train = amp_ir.jit(
#         step, model=model, optimizer=optimizer, amp_dtype="bfloat16", device="cuda"
#     )
#
# The step then runs on the model's own CUDA tensors and on PyTorch's current stream. The first call
# launches kernel after kernel; from the second on the whole step, loss scaling included, is one
# CUDA graph. It reads nothing back: a learning rate that you change between steps is written to the
# GPU, and a batch in pinned memory is copied without waiting.
#
# Matmuls are cuBLASLt's, convolutions and attention PyTorch's own, everything else is fused into
# few kernels. This lesson also runs where there is no GPU: a step can be compiled anywhere.

# %%
import torch
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.api import lower
from amp_ir.ir import target
from amp_ir.vm.build import compile_executable

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 8))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One training step; returns the loss."""
    loss = functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


batch = torch.randn(128, 64, device=device), torch.randn(128, 8, device=device)
mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
amp_mod = amp_ir.autocast(mod, args, amp_dtype="bfloat16")

# %% [markdown]
# ## Train on it
#
# On a CPU if there is no GPU here: the device is the only difference.

# %%
train = amp_ir.compile(amp_mod, device=device)
losses = [float(train(*batch)) for _ in range(20)]
print(f"on {device}: loss {losses[0]:.4f}, after 20 steps {losses[-1]:.4f}")
assert losses[-1] < losses[0]

# %% [markdown]
# ## Compile for a GPU that is elsewhere
#
# The memory plan depends on the target: another library needs other workspace.

# %%
for name in ("cpu", "sm_90"):
    print(f"{name:6} {amp_ir.get_peak_memory(amp_mod, name):6.2f} MiB at the peak")

# %% [markdown]
# Machine code needs NVIDIA's compiler, and no driver: `pip install "amp_ir[cuda]"`. A program is
# written by the command
#
#     amp-ir compile train.py --target sm_90 --amp-dtype bfloat16 --out step.so
#
# which says what the kernels need (registers, shared memory, spills) and which libraries the
# program will look for. TVM's runtime alone runs it. In Python the same is two calls:

# %%
hopper = target.cuda("sm_90")
planned = lower(amp_mod, target=hopper)
for note in planned.dispatched:
    print(f"{note.op} x {note.calls}: {note.library or 'a kernel of our own'}")
try:
    program = compile_executable(planned, hopper)
except amp_ir.errors.BuildError as error:
    print(f"no machine code here: {error}")
else:
    program.export_library("step.so")

# %% [markdown]
# TF32 is PyTorch's decision: `torch.set_float32_matmul_precision("high")` before compiling lets
# float32 matmuls use it. `amp_ir.profile_vm_model(mod, "cuda", args)` times a step on the GPU.
