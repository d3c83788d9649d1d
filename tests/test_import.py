# SPDX-License-Identifier: Apache-2.0
"""`import amp_ir` is quick, and its names are there as if it were not."""

from __future__ import annotations

import os
import pickle
import pydoc
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

import amp_ir
from amp_ir import step_names

HEAVY = ("torch", "tvm", "tvm_ffi", "numpy", "attrs", "rich")
# What a step on a CPU without ranks, buckets, a scaler and a budget has no use for.
NOT_FOR_A_PLAIN_STEP = (
    "amp_ir.api.examine",
    "amp_ir.api.measure",
    "amp_ir.buckets",
    "amp_ir.capture.rolled_loops.write_loop",
    "amp_ir.commands",
    "amp_ir.cuda.compiler",
    "amp_ir.distributed.contract",
    "amp_ir.distributed.exchange",
    "amp_ir.distributed.links",
    "amp_ir.distributed.meeting",
    "amp_ir.inference",
    "amp_ir.integrations",
    "amp_ir.loops.cuda",
    "amp_ir.loops.fusion.cuda_launches",
    "amp_ir.loss_scaling.degrees",
    "amp_ir.memory.chunking",
    "amp_ir.padding",
    "amp_ir.public_names",
    "amp_ir.replay.find_overflow",
    "amp_ir.report.kernel_profile",
    "amp_ir.report.program_text",
    "amp_ir.rewrites.align_matmuls",
    "amp_ir.rewrites.exchange_gradients",
    "amp_ir.runtime.checkpoint",
    "amp_ir.testing",
    "amp_ir.verification",
    "rich",
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_and_the_help_of_the_command_import_nothing_heavy():
    code = f"""
import sys
import amp_ir, amp_ir.errors
from amp_ir.cli import main
assert amp_ir.__version__ and amp_ir.errors.CaptureError
assert not hasattr(amp_ir, "__wrapped__")
try:
    main(["--help"])
except SystemExit as done:
    assert done.code == 0
print([name for name in {HEAVY} if name in sys.modules])
"""
    printed = run(code)
    assert printed.endswith("[]\n")
    assert "    cache     look at the steps that are kept" in printed


def test_the_first_name_brings_all_of_them():
    code = """
import threading, amp_ir
found = []
def look():
    found.append(amp_ir.jit)
threads = [threading.Thread(target=look) for _ in range(4)]
[one.start() for one in threads]
[one.join() for one in threads]
assert found == [amp_ir.jit] * 4
assert set(amp_ir.__all__) <= vars(amp_ir).keys()
from amp_ir import *
assert compile is amp_ir.compile and jit is amp_ir.jit
"""
    run(code)


def test_a_plain_step_imports_nothing_that_it_does_not_need():
    code = f"""
import sys
import torch
import amp_ir
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype="bfloat16")
train(torch.ones(2, 4))
assert "__all__" not in vars(amp_ir)
print([name for name in {NOT_FOR_A_PLAIN_STEP} if name in sys.modules])
"""
    assert run(code) == "[]\n"
    missing = [name for name in NOT_FOR_A_PLAIN_STEP if find_spec(name) is None]
    assert not missing, f"{missing}: there are no such modules any more"


def test_the_names_of_a_step_are_public_names():
    assert set(step_names.__all__) < set(amp_ir.__all__)
    for name in step_names.__all__:
        assert getattr(step_names, name) is getattr(amp_ir, name)


def test_no_public_name_is_hidden_by_a_module_of_the_package():
    modules = [name for name in amp_ir.__all__ if find_spec(f"amp_ir.{name}") is not None]
    assert all(isinstance(getattr(amp_ir, name), ModuleType) for name in modules)


def test_dir_and_help_know_the_names():
    assert set(amp_ir.__all__) <= set(dir(amp_ir))
    text = pydoc.plain(pydoc.render_doc(amp_ir))
    assert "class GradScaler" in text and "    jit(" in text


def test_a_name_that_there_is_not_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="^module 'amp_ir' has no attribute 'jitt'$"):
        amp_ir.jitt  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'jitt' from 'amp_ir'"):
        from amp_ir import jitt  # noqa: F401


# Programs that import amp_ir first, each in a fork of one process with PyTorch and TVM imported,
# which take longest, and without amp_ir.
PICKLED = pickle.dumps((amp_ir.StepRecord, amp_ir.Override(op="x", to="float32")))
FIRST_STEP = f"""
import pickle
import amp_ir
assert amp_ir.host.logs.TOPICS and amp_ir.pipeline.lower
assert pickle.loads({PICKLED!r})[1].op == "x"
from amp_ir.jit_function import jit
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x):
    with amp_ir.autocast_off():
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
assert "jit" not in vars(amp_ir)
train = jit(step, model=model, optimizer=optimizer)
first, second = train(torch.ones(2, 4)), train(torch.ones(2, 4))
assert second < first and not train.recompiles[1:], train.recompiles
"""
TERMINAL = """
import io, random, sys
import amp_ir.jit_step
from amp_ir.report import live_stage

class Terminal(io.StringIO):
    def isatty(self):
        return True

errors, sys.stderr = sys.stderr, Terminal()
random.seed(0)
before = random.getstate()
with live_stage.live_stage("step"):
    assert "rich.console" in sys.modules
    assert random.getstate() == before
sys.stderr = errors
"""
USES = (
    "amp_ir.jit",
    "amp_ir.load",
    "amp_ir.compat",
    "from amp_ir.compat import apex, mxnet, r_torch, raf",
    "dir(amp_ir)",
    "help(amp_ir.save)",
)
DRAWS_NOTHING = """
import random
import amp_ir
random.seed(0)
before = random.getstate()
{use}
assert random.getstate() == before
"""
PROGRAMS = {
    "step": FIRST_STEP,
    "terminal": TERMINAL,
    **{use: DRAWS_NOTHING.format(use=use) for use in USES},
}
IN_FORKS = f"""
import os, sys, traceback
import torch, tvm
assert not {{"rich", "amp_ir"}} & sys.modules.keys()
for name, program in {PROGRAMS!r}.items():
    child = os.fork()
    if not child:
        status = 1
        try:
            exec(program, {{"__name__": "__main__"}})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("status", status, name, file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def in_forks() -> str:
    """What the programs wrote to stderr, each followed by its status."""
    if not hasattr(os, "fork"):
        pytest.skip("processes cannot be forked here")
    done = subprocess.run([sys.executable, "-c", IN_FORKS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_step_may_be_the_first_to_use_the_names(in_forks: str):
    assert "status 0 step\n" in in_forks, in_forks


@pytest.mark.parametrize("use", USES)
def test_the_first_use_of_a_name_draws_nothing_of_the_users_random_numbers(use: str, in_forks: str):
    """Rich draws from Python's `random` while it is imported."""
    assert f"status 0 {use}\n" in in_forks, in_forks


def test_a_terminal_draws_nothing_of_the_users_random_numbers(in_forks: str):
    """The line that it shows while a compilation takes long is Rich's."""
    assert "status 0 terminal\n" in in_forks, in_forks
