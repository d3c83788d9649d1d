# SPDX-License-Identifier: Apache-2.0
"""What cannot be captured is refused with the op, the module, the user's line and a way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from amp_ir import errors
from amp_ir.capture.trace import capture_model, capture_step
from amp_ir.errors import ArgumentError, CaptureError, ShapeMismatchError, StateError
from scaled_training import line_of
from step_comparison import integers, normal

READS = "a tensor's value is read in Python, by .item(), float(), int(), bool(), if or while"
KEEP = (
    "Keep it a tensor: return it and read it after the call, or choose with torch.where. A check "
    "of tensors that raises (if not torch.isfinite(loss): raise ...) stays; to skip a step whose "
    "gradients are not finite, use amp_ir.GradScaler"
)
PLACE = (
    "A place may stay a tensor: x[k] for x[int(k)], and x[(k + torch.arange(n)) % len(x)] for n "
    "places from k on"
)
FIXED = (
    "A compiled step has fixed shapes: multiply by the mask or use torch.where instead of "
    "selecting. A mask that the step makes of constants (torch.eye, torch.arange) may select"
)
outside = torch.zeros(3, 2)[:, 0]
foreign = nn.Parameter(torch.ones(3))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # marked: branch
            y = y * 2
        return y[: int(y.argmax())]  # marked: index


def line(of: object, mark: str) -> int:
    """The line of a source that ends in `# marked: mark`."""
    lines, first = inspect.getsourcelines(of)  # type: ignore[arg-type]
    return first + next(i for i, text in enumerate(lines) if text.endswith(f"# marked: {mark}\n"))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return normal(0, 4, 6), integers(0, 3, 4)


def error_text(step: Callable[..., Any], model: nn.Module, optimizer: Any = None) -> str:
    with pytest.raises(CaptureError) as caught:
        capture_step(step, batch(), model=model, optimizer=optimizer)
    return str(caught.value)


def test_every_read_of_a_value_is_listed_at_once() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Branching())

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = model(x).sum()
        return float(loss)  # marked: result

    assert error_text(step, model) == "\n".join([
        "this step cannot be captured, 3 places:",
        f"  1. 1 (forward), {__file__}:{line(Branching, 'branch')}; "
        f"step (forward), {__file__}:{line(step, 'result')}: {READS}. {KEEP}",
        f"  2. 1 (forward), {__file__}:{line(Branching, 'index')}: {READS}. {PLACE}. {KEEP}",
    ])  # fmt: skip


def select(model: Any, _optimizer: Any, x: Any, _y: Any) -> Any:
    logits = model(x)
    return logits[logits > 0].median()  # marked: here


def compare(model: Any, _optimizer: Any, x: Any, _y: Any) -> Any:
    return model(x) if torch.equal(x, x) else x  # marked: here


def loop(model: Any, _optimizer: Any, x: Any, _y: Any) -> Any:
    while (x.sum() < 9).item():  # marked: here
        x = model(x)
    return x


def write_outside(model: Any, _optimizer: Any, x: Any, _y: Any) -> Any:
    outside.add_(model(x).detach().mean(0))  # marked: here


def write_batch(model: Any, _optimizer: Any, x: Any, _y: Any) -> Any:
    x[0].mul_(2)  # marked: here


def draw(model: Any, _optimizer: Any, x: Any, _y: Any) -> Any:
    return model(x) + torch.randn(4, 3, generator=torch.Generator())  # marked: here


def use_foreign(model: Any, _optimizer: Any, x: Any, _y: Any) -> Any:
    return model(x) * foreign  # marked: here


def schedule(_model: Any, optimizer: Any, _x: Any, _y: Any) -> Any:
    optimizer.scheduler.step()  # marked: here


def convert(model: Any, optimizer: Any, x: Any, _y: Any) -> Any:
    return model(x) * float(optimizer.param_groups[0]["lr"])  # marked: here


def counts(model: Any, _optimizer: Any, x: Any, _y: Any) -> Any:
    return torch.bincount(model(x).argmax(-1), minlength=3)  # marked: here


IN_A_LINE = [
    (
        counts,
        "aten.bincount.default makes a shape or a branch depend on the data. Count into a tensor "
        "of fixed size: torch.zeros(n).index_add(0, ids, torch.ones(len(ids)))",
    ),
    (
        select,
        "calls median on what a mask selects, x[mask], whose number of rows the data decide. A "
        "compiled step has fixed shapes. What computes each row, or element, by itself works: "
        "arithmetic, activations, Linear, LayerNorm, dropout, softmax along a row; so do assigning "
        "by the same mask, sums, means and losses. For all else compute on all rows, and choose by "
        "torch.where(mask, a, b)",
    ),
    (compare, f"aten.equal.default makes a shape or a branch depend on the data. {FIXED}"),
    (loop, f"{READS}. {KEEP}"),
    (
        write_outside,
        "aten.add_.Tensor writes to a tensor outside of the model and the optimizer. Pass its "
        "module in model=[...], register it as a buffer of the model, pass its optimizer in "
        "optimizer=, or update it after the step. A tensor of a dict, a list or a closure is "
        "followed where it needs no gradient, is contiguous and no part of another one",
    ),
    (
        write_batch,
        "aten.mul_.Tensor writes to a tensor of the batch. Write to a copy: call .clone() first",
    ),
    (
        draw,
        "aten.randn.generator draws from a torch.Generator. Leave generator= out: a compiled step "
        "draws numbers of its own, other ones at each call, from the seed of torch.manual_seed "
        "before it is compiled. Or draw before the step, and pass the tensor in the batch",
    ),
    (
        use_foreign,
        "uses what requires a gradient and is in none of the models: a tensor of shape (3,). Pass "
        "its module in model=[...], or detach() the tensor",
    ),
    (
        schedule,
        "ExponentialLR.step is called inside the step. Call it after the compiled step: the new "
        "learning rate is read at the next call",
    ),
    (
        convert,
        "converts a hyper-parameter with float() or int(). Compute with the value as it is, or "
        "with tensors",
    ),
]


@pytest.mark.parametrize(("body", "message"), IN_A_LINE, ids=[b.__name__ for b, _ in IN_A_LINE])
def test_refusals_name_the_users_line(body: Callable[..., Any], message: str) -> None:
    model = nn.Linear(6, 6) if body is loop else nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    text = error_text(lambda x, y: body(model, optimizer, x, y), model, optimizer)
    place = f"{__file__}:{line(body, 'here')}"
    first, second, *rest = text.splitlines()
    assert first == "this step cannot be captured, 1 place:" and not rest
    assert second.split(", ", 1)[1].startswith(place)
    assert second.split(f"{place}: ")[1] == message


def test_an_error_of_the_step_itself_is_told_with_its_place() -> None:
    model = nn.Linear(6, 3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x.T)  # marked: here

    assert error_text(step, model) == (
        f"the step failed while it was traced, at step (forward), {__file__}:{line(step, 'here')}: "
        "RuntimeError: a and b must have same reduction dim, but got [6, 4] X [6, 3]. Shapes "
        "are known while a step is captured: print(x.shape) before this line shows them. They have "
        "to be what PyTorch takes"
    )


class CountsInPython(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1


def test_what_a_step_leaves_behind_is_checked() -> None:
    model = nn.Linear(6, 3)
    counting = CountsInPython(model.parameters())

    def replace(x: torch.Tensor, y: torch.Tensor) -> object:
        model.weight = nn.Parameter(torch.zeros(3, 6))
        counting.param_groups[0]["lr"] = 0.5  # here
        counting.step()
        return object()

    assert error_text(replace, model, counting) == "\n".join([
        "this step cannot be captured, 4 places:",
        f"  1. step (forward), {line_of(replace, 'here')}: the step sets param_groups[...]['lr']. "
        "Set it between two steps: it is read at each call, and nothing is compiled again",
        "  2. step (forward): the step returns an object of type object. Return tensors and plain "
        "values in tuples, lists, dicts or dataclasses",
        "  3. step (forward): the step replaces weight by something of another kind. Write to it "
        "in place (copy_) and keep its shape and dtype",
        "  4. step (forward): CountsInPython keeps 'count' as a Python value and changes it. Let "
        "the optimizer keep it as a tensor and update it in place: state['count'] = "
        "torch.zeros(()), then state['count'] += 1",
    ])  # fmt: skip


def captured_pair() -> Any:
    model = nn.Linear(6, 3)
    example = ({"x": normal(0, 4, 6), "scale": 2.0}, [True, None])
    return capture_step(lambda b, flags: model(b["x"]) * b["scale"], example, model=model)


WRONG_CALLS = [
    (
        (({"x": normal(0, 4, 6)}, [True, None]),),
        "the step was called with the structure ({'x': Tensor}, [bool, NoneType]), but was "
        "captured with ({'x': Tensor, 'scale': float}, [bool, NoneType])",
    ),
    (
        (({"x": normal(0, 4, 6).double(), "scale": 2.0}, [True, None]),),
        "argument 0['x'] has dtype torch.float64, captured with torch.float32",
    ),
    (
        (({"x": normal(0, 4, 6), "scale": 3.0}, [1, None]),),
        "argument 0['scale'] is 3.0, captured as the fixed value 2.0; argument 1[0] is 1, captured "
        "as the fixed value True",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_CALLS)
def test_wrong_calls_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        captured_pair().flatten_batch(*arguments)
    assert not isinstance(caught.value, ShapeMismatchError)
    advice = "Call it as it was captured, or capture (jit) the step again"
    assert str(caught.value) == f"{message}. {advice}"


def test_an_array_is_refused() -> None:
    with pytest.raises(ArgumentError) as caught:
        captured_pair().flatten_batch(({"x": numpy.zeros((4, 6)), "scale": 2.0}, [True, None]))
    assert str(caught.value) == (
        "argument 0['x'] is a numpy.ndarray, expected a tensor; torch.from_numpy makes a tensor of "
        "an array"
    )


def test_another_shape_is_an_error_of_its_own() -> None:
    with pytest.raises(ShapeMismatchError) as caught:
        captured_pair().flatten_batch(({"x": normal(0, 5, 6), "scale": 2.0}, [True, None]))
    assert str(caught.value) == (
        "argument 0['x'] has shape (5, 6), captured with (4, 6). Call it as it was captured, or "
        "capture (jit) the step again"
    )


def test_a_hyper_parameter_that_is_gone_is_told() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    captured = capture_step(step, batch(), model=model, optimizer=optimizer)
    (reader,) = [x.tensor_or_reader for x in captured.inputs if x.name == "optimizer0.group0.lr"]
    optimizer.param_groups[0]["lr"] = "large"
    with pytest.raises(StateError) as caught:
        reader()
    assert str(caught.value) == (
        "optimizer0.group0.lr is an input of the compiled step, but param_groups[0]['lr'] is now "
        "'large'; expected a number. Restore it, or capture the step again"
    )


def test_a_capture_inside_of_a_capture_is_refused() -> None:
    model = nn.Linear(6, 3)
    with pytest.raises(ArgumentError) as caught:
        capture_step(lambda x, y: capture_model(model, (x,)), batch(), model=model)
    assert str(caught.value) == (
        "this is already inside of a capture; capture the outermost step only"
    )


def test_the_old_name_of_a_shape_mismatch_is_a_deprecated_alias() -> None:
    with pytest.warns(DeprecationWarning) as caught:
        old = errors.ShapeChanged
    assert old is ShapeMismatchError
    assert str(caught[0].message) == (
        "amp_ir.errors.ShapeChanged is called amp_ir.errors.ShapeMismatchError now; the old name "
        "goes in the next minor version"
    )
