# SPDX-License-Identifier: Apache-2.0
"""Long sums of every kind are as exact as PyTorch's, of numbers that make it hard."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from tvm.relax import op as R

import amp_ir
from amp_ir.ir.interpreter import interpret
from cuda_emulator import in_emulator
from import_checks import import_step, traced
from kernel_check import module_of, run_cuda_modules, run_kernels
from relax_functions import build

# What our error may be of PyTorch's; it is the same in either where both only round the result.
FACTOR = 1.5
Function = Callable[..., Any]
Inputs = Callable[[], Sequence[torch.Tensor]]


def even(*shape: int) -> torch.Tensor:
    """0.1 everywhere: every addition to a running value errs the same way."""
    return torch.full(shape, 0.1)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape)


def normal(*shape: int, mean: float = 0.0) -> torch.Tensor:
    return torch.randn(shape) + mean


def alternating(*shape: int) -> torch.Tensor:
    """Large numbers that nearly cancel."""
    return torch.tensor([1e4, -1e4 + 0.1]).repeat(math.prod(shape) // 2).reshape(shape)


def near_one(*shape: int) -> torch.Tensor:
    return 1 + (torch.rand(shape) - 0.5) * 2e-3


def gradients(forward: Function) -> Function:
    """The gradients of `forward(*inputs)` by all inputs, where the first argument is its own."""

    def backward(grad: torch.Tensor, *inputs: torch.Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(forward(*leaves), leaves, grad)

    return backward


def with_gradient(x: torch.Tensor) -> list[torch.Tensor]:
    """A gradient and what it is for: not so independent that the weight's gradient cancels out."""
    return [torch.rand(x.shape) + 0.1 * x, x]


def confident() -> Sequence[torch.Tensor]:
    """Logits of a loss of about 1e-6."""
    target = torch.arange(4)
    return torch.randn(4, 50000) * 0.1 + 24.6 * F.one_hot(target, 50000), target


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def normed(x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, training=True)


ZEROS = torch.zeros(20000, dtype=torch.long)
ROWS = torch.arange(20000) % 3

SUMS: dict[str, tuple[Function, Inputs]] = {
    "rows": (lambda x: x.sum(1), lambda: [even(4, 20000)]),
    "rows of uniform": (lambda x: x.sum(1), lambda: [uniform(4, 20000)]),
    "rows, not whole vectors": (lambda x: x.sum(1), lambda: [even(5, 5003)]),
    "rows, one vector and more": (lambda x: x.sum((1, 2)), lambda: [even(5, 300, 31)]),
    "short rows in long ones": (lambda x: x.sum((0, 2)), lambda: [even(3000, 5, 7)]),
    "rows of planes": (lambda x: x.sum((0, 2)), lambda: [even(60, 4, 3, 49).flatten(2)]),
    "planes of a few": (lambda x: x.sum((0, 2)), lambda: [even(2, 3, 31)]),
    "large mean": (lambda x: x.sum(1), lambda: [normal(4, 20000, mean=1e4)]),
    "nearly cancelling": (lambda x: x.sum(1), lambda: [alternating(4, 20000)]),
    "all": (lambda x: x.sum(), lambda: [even(300007)]),
    "all of uniform": (lambda x: x.sum(), lambda: [uniform(300007)]),
    "all of a matrix": (lambda x: x.mean(), lambda: [even(301, 1003)]),
    "columns": (lambda x: x.sum(0), lambda: [even(30000, 16)]),
    "columns of uniform": (lambda x: x.sum(0), lambda: [uniform(30000, 16)]),
    "columns of the rest of a part": (lambda x: x.sum(0), lambda: [even(5003, 21)]),
    "few columns": (lambda x: x.sum(0), lambda: [even(30000, 3)]),
    "many columns": (lambda x: x.sum(0), lambda: [even(700, 1000)]),
    "middle": (lambda x: x.mean(1), lambda: [uniform(4, 5000, 24)]),
    "outer ones": (lambda x: x.mean((0, 1)), lambda: [even(50, 100, 24)]),
    "several columns and rows": (lambda x: (x.sum(0), (x * x).sum(1)), lambda: [even(3000, 40)]),
    "columns beside elements": (lambda x: (x * 2, (x * 2).sum(0)), lambda: [even(3000, 40)]),
    "softmax, and its columns": (
        lambda x: (lambda y: (y, y.sum(0)))(F.softmax(x, 1)), lambda: [normal(3000, 40)]
    ),
    "broadcast": (gradients(lambda b: b.expand(20000, 24)), lambda: [even(20000, 24), normal(24)]),
    "bias": (
        gradients(lambda x, w, b: F.linear(x, w, b)),
        lambda: [uniform(65536, 8), normal(65536, 2), normal(8, 2), normal(8)],
    ),
    "product": (lambda x: x.prod(), lambda: [near_one(20000)]),
    "products of rows": (lambda x: x.prod(1), lambda: [near_one(3, 5000)]),
    "products of columns": (lambda x: x.prod(0), lambda: [near_one(5000, 3)]),
    "running": (lambda x: x.cumsum(0), lambda: [even(50000)]),
    "running, in columns": (lambda x: x.cumsum(0), lambda: [uniform(5000, 3)]),
    "running product": (lambda x: x.cumprod(0), lambda: [near_one(10000)]),
    "norm": (lambda x: x.norm(), lambda: [normal(300007)]),
    "norms of rows": (lambda x: x.norm(dim=1), lambda: [normal(4, 20000)]),
    "norm 1": (lambda x: torch.linalg.vector_norm(x, 1), lambda: [normal(300007)]),
}  # fmt: skip
MOMENTS: dict[str, tuple[Function, Inputs]] = {
    "var": (lambda x: x.var(1), lambda: [normal(16, 2048)]),
    "var, mean 1e4": (lambda x: x.var(1), lambda: [normal(16, 2048, mean=1e4)]),
    "var, mean 1e6": (lambda x: x.var(1), lambda: [normal(16, 2048, mean=1e6)]),
    "var of columns, mean 1e6": (lambda x: x.var(0), lambda: [normal(2048, 16, mean=1e6)]),
    "std and mean of all": (torch.std_mean, lambda: [normal(300, 301, mean=1e3)]),
    "batch norm": (normed, lambda: [normal(32, 4, 28, 28, mean=3.5)]),
    "batch norm, mean 1e3": (normed, lambda: [normal(32, 4, 28, 28, mean=1e3)]),
    "batch norm, mean 1e5": (normed, lambda: [normal(32, 4, 28, 28, mean=1e5)]),
    "batch norm, channels last": (
        normed, lambda: [normal(32, 4, 28, 28, mean=3.5).to(memory_format=torch.channels_last)]
    ),
    "layer norm": (lambda x: F.layer_norm(x, (4096,)), lambda: [normal(16, 4096)]),
    "layer norm, mean 1e3": (
        lambda x: F.layer_norm(x, (4096,)), lambda: [normal(16, 4096, mean=1e3)]
    ),
    "group norm": (lambda x: F.group_norm(x, 4), lambda: [normal(4, 16, 28, 28, mean=10)]),
    "instance norm": (F.instance_norm, lambda: [normal(4, 4, 56, 56, mean=10)]),
    "rms norm": (lambda x: F.rms_norm(x, (8192,)), lambda: [normal(16, 8192)]),
    "batch norm's gradients": (
        gradients(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)),
        lambda: [*with_gradient(normal(32, 4, 28, 28)), uniform(4), uniform(4)],
    ),
    "layer norm's gradients": (
        gradients(lambda x, w, b: F.layer_norm(x, (24,), w, b)),
        lambda: [*with_gradient(normal(20000, 24)), uniform(24), uniform(24)],
    ),
    "layer norm's weight gradients": (
        lambda g, x: gradients(lambda w, b: F.layer_norm(x, (24,), w, b))(g, x[0], x[1]),
        lambda: with_gradient(normal(20000, 24)),
    ),
    "group norm's gradients": (
        gradients(lambda x, w, b: F.group_norm(x, 2, w, b)),
        lambda: [*with_gradient(normal(32, 4, 28, 28)), uniform(4), uniform(4)],
    ),
    "rms norm's gradients": (
        gradients(lambda x, w: F.rms_norm(x, (24,), w)),
        lambda: [*with_gradient(normal(20000, 24)), uniform(24)],
    ),
}  # fmt: skip
LOSSES: dict[str, tuple[Function, Inputs]] = {
    "softmax": (lambda x: F.softmax(x, 1), lambda: [normal(4, 50000)]),
    "log softmax": (lambda x: F.log_softmax(x, 1), lambda: [normal(4, 50000)]),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), lambda: [normal(4, 50000)]),
    "softmax's gradient": (
        gradients(lambda x: F.softmax(x, 1)), lambda: [uniform(4, 50000), normal(4, 50000)]
    ),
    "cross entropy": (
        F.cross_entropy, lambda: [normal(16, 50000), torch.randint(0, 50000, (16,))]
    ),
    "mse": (F.mse_loss, lambda: [normal(300, 1000), normal(300, 1000)]),
    "l1": (F.l1_loss, lambda: [normal(300, 1000), normal(300, 1000)]),
    "bce": (
        F.binary_cross_entropy_with_logits, lambda: [normal(300, 1000), uniform(300, 1000)]
    ),
    "attention": (
        attention, lambda: [normal(1, 2, 4, 8), normal(1, 2, 8192, 8), uniform(1, 2, 8192, 8)]
    ),
    "average of windows": (lambda x: F.avg_pool2d(x, 100), lambda: [even(2, 3, 100, 100)]),
    "average of planes": (lambda x: F.adaptive_avg_pool2d(x, 1), lambda: [even(2, 3, 100, 100)]),
    "average of quarters": (lambda x: F.adaptive_avg_pool2d(x, 2), lambda: [even(2, 3, 99, 99)]),
    "one row of a table": (
        gradients(lambda w: F.embedding(ZEROS, w)), lambda: [even(20000, 16), normal(4, 16)]
    ),
    "few rows of a table": (
        gradients(lambda w: F.embedding(ROWS, w)), lambda: [uniform(20000, 16), normal(4, 16)]
    ),
    "index_add": (
        lambda x, s: x.index_add(0, ZEROS, s), lambda: [normal(4, 16), uniform(20000, 16)]
    ),
    "scatter_add": (
        lambda x, s: x.scatter_add(0, ROWS, s), lambda: [normal(4), uniform(20000)]
    ),
}  # fmt: skip
CASES = SUMS | MOMENTS | LOSSES


def compiled(function: Function, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    step = amp_ir.compile(import_step(traced(function, inputs)))
    return pytree.tree_leaves(step(*inputs))


def error(found: torch.Tensor, exact: torch.Tensor, scale: float | None = None) -> float:
    """The largest distance, as a share of the largest number (or of `scale`)."""
    if scale is None:
        scale = float(exact.abs().max())
    return float((found.double() - exact).abs().max()) / max(scale, 1e-30)


def check(function: Function, inputs: Sequence[torch.Tensor], scale: float | None = None) -> None:
    """Ours is at most `FACTOR` times as far from float64 as PyTorch's is.

    Or a unit in the last place: a result is rounded once in any case, and how it falls is chance.
    """
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    exact = pytree.tree_leaves(function(*wide))
    eager = pytree.tree_leaves(function(*inputs))
    for ours, theirs, right in zip(compiled(function, inputs), eager, exact, strict=True):
        assert ours.dtype == theirs.dtype
        allowed = max(FACTOR * error(theirs, right, scale), torch.finfo(ours.dtype).eps)
        assert error(ours, right, scale) <= allowed


@pytest.mark.parametrize("name", CASES)
def test_a_long_sum_is_as_exact_as_in_pytorch(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = CASES[name]
    check(function, inputs())


def test_constants_are_normalized_to_nothing() -> None:
    # What is left of a distance, over the root of eps, beside normalized numbers, which are 1.
    check(normed, [even(32, 4, 28, 28)], scale=1.0)


def test_a_confident_loss_keeps_the_small_probabilities() -> None:
    torch.manual_seed(0)
    # The sum of the exponentials is 1 and a little, and rounded: the loss, its logarithm, is off
    # by a unit of 1 however small it is.
    check(F.cross_entropy, confident(), scale=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    ["rows of uniform", "columns of uniform", "all of uniform", "middle", "var", "layer norm",
     "batch norm", "rms norm", "softmax", "cross entropy", "average of planes"],
)  # fmt: skip
def test_low_precision_is_summed_in_float32(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, inputs = CASES[name]
    check(function, [x.to(dtype) if x.is_floating_point() else x for x in inputs()])


@pytest.mark.parametrize("name", ["rows of uniform", "columns of uniform", "all of uniform"])
def test_low_precision_is_summed_to_float32(name: str) -> None:
    torch.manual_seed(0)
    function, inputs = CASES[name]
    check(lambda x: function(x.float()), [x.bfloat16() for x in inputs()])


def test_large_numbers_have_a_variance() -> None:
    # Their sum is not a float32, nor are the squares.
    for x in (torch.tensor([1e38] * 40), torch.tensor([-2e38, 2e38, 1e38]), torch.tensor([1e20])):
        (ours, mean) = compiled(lambda x: torch.var_mean(x, 0, correction=0), [x])
        theirs, right = torch.var_mean(x, 0, correction=0)
        torch.testing.assert_close((ours, mean), (theirs, right), equal_nan=True)


def test_float64_is_summed_in_blocks() -> None:
    x = torch.full((100000,), 0.1, dtype=torch.float64)
    exact = math.fsum(x.tolist())
    for function, given in (
        (lambda x: x.sum(), x),
        (lambda x: x.sum(0), x.reshape(-1, 4)),
        (lambda x: x.sum(1), x.reshape(4, -1)),
    ):
        (ours,) = compiled(function, [given])
        # Nothing is wider: a lane of 1563 elements is a block of 8 or 16, then 98 to 196 blocks,
        # each with half a unit in the last place at most. One by one it would be 1563 to 25000.
        allowed = 0.5 * (16 + 196) * 2**-52
        assert float((ours * ours.numel() / exact - 1).abs().max()) <= allowed


def test_a_sum_of_integers_or_bools_is_exact() -> None:
    x = torch.full((3, 5000), 2**30, dtype=torch.int32)
    for function in (lambda x: x.sum(1), lambda x: (x > 0).sum(0), lambda x: x.cumsum(1)):
        (ours,) = compiled(function, [x])
        assert ours.dtype == torch.int64
        assert torch.equal(ours, function(x))


def test_the_gradient_of_a_convolution_s_weight_takes_blocks_too() -> None:
    torch.manual_seed(0)
    grad, x = uniform(8, 2, 50, 50), uniform(8, 2, 50, 50)
    options = {"strides": [1, 1], "padding": [1, 1], "dilation": [1, 1]}
    shape = (2, 2, 3, 3)
    mod = module_of("amp_ir.conv_backward_weight", [grad, x], weight_shape=shape, **options)
    (ours,) = run_kernels(mod, [grad, x])
    exact = torch.nn.grad.conv2d_weight(x.double(), shape, grad.double(), padding=1)
    assert error(ours, exact) <= torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("function", "right"),
    [(torch.sum, 0.0), (torch.mean, math.nan), (torch.prod, 1.0)],
)
def test_nothing_is_summed_to_the_neutral_element(function: Function, right: float) -> None:
    empty = torch.zeros(3, 0)
    for over in (lambda x: function(x), lambda x: function(x, 1)):
        (ours,) = compiled(over, [empty])
        torch.testing.assert_close(ours, over(empty), equal_nan=True)
        assert torch.isnan(ours).all() if math.isnan(right) else (ours == right).all()


def averages(x: Any) -> Any:
    return R.sum(R.subtract(x, R.mean(x, axis=[1], keepdims=True)), axis=[0]), R.sum(x, axis=[0])


# By what a thread has much of.
ON_A_GPU: dict[str, tuple[Function, Callable[[], torch.Tensor]]] = {
    "a row": (lambda x: R.sum(x, axis=[1]), lambda: even(40, 1100)),
    "a row that blocks share": (R.mean, lambda: even(800000)),
    "lines of a tile": (lambda x: R.sum(x, axis=[0]), lambda: even(70000, 5)),
    "lines of several tiles": (lambda x: R.mean(x, axis=[1]), lambda: even(2, 35000, 5)),
    "rows that are added up too": (averages, lambda: even(5000, 40)),
    "rows that are added up too, wide ones": (
        lambda x: (R.sum(x, axis=[1]), R.sum(x, axis=[0])), lambda: even(600, 1100)
    ),
    "factors": (lambda x: R.prod(x, axis=[1]), lambda: near_one(30, 3000)),
}  # fmt: skip


@in_emulator
def test_a_gpu_s_sums_are_as_exact() -> None:
    torch.manual_seed(0)
    inputs = [make() for _, make in ON_A_GPU.values()]
    bodies = [body for body, _ in ON_A_GPU.values()]
    cases = [
        (build([(tuple(x.shape), "float32")], body), [x])
        for body, x in zip(bodies, inputs, strict=True)
    ]
    results = run_cuda_modules(cases)
    for name, (mod, (x,)), body, found in zip(ON_A_GPU, cases, bodies, results, strict=True):
        exact = interpret(build([(tuple(x.shape), "float64")], body), [x.double()])
        for ours, right, theirs in zip(found, exact, interpret(mod, [x]), strict=True):
            if float(right.abs().max()) < 1e-6:
                continue  # Distances from a mean, whose sum is the mean's rounding.
            # Of what a thread has, blocks; then threads, warps and parts two by two or in float64.
            allowed = max(FACTOR * error(theirs, right), 2 * torch.finfo(torch.float32).eps)
            assert error(ours, right) <= allowed, name
