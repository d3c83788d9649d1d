# SPDX-License-Identifier: Apache-2.0
"""Where memory ends: an error that says how much was asked for and what to do, and whole state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import amp_ir
from amp_ir.errors import AmpIrError, OutOfMemoryError, StepFailedError
from amp_ir.host.memory_limit import ADVICE, asked_nbytes, is_out_of_memory
from failing_steps import compiled, different, linear_step

# The address space is limited to 1000 MiB more than the process has: what it needs, one tensor of
# 40000 x 4096 float32, but not two.
_PROGRAM = """
import json, resource, sys
import torch, amp_ir
from torch import nn
from amp_ir.host import native

torch.manual_seed(0)
model = nn.Linear(4096, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def step(x):
    loss = (model(torch.tanh(x)) + model(torch.sin(x))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

def bits():
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [t.clone() for t in (*model.state_dict().values(), *momenta)]

def caught(call):
    before = bits()
    try:
        call()
    except Exception as error:
        names = [cls.__name__ for cls in type(error).__mro__]
        same = all(torch.equal(a, b) for a, b in zip(before, bits(), strict=True))
        return [names, str(error), getattr(error, "nbytes", None), same]
    return [[], "nothing was raised", None, False]

rows = 40000
large = torch.zeros(1, 1).expand(rows, 4096)
huge = torch.zeros(1, 1).expand(5 * rows, 4096)
small = torch.randn(4, 4096)
train = amp_ir.jit(step, model=model, optimizer=optimizer)
train(small)
double, _ = amp_ir.trace_model(nn.Hardtanh(-3.0, 3.0), (large,))
double = amp_ir.compile(double)
sizes = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
limit = int(sizes["VmSize"].split()[0]) * 1024 + 1000 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

matmul = native.function("amp_ir.onednn.matmul") if native.has("amp_ir.onednn.matmul") else None

def product():
    one, shape = torch.zeros(1), lambda *n: __import__("tvm_ffi").Shape(n)
    out = torch.zeros(200000 * 8)
    matmul(one, torch.zeros(4096 * 8), None, shape(200000, 4096), shape(0, 0), shape(4096, 8),
           shape(8, 1), shape(200000, 8), shape(8, 1), "none", out)

found = {"plan": caught(lambda: train(huge)), "arena": caught(lambda: train(large))}
found["results"] = caught(lambda: double(large))
if matmul is not None:
    found["workspace"] = caught(product)
loss = train(small)
found["afterwards"] = bool(loss.isfinite())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def limited() -> dict[str, Any]:
    """What each attempt of `_PROGRAM` met."""
    if sys.platform != "linux":
        pytest.skip("the address space is limited as Linux does it")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_an_arena_that_cannot_be_had(limited: dict[str, Any]) -> None:
    names, message, nbytes, is_same = limited["arena"]
    assert is_same and {"OutOfMemoryError", "AmpIrError", "MemoryError"} <= set(names)
    assert nbytes >= 2 * 40000 * 4096 * 4
    assert message == (
        f"the step, beside its state, needs memory of {nbytes} bytes ({nbytes / 2**20:.1f} MiB) "
        "that the system does not have; pass memory_budget= to compute values again instead of "
        "holding them, make the batch smaller, or free memory of the process. Model, optimizer, "
        "scaler and random state are unchanged"
    )


def test_a_tensor_that_cannot_be_had(limited: dict[str, Any]) -> None:
    names, message, nbytes, is_same = limited["plan"]
    assert is_same and {"OutOfMemoryError", "AmpIrError", "MemoryError"} <= set(names)
    assert nbytes == 200000 * 4096 * 4
    assert message.startswith(f"a tensor of the step needs memory of {nbytes} bytes")


def test_results_that_cannot_be_had(limited: dict[str, Any]) -> None:
    names, message, nbytes, is_same = limited["results"]
    assert is_same and {"OutOfMemoryError", "AmpIrError", "MemoryError"} <= set(names)
    assert nbytes == 40000 * 4096 * 4
    assert message.startswith(f"the batch and the results of a step need memory of {nbytes} bytes")


def test_workspace_that_cannot_be_had(limited: dict[str, Any]) -> None:
    if "workspace" not in limited:
        pytest.skip("onednn is not in this build")
    names, message, _, _ = limited["workspace"]
    assert "MemoryError" in names
    assert message.startswith("oneDNN's workspace of 3276")


def test_afterwards_it_goes_on(limited: dict[str, Any]) -> None:
    assert limited["afterwards"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("oneDNN's workspace of 4096 bytes cannot be had from the system"),
        RuntimeError(
            "PyTorch's mm failed: [enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: "
            "can't allocate memory: you tried to allocate 4096 bytes. Error code 12"
        ),
    ],
)
def test_a_call_that_runs_out_of_memory(failing_matmul: dict[str, Any], error: Exception) -> None:
    step, model, optimizer = linear_step()
    case = compiled(step, (torch.randn(4, 300),), model, optimizer)
    before = case.bits()
    failing_matmul.update(count=0, error=error)
    with pytest.raises(OutOfMemoryError) as caught:
        case.train(*case.batch)
    failing_matmul["count"] = -1
    failure = caught.value
    assert isinstance(failure, StepFailedError) and isinstance(failure, AmpIrError)
    assert failure.nbytes == 4096 and not failure.is_torn and failure.call == "onednn.matmul"
    assert str(failure).endswith(f"may be called again. Where memory is short: {ADVICE}")
    assert not different(before, case.bits())
    case.train(*case.batch)


@pytest.mark.parametrize("at", ["capture", "compilation"])
def test_a_capture_or_a_compilation_that_runs_out_of_memory(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, model, optimizer = linear_step()
    train = amp_ir.jit(step, model=model, optimizer=optimizer)

    def no_memory(*_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError("can't allocate memory: you tried to allocate 360000 bytes.")

    where = "amp_ir.capture.state.initial_state" if at == "capture" else "amp_ir.api.compile.lower"
    monkeypatch.setattr(where, no_memory)
    with pytest.raises(OutOfMemoryError) as caught:
        train(torch.randn(4, 300))
    assert str(caught.value).startswith(
        f"the {at} of the step needs memory of 360000 bytes (0.3 MiB) that the system does not have"
    )
    monkeypatch.undo()
    train(torch.randn(4, 300))


def test_what_memory_errors_are_told_by() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert not is_out_of_memory(RuntimeError("could not execute a primitive"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert asked_nbytes(RuntimeError("it wants 12 bytes")) == 12
    assert asked_nbytes(RuntimeError("it wants more")) == 0
