# SPDX-License-Identifier: Apache-2.0
"""Programs of which a tool cannot say what it is asked: it answers truly, or says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.host.machine_model import Curve, MachineModel
from square_steps import square_step

RATES = {"float32": 100.0, "bfloat16": 800.0, "float16": 800.0}
MACHINE = MachineModel(
    "a test's", "cpu", {name: Curve(((1.0, rate),)) for name, rate in RATES.items()},
    Curve(((1.0, 50.0),)), call_microseconds=0.0, units=0, multiple=16, source="a test",
)  # fmt: skip
Step = Callable[..., Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(rows: int = 4) -> tuple[torch.Tensor]:
    return (torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)),)


def trained(model: nn.Module, factor: float = 1.0) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) * factor).square().sum()
        loss.backward()
        return loss.detach()

    return step


def searched(step: Step, model: nn.Module, given: tuple[Any, ...], **options: Any) -> Any:
    mod, args = amp_ir.trace_step(step, given, model=model)
    named = {"max_error": 1e-2, "machine": MACHINE, "measure": False, "progress": False}
    return amp_ir.search_precision(mod, args, **{**named, **options})


def test_the_error_of_a_step_without_gradients_is_that_of_its_results():
    model = network().requires_grad_(False)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    found = amp_ir.error_report(step, batch(), model=model)
    assert found.measure == "result"
    assert found.error > 0.0
    assert "relative result error" in str(found) and "result error" in found.to_html()
    assert max(one.error for one in found.contributions) > 0.0
    assert searched(step, model, batch(), max_error=0.5).default.error == pytest.approx(
        found.error, rel=1e-3
    )


def test_where_only_integers_come_out_there_is_no_error_to_measure():
    model = network()

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).argmax(1)

    message = (
        "the step has no gradient, and none of its results is a floating-point tensor: there is no "
        "error to measure; give {} a step that calls backward() or returns one"
    )
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        amp_ir.error_report(step, batch(), model=model)
    assert str(caught.value) == message.format("error_report")
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        searched(step, model, batch())
    assert str(caught.value) == message.format("search_precision")
    found = amp_ir.verify(step, batch(), model=model)
    assert found.is_good
    assert "no error could be measured there, and the plan check is all" in str(found)
    assert str(found).endswith("There were no numbers to check.") and not found.ratios


@pytest.mark.parametrize("where", ["weight", "batch"])
def test_where_float64_is_not_finite_the_tools_say_so_and_who_knows_more(where):
    model, given = network(), batch()
    with torch.no_grad():
        (model[0].weight if where == "weight" else given[0])[0, 0] = float("nan")
    step = trained(model)
    for tool in (
        lambda: amp_ir.error_report(step, given, model=model),
        lambda: searched(step, model, given),
    ):
        with pytest.raises(amp_ir.errors.ArgumentError) as caught:
            tool()
        assert str(caught.value).startswith("in float64 4 of the 4 gradients or results of the ")
        assert str(caught.value).endswith(
            "train.find_overflow(*batch) says which, after train(*batch)"
        )
    # What the message sends to.
    train = amp_ir.jit(step, model=model, amp_dtype="bfloat16")
    train(*given)
    assert "nan" in str(train.find_overflow(*given)).lower()


@pytest.mark.parametrize(("rows", "factor"), [(0, 1.0), (4, 0.0)])
def test_gradients_that_are_all_0_are_no_measure(rows, factor):
    model = network()
    step = trained(model, factor)
    with pytest.raises(amp_ir.errors.ArgumentError, match="are 0 on this batch, so that no error"):
        searched(step, model, batch(rows))
    if rows:
        with pytest.raises(amp_ir.errors.ArgumentError, match="give error_report a batch that tr"):
            amp_ir.error_report(step, batch(rows), model=model)
    found = amp_ir.verify(step, batch(rows), model=model)
    assert "no error could be measured" in str(found)


@pytest.mark.parametrize("learning_rate", [0.0, 0.1])
def test_verify_says_that_a_learning_rate_of_0_hides_the_updates(learning_rate):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)

    step = square_step(model, optimizer)

    found = amp_ir.verify(step, batch(), model=model, optimizer=optimizer)
    note = (
        "in float64 the optimizer changes no parameter on a batch, as at a learning rate of 0 in a "
        "warm-up: an update error of 0 says nothing about it"
    )
    assert (note in found.notes) == (learning_rate == 0.0)


def test_where_nothing_becomes_low_no_time_changes():
    model = nn.LayerNorm(8)
    mod, args = amp_ir.trace_step(trained(model), batch(), model=model)
    found = amp_ir.advise(mod, args, gpu="L4")
    assert found.gain == 1.0
    assert "Mixed precision changes no time here: 1.00 times as fast." in str(found)
    # An equal plan is no reason to round.
    assert searched(trained(model), model, batch()).returned == "float32"


def test_reports_of_infinite_errors_are_json():
    def refused(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    model = network()
    found = amp_ir.error_report(trained(model, 1e6), batch(), model=model, amp_dtype="float16")
    assert found.error == float("inf")
    assert json.loads(found.to_json(), parse_constant=refused)["error"] == "Infinity"
    verified = amp_ir.verify(
        trained(model, 1e6), batch(), model=model, amp_dtype="float16", check=False
    )
    assert not verified.is_good
    data = json.loads(verified.to_json(), parse_constant=refused)
    assert data["draws"][0]["amp_ir low"]["gradient"] == "Infinity"


def test_a_step_that_computes_nothing_has_no_time_to_gain():
    model = network()
    mod, args = amp_ir.trace_step(lambda x: None, batch(), model=model)
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        amp_ir.advise(mod, args, gpu="L4")
    assert str(caught.value) == (
        "the step computes nothing, so that there is no time to gain; give advise a step that "
        "trains, or returns what a model makes of the batch"
    )


@pytest.mark.parametrize("seconds", ["60", None, -1, float("nan"), True])
def test_times_that_are_none_are_refused(seconds):
    model = network()
    message = f"seconds={seconds!r}; expected a number of seconds, 0 or more"
    for tool in (
        lambda: amp_ir.error_report(trained(model), batch(), model=model, seconds=seconds),
        lambda: searched(trained(model), model, batch(), seconds=seconds),
    ):
        with pytest.raises(amp_ir.errors.OptionError) as caught:
            tool()
        assert str(caught.value) == message


def test_a_budget_that_is_no_number_is_refused():
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        model = network()
        searched(trained(model), model, batch(), max_error="1e-3")
    assert str(caught.value) == (
        "max_error='1e-3'; expected a relative error between 0 and 1, such as 5e-3"
    )


@pytest.mark.parametrize("tool", [amp_ir.verify, amp_ir.error_report])
def test_what_is_no_model_is_refused_as_a_capture_refuses_it(tool):
    for model, name in ((1, "int"), (None, "NoneType")):
        with pytest.raises(amp_ir.errors.ArgumentError) as caught:
            tool(lambda x: x, batch(), model=model)
        assert str(caught.value) == f"model= has a {name}, expected torch.nn.Module"
