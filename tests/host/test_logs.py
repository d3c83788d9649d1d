# SPDX-License-Identifier: Apache-2.0
"""AMP_IR_LOG: what is written to stderr, and names that there are not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import amp_ir
from amp_ir.errors import OptionError
from amp_ir.host.logs import TOPICS, logger_of, show_topics


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    before = {name: (logger_of(name).level, [*logger_of(name).handlers]) for name in TOPICS}
    yield
    for name, (level, handlers) in before.items():
        logger_of(name).setLevel(level)
        logger_of(name).handlers[:] = handlers


def train_twice() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @amp_ir.jit(model=model, optimizer=optimizer, amp_dtype="bfloat16")
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) + 2).lgamma().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(torch.ones(2, 4)), step(torch.ones(3, 4))


def test_each_topic_writes_its_lines_and_no_other(capsys: Any) -> None:
    show_topics("dispatch, memory")
    show_topics("memory")
    train_twice()
    lines = capsys.readouterr().err.splitlines()
    topics = {line.split("]")[0] for line in lines if line.startswith("[amp_ir.")}
    assert topics == {"[amp_ir.dispatch", "[amp_ir.memory"}
    external = "[amp_ir.dispatch] aten::lgamma: 1 call -> PyTorch (external call)"
    assert sum(line.startswith(external) for line in lines) == 2
    assert sum(line.startswith("[amp_ir.memory] peak ") for line in lines) == 2


def test_all_topics_say_why_and_how_a_step_was_compiled(capsys: Any) -> None:
    show_topics("all")
    train_twice()
    shown = capsys.readouterr().err
    assert "[amp_ir.plan] bfloat16, policy default, placement cut: " in shown
    assert "as program 1, unlike program 0: argument 0 was of shape (2, 4)" in shown
    assert max(map(len, shown.splitlines())) < 240


def test_nothing_is_written_by_default(capsys: Any) -> None:
    train_twice()
    assert "[amp_ir" not in capsys.readouterr().err


def test_records_are_those_of_pythons_loggers(caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="amp_ir")
    train_twice()
    # Those of many lines a compilation are silent until they are asked for.
    assert {one.name for one in caplog.records} == {"amp_ir.recompiles"}
    for name in TOPICS:
        caplog.set_level(logging.INFO, logger=f"amp_ir.{name}")
    train_twice()
    assert {one.name for one in caplog.records} >= {f"amp_ir.{name}" for name in TOPICS}


def test_an_unknown_topic_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(OptionError) as refused:
        show_topics("plan,recompile")
    assert str(refused.value) == (
        "AMP_IR_LOG='plan,recompile': there is no topic 'recompile' "
        '(did you mean "recompiles"?). '
        "Give some of recompiles, plan, dispatch, memory, all, with commas between them"
    )
    show_topics("plan,recompiles")
