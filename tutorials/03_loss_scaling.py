# SPDX-License-Identifier: Apache-2.0
"""Lesson 3: loss scaling, inside of the compiled step."""

# %% [markdown]
# # Loss scaling, inside of the compiled step
#
# float16 has no number between 0 and 6e-8. Gradients are often smaller, and then vanish. A loss
# scale multiplies the loss, and so every gradient, by a power of two; before the optimizer uses
# them they are divided again. The scale is found while training: it halves when a gradient
# overflows, and doubles when none has for a while.
#
# `amp_ir.GradScaler` is `torch.amp.GradScaler`: same methods, same defaults, same scales. You write
# the loops of PyTorch's note "Automatic Mixed Precision examples" as they stand. The difference is
# what becomes of them: the whole step, scaler included, is one compiled program. It reads nothing
# back, and a step that overflows changes nothing at all.

# %%
import copy

import torch
from torch import nn
from torch.nn import functional

import amp_ir

torch.manual_seed(0)


def make_model() -> nn.Module:
    """Return a small network with everything that a skipped step must leave alone."""
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)
    )


TEACHER = torch.randn(16, 4)


def make_batch(size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs, and what a fixed map makes of them."""
    inputs = torch.randn(size, 16)
    return inputs, inputs @ TEACHER / 4


# %% [markdown]
# ## The typical step
#
# This is the loop of the note, and, but for R's `$`, that of the vignette of torch for R. Three
# lines are not those of a loop without scaling: the loss is scaled, and the scaler steps and
# updates.

# %%
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = amp_ir.GradScaler(growth_interval=20)


def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One training step; returns the loss, unscaled."""
    optimizer.zero_grad()
    loss = functional.mse_loss(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


mod, args = amp_ir.trace_step(step, make_batch(), model=model, optimizer=optimizer, scaler=scaler)
train = amp_ir.compile(amp_ir.autocast(mod, args, amp_dtype="float16"))

losses = [float(train(*make_batch())) for _ in range(30)]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} at scale {scaler.get_scale():g}")
assert losses[-1] < 0.5 * losses[0]
assert scaler.get_scale() == 2.0**17  # it started at 2**16 and grew after 20 clean steps

# %% [markdown]
# The scaler is yours, as the model and the optimizer are: `get_scale()` and `state_dict()` are
# current after every call, and PyTorch's own scaler can load that state.

# %%
torch.amp.GradScaler("cpu").load_state_dict(scaler.state_dict())

# %% [markdown]
# ## A step that overflows changes nothing
#
# One infinity in the batch makes gradients that are not finite. PyTorch skips the optimizer, but
# BatchNorm has seen the bad batch by then. Here the step is a transaction: parameters, momentum,
# BatchNorm's statistics and the random state stay as they were, bit for bit. Only the scale moves.

# %%
before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
inputs, targets = make_batch()
inputs[0, 0] = float("inf")
train(inputs, targets)


def same(a: object, b: object) -> bool:
    """Whether two states are equal bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


assert same(before[0], model.state_dict())
assert same(before[1], optimizer.state_dict()["state"])
assert scaler.get_scale() == 2.0**16

# %% [markdown]
# `train.last` says what became of the last step. Asking waits for the step; not asking costs
# nothing. The last 1024 steps can be read at any time, for instance once an epoch.

# %%
print(train.last)
assert train.last.skipped
assert train.last.scale == 2.0**17  # the scale that the step used
assert scaler.log.skips == 1
assert [record.skipped for record in scaler.log.history()] == [False] * 30 + [True]

# %% [markdown]
# A learning-rate scheduler counts optimizer steps, and a skipped step is none. Ask `train.skipped`:

# %%
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
train(inputs, targets)  # the bad batch again
if not train.skipped:
    scheduler.step()
assert scheduler.last_epoch == 0
train(*make_batch())
if not train.skipped:
    scheduler.step()
assert scheduler.last_epoch == 1

# %% [markdown]
# ## Clipping
#
# A threshold is meant for gradients as they are, not scaled: unscale them first. `scaler.step`
# knows that they are unscaled already.


# %%
def clipping_step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the norm of the gradients before clipping."""
    optimizer.zero_grad()
    loss = functional.mse_loss(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
    scaler.step(optimizer)
    scaler.update()
    return norm


options = {"model": model, "optimizer": optimizer, "scaler": scaler}
clipping = amp_ir.jit(clipping_step, **options, amp_dtype="float16")
norm = float(clipping(*make_batch()))
# The check of the gradients has computed their norm on the way.
assert abs(clipping.last.gradient_norm - norm) < 1e-3 * norm

# %% [markdown]
# ## The mistake that trains wrongly in silence
#
# Without `unscale_` the threshold is compared with gradients 65536 times too large. PyTorch cannot
# notice. amp_ir follows the loss scale through the whole step: every value is multiplied by some
# power of it, and values of different powers may not be added or compared. It is found before
# anything runs, and the error names the line.


# %%
def wrong_step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Clips gradients that are still scaled."""
    optimizer.zero_grad()
    loss = functional.mse_loss(model(inputs), targets)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
    scaler.step(optimizer)
    scaler.update()


try:
    amp_ir.trace_step(wrong_step, make_batch(), **options)
except amp_ir.errors.LossScaleError as error:
    message = str(error)
print(message)
assert "03_loss_scaling.py" in message
assert "call scaler.unscale_(optimizer) before this line" in message

# %% [markdown]
# ## Accumulation
#
# Gradients of several batches add up before one step. They add up scaled, so the scale must not
# change in between: `update` only where the effective batch ends. Here that makes two compiled
# steps which share the model, the optimizer and the gradients.

# %%
ACCUMULATE = 4


def accumulate_step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Add the gradients of one batch."""
    loss = functional.mse_loss(model(inputs), targets) / ACCUMULATE
    scaler.scale(loss).backward()


def last_step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Add those of the last batch, and step."""
    accumulate_step(inputs, targets)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=False)


for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
accumulate = amp_ir.jit(accumulate_step, **options, amp_dtype="float16")
last = amp_ir.jit(last_step, **options, amp_dtype="float16")
steps_before = scaler.log.steps
for number in range(2 * ACCUMULATE):
    (last if number % ACCUMULATE == ACCUMULATE - 1 else accumulate)(*make_batch())
assert scaler.log.steps == steps_before + 2

# %% [markdown]
# ## Gradient penalty
#
# The gradients that a penalty is made of come from `torch.autograd.grad`, which the scaler knows
# nothing of. Divide them yourself, by the scale as it is: `scaler.get_scale()` is read in the step.


# %%
def penalty_step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a loss plus the norm of its gradients."""
    optimizer.zero_grad()
    loss = functional.mse_loss(model(inputs), targets)
    scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    penalty = sum((gradient * inverse).pow(2).sum() for gradient in scaled) ** 0.5
    loss = loss + 0.1 * penalty
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


penalized = amp_ir.jit(penalty_step, **options, amp_dtype="float16")
optimizer.zero_grad()
assert penalized(*make_batch()).isfinite()

# %% [markdown]
# Forget the inverse, and the sum of loss and penalty is refused as the clipping was.
#
# ## Two models, losses and optimizers
#
# One scaler serves all. Each optimizer is checked by itself, and skipped by itself; `update` comes
# once, after both.

# %%
models = [make_model(), make_model()]
optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in models]
shared = amp_ir.GradScaler()


def two_losses_step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Two losses, each of both models."""
    for one in optimizers:
        one.zero_grad()
    first, second = models[0](inputs), models[1](inputs)
    loss0 = functional.mse_loss(2 * first + 3 * second, targets)
    loss1 = functional.mse_loss(3 * first - 5 * second, targets)
    shared.scale(loss0).backward(retain_graph=True)
    shared.scale(loss1).backward()
    shared.unscale_(optimizers[0])  # needed only to look at the gradients of this one
    for one in optimizers:
        shared.step(one)
    shared.update()


both = amp_ir.jit(
    two_losses_step, model=models, optimizer=optimizers, scaler=shared, amp_dtype="float16"
)
for _ in range(3):
    both(*make_batch())
assert shared.log.steps == 3

# %% [markdown]
# ## Stop and go on
#
# `save_checkpoint` writes an ordinary PyTorch file of state dictionaries, and a process that is
# killed meanwhile leaves the file before whole. A run goes on from it bit for bit, dropout's masks
# and the order of the data included. (Loading gives the optimizer new tensors, so a step made by
# `jit` captures again; after `compile`, capture and compile again yourself.)

# %%
resumable = amp_ir.jit(step, **options, amp_dtype="float16")
resumable(*make_batch())
amp_ir.save_checkpoint("run.pt", **options, train=resumable, epoch=1)
expected = float(resumable(*make_batch()))

entries = amp_ir.load_checkpoint("run.pt", **options, train=resumable)
assert entries == {"epoch": 1}
assert float(resumable(*make_batch())) == expected
assert "0.weight" in torch.load("run.pt")["model"]
