# SPDX-License-Identifier: Apache-2.0
"""Sums of products merged: what they become, what is left alone, the numbers, and real models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

import amp_ir
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.location import Location, locations_of, to_span
from amp_ir.rewrites.concat_matmuls import concat_matmuls
from own_recurrence import language_training
from relax_functions import assert_ir_equal
from small_programs import calls, program

# Sums of at most 60 float32 products, 2^-24 a rounding, in another order.
TOLERANCE = 60 * 2**-24


def test_a_sum_of_products_is_a_product_of_concatenations():
    @I.ir_module
    class Before:
        @R.function
        def main(
            g0: R.Tensor((2, 8), "float32"),
            g1: R.Tensor((2, 8), "float32"),
            x0: R.Tensor((2, 8), "float32"),
            x1: R.Tensor((2, 8), "float32"),
        ):
            with R.dataflow():
                t0 = R.permute_dims(g0, axes=[1, 0])
                y0 = R.matmul(t0, x0)
                t1 = R.permute_dims(g1, axes=[1, 0])
                y1 = R.matmul(t1, x1)
                y = R.add(y0, y1)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def main(
            g0: R.Tensor((2, 8), "float32"),
            g1: R.Tensor((2, 8), "float32"),
            x0: R.Tensor((2, 8), "float32"),
            x1: R.Tensor((2, 8), "float32"),
        ):
            with R.dataflow():
                g = R.concat((g0, g1), axis=0)
                t = R.permute_dims(g, axes=[1, 0])
                x = R.concat((x0, x1), axis=0)
                y = R.matmul(t, x)
                R.output(y)
            return y

    assert_ir_equal(concat_matmuls(Before), Expected)


def test_a_concatenation_that_is_there_gives_the_order_and_the_sums_over_rows():
    @I.ir_module
    class Before:
        @R.function
        def main(
            g0: R.Tensor((2, 8), "float32"),
            g1: R.Tensor((2, 8), "float32"),
            x0: R.Tensor((2, 8), "float32"),
            x1: R.Tensor((2, 8), "float32"),
        ):
            with R.dataflow():
                t0 = R.permute_dims(g0, axes=[1, 0])
                y0 = R.matmul(t0, x0)
                s0 = R.sum(g0, axis=[0], keepdims=True)
                b0 = R.reshape(s0, (8,))
                t1 = R.permute_dims(g1, axes=[1, 0])
                y1 = R.matmul(t1, x1)
                s1 = R.sum(g1, axis=[0], keepdims=True)
                b1 = R.reshape(s1, (8,))
                y = R.add(y0, y1)
                b = R.add(b0, b1)
                g = R.concat((g1, g0), axis=0)
                result = (y, b, g)
                R.output(result)
            return result

    @I.ir_module
    class Expected:
        @R.function
        def main(
            g0: R.Tensor((2, 8), "float32"),
            g1: R.Tensor((2, 8), "float32"),
            x0: R.Tensor((2, 8), "float32"),
            x1: R.Tensor((2, 8), "float32"),
        ):
            with R.dataflow():
                g = R.concat((g1, g0), axis=0)
                t = R.permute_dims(g, axes=[1, 0])
                x = R.concat((x1, x0), axis=0)
                y = R.matmul(t, x)
                s = R.sum(g, axis=[0], keepdims=True)
                b = R.reshape(s, (8,))
                result = (y, b, g)
                R.output(result)
            return result

    assert_ir_equal(concat_matmuls(Before), Expected)


def products(rows, *, dtype="float32", out_dtype=None, width=8, change=lambda e, k, y: y):
    """A sum of products of `rows[k]` rows each; `change` may alter the k-th."""

    def build(e, *tensors):
        total = None
        for k, (g, x) in enumerate(zip(tensors[::2], tensors[1::2], strict=True)):
            y = e(op.matmul(e(op.permute_dims(g, [1, 0])), x, out_dtype=out_dtype))
            y = change(e, k, y)
            total = y if total is None else e(op.add(total, y))
        return total

    shapes = [(count, width) for count in rows for _ in range(2)]
    return program(build, *shapes, dtypes=[dtype] * len(shapes))


def test_low_operands_are_merged_where_the_sum_is_in_float32():
    merged = concat_matmuls(products([2, 2, 2], dtype="bfloat16", out_dtype="float32", width=16))
    ((_, product),) = calls(merged, "relax.matmul")
    assert str(product.ty.dtype) == "float32"
    assert str(product.args[0].ty.dtype) == "bfloat16"


@pytest.mark.parametrize(
    ("why", "mod"),
    [
        ("each sum rounds, as the user wrote it", products([2, 2], dtype="float16")),
        ("the operands are larger than the result", products([5, 5])),
        ("one product is not a sum", products([2])),
        (
            "the terms are not products",
            products([2, 2], change=lambda e, _k, y: e(op.exp(y))),
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_would_not_pay_or_may_not_be_is_left(why, mod):
    assert concat_matmuls(mod) is mod, why


def test_products_that_something_else_reads_are_left():
    def build(e, *tensors):
        y = [e(op.matmul(a, b)) for a, b in zip(tensors[::2], tensors[1::2], strict=True)]
        return [e(op.add(e(op.add(y[0], y[1])), y[2])), e(op.exp(y[1]))]

    shapes = [(8, 1), (1, 8)] * 3
    mod = program(build, *shapes)
    merged = concat_matmuls(mod)
    assert len(calls(merged, "relax.matmul")) == 2
    assert len(calls(merged, "relax.add")) == 1


def test_a_product_holds_no_more_than_its_result():
    # A result is 8 x 8 and a term's operands 2 x 16: two fit, and four terms give two products.
    merged = concat_matmuls(products([2, 2, 2, 2, 2]))
    shapes = [[int(n) for n in call.args[1].ty.shape] for _, call in calls(merged, "relax.matmul")]
    assert shapes == [[2, 8], [4, 8], [4, 8]]


def located(mod, places):
    """The module with the k-th matmul at `places[k]`."""
    main, places = mod["main"], iter(places)
    bindings = []
    for binding in main.body.blocks[0].bindings:
        value = binding.value
        if isinstance(value, relax.Call) and value.op.name == "relax.matmul":
            span = to_span(next(places))
            new = relax.Call(value.op, value.args, value.attrs, value.ty_args, span)
            relax.expr._update_type(new, value.ty)
            value = new
        bindings.append(relax.VarBinding(binding.var, value))
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], main.body.body)
    relax.expr._update_type(body, main.body.ty)
    mod["main"] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    return mod


def test_terms_of_one_module_and_phase_are_merged_and_keep_their_lines():
    places = [Location("cell", "backward", "model.py", line) for line in (3, 5)]
    merged = concat_matmuls(located(products([1, 1]), places))
    ((_, product),) = calls(merged, "relax.matmul")
    assert locations_of(product.span) == tuple(places)


@pytest.mark.parametrize(
    "other",
    [
        Location("decoder", "backward"),
        Location("encoder", "forward"),
        Location("encoder", "backward", precision="off"),
    ],
    ids=str,
)
def test_terms_of_two_places_that_rules_tell_apart_are_not_merged(other):
    mod = located(products([1, 1]), [Location("encoder", "backward"), other])
    assert concat_matmuls(mod) is mod


@st.composite
def sums(draw):
    """A sum of products and other terms in some tree, some of them read elsewhere too."""
    rows = draw(st.lists(st.integers(1, 3), min_size=2, max_size=6))
    kinds = draw(st.lists(st.sampled_from("ptns"), min_size=len(rows), max_size=len(rows)))
    together = draw(st.permutations(range(len(rows))))
    shared = draw(st.sets(st.integers(0, 3 * len(rows))))
    joins = draw(st.lists(st.integers(0, 100), min_size=len(rows), max_size=len(rows)))
    has_concat = draw(st.booleans())

    def build(e, *tensors):
        pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
        results, columns = [], []
        for k, (kind, (g, x)) in enumerate(zip(kinds, pairs, strict=True)):
            if kind == "p":
                y = e(op.matmul(e(op.permute_dims(g, [1, 0])), x))
            elif kind == "t":
                flat = e(op.permute_dims(g, [1, 0]))
                y = e(op.matmul(e(op.exp(flat)), x))
            elif kind == "n":
                y = e(op.matmul(e(op.permute_dims(g, [1, 0])), e(op.exp(x))))
            else:
                y = e(op.broadcast_to(e(op.sum(x, axis=[0], keepdims=True)), (8, 8)))
            results.append(y)
            columns.append(e(op.sum(g, axis=[0], keepdims=k % 2 == 0)))
        others = [y for k, y in enumerate(results) if k in shared]
        totals = [_joined(e, results, joins)]
        alike = [one for k, one in enumerate(columns) if k % 2 == 0]
        totals.append(_joined(e, alike, joins))
        if has_concat:
            totals.append(e(op.concat([pairs[k][0] for k in together], 0)))
            totals.append(e(op.concat([pairs[k][1] for k in together], 0)))
        return [*totals, *others]

    shapes = [(count, 8) for count in rows for _ in range(2)]
    return program(build, *shapes)


def _joined(e, terms, joins):
    """The terms added up, in an order that `joins` chooses."""
    terms = list(terms)
    for choice in joins:
        if len(terms) > 1:
            first = terms.pop(choice % len(terms))
            at = choice % len(terms)
            terms[at] = e(op.add(first, terms[at]))
    return terms[0]


@settings(max_examples=60)
@given(sums())
def test_the_merged_step_computes_the_same(mod):
    merged = concat_matmuls(mod)
    relax.analysis.well_formed(merged)
    inputs = [
        torch.randn([int(n) for n in one.ty.shape], dtype=torch.float64)
        for one in mod["main"].params
    ]
    exact = interpret(mod, inputs, float_dtype=torch.float64)
    for got, wanted in zip(
        interpret(merged, inputs, float_dtype=torch.float64), exact, strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    narrow = [one.float() for one in inputs]
    for got, wanted in zip(interpret(merged, narrow), interpret(mod, narrow), strict=True):
        scale = max(float(wanted.abs().max()), 1.0)
        torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE * scale)
    assert concat_matmuls(merged) is merged


def test_a_recurrence_has_one_weight_gradient_a_layer_and_its_gradients_are_right():
    training = language_training()
    mod, _ = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    backward = [
        call
        for _, call in calls(mod.ir, "relax.matmul")
        if locations_of(call.span)[0].phase == "backward"
    ]
    # 4 steps and 2 layers: a gradient of the state a step but the first, and of each weight one.
    of_weights = [call for call in backward if [int(n) for n in call.ty.shape] == [64, 16]]
    assert len(of_weights) == 4
    again = language_training()
    again.step(*again.batch)
    train = amp_ir.compile(mod)
    train(*training.batch)
    for got, wanted in zip(training.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


class _Twice(torch.nn.Module):
    """One weight, used in two places of one module."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(x @ self.weight)
        return x


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
def test_a_weight_used_three_times_trains_as_in_pytorch(amp_dtype):
    model, again = _Twice(), _Twice()
    again.load_state_dict(model.state_dict())
    x = torch.randn(4, 32)

    def step_of(one):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)

        def step(x):
            loss = one(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, optimizer

    step, optimizer = step_of(model)
    mod, args = amp_ir.trace_step(step, (x,), model=model, optimizer=optimizer)
    weight_gradients = [
        call for _, call in calls(mod.ir, "relax.matmul") if int(call.args[1].ty.shape[0]) == 12
    ]
    assert len(weight_gradients) == 1
    if amp_dtype is not None:
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    train = amp_ir.compile(mod)
    before = model.weight.detach().clone()
    train(x)
    step_of(again)[0](x)
    moved = again.weight.detach() - before
    # bfloat16 rounds operands and activations, 2^-9 each, five of them in a row.
    share = 1e-5 if amp_dtype is None else 5 * 2**-8
    error = (model.weight.detach() - again.weight.detach()).norm() / moved.norm()
    assert error < share
