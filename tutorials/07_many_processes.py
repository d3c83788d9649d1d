# SPDX-License-Identifier: Apache-2.0
"""Lesson 7: train on several processes, with the exchange of gradients inside of the step."""

# %% [markdown]
# # Many processes
#
# `torchrun` starts a script once for each rank. Each rank has a copy of the model and its own part
# of the data, and after every backward pass all ranks need the mean of their gradients. A compiled
# step has that exchange in it: gradients travel in buckets while the backward pass goes on.
#
# This lesson starts its two ranks itself, so that it runs anywhere; `train` is what a script under
# `torchrun` would do.

# %% A model and a step, as in any script.
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn import functional

import amp_ir

RANKS, STEPS = 2, 20


def network() -> nn.Module:
    """Make the model; what it begins with is decided below, by rank 0."""
    layers = [nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4)]
    return nn.Sequential(*layers)


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give a rank its part of a step's data."""
    torch.manual_seed(1000 * step + rank)
    x = torch.randn(16, 32)
    return x, x[:, :4].argmax(1)


# %% [markdown]
# ## One rank
#
# `data_parallel=True` makes the ranks train together: rank 0's parameters are sent to all before
# the first step, and `backward()` leaves the mean over the ranks in every `p.grad`. (A model in
# `DistributedDataParallel` works as well: pass it in `model=`, without the option.)
#
# `comm_dtype="bfloat16"` halves the bytes between the ranks. It is a cast like any other: the plan
# says where it is, and why.


# %% What torchrun would run.
def train(rank: int, folder: str) -> None:
    """Train on one rank, and save what it ends with."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(rank)  # each rank begins with other numbers
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = amp_ir.GradScaler("cpu", init_scale=2.0**10)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    options = {"amp_dtype": "bfloat16", "comm_dtype": "bfloat16", "data_parallel": True}
    jitted = amp_ir.jit(step, model=model, optimizer=optimizer, scaler=scaler, **options)
    losses, skipped = [], []
    for number in range(STEPS):
        x, y = batch_of(rank, number)
        if number == 7 and rank == 1:
            x[0, 0] = float("inf")  # rank 1 alone has a bad example
        losses.append(float(jitted(x, y)))
        skipped.append(jitted.skipped)
    if rank == 0:
        plan = jitted.compiled.module.plan
        print(plan.explain("*all_reduce_start*"))
        print(
            [call.name for call in jitted.compiled.report.plan.calls if "all_reduce" in call.name]
        )
    ended = {"model": model.state_dict(), "losses": losses, "skipped": skipped}
    torch.save({**ended, "scale": scaler.get_scale()}, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


# %% [markdown]
# ## Two ranks
#
# Their losses differ, since their data do. Everything that is trained is equal, bit for bit: the
# infinity that rank 1 met in one step made the *sum* of the gradients infinite, so both ranks found
# it, skipped the step and halved the scale.


# %% Start them, and compare what they end with.
def main() -> None:
    """Start the ranks, and look at what they saved."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (folder,), nprocs=RANKS)
        first, second = (torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(RANKS))
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name])
    assert first["losses"] != second["losses"]
    assert first["skipped"] == second["skipped"]
    assert [k for k, was in enumerate(first["skipped"]) if was] == [7]
    assert first["scale"] == second["scale"] == 2.0**9
    assert sum(first["losses"][-5:]) < sum(first["losses"][:5])
    print(f"{RANKS} ranks, {STEPS} steps, step 7 skipped on both; the models are equal")


if __name__ == "__main__":
    main()

# %% [markdown]
# ## What may go wrong
#
# Before the first exchange the ranks compare their programs; one that differs is an error on every
# rank, which names the first different op. A rank that dies is an error on the others at once, and
# their state is as before the step. docs/distributed.md has the rest.
#
# With `shard="optimizer"` each rank keeps its part of AdamW's moments alone, and updates its part
# of the parameters: with N ranks the optimizer takes 1 / N of its bytes. Checkpoints are then saved
# by all ranks together.
