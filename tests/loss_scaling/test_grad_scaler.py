# SPDX-License-Identifier: Apache-2.0
"""GradScaler in plain PyTorch: torch.amp.GradScaler's state machine, and the limits it lacks."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import amp_ir
from amp_ir.errors import OptionError, SkippedTooOftenError


class Loop:
    """A scalar parameter trained with a scaler; each step's gradient is chosen."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self.parameter = torch.nn.Parameter(torch.tensor(1.0))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.5)

    def step(self, gradient: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.parameter * gradient).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def scaler_of(**options: Any) -> amp_ir.GradScaler:
    return amp_ir.GradScaler("cpu", **{"init_scale": 64.0, "growth_interval": 3, **options})


OVERFLOW = st.sampled_from([1.0, 1.0, 1.0, float("inf"), float("-inf"), float("nan")])


@given(st.lists(OVERFLOW, max_size=40), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_sequence_of_scales_is_that_of_pytorch(gradients: list[float], interval: int):
    options = {"init_scale": 64.0, "growth_interval": interval}
    ours = Loop(amp_ir.GradScaler("cpu", **options, min_scale=None, max_scale=None))
    theirs = Loop(torch.amp.GradScaler("cpu", **options))
    for gradient in gradients:
        ours.step(gradient)
        theirs.step(gradient)
        assert ours.scaler.get_scale() == theirs.scaler.get_scale()
        assert ours.scaler._get_growth_tracker() == theirs.scaler._get_growth_tracker()
        assert torch.equal(ours.parameter, theirs.parameter)


def test_defaults_are_those_of_pytorch():
    ours, theirs = amp_ir.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    state = ours.state_dict()
    assert {key: state[key] for key in theirs.state_dict()} == theirs.state_dict()
    assert theirs.state_dict()["scale"] == 65536.0
    assert ours.is_enabled()
    assert (ours.min_scale, ours.max_scale, ours.hysteresis) == (1.0, 2.0**24, 1)


def test_a_disabled_scaler_does_nothing():
    loop = Loop(scaler_of(enabled=False))
    loop.step()
    assert loop.parameter.item() == 0.5
    assert loop.scaler.state_dict() == {}
    assert loop.scaler.get_scale() == 1.0
    assert loop.scaler.log is None


def test_states_load_into_each_other():
    ours = Loop(scaler_of(hysteresis=2))
    for gradient in (1.0, float("inf"), 1.0, 1.0):
        ours.step(gradient)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.scaler.state_dict())
    assert theirs.get_scale() == ours.scaler.get_scale()
    back = scaler_of()
    back.load_state_dict(theirs.state_dict())
    assert back.state_dict()["_growth_tracker"] == ours.scaler._get_growth_tracker() == 2
    again = pickle.loads(pickle.dumps(ours.scaler))
    assert again.state_dict() == ours.scaler.state_dict()


@pytest.mark.filterwarnings("ignore:the loss scale has come down")
def test_the_scale_stays_within_its_limits():
    loop = Loop(scaler_of(init_scale=8.0, min_scale=4.0, max_scale=16.0, growth_interval=1))
    scales = []
    for gradient in (1.0, 1.0, float("inf"), float("inf"), 1.0):
        loop.step(gradient)
        scales.append(loop.scaler.get_scale())
    assert scales == [16.0, 16.0, 8.0, 4.0, 8.0]


@pytest.mark.filterwarnings("ignore:the loss scale has come down")
def test_a_limit_does_not_move_a_scale_beyond_it():
    loop = Loop(scaler_of(max_scale=16.0, growth_interval=1))
    loop.step()
    assert loop.scaler.get_scale() == 64.0
    low = Loop(scaler_of(init_scale=0.5))
    low.step(float("inf"))
    assert low.scaler.get_scale() == 0.5


def test_hysteresis_tolerates_overflows_in_a_row():
    loop = Loop(scaler_of(hysteresis=2, growth_interval=100))
    scales = []
    for gradient in (float("inf"), 1.0, float("inf"), float("inf"), float("inf"), 1.0):
        loop.step(gradient)
        scales.append(loop.scaler.get_scale())
    assert scales == [64.0, 64.0, 64.0, 32.0, 16.0, 16.0]


def test_reaching_the_minimum_warns_once():
    loop = Loop(scaler_of(init_scale=2.0))
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(3):
            loop.step(float("inf"))
    assert [str(one.message) for one in caught] == [
        "the loss scale has come down to min_scale=1 after 1 skipped steps in a row: gradients "
        "overflow for another reason than the scale. Look for an infinity or a NaN in the batch "
        "and the loss"
    ]


def test_too_many_skips_in_a_row_are_an_error():
    loop = Loop(scaler_of(max_consecutive_skips=2))
    loop.step(float("nan"))
    loop.step(float("nan"))
    with pytest.raises(SkippedTooOftenError) as caught:
        loop.step(float("nan"))
    assert str(caught.value) == (
        "3 steps in a row were skipped, since a gradient was not finite in each, and "
        "max_consecutive_skips=2; the loss scale is 8. Parameters and optimizer state are as "
        "before these steps. Look for an infinity or a NaN in the batch and the loss, or lower "
        "the learning rate"
    )
    assert isinstance(caught.value, FloatingPointError)
    loop.scaler.load_state_dict(scaler_of().state_dict())
    loop.step()
    assert loop.parameter.item() == 0.5


def test_a_static_scale_skips_and_stays():
    loop = Loop(scaler_of(dynamic=False, growth_interval=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gradient in (1.0, float("inf"), 1.0):
            loop.step(gradient)
    assert loop.scaler.get_scale() == 64.0
    assert loop.parameter.item() == 0.0
    assert [record.skipped for record in loop.scaler.log.history()] == [False, True, False]


WRONG = [
    (
        lambda: scaler_of(init_scale=1000.0, hysteresis=0),
        "init_scale=1000.0 is not a power of two, so scaling by it would round every gradient; "
        "the nearest is 1024; hysteresis=0, expected an integer of at least 1",
    ),
    (
        lambda: scaler_of(growth_factor=1.5),
        "growth_factor=1.5 is not a power of two, so scaling by it would round every gradient; "
        "the nearest is 2",
    ),
    (lambda: scaler_of(min_scale=-1.0), "min_scale=-1.0, expected a power of two"),
    (
        lambda: scaler_of(max_consecutive_skips=1.5),
        "max_consecutive_skips=1.5, expected an integer of at least 0",
    ),
    (
        lambda: scaler_of().set_backoff_factor(0.3),
        "new_factor=0.3 is not a power of two, so scaling by it would round every gradient; the "
        "nearest is 0.25",
    ),
    (
        lambda: scaler_of().load_state_dict({"scale": 3.0, "growth_factor": 2.0}),
        "state_dict['scale']=3.0 is not a power of two, so scaling by it would round every "
        "gradient; the nearest is 4",
    ),
]


@pytest.mark.parametrize(("use", "message"), WRONG)
def test_wrong_numbers(use: Any, message: str):
    with pytest.raises(OptionError) as caught:
        use()
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


def test_pytorchs_own_errors():
    with pytest.raises(AssertionError, match="The growth factor must be > 1.0."):
        scaler_of(growth_factor=1.0)
    loop = Loop(scaler_of())
    loop.scaler.scale(loop.parameter * 2).backward()
    loop.scaler.unscale_(loop.optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        loop.scaler.unscale_(loop.optimizer)
    loop.scaler.step(loop.optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since"):
        loop.scaler.step(loop.optimizer)
