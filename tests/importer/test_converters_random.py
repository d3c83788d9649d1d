# SPDX-License-Identifier: Apache-2.0
"""Random ops (by their distributions, state and gradients) and attention."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from amp_ir.ir.interpreter import interpret
from amp_ir.ir.step_module import Role, StepModule
from import_checks import check, evaluated, imported, run, with_gradients

COUNT = 40000
# Five standard errors of a mean of COUNT numbers of variance 1: 5 / sqrt(40000).
BOUND = 0.025
ONES = torch.ones(200, 200)

# name -> (function, mean, variance)
DISTRIBUTIONS = {
    "rand": (lambda x: torch.rand(200, 200), 0.5, 1 / 12),
    "rand_like": (lambda x: torch.rand_like(x), 0.5, 1 / 12),
    "randn": (lambda x: torch.randn(200, 200), 0.0, 1.0),
    "randn_like in bfloat16": (lambda x: torch.randn_like(x.bfloat16()).float(), 0.0, 1.0),
    "uniform": (lambda x: x.clone().uniform_(-1, 3), 1.0, 16 / 12),
    "normal": (lambda x: x.clone().normal_(2, 0.5), 2.0, 0.25),
    "normal of a size": (lambda x: torch.normal(2, 0.5, (200, 200)), 2.0, 0.25),
    "normal of tensors": (lambda x: torch.normal(2 * x, x / 2), 2.0, 0.25),
    "normal of a number and a tensor": (lambda x: torch.normal(2.0, x / 2), 2.0, 0.25),
    "normal of a tensor and a number": (lambda x: torch.normal(2 * x, 0.5), 2.0, 0.25),
    "bernoulli with p": (lambda x: x.clone().bernoulli_(0.3), 0.3, 0.21),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3, 0.21),
    "exponential": (lambda x: x.clone().exponential_(2.0), 0.5, 0.25),
    "log-normal": (lambda x: x.clone().log_normal_(0.0, 0.25).log(), 0.0, 1 / 16),
    "geometric": (lambda x: x.clone().geometric_(0.25), 4.0, 12.0),
    # The arc tangent of a Cauchy number is uniform.
    "cauchy": (lambda x: ((x.clone().cauchy_(2.0, 3.0) - 2) / 3).atan(), 0.0, math.pi**2 / 12),
    "randint": (lambda x: torch.randint(2, 6, (200, 200)).float(), 3.5, 1.25),
    "many integers": (lambda x: torch.randint(2**40, (200, 200)) / 2**40, 0.5, 1 / 12),
    "randint_like": (lambda x: torch.randint_like(x, 4), 1.5, 1.25),
    "dropout": (lambda x: F.dropout(x, 0.25), 1.0, 1 / 3),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.25, True)[0], 1.0, 1 / 3),
    "feature dropout": (lambda x: F.dropout1d(x[..., None], 0.25), 1.0, 1 / 3),
    "rrelu": (lambda x: F.rrelu(-x, 0.0, 1.0, training=True), -0.5, 1 / 12),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution(name):
    function, mean, variance = DISTRIBUTIONS[name]
    (drawn,) = evaluated(function, ONES)
    assert abs(float(drawn.double().mean()) - mean) < BOUND * max(1.0, variance**0.5)
    # The variance of a square is at most 8 (exponential, in units of its variance).
    assert abs(float(drawn.double().var()) - variance) < 3 * BOUND * variance


def test_a_negative_standard_deviation_gives_nan():
    (drawn,) = evaluated(lambda x: torch.normal(x, torch.tensor([1.0, -1.0]) * x), torch.ones(2))
    assert drawn.isnan().tolist() == [False, True]


def test_permutation():
    (order,) = evaluated(lambda x: torch.randperm(50), ONES)
    assert sorted(order.tolist()) == list(range(50))
    assert order.tolist() != list(range(50))


def run_twice(mod: StepModule, *inputs: torch.Tensor) -> tuple[list[torch.Tensor], ...]:
    """The outputs of two steps, the second with the random state that the first leaves."""
    first = interpret(mod, [*inputs, mod.state["random_state"]])
    return first, interpret(mod, [*inputs, first[-1]])


def test_random_state_is_an_input_that_the_step_advances():
    torch.manual_seed(1234)
    mod = imported(lambda x: torch.rand(4) + x, torch.zeros(4))
    spec = mod.signature.inputs[-1]
    assert (spec.name, spec.role, spec.shape, spec.dtype) == (
        "random_state", Role.RANDOM_STATE, (2,), "int64",
    )  # fmt: skip
    assert mod.signature.outputs[-1].updates == 1
    assert mod.state["random_state"].tolist() == [1234, 0]
    first, second = run_twice(mod, torch.zeros(4))
    assert first[-1].tolist() == [1234, 1]
    assert not torch.equal(first[0], second[0])


def test_same_state_same_numbers():
    mod = imported(lambda x: torch.rand(4) + x, torch.zeros(4))
    first, _ = run_twice(mod, torch.zeros(4))
    again, _ = run_twice(mod, torch.zeros(4))
    assert torch.equal(first[0], again[0])


def test_every_op_draws_numbers_of_its_own():
    mod = imported(lambda x: (torch.rand(50), torch.rand(50)), torch.zeros(1))
    first, _ = run_twice(mod, torch.zeros(1))
    assert not torch.equal(first[0], first[1])


def test_a_step_without_random_ops_has_no_random_state():
    mod = imported(lambda x: F.dropout(x, 0.5, training=False), torch.zeros(4))
    assert "random_state" not in mod.state
    assert len(mod.signature.inputs) == 1


def test_gradient_of_dropout_has_the_mask_of_the_forward_op():
    def with_unit_gradient(x):
        y = torch.native_dropout(x, 0.5, True)[0]
        return y, *torch.autograd.grad(y.sum(), x)

    x = torch.full((64,), 3.0, requires_grad=True)
    mod = imported(with_unit_gradient, x)
    assert mod.script().count('"amp_ir.dropout"') == 1
    assert mod.script().count('"amp_ir.dropout_backward"') == 1
    y, gradient = run(mod, [x])
    assert 0 < int((y == 0).sum()) < 64
    assert torch.equal(gradient, y / 3)


Q = torch.linspace(-1, 1, 2 * 2 * 3 * 4).cos().reshape(2, 2, 3, 4)
K = torch.linspace(-2, 1, 2 * 2 * 5 * 4).sin().reshape(2, 2, 5, 4)
V = torch.linspace(0, 3, 2 * 2 * 5 * 4).sin().reshape(2, 2, 5, 4)
SEEN = torch.arange(15).reshape(3, 5) % 4 != 1

ATTENTIONS = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "scaled": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, :, :3], v[:, :, :3], is_causal=True
    ),
    "bool mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=SEEN),
    "float mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=SEEN.float() * 2 - 1
    ),
    "mask of the batch": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=SEEN[None, None].expand(2, 1, 3, 5)
    ),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name):
    mod = check(ATTENTIONS[name], *(x.clone().requires_grad_() for x in (Q, K, V)))
    script = mod.script()
    assert script.count('"amp_ir.attention"') == script.count('"amp_ir.attention_backward"') == 1


def test_dropout_of_attention_is_the_same_in_its_gradient():
    # Along any direction the change of the loss is the gradient's product with the direction.
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)

    step = 1e-4
    inputs = [x.clone().requires_grad_() for x in (Q, K, V)]
    whole, forward = imported(with_gradients(attend), *inputs), imported(attend, Q, K, V)
    state = torch.tensor([7, 3])

    def loss(*tensors: torch.Tensor) -> float:
        out = interpret(forward, [*tensors, state], float_dtype=torch.float64)[0]
        return float((out * weights).sum())

    _, *gradients, _ = interpret(
        whole, [*(x.detach() for x in inputs), state], float_dtype=torch.float64
    )
    weights = torch.cos(torch.arange(48, dtype=torch.float64) * 1.7 + 0.3).reshape(2, 2, 3, 4)
    given = [x.detach().double() for x in inputs]
    for k, gradient in enumerate(gradients):
        direction = torch.linspace(-1, 1, gradient.numel(), dtype=torch.float64).sin()
        direction = direction.reshape(gradient.shape)
        up, down = list(given), list(given)
        up[k], down[k] = given[k] + step * direction, given[k] - step * direction
        slope = (loss(*up) - loss(*down)) / (2 * step)
        # The weights of the loss are rounded to float32 in the graph, as is the constant 1.7.
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-4, abs=1e-4)
