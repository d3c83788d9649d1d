# SPDX-License-Identifier: Apache-2.0
"""Lesson 8: a model inside of somebody else's training loop, through torch.compile."""

# %% [markdown]
# # `torch.compile(backend="amp_ir")`
#
# `amp_ir.jit` wants the whole step. Where a framework owns the loop, give it a compiled *model*:
# PyTorch cuts the model's graph at what it cannot capture, and amp_ir compiles forward and backward
# of each graph. The optimizer, and everything else outside of the model, stays PyTorch's.

# %% A model with dropout and BatchNorm, which both have state that has to be right.
import copy

import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(20, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 3)
)
eager = copy.deepcopy(model)
compiled = torch.compile(model, backend="amp_ir", options={"amp_dtype": "bfloat16"})

# %% The loop is the user's own. Programs are made for training and for evaluation.
batch, labels = torch.randn(256, 20), torch.randint(0, 3, (256,))


def train(callee: nn.Module, parameters: list[nn.Parameter]) -> list[float]:
    """Train for 30 steps; return the losses."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(30):
        loss = functional.cross_entropy(callee(batch), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


losses = train(compiled, list(model.parameters()))
print(f"bfloat16 through torch.compile: {losses[0]:.3f} -> {losses[-1]:.3f}")
print(f"float32 in eager PyTorch: {train(eager, list(eager.parameters()))[-1]:.3f}")
assert losses[-1] < 0.9 * losses[0]

# %% Dropout draws from PyTorch's generator: the same seed gives the same masks.
torch.manual_seed(7)
first = compiled(batch)
torch.manual_seed(7)
assert torch.equal(first, compiled(batch))

# %% In eval mode, without gradients, a graph is one program.
model.eval()
with torch.no_grad():
    scores = compiled(batch)
    exact = model(batch)
# bfloat16 has 8 significant bits; scores are below 8, and two layers round.
assert (scores - exact).abs().max() < 8 * 2 * 2**-8

# %% [markdown]
# What amp_ir cannot compile runs in eager PyTorch, and one warning names the op. `amp_ir.jit` on
# the whole step is faster: there the optimizer is compiled too, gradients that only it reads are
# never stored, and nothing is written between the passes. docs/integrations.md has the numbers.
