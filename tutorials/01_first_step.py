# SPDX-License-Identifier: Apache-2.0
"""Lesson 1: from a plain training loop to the compiled one."""

# %% [markdown]
# # A first step: from a plain training loop to a compiled one
#
# You have a PyTorch training loop. This lesson captures its step, compiles it in float32 and in
# mixed precision, and trains with it. Nothing of your model, optimizer or loop has to change.

# %%
import copy

import torch

import amp_ir

torch.manual_seed(0)

# %% [markdown]
# ## The loop as you wrote it
#
# A small regression network, AdamW, clipping and a learning-rate scheduler. `step` is an ordinary
# function: it computes the loss, goes backward, clips, updates and clears the gradients.

# %%
model = torch.nn.Sequential(
    torch.nn.Linear(64, 256),
    torch.nn.LayerNorm(256),
    torch.nn.GELU(),
    torch.nn.Linear(256, 8),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)


def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One training step; returns the loss."""
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


teacher = torch.nn.Linear(64, 8)


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs, and what a fixed linear map makes of them."""
    inputs = torch.randn(128, 64)
    with torch.no_grad():
        return inputs, teacher(inputs)


# %% [markdown]
# ## Capture
#
# `trace_step` runs the step once on tensors without data. Your model and optimizer stay exactly as
# they were: not one parameter changes, and the optimizer has no state yet.

# %%
before = copy.deepcopy(model.state_dict())
batch = make_batch()
mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
assert not optimizer.state

# %% [markdown]
# `mod` is a `StepModule`: the whole step (forward, backward, clipping and AdamW) as one program in
# TVM's Relax IR. `mod.script()` prints it. Every op knows the line of yours that it came from.

# %%
assert "layer_norm_backward_input" in mod.script()

# %% [markdown]
# ## Casts
#
# `autocast` decides where low precision is used. Parameters and optimizer state keep float32. The
# plan says which casts there are and why.

# %%
amp_mod = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
print(amp_mod.plan.summary())
assert 'out_dtype="bfloat16"' in amp_mod.script()
assert 'out_dtype="bfloat16"' not in mod.script()

# %% [markdown]
# ## Compile and train
#
# `compile` builds machine code for this CPU. The compiled step is called as yours is, and works on
# the model's and the optimizer's own tensors, in place.

# %%
train = amp_ir.compile(amp_mod)
print(train)

losses = []
for _ in range(60):
    losses.append(float(train(*make_batch())))
    scheduler.step()
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < 0.2 * losses[0]

# %% [markdown]
# The scheduler worked: the learning rate is read from `param_groups` at every call. And between
# steps everything is plain PyTorch: evaluate, save, or go on training without the compiler.

# %%
assert optimizer.state_dict()["state"][0]["step"] == 60
inputs, targets = make_batch()
with torch.no_grad():
    error = torch.nn.functional.mse_loss(model(inputs), targets)
assert error < 0.2 * losses[0]

twin = copy.deepcopy(model)
expected = torch.nn.functional.mse_loss(twin(inputs), targets)
# One step in bfloat16 beside PyTorch's loss in float32: bfloat16 keeps 8 bits, so within 2 %.
assert torch.isclose(train(inputs, targets), expected, rtol=0.02)

# %% [markdown]
# ## Time and memory
#
# `profile_vm_model` runs the step on copies of the state, so your parameters stay as they are.
# `get_peak_memory` reads the memory plan and runs nothing.

# %%
trained = copy.deepcopy(model.state_dict())
for name, one in (("float32", mod), ("bfloat16", amp_mod)):
    (milliseconds,) = amp_ir.profile_vm_model(one, "cpu", args, number=20)
    peak_mib = amp_ir.get_peak_memory(one, "cpu", args)
    print(f"{name:9} {milliseconds:6.3f} ms a step, {peak_mib:.2f} MiB at the peak")
assert all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())

# %% [markdown]
# ## All of it in one line
#
# `jit` captures, casts and compiles when it is first called. A batch of another shape compiles
# again, with a one-line notice, and both stay ready.

# %%
train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype="bfloat16")
assert train(*make_batch()).isfinite()

# %% [markdown]
# ## When something does not fit
#
# A compiled step that is called wrongly says what it got and what it expected, and changes nothing.

# %%
try:
    train(torch.randn(128, 64, device="meta"), torch.randn(128, 8))
except amp_ir.errors.ArgumentError as error:
    print(error)
else:
    raise AssertionError("a batch without values was taken for one with values")
