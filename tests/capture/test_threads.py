# SPDX-License-Identifier: Apache-2.0
"""Captures and steps beside other threads, and captures that are cut off: nothing else notices."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from tvm import relax

import amp_ir
from amp_ir import errors
from amp_ir.amp.custom_type_hint import find_rule
from amp_ir.amp.policies import find_policy
from amp_ir.capture.patches import install
from amp_ir.ir import annotations
from pytorch_as_it_was import pytorch_state

# float32, 8 elements a sum and a few steps: a few roundings of 2^-24 each.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def training(seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, (step, optimizer)


def jitted(seed: int = 0) -> tuple[nn.Module, Any]:
    model, (step, optimizer) = training(seed)
    return model, amp_ir.jit(step, model=model, optimizer=optimizer)


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, generator=generator), torch.arange(rows) % 3


def assert_trained_alike(model: nn.Module, seed: int, steps: int) -> None:
    peer, (step, _) = training(seed)
    for _ in range(steps):
        step(*batch())
    torch.testing.assert_close(model.state_dict(), peer.state_dict(), **CLOSE)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """What each function returns, run in threads that start at the same moment."""
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        barrier.wait(30)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [one.result(120) for one in [pool.submit(run, f) for f in functions]]


def test_first_calls_that_coincide_are_each_right() -> None:
    before = pytorch_state()
    (first, train), (second, other_train) = jitted(0), jitted(1)
    in_threads(lambda: train(*batch()), lambda: other_train(*batch()))
    assert pytorch_state() == before
    train(*batch()), other_train(*batch())
    assert_trained_alike(first, 0, 2)
    assert_trained_alike(second, 1, 2)


def test_calls_of_one_step_from_two_threads_run_one_after_the_other() -> None:
    model, train = jitted()

    def ten() -> None:
        for _ in range(10):
            train(*batch())

    in_threads(ten, ten)
    assert train.recompiles == []
    assert_trained_alike(model, 0, 20)


class Eager:
    """A loop of plain PyTorch that uses what a capture replaces."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.Dropout(0.3)
        self.parameters = [*self.embed.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(self) -> float:
        x, y = batch()
        hidden = checkpoint(self.embed, x, use_reentrant=False)
        hidden = hidden + checkpoint(self.embed, hidden[:, :6], use_reentrant=True)
        attended = F.scaled_dot_product_attention(hidden[None], hidden[None], hidden[None])[0]
        spread = torch.distributions.Normal(attended, 1.0).log_prob(hidden).mean()
        loss = F.cross_entropy(self.head(self.norm(attended)), y) - math.sqrt(1e-4) * spread
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.parameters, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.item()


def test_training_beside_captures_is_the_same_to_the_bit() -> None:
    """Also its dropout: a capture does not put back generators that others draw from."""
    steps = 150
    alone = Eager()
    expected = [alone.step() for _ in range(steps)]
    trainings = [training()[1] for _ in range(5)]
    mod = captured(*trainings[0])
    eager, losses, scripts = Eager(), [], []
    done = threading.Event()

    def trains() -> None:
        while len(losses) < steps or not done.is_set():
            losses.append(eager.step())

    def captures() -> None:
        try:
            scripts.extend(captured(*one).script() for one in trainings[1:])
        finally:
            done.set()

    in_threads(trains, captures)
    assert losses[:steps] == expected
    # And nothing of it was captured.
    assert scripts == [mod.script()] * 4


def captured(step: Any, optimizer: torch.optim.Optimizer) -> amp_ir.StepModule:
    model = nn.Module()
    model.all = nn.ParameterList(optimizer.param_groups[0]["params"])
    return amp_ir.trace_step(step, batch(), model=model, optimizer=optimizer)[0]


def seen_elsewhere() -> dict[str, Any]:
    """What a thread sees of everything that a capture replaces."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.error("heard")
    log.removeHandler(handler)
    eager = Eager()
    try:
        torch.distributions.Normal(0.0, -1.0)
    except ValueError as error:
        checked = str(error)[:40]
    return {
        "losses": [eager.step() for _ in range(2)],
        "checked": checked,
        "heard": heard,
        "validates": torch.distributions.Distribution._validate_args,
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "cudnn": torch._C._get_cudnn_enabled(),
        "threads": torch._C._is_multithreading_enabled(),
        "sqrt": math.sqrt(2.0),
        "value": sys.modules["torch.optim.adam"]._get_value(torch.tensor(2.0)),
        "lookup": nn.Module.__getattr__(eager.head, "weight").shape,
    }


def test_another_thread_sees_nothing_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is compared needs a check that fails, whatever ran before in this process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    expected = in_threads(seen_elsewhere)[0]

    def step(x: torch.Tensor) -> torch.Tensor:
        # Here, as a step that keeps it cannot be captured; what fails here fails the capture.
        assert in_threads(seen_elsewhere)[0] == expected
        return x + 1

    amp_ir.trace_step(step, (torch.ones(2),), model=nn.Linear(1, 1))


def test_what_another_thread_sets_meanwhile_stays() -> None:
    distribution = torch.distributions.Distribution
    before = distribution._validate_args

    def step(x: torch.Tensor) -> torch.Tensor:
        in_threads(lambda: distribution.set_default_validate_args(not before))
        return x + 1

    try:
        amp_ir.trace_step(step, (torch.ones(2),), model=nn.Linear(1, 1))
        assert distribution._validate_args is (not before)
    finally:
        distribution.set_default_validate_args(before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_while_patches_are_put_takes_back_those_before(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    real, before = install.patch, pytorch_state()
    calls = 0
    while True:
        left = calls

        def failing(*args: Any) -> None:
            nonlocal left
            if not left:
                raise error("cut off")
            left -= 1
            real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(install, "patch", failing)
            try:
                amp_ir.trace_step(lambda x: x, (torch.ones(2),), model=nn.Linear(1, 1))
                break
            except (error, errors.CaptureError):
                assert pytorch_state() == before
        calls += 1
    assert calls >= 4


def model_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    owned = [id(one) for one in (*model.parameters(), *model.buffers())]
    return [owned, [list(map(id, g["params"])) for g in optimizer.param_groups], vars(optimizer)]


def test_a_capture_that_is_interrupted_anywhere_leaves_everything_as_it_was() -> None:
    """Ctrl-C arrives where Python enters a function: here, those of the files that put back.

    In functions that PyTorch's C++ calls it may end the process, capture or not.
    """
    model, (step, optimizer) = training()
    before, owned = pytorch_state(), model_state(model, optimizer)

    files = ("restores.py", "install.py", "trace_leftovers.py", "generators.py")

    def capture_until(place: int) -> int:
        """Interrupt at the call of that number; returns how many there were."""
        count = 0

        def on_call(frame: Any, event: str, _arg: Any) -> None:
            nonlocal count
            if frame.f_code.co_filename.endswith(files):
                count += 1
                if count == place:
                    raise KeyboardInterrupt

        sys.settrace(on_call)
        try:
            amp_ir.trace_step(step, batch(), model=model, optimizer=optimizer)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return count

    count = capture_until(0)
    # The last ones are where several changes are undone at once.
    for place in sorted({*range(1, count, max(1, count // 24)), *range(max(1, count - 24), count)}):
        assert capture_until(place) >= place
        now = pytorch_state()
        assert now == before, {key: now[key] for key in now if now[key] != before[key]}
        assert model_state(model, optimizer) == owned, place
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    train(*batch())
    assert_trained_alike(model, 0, 1)


def test_a_step_that_is_called_inside_of_a_capture_is_refused() -> None:
    _, train = jitted()
    with pytest.raises(errors.ArgumentError) as refused:
        amp_ir.trace_step(lambda x, y: train(x, y), batch(), model=nn.Linear(1, 1))
    assert str(refused.value) == (
        "this is already inside of a capture; capture the outermost step only"
    )


def never_low(args: Any, ret_type: Any, amp_dtype: str) -> Any:
    """Stay in float32: this test asks for it."""
    return [amp_ir.amp.PrimType("float32")] * len(args)


RULES = amp_ir.CustomTypeHint({"relax.matmul": never_low})


class Mixed(nn.Module):
    """A network of which one part is annotated, one is checkpointed, and one is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = amp_ir.float_function(torch.tanh)(amp_ir.half_function(self.first)(x))
        x = checkpoint(self.second, x, use_reentrant=False)
        result: torch.Tensor = self.head(F.relu(x))
        return result


def saved_training(model: nn.Module, folder: Path, kind: str) -> dict[str, Any]:
    """Train, save, train on, load and train again, and give all that there is to compare."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = amp_ir.GradScaler("cpu", init_scale=1024.0)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer, scaler=scaler, amp_dtype="float16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    losses = []
    with RULES if kind == "rules" else contextlib.nullcontext():
        for rows in (4, 5):
            losses += [train(*batch(rows)).item() for _ in range(3)]
            amp_ir.save_checkpoint(folder / "run.pt", **parts)
            after = [train(*batch(rows)).item() for _ in range(3)]
            amp_ir.load_checkpoint(folder / "run.pt", **parts)
            assert [train(*batch(rows)).item() for _ in range(3)] == after
            losses += after
    return {
        "losses": losses,
        "plan": train.compiled.module.plan.hash,
        "state": [one.detach().clone() for one in model.parameters()],
        "recompiles": [one.reason for one in train.recompiles],
    }


def test_rules_annotations_and_checkpoints_of_threads_do_not_meet(tmp_path: Path) -> None:
    """Three threads at once give what one thread gives, and one block of rules serves two."""

    def run(name: str, kind: str) -> Callable[[], dict[str, Any]]:
        (tmp_path / name).mkdir()
        mine = copy.deepcopy(model)
        return lambda: saved_training(mine, tmp_path / name, kind)

    model = Mixed()

    alone = {kind: run(f"alone {kind}", kind)() for kind in ("plain", "rules")}
    assert alone["plain"]["plan"] != alone["rules"]["plan"]
    kinds = ["plain", "rules", "rules"]
    together = in_threads(*(run(f"{k}", kind) for k, kind in enumerate(kinds)))
    for kind, found in zip(kinds, together, strict=True):
        torch.testing.assert_close(found.pop("state"), alone[kind]["state"], rtol=0, atol=0)
        assert found == {name: alone[kind][name] for name in found}


def test_blocks_of_one_object_overlap_in_threads() -> None:
    entered, left = threading.Event(), threading.Event()
    before = find_rule(find_policy("default"), "relax.matmul")

    def rule() -> Any:
        return find_rule(find_policy("default"), "relax.matmul")

    def first() -> None:
        with RULES, RULES:
            entered.set()
            assert left.wait(30)
            assert rule() is never_low
        assert rule() is before

    def second() -> None:
        assert entered.wait(30)
        with RULES:
            assert rule() is never_low
        assert rule() is before
        left.set()

    in_threads(first, second)


def test_registrations_from_threads_are_all_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotations, "_registered", {})
    monkeypatch.setattr(annotations, "_described", "none")
    owner = ModuleType("mine")
    names = [f"f{k}" for k in range(200)]
    for name in names:
        setattr(owner, name, torch.relu)

    def registers(some: list[str]) -> Callable[[], None]:
        return lambda: [amp_ir.register_half_function(owner, name) for name in some]  # type: ignore[return-value]

    in_threads(*(registers(names[k::4]) for k in range(4)))
    described = annotations.described_registrations()
    assert sorted(described.split(", ")) == sorted(f"mine.{name} (low)" for name in names)


def test_functions_that_threads_write_at_once_are_each_whole() -> None:
    """TVM's stack of builders is one of each thread: both are inside of a function here."""
    both_are_inside = threading.Barrier(2)

    def writes() -> Any:
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((2,), "float32"))
        with builder.function("main", [x]):
            both_are_inside.wait(30)
            y = builder.emit(relax.op.add(x, x))
            both_are_inside.wait(30)
            builder.emit_func_output(y)
        return builder.get()["main"]

    first, second = in_threads(writes, writes)
    assert first.script() == second.script()


def test_what_the_garbage_collector_calls_is_not_the_steps():
    """As profilers, and tests' tools, measure how long a collection takes."""
    model, (step, optimizer) = training()
    seconds = []

    def measure(_phase: str, _info: dict[str, int]) -> None:
        seconds.append(time.perf_counter())

    def collecting(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return step(x, y)

    gc.callbacks.append(measure)
    try:
        train = amp_ir.jit(collecting, model=model, optimizer=optimizer)
        for _ in range(3):
            train(*batch())
    finally:
        gc.callbacks.remove(measure)
    assert seconds
    assert_trained_alike(model, 0, 3)
