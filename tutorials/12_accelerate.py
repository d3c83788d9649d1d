# SPDX-License-Identifier: Apache-2.0
"""Lesson 12: a loop of Accelerate, with its body compiled."""

# %% [markdown]
# # One function of the loop
#
# Accelerate leaves the loop to you. Put what it does for a batch into a function, and compile it
# with `amp_ir.integrations.accelerate.jit`. `mixed_precision="bf16"` chooses the dtype; casts,
# backward, clipping and optimizer are one program.

# %% A loop as you have it, with two batches for each update.
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from amp_ir.integrations.accelerate import jit

set_seed(0)
accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
points = torch.rand(640, 2) * 2 - 1
quarters = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
loader = DataLoader(TensorDataset(points, quarters), batch_size=32)
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)


def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Train on a batch; return its loss."""
    loss = torch.nn.functional.cross_entropy(model(x), y)
    accelerator.backward(loss)
    if accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# %% The one line that is new. The step is called where its body stood.
train = jit(step, accelerator=accelerator, model=model, optimizer=optimizer)

for epoch in range(8):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = train(x, y)
            schedule.step()
    print(f"epoch {epoch}: loss {loss:.3f}, rate {schedule.get_last_lr()[0]:.4f}")
with torch.no_grad():
    accuracy = (model(points).argmax(-1) == quarters).float().mean()
assert accuracy > 0.9

# %% A batch that accumulates and one that updates are a program each.
print(train)
assert len(train.compiled_step.recompiles) == 1

# %% A checkpoint of Accelerate has the state of dropout, too.
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)
    accelerator.load_state(folder)
