# SPDX-License-Identifier: Apache-2.0
"""Lesson 5: where a step's milliseconds and bytes go, and how to make it fit a budget."""

# %% [markdown]
# # Time and memory of a step
#
# A compiled step is a list of kernels and library calls whose memory was planned before anything
# ran. So two questions have exact answers: which of *your* modules the time goes to, and what is
# held at the moment that needs the most. This lesson asks both, and then makes a step smaller.

# %% A deep network and a large batch: what the forward pass keeps for the backward is the peak.
import copy

import torch
from torch import nn
from torch.nn import functional

import amp_ir

torch.manual_seed(0)


class Block(nn.Module):
    """x + mlp(norm(x)), as in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual branch with a GELU in between."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


model = nn.Sequential(*(Block(64) for _ in range(4)), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One training step; returns the loss."""
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


batch = torch.randn(1024, 64), torch.randint(0, 8, (1024,))
mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
amp_mod = amp_ir.autocast(mod, args, amp_dtype="bfloat16")

# %% [markdown]
# ## Time
#
# `profile_kernels` runs the step on copies of the state and clocks every call. Each row says which
# of your modules it works for, in which phase, what it moves and computes, and how far that is from
# what this machine could do ("roofline").

# %%
profile = amp_ir.profile_kernels(amp_mod, "cpu", args, steps=5)
print(profile)

by_phase = profile.milliseconds_by_phase
assert {"forward", "backward", "optimizer"} <= set(by_phase)
assert 0 < profile.kernel_milliseconds <= profile.step_milliseconds

# %% [markdown]
# `profile.save_trace("step.json")` is a timeline for ui.perfetto.dev. The lines under "heavy op"
# tell which library took each matmul, and why a better one did not.

# %%
slowest = profile.kernels[0]
print(f"most time: {slowest.name} for {', '.join(slowest.modules[:2])}: {slowest.calls} calls")

# %% [markdown]
# ## Memory
#
# `memory_report` comes from the plan, so nothing runs. With the float32 step as `baseline` it also
# says what mixed precision saved (activations of half the size) and what it cost (low copies of
# weights).

# %%
report = amp_ir.memory_report(amp_mod, args, baseline=mod)
print(report)

assert report.peak_bytes < report.balance.baseline_peak_bytes
assert report.peak_bytes == amp_ir.get_peak_memory(amp_mod, "cpu", args) * 2**20

# %% [markdown]
# ## A budget
#
# The activations that the forward pass keeps can be computed again instead. `memory_budget` takes
# the bytes that the step may need in all; what is computed twice is chosen by cost for each byte
# saved, and the numbers stay bit-identical. Where that does not reach, a loss over a large
# vocabulary is computed in chunks of rows, whose sums round in another order; the report then says
# so. State cannot be computed again, so the budget here is for what comes on top of it.

# %%
temporary = report.peak_bytes - report.state_bytes
budget = report.state_bytes + int(0.6 * temporary)
fitted = amp_ir.memory_report(amp_mod, args, memory_budget=budget)
print(f"{report.peak_bytes / 2**20:.2f} MiB, with a budget {fitted.peak_bytes / 2**20:.2f} MiB")
assert fitted.peak_bytes <= budget

# %% [markdown]
# A budget that nothing can hold is an error that says what can:

# %%
try:
    amp_ir.compile(amp_mod, memory_budget=report.state_bytes + 1024)
except amp_ir.errors.BudgetError as error:
    print(error)
else:
    raise AssertionError("a step needs more than a kibibyte")

# %% The same numbers, held or computed again: two runs from the same weights.
start = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def losses_of(**options: int) -> list[float]:
    """Losses of five steps from the start."""
    model.load_state_dict(start[0])
    optimizer.load_state_dict(copy.deepcopy(start[1]))
    train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype="bfloat16", **options)
    return [float(train(*batch)) for _ in range(5)]


held, again = losses_of(), losses_of(memory_budget=budget)
print(held)
assert held == again

# %% [markdown]
# `amp-ir profile train.py` prints these tables for a file of yours that defines `step`, `batch`,
# `model` and `optimizer`; `amp-ir report train.py --out report.html` draws them as one page.
