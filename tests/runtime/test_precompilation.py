# SPDX-License-Identifier: Apache-2.0
"""`jit(..., precompile=)`: programs for other shapes are made while steps run, and change nothing.

The reference is the same step compiled on demand, bit for bit.
"""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
import amp_ir.api.compile as compile_module
from amp_ir import errors, jit_step
from amp_ir.capture import tracing
from cuda_emulator import in_emulator

ROWS = (6, 6, 6, 4, 6, 3, 4, 5)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def dampened(parameters: Any) -> torch.optim.Optimizer:
    # Its first step is another one: the momentum begins as the gradient.
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)


def batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=draws)
    return x, torch.randint(0, 3, (rows,), generator=draws)


class Run:
    """A step with dropout and its state, jitted with some options."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer] = adamw, **options: Any):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))
        self.optimizer = make(self.model.parameters())
        self.train = amp_ir.jit(
            self.step, model=self.model, optimizer=self.optimizer, amp_dtype="bfloat16", **options
        )

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 13:
            raise RuntimeError("an unlucky batch")
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def wait(self) -> None:
        """Wait for the program that is being made."""
        running = self.train._precompilation._running
        if running is not None:
            running.task.wait()

    @property
    def in_background(self) -> list[bool]:
        return [one.in_background for one in self.train.recompiles]


@pytest.mark.parametrize("make", [adamw, dampened])
@pytest.mark.parametrize("waits", [True, False])
def test_results_are_those_of_compiling_on_demand(make: Any, waits: bool) -> None:
    ours, on_demand = Run(make, precompile=[batch(4), batch(3), batch(6)]), Run(make)
    state = on_demand.train
    for seed, rows in enumerate(ROWS):
        got, wanted = ours.train(*batch(rows, seed)), on_demand.train(*batch(rows, seed))
        if seed == 0:
            # Dropout's seed is drawn by the first capture.
            assert ours.train.state_dict().keys() == state.state_dict().keys()
        assert torch.equal(got, wanted)
        if waits:
            ours.wait()
    for one, other in zip(ours.model.parameters(), on_demand.model.parameters(), strict=True):
        assert torch.equal(one, other)
    expected = 4 if make is dampened else 3
    assert len(ours.train.recompiles) == len(on_demand.train.recompiles) == expected
    assert sum(ours.in_background) == 2 if waits else sum(ours.in_background) >= 1
    assert not any(on_demand.in_background)


def test_nothing_is_captured_before_the_first_step_has_made_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured: list[tuple[int, int]] = []
    real = jit_step.trace_unchanged

    def traced(step: Any, example: Any, **options: Any) -> Any:
        captured.append((len(example[0]), len(run.optimizer.state)))
        return real(step, example, **options)

    monkeypatch.setattr(jit_step, "trace_unchanged", traced)
    run = Run(precompile=[batch(4), batch(3)])
    run.train(*batch(6))
    assert captured == [(6, 0)]
    for _ in range(3):
        run.train(*batch(6))
        run.wait()
    assert captured == [(6, 0), (4, 4), (3, 4)]
    # The program that ran last is another than the one that was made last.
    inputs = run.train.compiled.module.signature.inputs
    assert [one.shape for one in inputs if not one.is_state] == [(6, 8), (6,)]
    reasons = [
        "argument 0 was of shape (6, 8) and is of shape (4, 8) (dimension 0); argument 1 was of "
        "shape (6,) and is of shape (4,) (dimension 0)",
        "argument 0 was of shape (6, 8) and is of shape (3, 8) (dimension 0); argument 1 was of "
        "shape (6,) and is of shape (3,) (dimension 0)",
    ]
    assert [one.reason for one in run.train.recompiles] == reasons
    assert run.in_background == [True, True]


def held_compile(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[str]]:
    """Let compilations in the background wait for an event; return it, and the threads' names."""
    goes_on, names = threading.Event(), []
    real = jit_step.compile_into

    def compiled(*arguments: Any, **options: Any) -> Any:
        names.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            assert goes_on.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(jit_step, "compile_into", compiled)
    return goes_on, names


def test_steps_run_meanwhile_and_a_call_that_needs_the_program_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, names = held_compile(monkeypatch)
    run = Run(precompile=[batch(4)])
    for _ in range(4):
        run.train(*batch(6))
    run.train(*batch(5))  # compiled beside it
    assert run.in_background == [False]
    threading.Timer(0.2, goes_on.set).start()
    run.train(*batch(4))
    assert run.in_background == [False, True] and len(names) == 3
    assert names[0] == names[2] == "MainThread"
    line = Run.step.__code__.co_firstlineno
    assert names[1] == f"amp_ir compiles Run.step (test_precompilation.py:{line})"


def test_a_program_is_not_put_on_the_state_while_another_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fakes and symbols are in the user's objects then; reading those ended the capture."""
    is_reached, goes_on = threading.Event(), threading.Event()
    exchange_of, watched = compile_module.exchange_of, tracing.WatchedArguments

    def held(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            is_reached.set()
            assert goes_on.wait(60)
        return exchange_of(*arguments)

    def slowly_watched(arguments: Any) -> Any:
        if is_reached.is_set() and not goes_on.is_set():
            goes_on.set()
            run.train._precompilation._running.task._thread.join(0.5)
        return watched(arguments)

    monkeypatch.setattr(compile_module, "exchange_of", held)
    monkeypatch.setattr(tracing, "WatchedArguments", slowly_watched)
    run = Run(precompile=[batch(4)])
    run.train(*batch(6)), run.train(*batch(6))
    assert is_reached.wait(60)
    run.train(*batch(5))
    run.wait()
    run.train(*batch(4))
    assert goes_on.is_set() and run.in_background == [False, True]


def test_a_program_whose_guards_fail_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, _ = held_compile(monkeypatch)
    run = Run(precompile=[batch(4)])
    run.train(*batch(6)), run.train(*batch(6))
    run.model.eval()
    run.train(*batch(4))
    assert run.in_background == [False]
    goes_on.set()
    run.wait()
    run.model.train()
    run.train(*batch(6)), run.train(*batch(4))
    assert run.in_background == [False, True]


def test_ctrl_c_in_a_wait_and_in_a_capture_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, _ = held_compile(monkeypatch)
    run = Run(precompile=[batch(4)])
    run.train(*batch(6))
    real = jit_step.trace_unchanged

    def interrupted(*_arguments: Any, **_options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(jit_step, "trace_unchanged", interrupted)
    before = copy.deepcopy(run.model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        run.train(*batch(6))
    assert all(torch.equal(one, before[name]) for name, one in run.model.state_dict().items())
    monkeypatch.setattr(jit_step, "trace_unchanged", real)
    run.train(*batch(6))
    running = run.train._precompilation._running
    assert running is not None
    monkeypatch.setattr(running.task._thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.train(*batch(4))
    monkeypatch.undo()
    goes_on.set()
    run.train(*batch(4))
    assert run.in_background == [True]


def test_failures_are_one_warning_each_and_raise_where_the_program_is_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = jit_step.compile_into

    def compiled(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise errors.BuildError("there is no linker\nhere")
        return real(*arguments, **options)

    monkeypatch.setattr(jit_step, "compile_into", compiled)
    run = Run(precompile=[batch(13), batch(4)])
    for _ in range(4):
        run.train(*batch(6))
        run.wait()
    line = Run.step.__code__.co_firstlineno
    name = f"Run.step (test_precompilation.py:{line})"
    told = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    end = ". A call with such a batch compiles it then, and raises this error if it comes again"
    assert told == [
        f"precompile[0] of the jitted step {name} could not be compiled in the background: "
        f"CaptureError: the step failed while it was traced, at step (forward), {__file__}:"
        f"{line + 2}: RuntimeError: an unlucky batch. Check that it runs as plain PyTorch on the "
        "same batch; if it does, it needs a tensor's values (as .numpy() does), which do not exist "
        f"yet when a step is captured{end}",
        f"precompile[1] of the jitted step {name} could not be compiled in the background: "
        f"BuildError: there is no linker{end}",
    ]
    with pytest.raises(errors.CaptureError, match="an unlucky batch"):
        run.train(*batch(13))
    run.train(*batch(4))
    assert run.in_background == [False]


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a tensor": (
        torch.zeros(2), errors.OptionError,
        "precompile= is a Tensor, expected a list of batches, each the tuple of the step's "
        "arguments: (inputs, targets), or (batch,) for a single one",
    ),
    "a list of tensors": (
        [torch.zeros(2)], errors.OptionError,
        "precompile[0] is a Tensor, expected the tuple of the step's arguments: (inputs, targets), "
        "or (batch,) for a single one",
    ),
    "an object": (
        [batch(2), (object(),)], errors.ArgumentError,
        "precompile[1]: argument 0 is a builtins.object, expected a tensor; pass tensors and plain "
        "values in tuples, lists, dicts and dataclasses",
    ),
    "too many": (
        [batch(2), batch(2), batch(3), batch(4)], errors.OptionError,
        "precompile= has batches of 3 shapes, dtypes or structures, and programs for max_shapes=2 "
        "are kept; pass max_shapes= of at least 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_list_of_batches_is_refused_at_once(name: str) -> None:
    given, kind, message = WRONG[name]
    with pytest.raises(kind) as refused:
        Run(precompile=given, max_shapes=2)
    assert str(refused.value) == message


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_a_program_is_made_leaves_both_processes_right() -> None:
    run, other = Run(precompile=[batch(4)]), Run()
    for one in (run, other):
        one.train(*batch(6)), one.train(*batch(6))
    expected = other.train(*batch(4))
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(run.train(*batch(4)), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(run.train(*batch(4)), expected)


def test_a_process_may_end_while_a_program_is_made() -> None:
    program = (
        "import torch, amp_ir\n"
        "model = torch.nn.Linear(8, 8)\n"
        "train = amp_ir.jit(lambda x: model(x).sum(), model=model, "
        "precompile=[(torch.ones(4, 8),)])\n"
        "train(torch.ones(6, 8)), train(torch.ones(6, 8))\n"
        "print(train._precompilation._running is not None)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"True\n", b"")


@in_emulator
def test_programs_for_a_gpu_are_made_in_the_thread_of_the_step() -> None:
    from cuda_emulator import as_cuda

    with as_cuda.as_cuda():
        run = Run(device="cuda", precompile=[batch(4)])
        for _ in range(3):
            run.train(*batch(6))
        assert run.in_background == [True]
        run.train(*batch(4))
        assert run.in_background == [True]
