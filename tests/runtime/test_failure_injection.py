# SPDX-License-Identifier: Apache-2.0
"""A call of a step that fails leaves all state as before, or says that it is torn and refuses."""

from __future__ import annotations

import contextlib
import copy
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import amp_ir
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.errors import StepFailedError
from amp_ir.runtime import torn_state
from failing_steps import (
    Case,
    InjectedError,
    case_of,
    compiled,
    different,
    linear_step,
)


@pytest.fixture(params=[*WORKLOADS, "scaled"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    found = case_of(request.param)
    yield found
    found.train.program.executable.vm.set_instrument(None)


def fail_at(case: Case, position: int, error: BaseException) -> None:
    """Let the planned call at `position` raise before it begins."""
    symbols = [call.symbol for call in case.calls]
    wanted, seen = set(symbols), [0]

    def instrument(_function: Any, symbol: str, is_before: bool, *_: Any) -> None:
        if is_before and str(symbol) in wanted:
            assert str(symbol) == symbols[seen[0]]
            seen[0] += 1
            if seen[0] == position + 1:
                raise error

    case.train.program.executable.vm.set_instrument(instrument)


def without_instrument(case: Case) -> None:
    def nothing(*_: Any) -> None:
        pass

    case.train.program.executable.vm.set_instrument(nothing)


def test_a_failed_call_changes_nothing_or_is_said_to_have_torn_the_state(case: Case) -> None:
    before = case.bits()
    torch.manual_seed(1)
    case.train(*case.batch)
    after = case.bits()
    case.put_back(before)
    count = len(case.calls)
    torn = []
    for position in range(0, count, max(1, count // 60)):
        fail_at(case, position, InjectedError("no more"))
        with pytest.raises(StepFailedError) as caught:
            case.train(*case.batch)
        assert "failed: no more. " in str(caught.value)
        changed = different(before, case.bits())
        without_instrument(case)
        if not caught.value.is_torn:
            assert not changed, (position, changed)
            assert "Nothing has changed" in str(caught.value)
            continue
        torn.append(position)
        with pytest.raises(StepFailedError, match="a step failed earlier and left") as again:
            case.train(*case.batch)
        assert again.value.is_torn
        assert different(case.bits(), before) == changed
        case.put_back(before)
    # Where it says nothing of torn state, the step can be called again, and is the same step.
    case.train(*case.batch)
    assert not different(after, case.bits())
    # It is not said of every failure: none before the first write that cannot be undone, less the
    # kernels before it up to a library call, which are not told apart.
    assert all(position >= case.train.report.plan.writes.first_call - 16 for position in torn)
    case.put_back(before)


def test_little_state_that_is_written_early_is_kept_aside() -> None:
    for name in ("resnet50", "ssd", "scaled"):
        plan = case_of(name).train.report.plan
        names = [case_of(name).train.module.signature.inputs[k].name for k in plan.writes.kept]
        assert any("running" in one for one in names)
        # Statistics are written in the forward pass, weights in the second half of the step.
        assert plan.writes.first_call > len(plan.calls) // 3
        assert plan.writes.kept_nbytes <= 2**14 + 20000 + plan.state_bytes // 2


def test_the_library_call_that_failed_is_named(failing_matmul: dict[str, Any]) -> None:
    step, model, optimizer = linear_step()
    case = compiled(step, (torch.randn(4, 300),), model, optimizer)
    calls = [k for k, call in enumerate(case.calls) if call.name == "onednn.matmul"]
    before = case.bits()
    for count, position in enumerate(calls):
        failing_matmul["count"] = count
        with pytest.raises(StepFailedError) as caught:
            case.train(*case.batch)
        failing_matmul["count"] = -1
        failure, planned = caught.value, case.calls[position]
        assert failure.call == planned.name
        assert failure.location == planned.locations[0]
        assert failure.is_torn == (position >= case.train.report.plan.writes.first_call)
        if not failure.is_torn:
            assert not different(before, case.bits())
        case.put_back(before)


def test_messages(failing_matmul: dict[str, Any]) -> None:
    step, model, optimizer = linear_step()
    case = compiled(step, (torch.randn(4, 300),), model, optimizer)
    before = case.bits()
    failing_matmul["count"] = 0
    with pytest.raises(StepFailedError) as caught:
        case.train(*case.batch)
    failing_matmul["count"] = -1
    first = next(k for k, call in enumerate(case.calls) if call.name == "onednn.matmul")
    place = case.calls[first].locations[0]
    named = f"call {first + 1} of {len(case.calls)} of the step, onednn.matmul (matmul) in {place},"
    assert place.module == "0" and place.file.endswith("failing_steps.py")
    assert str(caught.value) == (
        f"{named} failed: could not execute a primitive. Nothing has changed: model, optimizer, "
        "scaler and random state are as before the step, which may be called again"
    )
    last = len(case.calls) - 1
    fail_at(case, last, InjectedError("no more"))
    with pytest.raises(StepFailedError) as caught:
        case.train(*case.batch)
    without_instrument(case)
    failed = str(caught.value).removesuffix(
        ". Some of the state has the values of after the step already, so it is "
        "torn, and steps on it are refused until it is loaded: load a saved state with "
        "load_checkpoint, or with load_state_dict of the model and of the optimizer"
    )
    count = len(case.calls)
    possible = r"kernel_\d+ \([a-z, ]+\) in step \((forward|optimizer)\), \S+:\d+"
    assert re.fullmatch(
        rf"one of the calls \d+ to {count} of {count} of the step \({possible}(; {possible})*\) "
        "failed: no more",
        failed,
    )
    with pytest.raises(StepFailedError) as caught:
        case.train(*case.batch)
    assert str(caught.value) == (
        "a step failed earlier and left 0.weight, 0.bias, 2.weight and 5 more torn, with values of "
        "before and after it; load a saved state with load_checkpoint, or with load_state_dict of "
        f"the model and of the optimizer. It had said: {failed}"
    )
    case.put_back(before)
    case.train(*case.batch)


def test_after_loading_a_checkpoint_training_goes_on_as_if_nothing_had_failed(tmp_path) -> None:
    x = torch.randn(4, 300)
    step, model, optimizer = linear_step()
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    train(x)
    amp_ir.save_checkpoint(tmp_path / "run.pt", model=model, optimizer=optimizer, train=train)
    train(x)
    expected = copy.deepcopy(model.state_dict())
    case = Case(train.compiled, (x,), model, optimizer)
    fail_at(case, len(case.calls) - 1, InjectedError("no more"))
    with pytest.raises(StepFailedError):
        train(x)
    without_instrument(case)
    # The model alone is not enough: the momentum is torn, too.
    model.load_state_dict(torch.load(tmp_path / "run.pt")["model"])
    with pytest.raises(StepFailedError, match="left optimizer0"):
        train(x)
    amp_ir.load_checkpoint(tmp_path / "run.pt", model=model, optimizer=optimizer, train=train)
    train(x)
    found = model.state_dict()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_another_step_on_the_same_model_is_refused_too() -> None:
    step, model, optimizer = linear_step()
    case = compiled(step, (torch.randn(4, 300),), model, optimizer)
    other = compiled(step, (torch.randn(2, 300),), model, optimizer)
    before = case.bits()
    fail_at(case, len(case.calls) - 1, InjectedError("no more"))
    with pytest.raises(StepFailedError):
        case.train(*case.batch)
    without_instrument(case)
    with pytest.raises(StepFailedError, match="a step failed earlier"):
        other.train(*other.batch)
    case.put_back(before)
    other.train(*other.batch)


def test_a_first_step_that_fails_installs_no_optimizer_state() -> None:
    step, model, optimizer = linear_step()
    batch = (torch.randn(4, 300),)
    mod, _ = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    case = Case(amp_ir.compile(mod), batch, model, optimizer)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    fail_at(case, 0, InjectedError("no more"))
    with pytest.raises(StepFailedError):
        case.train(*batch)
    without_instrument(case)
    assert not optimizer.state and not different(before, model.state_dict())
    case.train(*batch)
    assert len(optimizer.state) == 4


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_interruption_inside_of_a_step_is_passed_on(share: float) -> None:
    """As a callback in Python gets it; the rule is the same."""
    step, model, optimizer = linear_step()
    case = compiled(step, (torch.randn(4, 300),), model, optimizer)
    before = case.bits()
    fail_at(case, int(share * (len(case.calls) - 1)), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        case.train(*case.batch)
    without_instrument(case)
    if share == 0.0:
        assert not different(before, case.bits())
        case.train(*case.batch)
        return
    with pytest.raises(StepFailedError, match="a step failed earlier"):
        case.train(*case.batch)
    case.put_back(before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such timer")
def test_a_signal_at_any_time_leaves_the_step_done_or_not_begun() -> None:
    """Python looks at signals when native code has returned; until then the step goes on."""
    step, model, optimizer = linear_step()
    case = compiled(step, (torch.randn(4, 300),), model, optimizer)
    before = case.bits()
    case.train(*case.batch)
    after = case.bits()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        for microseconds in (20, 30, 50, 80, 100, 120, 150, 200, 300, 500, 800, 1200):
            case.put_back(before)
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, microseconds * 1e-6)
                case.train(*case.batch)
                time.sleep(1)
            found = case.bits()
            assert not different(before, found) or not different(after, found)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    case.train(*case.batch)


def test_an_interruption_behind_the_last_call_leaves_a_whole_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, model, optimizer = linear_step()
    case = compiled(step, (torch.randn(4, 300),), model, optimizer)
    before = case.bits()
    case.train(*case.batch)
    after = case.bits()
    case.put_back(before)
    hooks, times = case.train.module.hooks, []
    real = hooks.after_step

    def interrupted(gradients: Any) -> None:
        times.append(len(times))
        if len(times) == 1:
            raise KeyboardInterrupt
        real(gradients)

    object.__setattr__(hooks, "after_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        case.train(*case.batch)
    assert times == [0, 1] and not different(after, case.bits())
    case.train(*case.batch)


def test_the_log_of_a_loss_scale_knows_nothing_of_a_failed_step() -> None:
    case = case_of("scaled")
    before, last, steps = case.bits(), case.train.last, case.train.logs[0].steps
    for position in range(len(case.calls)):
        fail_at(case, position, InjectedError("no more"))
        with pytest.raises(StepFailedError):
            case.train(*case.batch)
        # Text, in which one NaN is as another.
        assert repr(case.train.last) == repr(last) and case.train.logs[0].steps == steps
        assert case.train.skipped == last.skipped
        assert case.scaler.get_scale() == float(before["scaler0.scale"])
        case.put_back(before)
    without_instrument(case)


def test_what_is_torn_is_forgotten_with_the_model() -> None:
    tensor = torch.zeros(3)
    torn_state.mark([tensor], "it failed")
    with pytest.raises(StepFailedError):
        torn_state.refuse_torn([("weight", tensor)])
    tensor.zero_()
    torn_state.refuse_torn([("weight", tensor)])
    torn_state.mark([tensor], "it failed")
    key = id(tensor)
    del tensor
    other = torch.zeros(3)
    torn_state._torn[id(other)] = torn_state._torn.pop(key)
    torn_state.refuse_torn([("weight", other)])
