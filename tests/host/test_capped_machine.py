# SPDX-License-Identifier: Apache-2.0
"""A lesser CPU and fewer libraries than this machine has, by environment variables."""

from __future__ import annotations

import subprocess

import pytest

from prepared_process import run_code

TRAIN = """
import torch, amp_ir
from amp_ir.host import native
from amp_ir.ir.target import cpu
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
x = torch.randn(4, 8)
expected = model(x).square().mean().item()
loss = amp_ir.jit(step, model=model, optimizer=optimizer)(x)
assert abs(loss.item() - expected) <= 1e-6 * abs(expected), (loss, expected)
print(cpu().arch, native.has("amp_ir.onednn.matmul"), native.has("amp_ir.torch.matmul"))
"""


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    return run_code(TRAIN, variables)


def test_kernels_are_compiled_for_the_cpu_that_is_named() -> None:
    done = run(AMP_IR_LLVM_CPU="x86-64-v3", AMP_IR_DISABLE="onednn")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["x86-64-v3", "False", "True"]


def test_without_any_library_own_kernels_compute_everything() -> None:
    done = run(AMP_IR_DISABLE="onednn, torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["False", "False"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"AMP_IR_LLVM_CPU": "pentium-9"},
            "amp_ir.errors.OptionError: AMP_IR_LLVM_CPU=pentium-9 is not a CPU that LLVM knows; "
            'expected a name such as "x86-64-v3", "haswell", "skylake-avx512" or "znver4", or no '
            "such variable for this machine's own",
        ),
        (
            {"AMP_IR_DISABLE": "onednn,mkl"},
            "amp_ir.errors.OptionError: AMP_IR_DISABLE=onednn,mkl names no library that can be "
            "done without; expected some of openmp, torch, onednn, cublaslt, with commas in "
            "between",
        ),
    ],
)
def test_a_wrong_name_is_refused(variables: dict[str, str], message: str) -> None:
    done = run(**variables)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == message
