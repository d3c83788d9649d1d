# SPDX-License-Identifier: Apache-2.0
"""Lesson 11: a loop of Lightning Fabric, with its body compiled."""

# %% [markdown]
# # One function of the loop
#
# Fabric leaves the loop to you. Put what it does for a batch into a function, and compile it with
# `amp_ir.integrations.fabric.jit`. The Fabric's precision chooses the dtype; casts, backward,
# clipping and optimizer are one program.

# %% A loop as you have it.
import tempfile
from pathlib import Path

import torch
from lightning.fabric import Fabric

from amp_ir.integrations.fabric import jit

fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
fabric.seed_everything(0, verbose=False)
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)


def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Train on a batch; return its loss and the norm of the gradients."""
    loss = torch.nn.functional.cross_entropy(model(x), y)
    fabric.backward(loss)
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


# %% The one line that is new. Schedule, logs and evaluation stay outside of the step.
train = jit(step, fabric=fabric, model=model, optimizer=optimizer)

points = torch.rand(640, 2) * 2 - 1
quarters = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
for epoch in range(4):
    for x, y in zip(points.split(32), quarters.split(32), strict=True):
        loss, norm = train(x, y)
        schedule.step()
    print(f"epoch {epoch}: loss {loss:.3f}, norm {norm:.2f}")
with torch.no_grad():
    accuracy = (model(points).argmax(-1) == quarters).float().mean()
assert accuracy > 0.9
print(train)

# %% A checkpoint: beside model and optimizer, the state of dropout is in `train.state_dict()`.
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "last.ckpt"
    fabric.save(file, {"model": model, "optimizer": optimizer, "train": train.state_dict()})
    train.load_state_dict(fabric.load(file)["train"])
