# SPDX-License-Identifier: Apache-2.0
"""A jitted step keeps every program it was compiled to, and stays right whatever changes between.

Plain PyTorch is the reference: the same step on a copy, over several steps.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import pickle
import random
import re
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir import errors, jit_step
from amp_ir.capture.guards.call_signature import CallSignature

# float32, 8 elements a sum and a few steps: a few roundings of 2^-24 each.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@attrs.define
class Run:
    """A model with its optimizer, and the step on it: plain, or jitted."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Any = None

    @classmethod
    def make(cls, make_step: Callable[[Any, Any], Any], *, jits: bool, **options: Any) -> Run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        run = cls(model, optimizer, make_step(model, optimizer))
        if jits:
            run.train = amp_ir.jit(run.train, model=model, optimizer=optimizer, **options)
        return run


def trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: Any, y: torch.Tensor, factor: float = 1.0, clears: bool = True) -> torch.Tensor:
        x = x["x"] if isinstance(x, dict) else x
        loss = F.cross_entropy(model(x.float()), y) * factor
        loss.backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()
        return loss.detach()

    return step


def accumulates(model: nn.Module, _optimizer: torch.optim.Optimizer) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    return step


def both(make_step: Any, **options: Any) -> tuple[Run, Run]:
    return Run.make(make_step, jits=True, **options), Run.make(make_step, jits=False)


def batch(seed: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def assert_alike(ours: Run, eager: Run) -> None:
    torch.testing.assert_close(ours.model.state_dict(), eager.model.state_dict(), **CLOSE)
    for one, other in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, **CLOSE)
        state, expected = ours.optimizer.state.get(one, {}), eager.optimizer.state.get(other, {})
        torch.testing.assert_close(dict(state), dict(expected), **CLOSE)


def mode(run: Run, is_on: bool) -> None:
    run.model.train(is_on)


def frozen(run: Run, is_on: bool) -> None:
    run.model[0].weight.requires_grad_(is_on)  # type: ignore[index]


def nesterov(run: Run, is_on: bool) -> None:
    run.optimizer.param_groups[0]["nesterov"] = is_on


def gradients(run: Run, is_on: bool) -> None:
    if not is_on:
        run.optimizer.zero_grad()


SWITCHES: dict[str, Callable[[Run, bool], None]] = {
    "mode": mode, "frozen": frozen, "nesterov": nesterov, "gradients": gradients,
}  # fmt: skip


def in_a_dict(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    return {"x": x}, y


ARGUMENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]] = {
    "shape": lambda x, y: (x[:3], y[:3]),
    "dtype": lambda x, y: (x.double(), y),
    "structure": in_a_dict,
    "value": lambda x, y: (x, y, 0.5),
    "gradients stay": lambda x, y: (x, y, 1.0, False),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_that_is_turned_to_and_fro_compiles_twice(switch: str) -> None:
    ours, eager = both(trains)
    for step in range(6):
        for run in (ours, eager):
            SWITCHES[switch](run, step % 2 == 0)
        arguments = (*batch(step), 1.0, switch != "gradients")
        torch.testing.assert_close(ours.train(*arguments), eager.train(*arguments), **CLOSE)
        assert_alike(ours, eager)
    assert len(ours.train.recompiles) == 1


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_arguments_that_take_turns_compile_twice(argument: str) -> None:
    ours, eager = both(trains)
    for step in range(6):
        arguments = batch(step) if step % 2 else ARGUMENTS[argument](*batch(step))
        torch.testing.assert_close(ours.train(*arguments), eager.train(*arguments), **CLOSE)
        assert_alike(ours, eager)
        for run in (ours, eager):
            run.optimizer.zero_grad()
    assert len(ours.train.recompiles) == 1


def test_a_random_walk_through_all_switches_compiles_once_for_each_place() -> None:
    """Twelve steps, each with another switch turned, as eager makes them."""
    draw = random.Random(1)
    ours, eager = both(trains)
    at = dict.fromkeys(("mode", "frozen"), True)
    places = set()
    for step in range(12):
        switch = draw.choice(sorted(at))
        at[switch] = not at[switch]
        for run in (ours, eager):
            SWITCHES[switch](run, at[switch])
        rows = draw.choice((3, 5))
        places.add((rows, *at.values()))
        arguments = batch(step, rows)
        torch.testing.assert_close(ours.train(*arguments), eager.train(*arguments), **CLOSE)
        assert_alike(ours, eager)
    assert len(ours.train.recompiles) == len(places) - 1


def test_accumulation_as_a_step_of_its_own_compiles_twice() -> None:
    ours, eager = both(accumulates)
    for round_ in range(4):
        for part in range(3):
            arguments = batch(3 * round_ + part)
            torch.testing.assert_close(ours.train(*arguments), eager.train(*arguments), **CLOSE)
            assert_alike(ours, eager)
        for run in (ours, eager):
            run.optimizer.step()
            run.optimizer.zero_grad()
        assert_alike(ours, eager)
    assert [one.reason for one in ours.train.recompiles] == [
        "the step reads 0.weight.grad, which was None and is set"
    ]


def test_a_gradient_that_was_put_there_between_two_steps_is_read() -> None:
    ours, eager = both(accumulates)
    for step in range(4):
        for run in (ours, eager):
            for parameter in run.model.parameters():
                parameter.grad = torch.full_like(parameter, float(step))
        ours.train(*batch(step)), eager.train(*batch(step))
        assert_alike(ours, eager)
    assert ours.train.recompiles == []


@pytest.mark.parametrize(
    "make",
    [
        # Its first step is another one: the momentum begins as the gradient.
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ],
    ids=["dampened", "adamw"],
)
@pytest.mark.parametrize("between", ["eager step", "forget", "reload"])
def test_programs_share_the_state_of_the_optimizer(make: Any, between: str) -> None:
    """Two shapes: each program is captured with, or without, the state that the other one made."""

    def run(jits: bool) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        # Adam divides by the size of a gradient: float32 would differ where that is small.
        model = nn.Linear(4, 3).double()
        optimizer = make(model.parameters())

        def step(ids: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(ids[:, None] + torch.arange(4.0).double()), ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return (
            model,
            optimizer,
            amp_ir.jit(step, model=model, optimizer=optimizer) if jits else step,
        )

    (model, optimizer, train), (peer, peer_optimizer, peer_step) = run(True), run(False)
    # Compiled, but not run: nothing of the state that its capture made may come in later.
    with pytest.raises(errors.IndexOutOfRangeError):
        train(torch.tensor([0, 3]))
    for index, ids in enumerate(([0, 1, 2], [2, 0], [0, 1, 1], [1, 0], [1, 1], [2, 0, 0])):
        torch.testing.assert_close(train(torch.tensor(ids)), peer_step(torch.tensor(ids)), **CLOSE)
        torch.testing.assert_close(model.state_dict(), peer.state_dict(), **CLOSE)
        for one, other in zip(model.parameters(), peer.parameters(), strict=True):
            torch.testing.assert_close(
                dict(optimizer.state[one]), dict(peer_optimizer.state[other]), **CLOSE
            )
        if index != 2:
            continue
        for a_model, an_optimizer in ((model, optimizer), (peer, peer_optimizer)):
            if between == "eager step":
                a_model(torch.ones(2, 4).double()).sum().backward()
                an_optimizer.step()
                an_optimizer.zero_grad()
            elif between == "forget":
                an_optimizer.state.clear()
            elif between == "reload":
                an_optimizer.load_state_dict(copy.deepcopy(an_optimizer.state_dict()))


def test_a_program_of_a_first_step_that_eager_made_is_not_run() -> None:
    """The same for `compile`, which refuses where `jit` compiles again."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    def step(x: torch.Tensor) -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    x = torch.randn(3, 4)
    mod, _ = amp_ir.trace_step(step, (x,), model=model, optimizer=optimizer)
    train = amp_ir.compile(mod)
    step(x)
    with pytest.raises(errors.StateError, match="the optimizer's first step is unlike the later"):
        train(x)


def test_programs_of_a_state_that_is_gone_are_let_go() -> None:
    ours, eager = both(trains)
    ours.train(*batch(0)), eager.train(*batch(0))
    state = weakref.ref(ours.optimizer.state[ours.model[0].weight]["momentum_buffer"])
    first = weakref.ref(ours.train.compiled)
    for run in (ours, eager):
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    ours.train(*batch(1)), eager.train(*batch(1))
    gc.collect()
    assert first() is None and state() is None
    assert_alike(ours, eager)


def test_random_numbers_go_on_from_program_to_program() -> None:
    model = nn.Dropout(0.5)
    train = amp_ir.jit(lambda x: model(x), model=model)
    ones = torch.ones(64)
    drawn = [train(ones if step % 2 else ones[None])[..., :].flatten() for step in range(4)]
    assert len({tuple(one.tolist()) for one in drawn}) == 4
    assert train.state_dict()["random_state"].tolist()[1] == 4


def test_plain_values_are_told_apart_by_what_they_are() -> None:
    model = nn.Linear(1, 1)
    train = amp_ir.jit(lambda x, value: x * 0 + math.copysign(1.0, value), model=model)
    x = torch.ones(2)
    for value, expected in ((0.0, 1.0), (-0.0, -1.0), (0, 1.0), (False, 1.0), (0.0, 1.0)):
        assert train(x, value).tolist() == [expected] * 2
    assert len(train.recompiles) == 3
    nan, other_nan = float("nan"), float("nan")
    train(x, nan), train(x, other_nan)
    assert len(train.recompiles) == 4
    mod, _ = amp_ir.trace_step(lambda x, value: x + value, (x, 0.0), model=model)
    with pytest.raises(errors.ArgumentError) as refused:
        amp_ir.compile(mod)(x, -0.0)
    assert str(refused.value) == (
        "argument 1 is -0.0, captured as the fixed value 0.0. Call it as it was captured, or "
        "capture (jit) the step again"
    )


def test_the_common_case_asks_one_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = both(trains)
    for rows in (5, 3, 4):
        ours.train(*batch(0, rows))
    for is_on in (False, True):
        mode(ours, is_on)
        ours.train(*batch(0))
    asked = []
    for variant in ours.train._variants._recent:
        real = variant.guards.recompile_reason
        counted = attrs.evolve(
            variant.guards, recompile_reason=lambda real=real: asked.append(0) or real()
        )
        object.__setattr__(variant, "guards", counted)
        monkeypatch.setattr(
            variant.program, "module", attrs.evolve(variant.program.module, hooks=counted)
        )
    ours.train(*batch(0))
    assert len(asked) == 1


def test_every_compilation_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="amp_ir")
    ours, _ = both(trains)
    ours.train(*batch(0))
    mode(ours, False)
    ours.train(*batch(0))
    ours.train(batch(0)[0].double(), batch(0)[1])
    ours.train(*in_a_dict(*batch(0)))
    ours.train(*batch(0), 2.0)
    nesterov(ours, True)
    ours.train(*batch(0), 2.0)
    told = [one.getMessage() for one in caplog.records if one.getMessage().startswith("compiled")]
    assert {one.levelname for one in caplog.records} == {"INFO"}
    reasons = [one.reason for one in ours.train.recompiles]
    assert reasons == [
        "module (the model itself) is in eval mode now, and was in train mode",
        "argument 0 was torch.float32 and is torch.float64",
        "the structure of the arguments was (Tensor, Tensor) and is ({'x': Tensor}, Tensor)",
        "the structure of the arguments was ({'x': Tensor}, Tensor) and is (Tensor, Tensor, float)",
        "nesterov of param group 0 was False and is True",
    ]
    assert [one.split(": ", 1)[1] for one in told[1:]] == reasons
    # The step by its name and line, and both programs by their numbers.
    line = trains.__code__.co_firstlineno + 1
    name = f"trains.step (test_jit_variants.py:{line})"
    texts = [re.sub(r"in \d+\.\d s", "in 1.2 s", one) for one in told]
    assert texts[0] == f"compiled {name} in 1.2 s"
    assert texts[1].startswith(f"compiled {name} again in 1.2 s as program 1, unlike program 0: ")
    numbers = [(one.program, one.unlike) for one in ours.train.recompiles]
    assert numbers == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
    assert all(one.seconds > 0 for one in ours.train.recompiles)
    # The capture's notes are told as well, and can be asked for.
    assert ours.train.notes == ours.train.compiled.module.notes != ()
    assert {*ours.train.notes} <= {one.getMessage() for one in caplog.records}


def warned(caplog: pytest.LogCaptureFixture, build: Any) -> tuple[str, str, str]:
    """Return the one warning, the seconds in it, and the name of the lambda that `build` returns.

    The lambda is in the third line of `build`.
    """
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    seconds = warning.split("Compiling took ")[1].split(" s")[0]
    line = build.__code__.co_firstlineno + 2
    name = f"{build.__qualname__}.<lambda> (test_jit_variants.py:{line})".replace("<locals>.", "")
    return warning, seconds, name


def test_a_step_that_is_compiled_on_and_on_says_so_once(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def cuts(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        step = trains(model, optimizer)
        return lambda x, y, rows: step(x[:rows], y[:rows])

    ours, eager = both(cuts, recompile_limit=2)
    for step in range(5):
        arguments = (*batch(step, 9), 2 + step)
        torch.testing.assert_close(ours.train(*arguments), eager.train(*arguments), **CLOSE)
    assert_alike(ours, eager)
    warning, seconds, name = warned(caplog, cuts)
    assert warning == (
        f"a jitted step {name} was compiled 2 times more for arguments of the same shapes and "
        "dtypes, 2 times for one reason (the last time: argument 2 was 3 and is 4). Compiling took "
        f"{seconds} s so far and goes on where it changes again: results stay right, and 2 "
        "programs are kept. Leave it as it is between steps; where it decides what runs (if i in "
        "steps), pass what is decided instead, a bool; where it is computed with, make it a tensor "
        "that is an argument or a buffer of the model; where all its values come back, pass "
        "recompile_limit= of at least their number. Said once; train.recompiles lists every time"
    )
    kept = len(ours.train.recompiles)
    # The two used last are kept, the others are not.
    for rows, count in ((6, kept), (5, kept), (2, kept + 1)):
        ours.train(*batch(0, 9), rows)
        assert len(ours.train.recompiles) == count


def test_text_that_differs_at_every_call_is_told_before_many_compiles(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        step = trains(model, optimizer)
        return lambda batch: step(batch["x"], batch["y"])

    ours, _ = both(named)
    for step in range(5):
        x, y = batch(step, 6)
        ours.train({"x": x, "y": y, "name": [f"file{step}{row}.png" for row in range(6)]})
    reason = (
        "argument 0['name'][0] was 'file20.png' and is 'file30.png'; argument 0['name'][1] was "
        "'file21.png' and is 'file31.png'; argument 0['name'][2] was 'file22.png' and is "
        "'file32.png'; argument 0['name'][3] was 'file23.png' and is 'file33.png'; and 2 more"
    )
    assert ours.train.recompiles[2].reason == reason
    warning, seconds, name = warned(caplog, named)
    assert warning == (
        f"a jitted step {name} was compiled 3 times more for other text among its arguments (the "
        f"last time: {reason}). Compiling took {seconds} s so far and goes on with other text: "
        "results stay right. Leave text that it does not use, such as names of files, out of its "
        "arguments; where it decides what runs, and all its values come back, pass "
        "recompile_limit= of at least their number. Said once; train.recompiles lists every time"
    )


def test_programs_of_the_shapes_used_last_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    ours, eager = both(trains, max_shapes=2)
    for rows in (4, 5, 6, 5, 7):
        arguments = batch(rows, rows)
        torch.testing.assert_close(ours.train(*arguments), eager.train(*arguments), **CLOSE)
    assert_alike(ours, eager)
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    seconds = warning.split("Compiling took ")[1].split(" s")[0]
    assert [one.reason for one in ours.train.recompiles] == [
        "argument 0 was of shape (4, 6) and is of shape (5, 6) (dimension 0); argument 1 was of "
        "shape (4,) and is of shape (5,) (dimension 0)",
        "argument 0 was of shape (5, 6) and is of shape (6, 6) (dimension 0); argument 1 was of "
        "shape (5,) and is of shape (6,) (dimension 0)",
        "argument 0 was of shape (5, 6) and is of shape (7, 6) (dimension 0); argument 1 was of "
        "shape (5,) and is of shape (7,) (dimension 0)",
    ]
    reason = ours.train.recompiles[1].reason
    name = f"trains.step (test_jit_variants.py:{trains.__code__.co_firstlineno + 1})"
    assert warning == (
        f"a jitted step {name} was called with batches of more than 2 shapes, dtypes or "
        f"structures (the last new one: {reason}). Programs for the 2 used last are kept; results "
        f"stay right, and a shape that comes back is compiled again. Compiling took {seconds} s "
        "so far. Pad the batches to fewer shapes, or pass max_shapes= of at least their number: "
        "they share one arena. Said once; train.recompiles lists every time"
    )
    # 6 gave way to 7 and not 5, which was used between.
    for rows, count in ((5, 3), (7, 3), (6, 4)):
        ours.train(*batch(0, rows))
        assert len(ours.train.recompiles) == count


@pytest.mark.parametrize("name", ["recompile_limit", "max_shapes"])
@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_a_limit_that_is_no_number_of_programs_is_refused(limit: Any, name: str) -> None:
    with pytest.raises(errors.OptionError) as refused:
        amp_ir.jit(lambda x: x, model=nn.Linear(1, 1), **{name: limit})
    assert str(refused.value) == (
        f"{name}={limit!r} is not a number of programs; expected a positive int"
    )


def test_a_call_that_cannot_be_compiled_leaves_the_programs_as_they_are() -> None:
    ours, eager = both(trains)
    ours.train(*batch(0)), eager.train(*batch(0))
    with pytest.raises(errors.CaptureError):
        ours.train(torch.randn(5, 7), batch(0)[1])
    with pytest.raises(errors.ArgumentError) as refused:
        ours.train(object(), batch(0)[1].numpy())
    assert str(refused.value) == (
        "argument 0 is a builtins.object, expected a tensor; pass tensors and plain values in "
        "tuples, lists, dicts and dataclasses; argument 1 is a numpy.ndarray, expected a tensor; "
        "torch.from_numpy makes a tensor of an array"
    )
    ours.train(*batch(1)), eager.train(*batch(1))
    assert ours.train.recompiles == []
    assert_alike(ours, eager)


def test_a_number_that_changes_twice_becomes_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of `jit` alone: which names it asks a capture to leave open, and when."""
    asked: list[Any] = []
    real = jit_step.trace_unchanged
    changed: list[tuple[str, ...]] = [("a.temperature",), ("a.temperature", "b.p"), ("b.p",)]

    def traced(*given: Any, numbers_as_inputs: Any = frozenset(), **options: Any) -> Any:
        asked.append(sorted(numbers_as_inputs))
        mod = real(*given, **options)
        hooks = attrs.evolve(
            mod.hooks,
            changed_numbers=lambda: changed.pop(0),
            recompile_reason=lambda: "a number changed",
        )
        return attrs.evolve(mod, hooks=hooks)

    monkeypatch.setattr(jit_step, "trace_unchanged", traced)
    train = amp_ir.jit(lambda x: x + 1, model=nn.Linear(1, 1))
    for _ in range(4):
        train(torch.ones(2))
    assert asked == [[], [], ["a.temperature"], ["a.temperature", "b.p"]]


def test_a_number_that_changes_at_every_step_compiles_three_times() -> None:
    """Once, again for its first change, and at the second as an input."""

    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.temperature = nn.Linear(6, 3), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x) / self.temperature

    def run(jits: bool) -> Run:
        torch.manual_seed(0)
        model = Tempered()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        step = trains(model, optimizer)
        train = amp_ir.jit(step, model=model, optimizer=optimizer) if jits else step
        return Run(model, optimizer, train)

    ours, eager = run(jits=True), run(jits=False)
    for step in range(6):
        for one in (ours, eager):
            one.model.temperature = 1.0 + 0.5 * step
        torch.testing.assert_close(ours.train(*batch(step)), eager.train(*batch(step)), **CLOSE)
        assert_alike(ours, eager)
    assert [one.reason for one in ours.train.recompiles] == [
        "attribute 'temperature' of module (the model itself) was 1.0 and is 1.5",
        "attribute 'temperature' of module (the model itself) was 1.5 and is 2.0",
    ]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_step_is_not_copied_and_the_advice_works(copied: Any, compiles: bool) -> None:
    ours, eager = both(trains)
    ours.train(*batch(0)), eager.train(*batch(0))
    with pytest.raises(errors.CopyError) as refused:
        copied(ours.train.compiled if compiles else ours.train)
    assert str(refused.value) == (
        "a compiled step cannot be copied or pickled: it is machine code of this process, and "
        "works on the tensors of its own model and optimizer. Copy these, copy.deepcopy((model, "
        "optimizer)), or save them, amp_ir.save_checkpoint; then compile a step that uses the "
        "copies"
    )
    if copied is not copy.deepcopy:
        return
    model, optimizer = copy.deepcopy((ours.model, ours.optimizer))
    again = amp_ir.jit(trains(model, optimizer), model=model, optimizer=optimizer)
    again(*batch(1)), eager.train(*batch(1))
    assert_alike(Run(model, optimizer), eager)


def test_signatures_do_not_depend_on_values_of_tensors() -> None:
    first, _ = CallSignature.of((torch.zeros(2), {"a": 1.0}))
    again, tensors = CallSignature.of((torch.ones(2), {"a": 1.0}))
    assert first == again and hash(first.key) == hash(again.key)
    assert [one.tolist() for one in tensors] == [[1.0, 1.0]]
    assert again.differences(first) == []
