# SPDX-License-Identifier: Apache-2.0
"""What amp_ir has no kernel of is PyTorch's own op in the step: forward, backward, any dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import BuildError, CaptureError, StepFailedError, UnsupportedOpError
from amp_ir.ir.dispatch_log import EXTERNAL_CALL
from amp_ir.ir.target import cpu
from amp_ir.pipeline import lower
from amp_ir.vm.build import compile_executable
from amp_ir.vm.export import export_step
from external_ops import COMPLEX, LAYERS, LINALG, SPECIAL, Around, Function, training

FAMILIES = {"linalg": LINALG, "complex": COMPLEX, "special": SPECIAL, "layers": LAYERS}


def trained(functions: dict[str, Function], **options: object) -> tuple[Around, Around, list, list]:
    """Three steps in PyTorch and compiled: the two models, and the losses of the last steps."""
    ours = Around(functions)
    theirs = copy.deepcopy(ours)
    torch.manual_seed(1)
    x = torch.randn(16, 8)
    optimizer, step = training(ours)
    compiled = amp_ir.jit(step, model=ours, optimizer=optimizer, **options)
    _, eager = training(theirs)
    for _ in range(3):
        got, expected = compiled(x), eager(x)
    return ours, theirs, got, expected


def named(name: str) -> Callable[[str], str]:
    """What a comparison's message begins with."""
    return lambda message: f"{name}: {message}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_with_ops_of_pytorch_trains_as_in_eager(family: str):
    ours, theirs, got, expected = trained(FAMILIES[family], amp_dtype="float32")
    for name, one, other in zip(FAMILIES[family], got, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=2e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            one, other, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_integers_of_an_op_lie_where_a_result_is_written_over_them():
    model = nn.Linear(4, 1, bias=False)
    compiled = amp_ir.jit(lambda x: torch.frexp(x * model.weight).exponent * 0.5, model=model)
    x = torch.tensor([[3.0, -0.2, 9.0, 1000.0]]) / model.weight.detach()
    assert torch.equal(compiled(x), torch.tensor([[1.0, -1.0, 2.0, 5.0]]))
    memory = compiled.ir("memory")
    assert " result.result0          " in memory.split("aten::frexp.Tensor", 1)[1], memory


# The most frequent value, and a count of equal ones, jump where an argument is rounded.
JUMPING = ("mode", "histc", "matrix_rank", "nextafter")


@pytest.mark.parametrize("amp_dtype", ["bfloat16", "float16"])
def test_they_run_in_their_captured_dtypes_beside_low_precision(amp_dtype: str):
    chosen = {**LINALG, **COMPLEX} if amp_dtype == "bfloat16" else {**SPECIAL, **LAYERS}
    functions = {name: one for name, one in chosen.items() if name not in JUMPING}
    _, _, got, expected = trained(functions, amp_dtype=amp_dtype)
    # The linear layers round, by 2^-8 or 2^-11; what follows amplifies that by its condition.
    for name, one, other in zip(functions, got, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0.05, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


class _Singular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x @ self.weight).sum()  # marked: inv


def test_an_op_that_fails_names_itself_and_changes_nothing():
    model = _Singular()
    optimizer, step = training(model)
    compiled = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype="float32")
    with pytest.raises(StepFailedError, match=r"aten::linalg_inv_ex .*is singular") as caught:
        compiled(torch.eye(2))
    assert not caught.value.is_torn and caught.value.location.file == __file__
    assert caught.value.call == "aten::linalg_inv_ex"
    assert type(caught.value.__cause__) is torch.linalg.LinAlgError
    assert torch.equal(model.weight, torch.zeros(2, 2))
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    compiled(torch.eye(2))
    assert not torch.equal(model.weight, torch.eye(2))


@pytest.mark.parametrize("form", ["padded", "one after the other"])
@pytest.mark.parametrize("label", [6, -1, 10**9])
def test_a_label_of_ctc_that_is_no_class_changes_nothing(form: str, label: int):
    """PyTorch's op writes to memory that is not there: the process ends, then or later."""
    model = nn.Linear(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths = torch.tensor([8, 8]), torch.tensor([2, 3])
    # What is beyond a target's length is no label.
    right = torch.tensor([[1, 5, -100], [2, 3, 2]])
    wrong = torch.tensor([[1, 5, -100], [2, 3, label]])
    if form == "one after the other":
        right, wrong = right.flatten()[[0, 1, 3, 4, 5]], wrong.flatten()[[0, 1, 3, 4, 5]]

    def step(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = model(x).log_softmax(-1)
        loss = nn.functional.ctc_loss(scores, targets, *lengths)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0))
    expected = nn.functional.ctc_loss(model(x).log_softmax(-1), right, *lengths)
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    torch.testing.assert_close(train(x, right), expected.detach())
    before = model.weight.detach().clone()
    with pytest.raises(StepFailedError, match=f"a label of ctc_loss is {label}, expected 0 to 5"):
        train(x, wrong)
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)
    assert train(x, right) < expected


def test_they_are_in_the_plan_the_memory_and_the_dispatch_log():
    model = Around({"lgamma": SPECIAL["lgamma"]})
    optimizer, step = training(model)
    mod, _ = amp_ir.trace_step(step, (torch.randn(16, 8),), model=model, optimizer=optimizer)
    amp_mod = amp_ir.autocast(mod, amp_dtype="bfloat16")
    ops = [one for one in amp_mod.plan.ops if one.name.startswith("aten::")]
    assert [one.name for one in ops] == ["aten::lgamma", "aten::digamma"]
    assert {dtype for one in ops for dtype in one.reads} == {"float32"}
    planned = lower(amp_mod)
    (call,) = [one for one in planned.plan.calls if one.name == "aten::lgamma"]
    assert (call.read_nbytes, call.written_nbytes) == (16 * 16 * 4, 16 * 16 * 4)
    assert any(value.op == "aten::lgamma" for value in planned.plan.values)
    said = [note for note in planned.dispatched if note.op == "aten::lgamma"]
    assert [(note.library, note.calls) for note in said] == [(EXTERNAL_CALL, 1)]
    assert said[0].reason.startswith("amp_ir has no kernel of it (first in step (forward), ")


def test_such_a_step_is_not_exported(tmp_path):
    model = Around({"lgamma": SPECIAL["lgamma"]})
    optimizer, step = training(model)
    mod, _ = amp_ir.trace_step(step, (torch.randn(16, 8),), model=model, optimizer=optimizer)
    planned = lower(mod, host_checks="batch")
    executable = compile_executable(planned, cpu())
    with pytest.raises(BuildError) as refused:
        export_step(executable, planned, mod, cpu(), tmp_path / "step.so")
    at = {call.name: call.locations[0] for call in planned.plan.calls if call.locations}
    assert str(refused.value) == (
        f"the step cannot be written to a file: aten::digamma ({at['aten::digamma']}); "
        f"aten::lgamma ({at['aten::lgamma']}) would be called in PyTorch, which what runs the file "
        "does not have. Write that part of the step with other ops, or run the step in this "
        "process with amp_ir.compile"
    )


def test_complex_numbers_do_not_leave_a_step():
    model = nn.Linear(8, 8)
    with pytest.raises(
        UnsupportedOpError,
        match=r"aten\._fft_r2c\.default: leaves the step with dtype torch\.complex64; return "
        r"torch\.view_as_real of it",
    ):
        amp_ir.trace_model(nn.Sequential(model, Fourier()), (torch.randn(2, 8),))


class Fourier(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x)


def test_least_squares_say_what_to_use():
    model = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lstsq(model(x), x).solution

    with pytest.raises(
        CaptureError, match=r"residuals whose shape depends on the data\. Use torch\.linalg\.pinv"
    ):
        amp_ir.trace_step(step, (torch.randn(8, 8),), model=model)
