# SPDX-License-Identifier: Apache-2.0
"""What people write in a step to see its loss is refused with their line; no number is made up."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tqdm
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError

log = logging.getLogger("a user's log")
log.propagate = False  # pytest's handlers make text too
log.setLevel(logging.INFO)
X = torch.linspace(-1, 1, 20).reshape(5, 4)
TEXT = "makes text of a tensor's value, as print, logging, progress bars and f-strings do"
ADVICE = (
    "Return it, and print or log it after the call, as float(train(x)); nothing of the step runs "
    "at each call but its tensors"
)
CLOCK = "time.time() reads the clock, which a compiled step would do only when it is captured"


class Sink:
    """A logger as those of experiment trackers, which makes text at once."""

    def log(self, values: dict[str, Any]) -> None:
        print({key: str(value) for key, value in values.items()})  # marked


def show_number(loss: torch.Tensor) -> None:
    print("loss", loss.item())


def show_text(loss: torch.Tensor) -> None:
    print(f"loss {loss.item():.3f}")


def show_tensor(loss: torch.Tensor) -> None:
    print(f"loss {loss:.3f}")


def show_mean(loss: torch.Tensor) -> None:
    print(f"{loss.item() / 3:.2f}")


def log_number(loss: torch.Tensor) -> None:
    log.info("loss %s", loss.item())


def log_text(loss: torch.Tensor) -> None:
    log.info(f"loss {loss.item():.3f}")


SHOWING = [show_number, show_text, show_tensor, show_mean, log_number, log_text]


def percent_of_number(loss: torch.Tensor) -> None:
    print("loss %.3f" % loss.item())  # noqa: UP031 - as many programs do


def percent_of_tensor(loss: torch.Tensor) -> None:
    print("loss %d, %.3f" % (3, loss))  # noqa: UP031


def percent_of_integer(loss: torch.Tensor) -> None:
    print("right: %d" % (loss > 0).sum().item())  # noqa: UP031


def percent_in_place(loss: torch.Tensor) -> None:
    text = "loss %.3f"
    text %= loss
    print(text)


def log_percent_of_number(loss: torch.Tensor) -> None:
    log.info("loss %f", loss.item())


def log_percent_of_tensor(loss: torch.Tensor) -> None:
    log.info("loss %.2f", loss)


WITH_PERCENT = [
    percent_of_number, percent_of_tensor, percent_of_integer, percent_in_place,
    log_percent_of_number, log_percent_of_tensor,
]  # fmt: skip


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def jitted(show: Callable[[torch.Tensor], None]) -> Any:
    model, optimizer = parts()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        show(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return amp_ir.jit(step, model=model, optimizer=optimizer)


def refusal_of(show: Callable[[torch.Tensor], None]) -> tuple[str, io.StringIO]:
    """What a step that shows its loss so is told, and what it logs, now and later."""
    logged = io.StringIO()
    log.handlers = [logging.StreamHandler(logged)]
    with pytest.raises(CaptureError) as refused:
        jitted(show)(X)
    return str(refused.value), logged


@pytest.mark.parametrize("show", SHOWING)
def test_text_of_a_number_is_refused_at_its_line(
    show: Callable[[torch.Tensor], None], capsys: Any
) -> None:
    refused, logged = refusal_of(show)
    line = show.__code__.co_firstlineno + 1
    assert refused == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward), {__file__}:{line}: {TEXT}. {ADVICE}"
    )
    written = capsys.readouterr().out + logged.getvalue()
    assert "1.0" not in written

    loss = jitted(lambda _: None)(X)  # the hint
    show(loss)
    shown = loss.item() / 3 if show is show_mean else loss.item()
    assert f"{shown:.2f}" in capsys.readouterr().out + logged.getvalue()


@pytest.mark.parametrize("show", WITH_PERCENT)
def test_the_percent_operator_makes_no_text_of_a_number(
    show: Callable[[torch.Tensor], None], capsys: Any
) -> None:
    """It wrote 1.000 before the refusal; and logging does not hide the end of the capture."""
    refused, logged = refusal_of(show)
    line = show.__code__.co_firstlineno + (2 if show is percent_in_place else 1)
    assert refused == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward), {__file__}:{line}: {TEXT}. {ADVICE}"
    )
    told = capsys.readouterr()
    assert told.out + logged.getvalue() == "" and "Logging error" not in told.err

    show(jitted(lambda _: None)(X))  # the hint
    assert capsys.readouterr().out + logged.getvalue()


def print_read(loss: torch.Tensor) -> None:
    print(float(loss))


def log_read(loss: torch.Tensor) -> None:
    log.info("loss %s", float(loss))


def print_branch(loss: torch.Tensor) -> None:
    print("good" if loss < 0.1 else "bad")


@pytest.mark.parametrize("show", [print_read, log_read, print_branch])
def test_what_follows_a_read_that_is_refused_is_not_shown(
    show: Callable[[torch.Tensor], None], capsys: Any
) -> None:
    """The capture goes on with 1, to find other places, and 1.0 was printed."""
    refused, logged = refusal_of(show)
    assert refused == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward), {__file__}:{show.__code__.co_firstlineno + 1}: a tensor's value is "
        "read in Python, by .item(), float(), int(), bool(), if or while. Keep it a tensor: return "
        "it and read it after the call, or choose with torch.where. A check of tensors that raises "
        "(if not torch.isfinite(loss): raise ...) stays; to skip a step whose gradients are not "
        "finite, use amp_ir.GradScaler"
    )
    assert capsys.readouterr().out + logged.getvalue() == ""
    show(jitted(lambda _: None)(X))  # the hint
    assert capsys.readouterr().out + logged.getvalue()


def test_what_a_step_prints_besides_is_printed_while_it_is_captured(capsys: Any) -> None:
    train = jitted(lambda _: print("captured"))
    train(X)
    train(X)
    assert capsys.readouterr().out == "captured\n" and train.recompiles == []


def test_text_that_a_users_class_makes_is_refused_there(capsys: Any) -> None:
    with pytest.raises(CaptureError) as refused:
        jitted(lambda loss: Sink().log({"loss": loss.item()}))(X)
    line = Sink.log.__code__.co_firstlineno + 1
    assert str(refused.value).endswith(f"{__file__}:{line}: {TEXT}. {ADVICE}")
    Sink().log({"loss": float(jitted(lambda _: None)(X))})
    assert "loss" in capsys.readouterr().out


def test_a_progress_bar_is_refused_with_the_line_that_calls_it() -> None:
    bar = tqdm.tqdm(total=3, file=io.StringIO())

    def show(loss: torch.Tensor) -> None:
        bar.set_postfix(loss=loss.item())

    with pytest.raises(CaptureError) as refused:
        jitted(show)(X)
    called = f" (called at {__file__}:{show.__code__.co_firstlineno + 1})"
    lines = str(refused.value).splitlines()[1:]
    assert [line.split(": ", 1)[1] for line in lines] == [
        f"{TEXT}{called}. {ADVICE}",
        f"{CLOCK}{called}. Read it outside of the step",
    ]
    bar.set_postfix(loss=float(jitted(lambda _: None)(X)))


def test_text_of_what_no_input_reaches_is_made(capsys: Any) -> None:
    jitted(lambda _: print(f"{torch.ones(3).sum():.1f} {torch.ones(2).sum().item()}"))(X)
    assert capsys.readouterr().out == "3.0 2.0\n"


def test_a_check_may_put_the_value_into_its_message() -> None:
    def show(loss: torch.Tensor) -> None:
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss {loss.item():.3f}")

    train = jitted(show)
    train(X)
    with pytest.raises(amp_ir.errors.CheckFailedError):
        train(X * float("inf"))
