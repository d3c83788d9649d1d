# SPDX-License-Identifier: Apache-2.0
"""Matmuls padded to 16 bytes: what they become, when, and the numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from tvm import relax
from tvm.relax import op as R

import amp_ir
from amp_ir.dialect.registry import call_op
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.strided_view import view_of
from amp_ir.rewrites import align_matmuls as module
from amp_ir.rewrites.align_matmuls import align_matmuls
from cuda_emulator import in_emulator
from relax_functions import assert_ir_equal, build

ROWS, WIDTH, CLASSES = 16, 32, 101
# On a GPU on which an aligned matmul of any size saves more than copies cost.
SLOW = {
    "low": {0: 1.0, 1: 1.0, 2: 1.0, 4: 1.0, 8: 1e9},
    "tf32": {0: 1.0, 1: 1.0, 2: 1.0, 4: 1e9},
}


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding pays for the smallest matmul."""
    monkeypatch.setattr(module, "_RATES", SLOW)


def emit(expr: relax.Expr) -> relax.Var:
    return relax.BlockBuilder.current().emit(expr)


def low(x: relax.Expr, dtype: str = "bfloat16") -> relax.Var:
    return emit(call_op("amp_ir.cast", [x], dtype=dtype))


def wide(x: relax.Expr) -> relax.Var:
    return low(x, "float32")


def head(rows: int = ROWS, width: int = WIDTH, classes: int = CLASSES) -> tvm.IRModule:
    """A head with a bias, its loss and all its gradients, as autocast leaves them."""

    def body(x: Any, w: Any, bias: Any, labels: Any) -> tuple[relax.Expr, ...]:
        weight = low(w)
        product = R.matmul(x, emit(R.permute_dims(weight)), out_dtype="float32")
        logits = low(emit(R.add(emit(product), bias)))
        logp = emit(R.nn.log_softmax(wide(logits), axis=1))
        loss = emit(call_op("amp_ir.nll_loss", [logp, labels], reduction="mean"))
        one = relax.const(1.0, "float32")
        picked = emit(
            call_op(
                "amp_ir.nll_loss_backward",
                [one, labels, emit(relax.TupleGetItem(loss, 1))],
                input_shape=(rows, classes),
                reduction="mean",
                dtype="float32",
            )
        )
        full = emit(call_op("amp_ir.log_softmax_backward", [picked, logp], axis=1))
        gradient = low(full)
        return (
            relax.TupleGetItem(loss, 0),
            R.matmul(gradient, weight, out_dtype="bfloat16"),
            R.matmul(emit(R.permute_dims(gradient)), x, out_dtype="float32"),
            R.sum(full, axis=[0]),
        )

    shapes = [((rows, width), "bfloat16"), ((classes, width), "float32")]
    return build([*shapes, ((classes,), "float32"), ((rows,), "int64")], body)


def padded_head() -> tvm.IRModule:
    """`head()` as it is to be: 101 classes are 104."""

    def own() -> relax.Var:
        places = emit(R.arange(0, 104, 1, "int32"))
        return emit(R.less(places, relax.const(CLASSES, "int32")))

    def padded(x: relax.Expr, *shape: int) -> relax.Var:
        zero = relax.const(0.0, "float32")
        zeros = emit(R.full(relax.ShapeExpr(list(shape)), zero, "float32"))
        return emit(R.concat([x, zeros], axis=0))

    def body(x: Any, w: Any, bias: Any, labels: Any) -> tuple[relax.Expr, ...]:
        weight = low(padded(w, 3, WIDTH))
        product = R.matmul(x, emit(R.permute_dims(weight)), out_dtype="float32")
        product = emit(product)
        logits = wide(low(emit(R.add(product, padded(bias, 3)))))
        logits = emit(R.where(own(), logits, relax.const(-math.inf, "float32")))
        logp = emit(R.nn.log_softmax(logits, axis=1))
        loss = emit(call_op("amp_ir.nll_loss", [logp, labels], reduction="mean"))
        one = relax.const(1.0, "float32")
        picked = emit(
            call_op(
                "amp_ir.nll_loss_backward",
                [one, labels, emit(relax.TupleGetItem(loss, 1))],
                input_shape=(ROWS, 104),
                reduction="mean",
                dtype="float32",
            )
        )
        full = emit(call_op("amp_ir.log_softmax_backward", [picked, logp], axis=1))
        full = emit(R.where(own(), full, relax.const(0.0, "float32")))
        gradient = low(full)
        transposed = emit(R.permute_dims(gradient))
        by_weight = R.matmul(transposed, x, out_dtype="float32")
        return (
            relax.TupleGetItem(loss, 0),
            R.matmul(gradient, weight, out_dtype="bfloat16"),
            R.strided_slice(by_weight, [0], [0], [CLASSES], assume_inbound=True),
            R.strided_slice(R.sum(full, axis=[0]), [0], [0], [CLASSES], assume_inbound=True),
        )

    shapes = [((ROWS, WIDTH), "bfloat16"), ((CLASSES, WIDTH), "float32")]
    return build([*shapes, ((CLASSES,), "float32"), ((ROWS,), "int64")], body)


def test_a_head_its_loss_and_its_gradients_are_padded_together(pays: None) -> None:
    assert_ir_equal(align_matmuls(head()), padded_head())


def run(ir: tvm.IRModule, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return [one.double() for one in interpret(ir, list(inputs))]


def assert_same(ir: tvm.IRModule, *inputs: torch.Tensor) -> tvm.IRModule:
    """The padded program gives the same results but for the order of sums; return it."""
    new = align_matmuls(ir)
    for after, before in zip(run(new, *inputs), run(ir, *inputs), strict=True):
        # 2^-8 is one rounding of bfloat16 the other way.
        torch.testing.assert_close(after, before, rtol=2**-8, atol=1e-5, equal_nan=True)
    return new


def inputs_of(ir: tvm.IRModule, seed: int, classes: int = CLASSES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for one in ir["main"].params:
        shape, dtype = shape_of(one), str(one.ty.dtype)
        if dtype == "int64":
            found.append(torch.randint(0, classes, shape, generator=generator))
        else:
            found.append(torch.randn(shape, generator=generator).to(getattr(torch, dtype)))
    return found


def unaligned(ir: tvm.IRModule, dtype: str = "bfloat16") -> list[relax.Var]:
    """The matmuls of a dtype that read or write rows of no multiple of 16 bytes."""
    flow, found = Dataflow(ir), []
    alignment = 4 if dtype == "float32" else 8
    for variable, call in flow.calls("relax.matmul").items():
        if str(call.args[0].ty.dtype) != dtype:
            continue
        rows = [view_of(one, flow.values).strides for one in call.args if min(shape_of(one)) > 1]
        is_transposed = variable in flow.only_readers("relax.permute_dims")
        if min(shape_of(call)) > 1:
            rows.append((shape_of(call)[0 if is_transposed else 1], 1))
        if any(max(strides) % alignment for strides in rows):
            found.append(variable)
    return found


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 9), st.sampled_from([1, 8, 13, 16]), st.integers(1, 26), st.integers(0, 2**31)
)
def test_any_head_is_aligned_and_keeps_its_numbers(
    rows: int, width: int, classes: int, seed: int
) -> None:
    ir = head(rows, width, classes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_RATES", SLOW)
        new = assert_same(ir, *inputs_of(ir, seed, classes))
    assert unaligned(new) == []


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan, 3e38])
def test_padding_hides_and_makes_no_infinity(pays: None, special: float) -> None:
    """Not where logits, weights or gradients overflow: what is not finite is so at each place."""
    ir = head()
    for position, place in ((0, (3, 5)), (1, (100, 7)), (2, (100,))):
        inputs = inputs_of(ir, 1)
        inputs[position][place] = special
        new = align_matmuls(ir)
        for after, before in zip(run(new, *inputs), run(ir, *inputs), strict=True):
            assert torch.equal(after.isnan(), before.isnan())
            assert torch.equal(after.isinf(), before.isinf())


def product(rows: int, width: int, classes: int, dtype: str) -> tvm.IRModule:
    """Logits that the user gets, of a weight that is stored low."""
    shapes = [((rows, width), dtype), ((classes, width), dtype)]
    return build(shapes, lambda x, w: R.matmul(x, emit(R.permute_dims(w))))


@pytest.mark.parametrize(
    ("ir", "is_padded"),
    [
        # 8192 x 768 x 50257: 5.4 ms less in each matmul, and the padding is written anyway.
        (head(8192, 768, 50257), True),
        # 16 x 32 x 101: less than a launch takes.
        (head(), False),
        # The weight and the logits would be copied: 0.48 ms for 5.4 ms, and 0.04 for 0.005.
        (product(8192, 768, 50257, "bfloat16"), True),
        (product(8, 768, 50257, "bfloat16"), False),
        # A bit of alignment less to gain: 215 TFLOP/s are reached already.
        (product(128, 768, 30522, "float16"), False),
        (product(8192, 768, 50257, "float32"), False),
        (product(8192, 768, 50264, "bfloat16"), False),
    ],
)
def test_what_is_padded_saves_more_than_it_costs(ir: tvm.IRModule, is_padded: bool) -> None:
    assert (align_matmuls(ir) is not ir) == is_padded


def summed_up(rows: int, classes: int, width: int) -> tvm.IRModule:
    """The gradient of a head's input, in float32."""
    return build([((rows, classes), "float32"), ((classes, width), "float32")], R.matmul)


@pytest.mark.parametrize(
    ("ir", "is_padded"),
    [
        # Odd rows are added up: 8.2 ms become 0.1, for copies of 0.13 ms.
        (summed_up(512, 50257, 768), True),
        # 0.3 ms less, for a copy of the weight of 0.05 ms and of the logits of 0.06.
        (product(1024, 768, 30522, "float32"), True),
        (summed_up(1024, 30522, 768), True),
        (summed_up(1024, 30524, 768), False),
        (summed_up(4, 50257, 768), False),
    ],
)
def test_float32_is_padded_under_tf32_alone(ir: tvm.IRModule, is_padded: bool) -> None:
    assert (align_matmuls(ir, allow_tf32=True) is not ir) == is_padded
    assert align_matmuls(ir) is ir


def test_a_value_that_others_read_as_it_is_is_a_slice(pays: None) -> None:
    """A second reader of the logits, which nothing pads, gets its own elements."""

    def body(x: Any, w: Any) -> tuple[relax.Expr, ...]:
        logits = emit(R.matmul(x, emit(R.permute_dims(low(w)))))
        return R.argmax(logits, axis=1), R.sum(logits, axis=[1])

    ir = build([((4, 8), "bfloat16"), ((5, 8), "float32")], body)
    new = assert_same(ir, *inputs_of(ir, 0))
    assert unaligned(new) == []
    assert len(Dataflow(new).calls("relax.strided_slice")) == 1


@pytest.mark.parametrize("special", [1.0, math.inf])
def test_a_product_that_is_multiplied_again_is_masked(pays: None, special: float) -> None:
    """What is padded of a row with an infinity is not 0: 0 * inf is not a number."""

    def body(x: Any, w: Any, v: Any) -> relax.Expr:
        hidden = emit(R.matmul(x, emit(R.permute_dims(low(w)))))
        return R.matmul(hidden, low(v), out_dtype="float32")

    ir = build([((4, 8), "bfloat16"), ((5, 8), "float32"), ((5, 16), "float32")], body)
    inputs = inputs_of(ir, 0)
    inputs[0][1, 2] = special
    inputs[1:] = [one.abs() for one in inputs[1:]]
    assert unaligned(assert_same(ir, *inputs)) == []


def test_a_transposed_result_stays_the_matmul_s_own(pays: None) -> None:
    """A transpose that alone reads a product is how the library writes it."""

    def body(x: Any, w: Any) -> relax.Expr:
        return R.permute_dims(emit(R.matmul(x, emit(R.permute_dims(low(w))))))

    ir = build([((13, 8), "bfloat16"), ((16, 8), "float32")], body)
    flow = Dataflow(assert_same(ir, *inputs_of(ir, 0)))
    assert unaligned(flow.ir) == []
    (variable,) = flow.calls("relax.matmul")
    assert flow.only_readers("relax.permute_dims")[variable] is not None


def test_a_small_reader_of_a_padded_weight_is_padded_too() -> None:
    """It would save less than a launch, and an unpadded weight would be a copy."""

    def body(x: Any, y: Any, z: Any, w: Any) -> tuple[relax.Expr, ...]:
        weight = low(w)
        transposed = emit(R.permute_dims(weight))
        by_rows = R.matmul(weight, emit(R.permute_dims(z)), out_dtype="float32")
        return (
            R.sum(emit(R.matmul(x, transposed)), axis=[0, 1]),
            R.sum(emit(R.matmul(y, emit(R.permute_dims(weight)))), axis=[0, 1]),
            R.sum(emit(by_rows), axis=[0, 1]),
        )

    shapes = [((rows, 768), "bfloat16") for rows in (8192, 8, 16)]
    ir = build([*shapes, ((50257, 768), "float32")], body)
    new = align_matmuls(ir)
    assert unaligned(new) == []
    calls = Dataflow(new).calls("relax.matmul").values()
    assert [shape_of(one) for one in calls] == [(8192, 50264), (8, 50264), (50264, 16)]


class Language(nn.Module):
    """A model of language whose head is its embedding, and has a bias or not."""

    def __init__(self, classes: int, width: int, *, has_bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, classes, bias=has_bias)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(ids))))


def language_step(model: nn.Module, *, is_shifted: bool) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(ids)
        if is_shifted:
            logits, labels = logits[:, :-1], ids[:, 1:]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


@pytest.mark.parametrize(
    ("classes", "width", "has_bias", "is_shifted"),
    [(101, 32, False, True), (30, 32, True, False), (27, 13, True, True)],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32"])
@in_emulator
def test_a_step_on_a_gpu_trains_as_pytorch_does(
    dtype: str, classes: int, width: int, has_bias: bool, is_shifted: bool
) -> None:
    """Memory starts as NaN there: a padded element that is read and not written is seen."""
    from cuda_emulator import device, steps

    torch.manual_seed(0)
    model = Language(classes, width, has_bias=has_bias)
    exact = Language(classes, width, has_bias=has_bias).double()
    exact.load_state_dict(model.state_dict())
    batch = torch.randint(0, classes, (3, 6)), torch.randint(0, classes, (3, 6))
    reference, _ = language_step(exact, is_shifted=is_shifted)
    expected = [reference(*batch).item() for _ in range(3)]
    step, optimizer = language_step(model, is_shifted=is_shifted)
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    mod = mod if dtype == "tf32" else amp_ir.autocast(mod, args, amp_dtype=dtype)
    state = [one for one in mod.state.values() if isinstance(one, torch.Tensor)]
    before = [one.detach().clone() for one in state]
    steps.register_libraries()
    kernels, losses, left = [], [], []

    def spied(ir: tvm.IRModule, **options: Any) -> tvm.IRModule:
        # The emulator's matmuls are not rounded to TF32.
        options["allow_tf32"] = dtype == "tf32"
        new = align_matmuls(ir, **options)
        left.append(unaligned(new, "float32" if dtype == "tf32" else dtype))
        return new

    for rates in (SLOW, module._RATES):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_RATES", rates)
            patch.setattr(module, "align_matmuls", spied)
            with torch.no_grad():
                torch._foreach_copy_(state, before)
            compiled = steps.compile_step(mod)
            device.counters()
            losses.append([compiled(*batch).item() for _ in range(3)])
            kernels.append(device.counters().launches)
    # A loss is an average over logits that are rounded once, by 2^-9 or 2^-12 of each.
    # Only the order of sums is another one in float32.
    rtol = {"bfloat16": 4e-3, "float16": 5e-4, "tf32": 2e-6}[dtype]
    torch.testing.assert_close(losses[0], expected, rtol=rtol, atol=0.0)
    torch.testing.assert_close(losses[0], losses[1], rtol=rtol, atol=0.0)
    assert left[0] == [] and len(left[1]) == (3 if width == 32 else 6)
    if width == 32 and dtype != "tf32":
        # No copy of an operand or a result; under TF32 the weight is one.
        assert kernels[0] == kernels[1]
