# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of public functions are named with the closest ones; torch's dtypes are taken."""

from __future__ import annotations

import inspect

import pytest
import torch

import amp_ir
from amp_ir.errors import ArgumentError, OptionError
from amp_ir.integrations.torch_compile.backend_options import BackendOptions

MODEL = torch.nn.Linear(4, 4)
X = torch.randn(2, 4)
JIT = (
    "It takes step, model=, optimizer=, scaler=, amp_dtype=, overrides=, policy=, verbose=, "
    "device=, opt_level=, rounding=, memory_budget=, recompute=, recompile_limit=, max_shapes=, "
    "precompile=, buckets=, pad=, pad_check=, on_overflow=, explain_below=, process_group=, "
    "data_parallel=, comm_dtype=, bucket_cap_mb=, shard=, watch="
)


def step(x):
    return MODEL(x)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"amp_dtpe": "bfloat16"}, "there is no argument 'amp_dtpe', did you mean amp_dtype=?"),
        ({"dtype": "bfloat16"}, "there is no argument 'dtype', did you mean amp_dtype=?"),
        ({"optim": None}, "there is no argument 'optim', did you mean optimizer=?"),
        ({"fullgraph": True, "xyzzy": 1},
         "there is no argument 'fullgraph'; there is no argument 'xyzzy'"),
    ],
)  # fmt: skip
def test_a_misspelt_option_of_jit_is_named_with_the_closest_one(arguments, why):
    with pytest.raises(ArgumentError) as caught:
        amp_ir.jit(step, model=MODEL, **arguments)
    assert str(caught.value) == f"amp_ir.jit: {why}. {JIT}"
    assert isinstance(caught.value, TypeError)


def test_a_missing_argument_is_named():
    with pytest.raises(ArgumentError) as caught:
        amp_ir.jit(step)
    assert str(caught.value) == f"amp_ir.jit: missing a required argument: 'model'. {JIT}"


def test_too_many_by_position_are_told_to_be_given_by_name():
    with pytest.raises(ArgumentError) as caught:
        amp_ir.jit(step, MODEL, None)
    assert str(caught.value) == (
        "amp_ir.jit: 3 arguments are given by position, and 1 (step) is taken so; give the others "
        f"by name, as in model=.... {JIT}"
    )
    with pytest.raises(ArgumentError, match=r"3 arguments .* and 2 \(step, example_batch\) are "):
        amp_ir.trace_step(step, (X,), MODEL)
    assert amp_ir.jit(step, model=MODEL)(X).shape == X.shape


def test_public_functions_with_options_all_do_so():
    for name in ("trace_step", "autocast", "compile", "verify", "convert_model", "error_report",
                 "examine", "memory_report", "profile_kernels", "trace_model"):  # fmt: skip
        function = getattr(amp_ir, name)
        required = [one for one in inspect.signature(function).parameters.values()
                    if one.default is one.empty]  # fmt: skip
        given = {one.name: None for one in required}
        with pytest.raises(ArgumentError, match=f"amp_ir.{name}: there is no argument 'xyzzy'"):
            function(**given, xyzzy=1)


def test_dtypes_of_pytorch_are_taken_wherever_names_are():
    mod, args = amp_ir.trace_step(step, (X,), model=MODEL)
    named = amp_ir.autocast(mod, args, amp_dtype="bfloat16", out_dtype="bfloat16")
    low = amp_ir.autocast(mod, args, amp_dtype=torch.bfloat16, out_dtype=torch.bfloat16)
    assert low.plan == named.plan and low.plan.amp_dtype == "bfloat16"
    train = amp_ir.jit(step, model=MODEL, amp_dtype=torch.bfloat16)
    assert torch.equal(train(X), amp_ir.compile(amp_ir.autocast(mod, amp_dtype="bfloat16"))(X))
    assert amp_ir.Override(op="a", to=torch.float32) == amp_ir.Override(op="a", to="float32")
    assert amp_ir.amp.PrimType(torch.float16) == amp_ir.amp.PrimType("float16")
    assert BackendOptions.of({"amp_dtype": torch.float16}).amp_dtype == "float16"
    with pytest.raises(OptionError, match="amp_dtype='float64' is not supported"):
        amp_ir.jit(step, model=MODEL, amp_dtype=torch.float64)
