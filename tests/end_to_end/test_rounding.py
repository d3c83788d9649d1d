# SPDX-License-Identifier: Apache-2.0
"""`rounding=`: strict kernels give the interpreter's bits, fast ones drop roundings in between."""

from __future__ import annotations

import random

import pytest
import torch

import amp_ir
from amp_ir.ir.interpreter import interpret

# Correctly rounded in float32, so that only the rounding to the low dtype can make a difference.
UNARY = (torch.relu, torch.neg, torch.abs, torch.sqrt, torch.square)
BINARY = (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum)


def random_chain(number: int):
    """A function of x and y, eight ops deep."""
    choose = random.Random(number)
    ops = [choose.choice(UNARY + BINARY + BINARY) for _ in range(8)]

    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for op in ops:
            x = op(x) if op in UNARY else op(x, y)
        return x

    return chain


def compiled_chains(dtype, rounding, chains):
    inputs = tuple(torch.randn(6, 10).to(dtype) for _ in range(2))

    class Chains(torch.nn.Module):
        """All chains at once: one compilation."""

        def forward(self, x, y):
            return tuple(chain(x, y) for chain in chains)

    mod, _ = amp_ir.trace_model(Chains(), inputs)
    return mod, inputs, amp_ir.compile(mod, rounding=rounding)(*inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_strict_kernels_are_the_interpreter_bit_for_bit(dtype):
    chains = [random_chain(number) for number in range(12)]
    mod, inputs, got = compiled_chains(dtype, "strict", chains)
    for chain, one, expected in zip(chains, got, interpret(mod, list(inputs)), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, expected, rtol=0, atol=0, equal_nan=True)
        # PyTorch rounds after every op, as strict kernels do.
        torch.testing.assert_close(one, chain(*inputs), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rounding", ["fast", "strict"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scaled_sum_with_a_matmul_is_rounded_once(dtype, rounding):
    """Its integers and powers of two are exact in float32: one rounding has one result."""
    a, b = (torch.randint(-40, 40, shape).to(dtype) for shape in ((6, 10), (10, 8)))
    c = torch.randint(-2000, 2000, (6, 8)).to(dtype)

    class ScaledSum(torch.nn.Module):
        """What Muon computes."""

        def forward(self, c, a, b):
            return torch.addmm(c, a, b, beta=0.25, alpha=0.5)

    mod, _ = amp_ir.trace_model(ScaledSum(), (c, a, b))
    expected = (c.double() * 0.25 + a.double() @ b.double() * 0.5).to(dtype)
    assert torch.equal(amp_ir.compile(mod, rounding=rounding)(c, a, b), expected)
    assert torch.equal(interpret(mod, [c, a, b])[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fast_kernels_round_only_what_they_store(dtype):
    # No product stands before a sum: the compiler may contract those into one operation.
    def chain(x, y):
        return torch.sqrt(torch.abs(torch.div(x + y, torch.maximum(x, y)))) - y

    _, inputs, (got,) = compiled_chains(dtype, "fast", [chain])
    expected = chain(*(one.float() for one in inputs)).to(dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(got, chain(*inputs)), "the example has no rounding to drop"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fast_kernel_reads_what_it_stores_as_others_do(dtype):
    class Model(torch.nn.Module):
        """One kernel that computes, stores and reads the quotient."""

        def forward(self, x, y):
            quotient = torch.div(x, y)
            return quotient, torch.sqrt(torch.abs(quotient)) - y

    inputs = tuple(torch.randn(6, 10).to(dtype) for _ in range(2))
    mod, _ = amp_ir.trace_model(Model(), inputs)
    quotient, got = amp_ir.compile(mod, rounding="fast")(*inputs)
    x, y = (one.float() for one in inputs)
    assert torch.equal(quotient, (x / y).to(dtype))
    expected = (torch.sqrt(torch.abs(quotient.float())) - y).to(dtype)
    assert torch.equal(got, expected)
    unrounded = (torch.sqrt(torch.abs(x / y)) - y).to(dtype)
    assert not torch.equal(got, unrounded), "the example has no rounding to see"


@pytest.mark.parametrize("rounding", ["strict", "fast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_of_the_users_rounds_always(dtype, rounding):
    def chain(x, y):
        return torch.maximum((x + y).to(dtype).float(), y)

    class Model(torch.nn.Module):
        """float32 but for one explicit rounding."""

        def forward(self, x, y):
            return chain(x, y)

    inputs = torch.randn(6, 10), torch.full((6, 10), -9.0)
    mod, _ = amp_ir.trace_model(Model(), inputs)
    got = amp_ir.compile(mod, rounding=rounding)(*inputs)
    assert torch.equal(got, chain(*inputs))
    assert not torch.equal(got, torch.maximum(inputs[0] + inputs[1], inputs[1]))


def test_an_unknown_rounding_is_refused_everywhere():
    model = torch.nn.Linear(2, 2)
    batch = (torch.randn(3, 2),)
    mod, args = amp_ir.trace_model(model, batch)
    message = 'rounding=\'exact\' is not known; expected "strict" or "fast"'
    calls = (
        lambda: amp_ir.compile(mod, rounding="exact"),
        lambda: amp_ir.jit(lambda x: model(x).sum(), model=model, rounding="exact"),
        lambda: amp_ir.profile_vm_model(mod, "cpu", args, rounding="exact"),
        lambda: amp_ir.get_peak_memory(mod, "cpu", args, rounding="exact"),
    )
    for call in calls:
        with pytest.raises(amp_ir.errors.OptionError) as caught:
            call()
        assert str(caught.value) == message


@pytest.mark.parametrize("rounding", ["strict", "fast"])
def test_every_entry_takes_the_word(rounding):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    batch = (torch.randn(3, 4),)

    def step(x):
        return model(x).square().mean()

    train = amp_ir.jit(step, model=model, amp_dtype="bfloat16", rounding=rounding)
    assert torch.isfinite(train(*batch))
    mod = train.compiled.module
    times = amp_ir.profile_vm_model(mod, "cpu", batch, warmup=0, number=1, rounding=rounding)
    assert times[0] > 0
    assert amp_ir.get_peak_memory(mod, "cpu", batch, rounding=rounding) > 0
