# SPDX-License-Identifier: Apache-2.0
"""Ranks that split the optimizers' state: what they train, hold, save and refuse.

One group of processes runs all cases of a test: starting it costs more than a case.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_ir
from amp_ir.errors import ShardingError, StateError
from data_parallel import Training, batches, gan
from rank_processes import ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]
Batch = tuple[torch.Tensor, ...]
# The norm of gradients is a sum of other parts, so float32 rounds it otherwise: 2^-24 of it.
ORDER = 2e-6


def network() -> nn.Module:
    """Parameters that the border between two ranks cuts, and some too small to be cut."""
    return nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 33), nn.ReLU(),
                         nn.Linear(33, 4))  # fmt: skip


def fine_tuned() -> nn.Module:
    """A head that is trained, and a body that is not: one rank holds nothing of what is trained."""
    made = network()
    made[:4].requires_grad_(False)
    return made


def batch_of(rank: int, step: int) -> Batch:
    torch.manual_seed(100 * step + rank)
    return torch.randn(8, 16), torch.randint(0, 4, (8,))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


class Lamb(torch.optim.Optimizer):
    """Momentum whose step is as long as the parameter, tensor by tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p]["momentum"]
                momentum.mul_(0.9).add_(p.grad)
                ratio = p.norm() / (momentum.norm() + 1e-3)
                p.sub_(momentum * ratio * group["lr"])


class Whitened(Lamb):
    """A matrix of each momentum with itself, as Shampoo and Muon have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p]["momentum"]
            momentum.add_(p.grad)
            square = momentum.view(len(momentum), -1)
            p.sub_(1e-4 * (square @ square.T @ square).view(p.shape))


def of_own(kind: Any) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        made = kind(parameters)
        for p in made.param_groups[0]["params"]:
            made.state[p]["momentum"] = torch.zeros_like(p)
        return made

    return make


def clipped(optimizer_of: Any, *, scales: bool = False, make: Any = network) -> Training:
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer_of(model.parameters())
    scaler = amp_ir.GradScaler("cpu", init_scale=16.0, enabled=scales)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    made = Training([model], [optimizer], step)
    made_scalers[id(made)] = scaler
    return made


made_scalers: dict[int, Any] = {}


def jitted(one: Training, **options: Any) -> Any:
    scaler = made_scalers.get(id(one))
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    given = {"model": one.models, "optimizer": one.optimizers, "scaler": scaler}
    return amp_ir.jit(one.step, **given, data_parallel=True, **options)


def parameters(one: Training) -> list[numpy.ndarray]:
    return [p.detach().numpy().copy() for model in one.models for p in model.parameters()]


def state(one: Training) -> list[numpy.ndarray]:
    """Everything that is trained, gathered."""
    states = [amp_ir.gather_state_dict(optimizer)["state"] for optimizer in one.optimizers]
    held = [t for s in states for v in s.values() for t in v.values() if torch.is_tensor(t)]
    return [*parameters(one), *(t.numpy().copy() for t in held)]


def far(ours: list[numpy.ndarray], theirs: list[numpy.ndarray]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float(abs(a - b).max() / (1e-3 + abs(b).max())) for a, b in pairs)


@attrs.frozen
class Outcome:
    """A rank's state at the end, how far it is from the state that is whole everywhere, bytes."""

    state: list[numpy.ndarray]
    difference: float
    held: list[int]
    skipped: list[bool]
    recompiles: list[str]


def held_nbytes(one: Training) -> int:
    values = [v for o in one.optimizers for s in o.state.values() for v in s.values()]
    return sum(v.nbytes for v in values if v.dim())


def compared(make: Callable[[], Training], feed: Callable[[int], Batch], **options: Any) -> Outcome:
    """Train with the state split, and whole."""
    ours, theirs = make(), make()
    shard = options.pop("shard", "optimizer")
    train, other = jitted(ours, shard=shard, **options), jitted(theirs, **options)
    skipped, held = [], [0, 0]
    for k in range(5):
        train(*feed(k))
        other(*feed(k))
        skipped.append(train.skipped)
        assert train.skipped == other.skipped
    held = [held_nbytes(ours), held_nbytes(theirs)]
    held += [train.report.plan.state_bytes, other.report.plan.state_bytes]
    reasons = [one.reason for one in train.recompiles]
    return Outcome(state(ours), far(state(ours), state(theirs)), held, skipped, reasons)


def with_infinity(rank: int, step: int) -> Batch:
    x, y = batch_of(rank, step)
    if rank == 1 and step == 2:
        x[0, 0] = float("inf")
    return x, y


def within_a_budget(rank: int) -> tuple[int, bool]:
    """How many calls run again, and whether the state is that of a step without a budget."""
    states, budget = [], None
    for _ in range(2):
        one = clipped(adamw)
        train = jitted(one, shard="optimizer", amp_dtype="bfloat16", memory_budget=budget)
        for k in range(2):
            x, y = batch_of(rank, k)
            train(x.repeat(64, 1), y.repeat(64))
        plan = train.report.plan
        budget = int(plan.peak_bytes * 0.85)
        states.append(state(one))
    is_same = all((a == b).all() for a, b in zip(*states, strict=True))
    return sum(call.is_rerun for call in plan.calls), is_same


def train_all(rank: int) -> dict[str, Outcome]:
    torch.set_num_threads(1)
    feed = lambda k: batch_of(rank, k)  # noqa: E731
    pairs = batches("gan", 5, rank)
    return {
        "scaled": compared(lambda: clipped(adamw, scales=True), lambda k: with_infinity(rank, k)),
        "frozen": compared(
            lambda: clipped(adamw, scales=True, make=fine_tuned), lambda k: with_infinity(rank, k)
        ),
        "gan": compared(lambda: gan(lambda m: m), lambda k: pairs[k], shard="gradients"),
        "lamb": compared(
            lambda: clipped(of_own(Lamb)), feed, amp_dtype="bfloat16", comm_dtype="bfloat16"
        ),
    }


def test_a_memory_budget_changes_nothing(tmp_path: Path) -> None:
    for reruns, is_same in ranks(within_a_budget, tmp_path):
        assert reruns and is_same


def test_split_state_trains_as_whole_state(tmp_path: Path) -> None:
    first, second = ranks(train_all, tmp_path, seconds=200)
    for name, one in first.items():
        for ours, others in zip(one.state, second[name].state, strict=True):
            assert (ours == others).all(), name
        assert one.difference < ORDER, name
        assert one.recompiles == [] and one.skipped == second[name].skipped, name
    assert first["scaled"].skipped == [False, False, True, False, False]
    assert first["frozen"].skipped == first["scaled"].skipped
    for one in (first, second):
        split, whole, planned, planned_whole = one["scaled"].held
        assert split <= 0.52 * whole
        # The plan counts what the rank holds.
        assert planned_whole - planned == whole - split


def tiny() -> nn.Module:
    """Two parts of 32 elements, for two of four ranks."""
    return nn.Linear(8, 4)


def train_tiny(rank: int) -> tuple[Outcome, bool]:
    """Train beside whole state; then save, and load, on all ranks."""
    feed = lambda k: with_infinity(rank, k)  # noqa: E731

    def narrow(k: int) -> Batch:
        x, y = feed(k)
        return x[:, :8].contiguous(), y

    def make() -> Training:
        return clipped(adamw, scales=True, make=tiny)

    outcome = compared(make, narrow)
    one = make()
    train = jitted(one, shard="gradients", amp_dtype="bfloat16", comm_dtype="bfloat16")
    for k in range(2):
        train(*narrow(k))
    parts = {"model": one.models, "adam": one.optimizers}
    amp_ir.save_checkpoint(Path(os.environ["AMP_IR_TEST_FILE"]), **parts)
    train(*narrow(3))
    going_on = state(one)
    amp_ir.load_checkpoint(Path(os.environ["AMP_IR_TEST_FILE"]), **parts)
    train(*narrow(3))
    pairs = zip(going_on, state(one), strict=True)
    return outcome, all((ours == again).all() for ours, again in pairs)


def test_ranks_that_hold_nothing_train_with_those_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMP_IR_TEST_FILE", str(tmp_path / "run.pt"))
    found = ranks(train_tiny, tmp_path, 4, seconds=200)
    first = found[0][0]
    for one, goes_on in found:
        assert goes_on and one.difference < ORDER and one.recompiles == []
        assert one.skipped == first.skipped == [False, False, True, False, False]
        for ours, others in zip(first.state, one.state, strict=True):
            assert (ours == others).all()
    # Two moments of 32 weights, of 4 biases, and of nothing.
    assert [one.held[0] for one, _ in found] == [2 * 4 * 4, 2 * 4 * 32, 0, 0]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 33), nn.Linear(33, 4))


def test_a_checkpoint_is_loaded_on_any_number_of_ranks(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"

    def made(**options: Any) -> tuple[Training, Any, dict[str, Any]]:
        one = clipped(adamw, make=small)
        train = jitted(one, shard="optimizer", **options)
        return one, train, {"model": one.models, "adam": one.optimizers}

    def saved(rank: int) -> tuple[list[numpy.ndarray], list[numpy.ndarray]]:
        one, train, parts = made()
        for k in range(2):
            train(*batch_of(rank, k))
        amp_ir.save_checkpoint(file, **parts)
        train(*batch_of(rank, 2))
        going_on = state(one)
        # Into the optimizer, which holds later parts.
        amp_ir.load_checkpoint(file, **parts)
        assert held_nbytes(one) < 0.6 * sum(8 * p.numel() for p in one.models[0].parameters())
        train(*batch_of(rank, 2))
        return going_on, state(one)

    def loaded(rank: int) -> list[numpy.ndarray]:
        # Parts of other buckets, too.
        one, train, parts = made(bucket_cap_mb=0.0004)
        amp_ir.load_checkpoint(file, **parts)
        # Each of three ranks trains on what two did.
        train(*(torch.cat(parts) for parts in zip(batch_of(0, 2), batch_of(1, 2), strict=True)))
        return state(one)

    for name in ("two", "three"):
        (tmp_path / name).mkdir()
    for going_on, again in ranks(saved, tmp_path / "two"):
        assert all((a == b).all() for a, b in zip(going_on, again, strict=True))
    # PyTorch alone reads it, too.
    optimizer = adamw(small().parameters())
    optimizer.load_state_dict(torch.load(file)["adam"][0])
    for one in ranks(loaded, tmp_path / "three", 3):
        assert far(one, going_on) < 1e-4  # means over other parts of the batch


def test_ranks_of_a_part_of_the_world_get_their_own_random_state(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"

    def program(rank: int) -> list[Any]:
        group = torch.distributed.new_group([1, 2])
        if rank == 0:
            return []

        def dropping() -> nn.Module:
            return nn.Sequential(nn.Linear(16, 33), nn.Dropout(0.5), nn.Linear(33, 4))

        def made() -> tuple[Training, Any, dict[str, Any]]:
            one = clipped(adamw, make=dropping)
            train = jitted(one, shard="optimizer", process_group=group)
            return one, train, {"model": one.models, "adam": one.optimizers, "train": train}

        one, train, parts = made()
        torch.manual_seed(rank)
        train(*batch_of(rank, 0))
        amp_ir.save_checkpoint(file, **parts)
        train(*batch_of(rank, 1))
        found = [torch.rand(1).item(), one.digest()]
        other, again, parts = made()
        # Before its first call, when nothing of it is split.
        amp_ir.load_checkpoint(file, **parts)
        again(*batch_of(rank, 1))
        assert found == [torch.rand(1).item(), other.digest()]
        return found

    _, first, second = ranks(program, tmp_path, 3)
    assert first[0] != second[0]


def test_random_state_is_of_the_rank_in_the_group_also_without_a_model(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"

    def program(rank: int) -> list[float]:
        group = torch.distributed.new_group([1, 2])
        elsewhere = torch.distributed.new_group([0, 1])
        found = []
        if rank:
            one = clipped(adamw, make=small)
            train = jitted(one, shard="optimizer", process_group=group)
            train(*batch_of(rank, 0))
            torch.manual_seed(rank)
            amp_ir.save_checkpoint(file, adam=one.optimizers, epoch=3)
            found = [torch.rand(1).item()]
        torch.distributed.barrier()
        if rank:
            # Nothing that has a group: the file says who wrote it.
            torch.manual_seed(7)
            assert amp_ir.load_checkpoint(file)["epoch"] == 3
            found.append(torch.rand(1).item())
        if rank != 2:
            # Other ranks of the world, and an optimizer that is not split yet.
            other = clipped(adamw, make=small)
            jitted(other, shard="optimizer", process_group=elsewhere)
            amp_ir.load_checkpoint(file, adam=other.optimizers)
            found.append(torch.rand(1).item())
        return found

    zero, one, two = ranks(program, tmp_path, 3)
    assert one[0] == one[1] and two[0] == two[1] and one[0] != two[0]
    # Now rank 0 is the first of its group, and rank 1 the second.
    assert zero == [one[0]] and one[2] == two[0]


def refused(rank: int) -> dict[str, str]:
    said = {}

    def told(name: str, call: Callable[[], Any], kind: Any) -> None:
        with pytest.raises(kind) as caught:
            call()
        said[name] = str(caught.value)

    one = clipped(of_own(Whitened))
    told("matrix", lambda: jitted(one, shard="optimizer")(*batch_of(rank, 0)), ShardingError)
    factored = clipped(lambda p: torch.optim.Adafactor(p, lr=0.01))
    told("rows", lambda: jitted(factored, shard="optimizer")(*batch_of(rank, 0)), ShardingError)
    kept = clipped(adamw)
    model, optimizer = kept.models[0], kept.optimizers[0]

    def leaves_gradients(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    kept.step = leaves_gradients
    told("left", lambda: jitted(kept, shard="gradients")(*batch_of(rank, 0)), ShardingError)
    train = jitted(kept, shard="optimizer")
    train(*batch_of(rank, 0))
    told("state_dict", optimizer.state_dict, StateError)
    told("step", optimizer.step, StateError)
    told("whole", lambda: jitted(kept)(*batch_of(rank, 0)), ShardingError)
    told("overflow", lambda: train.find_overflow(*batch_of(rank, 0)), StateError)
    second = clipped(adamw)
    jitted(second, shard="optimizer")(*batch_of(rank, 0))

    def of_both(x: torch.Tensor, y: torch.Tensor) -> None:
        kept.step(x, y)
        second.step(x, y)

    both = Training(kept.models + second.models, kept.optimizers + second.optimizers, of_both)
    told("apart", lambda: jitted(both, shard="optimizer")(*batch_of(rank, 0)), ShardingError)
    if rank == 0:
        # The other one ends instead.
        told("gather", lambda: amp_ir.gather_state_dict(optimizer), StateError)
    return said


def test_what_needs_the_state_whole_is_refused(tmp_path: Path) -> None:
    said, other = ranks(refused, tmp_path)
    # What gloo says differs.
    assert said.pop("gather").startswith(
        "the state of an optimizer that is split over the ranks could not be gathered: every rank "
        "has to call save_checkpoint, or gather_state_dict, at the same point: ["
    )
    assert said == other
    lines = [inspect.unwrap(Whitened.step).__code__.co_firstlineno + k for k in (5, 6)]
    places = [f"step (optimizer), {__file__}:{line}" for line in lines]
    held = ", ".join(f"optimizer0.{k}.weight.momentum" for k in (0, 2, 4))
    assert said.pop("matrix") == (
        "shard= splits the optimizer's state over the ranks, and the step needs it whole: "
        f"relax.matmul in {places[1]} reads {held}; relax.reshape in {places[0]} reads "
        f"{held.replace('weight', 'bias')}. Only optimizers that compute each element alone can be "
        "split (SGD, Adam, AdamW, RMSprop, Adagrad and the like); leave shard= out for this one"
    )
    assert said == {
        "rows": "shard='optimizer' splits state of the shape of its parameter, and Adafactor keeps "
        "optimizer0.0.weight.row_var [48, 1], optimizer0.0.weight.col_var [1, 16], "
        "optimizer0.2.weight.row_var [33, 1]; leave shard= out for this optimizer",
        "left": 'shard="gradients" leaves no whole gradient, and the step ends with one in '
        "0.weight.grad; call optimizer.zero_grad() in the step, or use "
        'shard="optimizer"',
        "whole": "an optimizer of this step holds this rank's part of its state, as another step "
        "with shard= left it; pass data_parallel=True and shard= to amp_ir.jit or trace_step here "
        "too. For a tool that takes neither, as amp_ir.verify, make model and optimizer anew, and "
        "load amp_ir.gather_state_dict(optimizer) into that one",
        "overflow": "find_overflow runs a step again on this rank alone, and this one exchanges "
        "gradients with others; jit the same step without data_parallel= and "
        "DistributedDataParallel in one process, and ask it on this batch",
        "apart": "optimizers of this step have split their state in other steps, apart or over "
        "another process group, and the parts do not fit together; make models and optimizers "
        "anew, load amp_ir.gather_state_dict(optimizer) into each, and call this step before the "
        "others",
        "state_dict": "this rank holds a part of the state of the AdamW (shard=), so its "
        "state_dict() is not whole; call amp_ir.save_checkpoint, or "
        "amp_ir.gather_state_dict(optimizer), on every rank",
        "step": "this rank holds a part of the state of the AdamW (shard=), which its step() in "
        "plain PyTorch would take for the whole; call the compiled step, or load a checkpoint into "
        "a new optimizer",
    }
