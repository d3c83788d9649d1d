# SPDX-License-Identifier: Apache-2.0
"""Every backward op is the gradient of its forward op: references against autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch.nn import functional

from amp_ir.dialect import DECLARATIONS
from dialect_cases import ATTENTION, attention_inputs, gru_inputs, lstm_inputs, rnn_inputs


def reference(op: str, *tensors: torch.Tensor, **options: Any) -> Any:
    return DECLARATIONS[f"amp_ir.{op}"].reference(*tensors, **options)


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def unit(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.9 + 0.05


def gradients(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """(result, a random gradient of it, the gradients of the inputs)."""
    leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in inputs]
    result = function(*leaves)
    grad = torch.randn_like(result)
    floating = [one for one in leaves if one.requires_grad]
    return result.detach(), grad, torch.autograd.grad(result, floating, grad)


ACTIVATIONS: list[tuple[str, dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = [
    ("gelu_backward", {"approximate": "none"}, functional.gelu),
    (
        "gelu_backward",
        {"approximate": "tanh"},
        lambda x: functional.gelu(x, approximate="tanh"),
    ),
    ("silu_backward", {}, functional.silu),
    ("relu_backward", {}, torch.relu),
    ("relu_backward", {"threshold": 0.5}, lambda x: functional.threshold(x, 0.5, 0.0)),
    ("leaky_relu_backward", {"slope": 0.2}, lambda x: functional.leaky_relu(x, 0.2)),
    (
        "elu_backward",
        {"alpha": 1.5, "scale": 1.0, "input_scale": 1.0, "is_result": False},
        lambda x: functional.elu(x, 1.5),
    ),
    (
        "elu_backward",
        {
            "alpha": 1.6732632423543772,
            "scale": 1.0507009873554805,
            "input_scale": 1.0,
            "is_result": False,
        },
        functional.selu,
    ),
    (
        "softplus_backward",
        {"beta": 2.0, "threshold": 1.0},
        lambda x: functional.softplus(x, 2.0, 1.0),
    ),
    (
        "hardtanh_backward",
        {"min_value": -0.5, "max_value": 0.7},
        lambda x: functional.hardtanh(x, -0.5, 0.7),
    ),
    ("hardswish_backward", {}, functional.hardswish),
    ("hardsigmoid_backward", {}, functional.hardsigmoid),
    ("mish_backward", {}, functional.mish),
    ("log_sigmoid_backward", {}, functional.logsigmoid),
    ("shrink_backward", {"bound": 0.5}, lambda x: functional.softshrink(x, 0.5)),
    ("shrink_backward", {"bound": 0.5}, lambda x: functional.hardshrink(x, 0.5)),
]


@pytest.mark.parametrize(("op", "options", "function"), ACTIVATIONS)
def test_activation_of_its_input(op: str, options: dict[str, Any], function: Any):
    x = 3 * double(200)
    _, grad, (expected,) = gradients(function, [x])
    torch.testing.assert_close(reference(op, grad, x, **options), expected)


@pytest.mark.parametrize(
    ("op", "options", "function"),
    [
        ("tanh_backward", {}, torch.tanh),
        ("sigmoid_backward", {}, torch.sigmoid),
        (
            "elu_backward",
            {"alpha": 1.5, "scale": 1.0, "input_scale": 1.0, "is_result": True},
            lambda x: functional.elu(x, 1.5),
        ),
        ("softmax_backward", {"axis": 1}, lambda x: torch.softmax(x, 1)),
        ("log_softmax_backward", {"axis": 0}, lambda x: torch.log_softmax(x, 0)),
    ],
)
def test_activation_of_its_result(op: str, options: dict[str, Any], function: Any):
    result, grad, (expected,) = gradients(function, [double(10, 20)])
    torch.testing.assert_close(reference(op, grad, result, **options), expected)


@pytest.mark.parametrize(
    ("op", "options", "function"),
    [
        (
            "elu",
            {"alpha": 1.5, "scale": 1.0, "input_scale": 1.0},
            lambda x: functional.elu(x, 1.5),
        ),
        (
            "softplus",
            {"beta": 2.0, "threshold": 1.0},
            lambda x: functional.softplus(x, 2.0, 1.0),
        ),
        ("mish", {}, functional.mish),
        ("log_sigmoid", {}, functional.logsigmoid),
        ("softshrink", {"bound": 0.5}, lambda x: functional.softshrink(x, 0.5)),
        ("log1p", {}, torch.log1p),
        ("expm1", {}, torch.expm1),
    ],
)
def test_forward_activation_is_pytorchs_also_at_its_limits(
    op: str, options: dict[str, Any], function: Any
):
    extremes = torch.tensor([0.0, -0.0, 50.0, -50.0, 1e-9, -1e-9, float("nan")]).double()
    x = torch.cat([3 * double(100).abs() if op == "log1p" else 3 * double(100), extremes])
    torch.testing.assert_close(
        reference(op, x, **options), function(x), rtol=1e-12, atol=1e-12, equal_nan=True
    )


LOSSES: dict[str, tuple[dict[str, Any], Callable[..., torch.Tensor]]] = {
    "mse_loss": ({}, functional.mse_loss),
    "l1_loss": ({}, functional.l1_loss),
    "smooth_l1_loss": ({"beta": 0.7}, functional.smooth_l1_loss),
    "huber_loss": ({"delta": 0.7}, functional.huber_loss),
    "soft_margin_loss": ({}, functional.soft_margin_loss),
    "binary_cross_entropy": ({}, functional.binary_cross_entropy),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_its_gradient(name: str, reduction: str):
    options, function = LOSSES[name]
    make = unit if name == "binary_cross_entropy" else double
    pred, target = make(4, 5), make(4, 5)
    options = {**options, "reduction": reduction}
    result, grad, (expected,) = gradients(lambda x: function(x, target, **options), [pred])
    torch.testing.assert_close(reference(name, pred, target, **options), result)
    got = reference(f"{name}_backward", grad, pred, target, **options)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(5,), (6, 5), (3, 5, 2, 4)], ids=str)
@pytest.mark.parametrize("has_weight", [False, True])
def test_nll_loss_and_its_gradient(reduction: str, shape: tuple[int, ...], has_weight: bool):
    axis = 1 if len(shape) > 1 else 0
    target = torch.randint(0, 5, shape[:axis] + shape[axis + 1 :])
    if target.ndim:
        target.view(-1)[1] = -100
    weight = [unit(5)] if has_weight else []
    logp = torch.log_softmax(double(*shape), axis)
    result, grad, (expected,) = gradients(
        lambda x: functional.nll_loss(x, target, *weight, reduction=reduction), [logp]
    )
    options = {"reduction": reduction, "has_weight": has_weight}
    loss, total = reference("nll_loss", logp, target, *weight, **options)
    torch.testing.assert_close(loss, result)
    got = reference("nll_loss_backward", grad, target, total, *weight, input_shape=shape, **options)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("axes", [1, 2])
def test_layer_norm(axes: int):
    x = double(4, 3, 5)
    shape = x.shape[-axes:]
    weight, bias = double(*shape), double(*shape)
    result, grad, expected = gradients(
        lambda x, w, b: functional.layer_norm(x, shape, w, b, 1e-5), [x, weight, bias]
    )
    options = {"ndim_normalized": axes}
    y, mean, rstd = reference("layer_norm", x, weight, bias, eps=1e-5, **options)
    torch.testing.assert_close(y, result)
    dx = reference("layer_norm_backward_input", grad, x, mean, rstd, weight, **options)
    rest = reference("layer_norm_backward_weight", grad, x, mean, rstd, **options)
    torch.testing.assert_close((dx, *rest), expected)


def test_rms_norm():
    x, weight = double(4, 3, 5), double(5)
    result, grad, expected = gradients(
        lambda x, w: functional.rms_norm(x, (5,), w, 1e-5), [x, weight]
    )
    y, rstd = reference("rms_norm", x, weight, ndim_normalized=1, eps=1e-5)
    torch.testing.assert_close(y, result)
    dx = reference("rms_norm_backward_input", grad, x, rstd, weight, ndim_normalized=1)
    dw = reference("rms_norm_backward_weight", grad, x, rstd, ndim_normalized=1)
    torch.testing.assert_close((dx, dw), expected)


def test_group_norm():
    x, weight, bias = double(3, 6, 4, 2), double(6), double(6)
    result, grad, expected = gradients(
        lambda x, w, b: functional.group_norm(x, 3, w, b, 1e-5), [x, weight, bias]
    )
    y, mean, rstd = reference("group_norm", x, weight, bias, groups=3, eps=1e-5)
    torch.testing.assert_close(y, result)
    dx = reference("group_norm_backward_input", grad, x, mean, rstd, weight, groups=3)
    rest = reference("group_norm_backward_weight", grad, x, mean, rstd, groups=3)
    torch.testing.assert_close((dx, *rest), expected)


def test_batch_norm_and_its_running_statistics():
    x, weight, bias = double(3, 6, 4, 2), double(6), double(6)
    running = [double(6), unit(6)]
    updated = [one.clone() for one in running]
    result, grad, expected = gradients(
        lambda x, w, b: functional.batch_norm(x, *updated, w, b, True, 0.2, 1e-5),
        [x, weight, bias],
    )
    y, mean, rstd, *new = reference("batch_norm", x, weight, bias, *running, momentum=0.2, eps=1e-5)
    torch.testing.assert_close(y, result)
    torch.testing.assert_close(new, updated)
    got = reference("batch_norm_backward", grad, x, weight, mean, rstd)
    torch.testing.assert_close(got, expected)


@attrs.frozen
class Convolution:
    x: tuple[int, ...]
    weight: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1


CONVOLUTIONS = [
    Convolution((2, 3, 9), (4, 3, 3), (2,), (1,), (1,)),
    Convolution((2, 4, 7, 8), (6, 2, 3, 2), (2, 1), (1, 0), (1, 2), 2),
    Convolution((2, 2, 4, 5, 6), (3, 2, 2, 3, 1), (1, 2, 1), (0, 1, 0), (1, 1, 1)),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: f"{len(case.strides)}d")
def test_conv(case: Convolution):
    x, weight = double(*case.x), double(*case.weight)
    options = attrs.asdict(case, filter=lambda field, _: field.name not in ("x", "weight"))
    convolve = getattr(functional, f"conv{len(case.strides)}d")
    result, grad, expected = gradients(
        lambda x, w: convolve(x, w, None, case.strides, case.padding, case.dilation, case.groups),
        [x, weight],
    )
    torch.testing.assert_close(reference("conv", x, weight, **options), result)
    dx = reference("conv_backward_input", grad, weight, input_shape=case.x, **options)
    dw = reference("conv_backward_weight", grad, x, weight_shape=case.weight, **options)
    torch.testing.assert_close((dx, dw), expected)


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: f"{len(case.strides)}d")
def test_conv_transpose_and_the_gradients_its_docstring_gives(case: Convolution):
    n = len(case.strides)
    x, weight = double(2, case.weight[0], *case.x[2:]), double(*case.weight)
    options = attrs.asdict(case, filter=lambda field, _: field.name not in ("x", "weight"))
    convolve = getattr(functional, f"conv_transpose{n}d")
    output_padding = tuple(stride - 1 for stride in case.strides)
    result, grad, expected = gradients(
        lambda x, w: convolve(
            x, w, None, case.strides, case.padding, output_padding, case.groups, case.dilation
        ),
        [x, weight],
    )
    got = reference("conv_transpose", x, weight, output_shape=tuple(result.shape), **options)
    torch.testing.assert_close(got, result)
    dx = reference("conv", grad, weight, **options)
    dw = reference("conv_backward_weight", x, grad, weight_shape=case.weight, **options)
    torch.testing.assert_close((dx, dw), expected)


WINDOWS: list[dict[str, Any]] = [
    {"kernel": (3,), "strides": (2,), "padding": (1,)},
    {"kernel": (3, 2), "strides": (2, 1), "padding": (1, 0)},
    {"kernel": (2, 2, 3), "strides": (1, 2, 3), "padding": (0, 1, 1)},
]
SPACE = (7, 8, 6)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: f"{len(window['kernel'])}d")
def test_max_pool(window: dict[str, Any], ceil_mode: bool):
    n = len(window["kernel"])
    x = double(2, 3, *SPACE[:n])
    options = {**window, "dilation": (2,) + (1,) * (n - 1), "ceil_mode": ceil_mode}
    pool = getattr(functional, f"max_pool{n}d")
    result, grad, (expected,) = gradients(lambda x: pool(x, *options.values()), [x])
    y, indices = reference("max_pool", x, **options)
    torch.testing.assert_close(y, result)
    shape = tuple(x.shape)
    got = reference("max_pool_backward", grad, indices, input_shape=shape, **options)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("count_include_pad", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: f"{len(window['kernel'])}d")
def test_avg_pool(window: dict[str, Any], ceil_mode: bool, count_include_pad: bool):
    n = len(window["kernel"])
    x = double(2, 3, *SPACE[:n])
    options = {**window, "ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
    pool = getattr(functional, f"avg_pool{n}d")
    result, grad, (expected,) = gradients(lambda x: pool(x, *options.values()), [x])
    torch.testing.assert_close(reference("avg_pool", x, **options), result)
    got = reference("avg_pool_backward", grad, input_shape=tuple(x.shape), **options)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_adaptive_pools(n: int):
    x, size = double(2, 3, *SPACE[:n]), (3, 5, 4)[:n]
    shape = {"input_shape": tuple(x.shape), "ndim_space": n}
    average = getattr(functional, f"adaptive_avg_pool{n}d")
    result, grad, (expected,) = gradients(lambda x: average(x, size), [x])
    torch.testing.assert_close(reference("adaptive_avg_pool", x, output_size=size), result)
    got = reference("adaptive_avg_pool_backward", grad, **shape)
    torch.testing.assert_close(got, expected)

    largest = getattr(functional, f"adaptive_max_pool{n}d")
    result, grad, (expected,) = gradients(lambda x: largest(x, size), [x])
    y, indices = reference("adaptive_max_pool", x, output_size=size)
    torch.testing.assert_close(y, result)
    got = reference("adaptive_max_pool_backward", grad, indices, **shape)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding(padding_idx: int | None):
    ids = torch.tensor([[2, 0, 2], [4, 2, 0]])
    result, grad, (expected,) = gradients(
        lambda w: functional.embedding(ids, w, padding_idx), [double(5, 3)]
    )
    got = reference("embedding_backward", grad, ids, num_embeddings=5, padding_idx=padding_idx)
    torch.testing.assert_close(got, expected)
    assert result.shape == (2, 3, 3)


@pytest.mark.parametrize("note", ATTENTION)
def test_attention(note: str):
    torch.manual_seed(0)
    options, rest_of = ATTENTION[note]
    q, k, v = (one.double() for one in attention_inputs())
    rest = [one.double() if one.is_floating_point() else one for one in rest_of()]
    result, grad, expected = gradients(
        lambda *qkv: reference("attention", *qkv, *rest, **options)[0], [q, k, v]
    )
    out, lse = reference("attention", q, k, v, *rest, **options)
    got = reference("attention_backward", grad, q, k, v, out, lse, *rest, **options)
    torch.testing.assert_close(got, expected)
    assert result.isfinite().all() and all(one.isfinite().all() for one in expected)


@pytest.mark.parametrize("note", ["plain", "causal", "mask"])
def test_attention_is_pytorchs(note: str):
    options, rest_of = ATTENTION[note]
    q, k, v = (one.double() for one in attention_inputs())
    rest = rest_of()
    got, _ = reference("attention", q, k, v, *rest, **options)
    expected = functional.scaled_dot_product_attention(
        q, k, v, *rest, is_causal=options["is_causal"], scale=options["scale"]
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_lstm(reverse: bool):
    torch.manual_seed(0)
    inputs = [one.double() for one in lstm_inputs()]
    states, cells, activated = reference("lstm", *inputs, reverse=reverse)
    output, last = (slice(0, -1), 0) if reverse else (slice(1, None), -1)

    def results(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = reference("lstm", *given, reverse=reverse)
        return made[0][output], made[0][last], made[1][last]

    above = [torch.randn_like(one) for one in results(*inputs)]
    of_gates, of_hidden, of_cell = reference(
        "lstm_backward", *above, activated, cells, inputs[1], reverse=reverse
    )
    expected = vector_jacobian(results, inputs, above)
    previous = states[1:] if reverse else states[:-1]
    of_weight = of_gates.flatten(0, 1).T @ previous.flatten(0, 1)
    torch.testing.assert_close((of_gates, of_weight, of_hidden, of_cell), expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_gru(reverse: bool):
    torch.manual_seed(0)
    inputs = [one.double() for one in gru_inputs()]
    states, activated = reference("gru", *inputs, reverse=reverse)
    output, last = (slice(0, -1), 0) if reverse else (slice(1, None), -1)

    def results(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = reference("gru", *given, reverse=reverse)[0]
        return made[output], made[last]

    above = [torch.randn_like(one) for one in results(*inputs)]
    of_gates, of_recurrent, of_hidden = reference(
        "gru_backward", *above, activated, states, inputs[1], reverse=reverse
    )
    expected = vector_jacobian(results, inputs, above)
    previous = states[1:] if reverse else states[:-1]
    of_weight = of_recurrent.flatten(0, 1).T @ previous.flatten(0, 1)
    of_bias = of_recurrent.sum((0, 1))
    torch.testing.assert_close((of_gates, of_weight, of_bias, of_hidden), expected)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["rnn_tanh", "rnn_relu"])
def test_rnn(kind: str, reverse: bool):
    torch.manual_seed(0)
    inputs = [one.double() for one in rnn_inputs()]
    states = reference(kind, *inputs, reverse=reverse)
    output, last = (slice(0, -1), 0) if reverse else (slice(1, None), -1)

    def results(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = reference(kind, *given, reverse=reverse)
        return made[output], made[last]

    above = [torch.randn_like(one) for one in results(*inputs)]
    of_gates, of_hidden = reference(f"{kind}_backward", *above, states, inputs[1], reverse=reverse)
    expected = vector_jacobian(results, inputs, above)
    previous = states[1:] if reverse else states[:-1]
    of_weight = of_gates.flatten(0, 1).T @ previous.flatten(0, 1)
    torch.testing.assert_close((of_gates, of_weight, of_hidden), expected)


def vector_jacobian(
    function: Callable[..., tuple[torch.Tensor, ...]],
    inputs: list[torch.Tensor],
    above: list[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The gradients of the inputs, `above` being those of the results."""
    leaves = [one.clone().requires_grad_() for one in inputs]
    return torch.autograd.grad(function(*leaves), leaves, above)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_recurrent_layers_are_pytorchs(kind: str, reverse: bool):
    """PyTorch's bidirectional layer has both directions; each is compared with its half."""
    torch.manual_seed(0)
    width = 5
    name, _, nonlinearity = kind.partition("_")
    options = {"nonlinearity": nonlinearity} if nonlinearity else {}
    layer = getattr(torch.nn, name.upper())(4, width, bidirectional=True, **options).double()
    x, initial = double(3, 2, 4), [double(2, 2, width) for _ in range(2 if kind == "lstm" else 1)]
    output, last = layer(x, tuple(initial) if kind == "lstm" else initial[0])
    of_input, of_state, *biases = layer.all_weights[int(reverse)]
    start = [one[int(reverse)] for one in initial]
    if kind == "lstm":
        gates = x @ of_input.T + sum(biases)
        states, cells, _ = reference("lstm", gates, of_state, *start, reverse=reverse)
        expected_cell = last[1][int(reverse)]
        torch.testing.assert_close(cells[0 if reverse else -1], expected_cell)
    elif kind.startswith("rnn"):
        gates = x @ of_input.T + sum(biases)
        states = reference(kind, gates, of_state, *start, reverse=reverse)
    else:
        gates = x @ of_input.T + biases[0]
        states, _ = reference("gru", gates, of_state, biases[1], *start, reverse=reverse)
    half = output[..., width:] if reverse else output[..., :width]
    torch.testing.assert_close(states[:-1] if reverse else states[1:], half)
    assert torch.equal(states[-1 if reverse else 0], start[0])
