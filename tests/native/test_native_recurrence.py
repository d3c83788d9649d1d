# SPDX-License-Identifier: Apache-2.0
"""The recurrent layers of oneDNN's library against the same formulas in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from amp_ir.host import native
from prepared_process import run_code
from recurrence_calls import DTYPES, KINDS, check_all
from recurrence_reference import (
    PREFIX,
    Layer,
    Tensors,
    backward,
    expected_backward,
    expected_forward,
    forward,
    given,
)

pytestmark = pytest.mark.skipif(not native.has(f"{PREFIX}lstm"), reason="this build has no oneDNN")

# Steps, samples and the hidden state: nothing but one, odd extents, more than one block of samples.
EXTENTS = [(1, 1, 1), (3, 2, 16), (5, 3, 33), (4, 40, 100), (7, 1, 70)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extents", EXTENTS)
@pytest.mark.parametrize("is_reverse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward(kind, extents, dtype, is_reverse):
    check_all(kind, extents, dtype, is_reverse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_any_number_of_threads(kind, dtype, threads):
    """Columns are dealt to threads, and samples where there are more threads than columns."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_all(kind, (3, 50, 70), dtype, is_reverse=False)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_gives_the_same_bits_each_time(kind, dtype):
    layer = Layer(kind, (6, 20, 96), dtype)
    first, second = forward(layer, False), forward(layer, False)
    first += backward(layer, False, first)
    second += backward(layer, False, second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("isa", ["SSE41", "AVX2", "AVX512_CORE"])
def test_lesser_cpus(isa):
    """Without arithmetic in the dtype, operands are widened; loops have narrower vectors."""
    if "avx512" not in native.function("amp_ir.onednn.isa")():
        pytest.skip("this CPU cannot be told to be a lesser one")
    program = f"""
import torch
from amp_ir.host import native
from recurrence_calls import DTYPES, KINDS, check_all
for kind in KINDS:
    for dtype in DTYPES:
        torch.manual_seed(0)
        check_all(kind, (4, 20, 70), dtype, is_reverse=True)
found = native.function("amp_ir.onednn.isa")()
assert found == {isa.lower()!r}, found
"""
    support = str(Path(__file__).parents[1] / "support")
    done = run_code(program, {"ONEDNN_MAX_CPU_ISA": isa}, folders=[support])
    assert done.returncode == 0, done.stderr


def activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid and tanh of float32 numbers as an LSTM computes them: its products are 0."""
    layer = Layer("lstm", (1, x.numel() // 64, 64), torch.float32)
    layer.gates = x.view(1, -1, 1, 64).expand(1, -1, 4, 64).reshape(1, -1, 256).contiguous()
    layer.weight.zero_()
    layer.hidden.zero_()
    _, _, activated = forward(layer, False)
    parts = activated.view(-1, 4, 64)
    return parts[:, 0].reshape(-1), parts[:, 2].reshape(-1)


def test_sigmoid_and_tanh_are_right_to_two_units_in_the_last_place():
    small = torch.logspace(-38, 0, 2048)
    x = torch.cat([torch.linspace(-87, 110, 8192), small, -small])
    for actual, expected in zip(
        activations(x), (x.double().sigmoid(), x.double().tanh()), strict=True
    ):
        error = (actual.double() - expected).abs() / expected.abs()
        # Numbers below 2^-126 have fewer significant bits.
        assert error[expected.abs() >= 2.0**-126].max() <= 2**-22


def test_sigmoid_and_tanh_saturate_and_keep_nan():
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 104.0, 1e38, -1e38, -104.0] * 8)
    sigmoid, tanh = activations(x)
    torch.testing.assert_close(sigmoid, x.sigmoid(), rtol=0, atol=2.0**-126, equal_nan=True)
    torch.testing.assert_close(tanh, x.tanh(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so(kind, value, dtype):
    """A loss scaler has to see an overflow wherever it happened."""
    layer = Layer(kind, (4, 3, 20), dtype)
    layer.gates[1, 0, 5] = value
    layer.grad[2, 1, 7] = value
    saved = forward(layer, False)
    pairs = list(zip(saved, expected_forward(layer, False), strict=True))
    found = backward(layer, False, saved)
    pairs += zip(found, expected_backward(layer, False, saved), strict=True)
    assert not torch.isfinite(found[0]).all()
    for actual, expected in pairs:
        assert torch.equal(actual.isnan(), expected.isnan())
        finite = expected.isfinite()
        assert torch.equal(actual.isfinite(), finite)
        expected = expected.to(actual.dtype)
        torch.testing.assert_close(actual[~finite], expected[~finite], equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_overflows_float16_is_infinite(kind):
    layer = Layer(kind, (1, 3, 20), torch.float16)
    saved = forward(layer, False)
    layer.grad.fill_(60000.0)
    layer.grad_hidden.fill_(60000.0)
    layer.weight.fill_(1.0)
    assert backward(layer, False, saved)[1 if kind == "lstm" else -1].isinf().any()


def functions(layer: Layer) -> list[tuple[str, Tensors, Tensors]]:
    """Each function's name, operands and places for results."""
    saved = forward(layer, False)
    name = PREFIX + layer.kind
    return [
        (name, layer.operands(), layer.results()),
        (f"{name}_backward", layer.backward_operands(saved), layer.backward_results()),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_workspace_is_known_and_used(kind, dtype):
    layer = Layer(kind, (3, 5, 64), dtype)
    for name, operands, results in functions(layer):
        arguments = given(operands, layer.extents, False, results)
        nbytes = int(native.function(f"{PREFIX}scratch_nbytes")(name, *arguments))
        # The weight as oneDNN lays it out; asking has computed nothing.
        assert nbytes >= layer.weight.numel() * layer.weight.element_size()
        assert results[0].isnan().all()
        native.function(name)(*arguments)
        expected = [one.clone() for one in results]
        for share in (1, 0.5):
            workspace = torch.full((int(nbytes * share),), 0xAA, dtype=torch.uint8)
            native.function(f"{PREFIX}with_scratch")(name, workspace, *arguments)
            assert bool((workspace != 0xAA).any()) == (share == 1)
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_no_sample_at_all():
    layer = Layer("lstm", (3, 0, 8), torch.float32)
    assert [one.numel() for one in forward(layer, False)] == [0, 0, 0]


def message(name: str, operands: Tensors, dims: list[int], results: Tensors) -> str:
    with pytest.raises(Exception) as caught:  # noqa: B017 - the text is what is asserted
        native.function(PREFIX + name)(*given(operands, dims, False, results))
    return str(caught.value).splitlines()[0]


def test_messages():
    layer = Layer("lstm", (2, 3, 8), torch.bfloat16)
    operands, results = layer.operands(), layer.results()
    gates, weight, hidden, cell = operands
    assert message("lstm", [gates.double(), *operands[1:]], [2, 3, 8], results) == (
        "amp_ir.onednn.lstm: gates is float64; expected float32, bfloat16 or float16"
    )
    assert message("lstm", [gates, weight.float(), hidden, cell], [2, 3, 8], results) == (
        "amp_ir.onednn.lstm: weight is float32; expected bfloat16, as gates"
    )
    assert message("lstm", [gates, weight, hidden, cell.bfloat16()], [2, 3, 8], results) == (
        "amp_ir.onednn.lstm: cell is bfloat16; expected float32, in which cells are kept"
    )
    assert message("lstm", operands, [0, 3, 8], results) == (
        "amp_ir.onednn.lstm: dims are [0, 3, 8]; expected [steps, samples, hidden], with steps and "
        "hidden of at least 1"
    )
    assert message("lstm", operands, [2, 3, 9], results) == (
        "amp_ir.onednn.lstm: gates has 192 elements; expected those of [2, 3, 36], one after the "
        "other, for [t, n, h] = [2, 3, 9]"
    )
    transposed = [gates, torch.randn(8, 32).bfloat16().t(), hidden, cell]
    assert message("lstm", transposed, [2, 3, 8], results) == (
        "amp_ir.onednn.lstm: weight has 256 elements with gaps; expected those of [32, 8], one "
        "after the other, for [t, n, h] = [2, 3, 8]"
    )
    assert message("lstm", operands, [2, 3, 8], [results[0][:2], *results[1:]]) == (
        "amp_ir.onednn.lstm: states has 48 elements; expected those of [3, 3, 8], one after the "
        "other, for [t, n, h] = [2, 3, 8]"
    )
    gru = Layer("gru", (2, 3, 8), torch.float32)
    operands = gru.backward_operands(forward(gru, False))
    operands[0] = operands[0].half()
    assert message("gru_backward", operands, [2, 3, 8], gru.backward_results()) == (
        "amp_ir.onednn.gru_backward: grad_hidden is float32; expected float16, as grad"
    )
