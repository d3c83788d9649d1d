# SPDX-License-Identifier: Apache-2.0
"""What autocast does to small programs, and the errors of wrong uses."""

from __future__ import annotations

import functools
import itertools
import threading

import pytest
import torch
import tvm
from tvm import relax, tirx
from tvm.relax import op

import amp_ir
from amp_ir.amp import CustomTypeHint, PrimType, check_dtype, custom_type_hint, hint_for_floats
from amp_ir.amp.autocast import autocast
from amp_ir.amp.policies import POLICIES
from amp_ir.dialect.registry import call_op
from amp_ir.errors import OptionError, RuleError
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.location import Location, to_span
from small_programs import B, W, X, calls, dtypes_of, program


def count_casts(mod):
    return len(calls(mod, "amp_ir.cast"))


LOW = ["float16", "bfloat16"]


@pytest.mark.parametrize("low", LOW)
def test_matmul_is_low_softmax_is_full_and_the_interface_stays(low):
    mod = program(lambda e, x, w: e(op.nn.softmax(e(op.matmul(x, w)))), X, W)
    out = autocast(mod, amp_dtype=low)
    relax.analysis.well_formed(out)
    assert dtypes_of(out, "relax.matmul") == [([low, low], low)]
    assert dtypes_of(out, "relax.nn.softmax") == [(["float32"], "float32")]
    assert out["main"].ret_ty == mod["main"].ret_ty


def test_an_output_of_a_matmul_is_written_in_float32_directly():
    out = autocast(program(lambda e, x, w: e(op.matmul(x, w)), X, W))
    assert dtypes_of(out, "relax.matmul") == [(["float16", "float16"], "float32")]
    assert count_casts(out) == 2


def test_a_weight_and_its_transpose_share_one_cast():
    def build(e, x, w):
        return e(op.matmul(e(op.matmul(x, w)), e(op.permute_dims(w))))

    out = autocast(program(build, X, W))
    assert count_casts(out) == 2  # x and w, once each


def test_gradients_of_parameters_leave_in_float32():
    backward = to_span(Location(phase="backward"))
    optimizer = to_span(Location(phase="optimizer"))

    def at(span, call):
        return relax.Call(call.op, list(call.args), call.attrs, [], span)

    def build(e, x, grad, w):
        gradient = e(at(backward, op.matmul(e(op.permute_dims(x)), grad)))
        step = e(at(optimizer, op.multiply(gradient, relax.const(0.1))))
        return e(at(optimizer, op.subtract(w, step)))

    out = autocast(program(build, X, X, W), amp_dtype="bfloat16")
    assert dtypes_of(out, "relax.matmul") == [(["bfloat16", "bfloat16"], "float32")]
    assert dtypes_of(out, "relax.subtract") == [(["float32", "float32"], "float32")]
    (_, call), *_ = calls(out, "relax.matmul")
    assert call.span == backward


def test_what_autocast_may_not_touch_stays():
    def build(e, x, i, d, flag):
        kept = e(op.where(flag, x, x))
        return [e(op.add(i, i)), e(op.multiply(d, d)), e(op.logical_not(flag)), kept]

    mod = program(build, X, X, X, X, dtypes=["float32", "int64", "float64", "bool"])
    out = autocast(mod)
    assert dtypes_of(out, "relax.add") == [(["int64", "int64"], "int64")]
    assert dtypes_of(out, "relax.multiply") == [(["float64", "float64"], "float64")]
    assert out["main"].ret_ty == mod["main"].ret_ty


@pytest.mark.parametrize(
    ("constant", "low", "stays_full"),
    [
        (-1e9, "float16", True),
        (-1e9, "bfloat16", False),
        (-3.4028234663852886e38, "bfloat16", True),
        (float("-inf"), "float16", False),
        (1e-12, "float16", True),
        (1e-12, "bfloat16", False),
        (0.5, "float16", False),
    ],
)
def test_a_constant_that_low_cannot_hold_keeps_its_op_in_float32(constant, low, stays_full):
    def build(e, x, w):
        y = e(op.add(e(op.matmul(x, w)), relax.const(constant)))
        return e(op.matmul(y, w))

    out = autocast(program(build, X, W), amp_dtype=low)
    plan_full = dtypes_of(out, "relax.add")[0][1] == "float32"
    exact = constant in (float("-inf"), 0.5)
    assert plan_full == (stays_full or not exact)


def test_a_large_constant_is_followed_through_the_ops_that_carry_it():
    def build(e, x, w):
        mask = e(op.multiply(x, relax.const(-1e9)))
        scores = e(op.add(e(op.matmul(x, w)), mask))
        return [e(op.nn.softmax(e(op.reshape(scores, (32,))))), e(op.sum(scores, [0]))]

    out = autocast(program(build, X, W), amp_dtype="float16")
    inputs = [torch.ones(X), torch.eye(8)]
    assert dtypes_of(out, "relax.add")[0][1] == "float32"
    assert torch.isfinite(interpret(out, inputs)[1]).all()


def test_nothing_on_the_way_to_a_phase_is_rounded():
    def build(e, position, frequency):
        angle = e(op.matmul(position, frequency))
        return [e(op.sin(e(op.reshape(angle, (64,))))), e(op.matmul(angle, angle))]

    out = autocast(program(build, (8, 1), (1, 8)), amp_dtype="bfloat16")
    position = torch.arange(1000.0, 1008.0).reshape(8, 1)
    frequency = torch.linspace(0.1, 1, 8).reshape(1, 8)
    sine, _ = interpret(out, [position, frequency])
    expected = torch.sin((position * frequency).reshape(64))
    assert torch.allclose(sine, expected, atol=1e-4)  # float32: 1000 ulp is 6e-5


def test_a_cast_of_the_users_is_honoured():
    def build(e, x, w):
        return e(op.matmul(e(op.astype(e(op.astype(x, "float16")), "float32")), w))

    out = autocast(program(build, X, W), amp_dtype="bfloat16")
    assert dtypes_of(out, "relax.astype") == [
        (["float32"], "float16"),
        (["float16"], "float32"),
    ]


def test_statistics_of_a_normalization_stay_float32():
    def build(e, x, w, b):
        options = {"ndim_normalized": 1, "eps": 1e-5, "has_weight": True, "has_bias": True}
        y = e(op.matmul(x, w))
        norm = e(call_op("amp_ir.layer_norm", [y, b, b], **options))
        return [e(op.matmul(norm[0], w)), norm[1]]

    mod = program(build, X, W, B)
    out = autocast(mod, amp_dtype="bfloat16")
    relax.analysis.well_formed(out)
    assert out["main"].ret_ty == mod["main"].ret_ty


def test_results_take_out_dtype():
    mod = program(lambda e, x, w: [e(op.matmul(x, w)), e(op.nn.softmax(x))], X, W)
    out = autocast(mod, amp_dtype="float16", out_dtype="float16")
    assert [str(field.dtype) for field in out["main"].ret_ty.fields] == ["float16", "float16"]
    assert dtypes_of(out, "relax.matmul")[0][1] == "float16"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("placement", ["cut", "greedy"])
def test_every_pair_of_amp_dtype_and_out_dtype_works(policy, placement):
    mod = program(
        lambda e, x, w: [e(op.matmul(x, w)), e(op.exp(op.nn.relu(x))), e(op.argmax(x, 1))], X, W
    )
    inputs = [torch.randn(X) / 4, torch.randn(W)]
    true = interpret(mod, inputs, float_dtype=torch.float64)
    for amp_dtype, out_dtype in itertools.product((*LOW, "float32"), (None, *LOW, "float32")):
        out = autocast(
            mod, amp_dtype=amp_dtype, out_dtype=out_dtype, policy=policy, placement=placement
        )
        relax.analysis.well_formed(out)
        found = interpret(out, inputs)
        assert [str(one.dtype)[6:] for one in found[:2]] == [out_dtype or "float32"] * 2
        for mine, exact in zip(found[:2], true, strict=False):
            # Three roundings to bfloat16, of 2^-9 each.
            assert (mine.double() - exact).norm() <= 3 * 2.0**-9 * exact.norm()
        assert torch.equal(found[2], true[2])


def test_an_out_dtype_behind_autocast_is_refused():
    once = autocast(program(lambda e, x, w: e(op.matmul(x, w)), X, W), amp_dtype="bfloat16")
    assert autocast(once, amp_dtype="bfloat16", out_dtype="float32") is once
    with pytest.raises(OptionError) as error:
        autocast(once, amp_dtype="bfloat16", out_dtype="float16")
    assert str(error.value) == (
        "the module went through autocast already, with float32 results; apply "
        "out_dtype='float16' to the module before that"
    )


def test_casts_carry_the_place_of_their_consumer():
    here = to_span(Location(module="encoder", file="model.py", line=3))

    def build(e, x, w):
        product = op.matmul(x, w)
        return e(relax.Call(product.op, [x, w], product.attrs, [], here))

    out = autocast(program(build, X, W))
    assert all(call.span == here for _, call in calls(out, "amp_ir.cast"))


def cast_bias_add(args, ret_type, amp_dtype):
    """Follow the input data type, as in RAF's document."""
    target_dtype = amp_dtype if check_dtype(args[0].ty, amp_dtype) else "float32"
    return [hint_for_floats(argument.ty, target_dtype) for argument in args]


def never_cast_bias_add(args, ret_type, amp_dtype):
    """Custom bias add casting rule."""
    return [PrimType("float32"), PrimType("float32")]


def always_cast_bias_add(args, ret_type, amp_dtype):
    """Everything low."""
    return [PrimType(amp_dtype), PrimType(amp_dtype)]


def linear(e, x, w, b):
    return e(op.matmul(e(op.add(e(op.matmul(x, w)), b)), w))


def test_the_rules_of_rafs_document_work_with_our_names():
    mod = program(linear, X, W, B)
    with CustomTypeHint({"relax.add": never_cast_bias_add}):
        never = autocast(mod)
    with CustomTypeHint({"relax.add": cast_bias_add}):
        follows = autocast(mod)
    with CustomTypeHint({"relax.add": always_cast_bias_add}):
        always = autocast(mod)
    default = autocast(mod)
    assert dtypes_of(never, "relax.add") == [(["float32", "float32"], "float32")]
    assert dtypes_of(always, "relax.add") == [(["float16", "float16"], "float16")]
    assert dtypes_of(follows, "relax.add") == dtypes_of(default, "relax.add")


def test_custom_hints_nest_survive_exceptions_and_stay_in_their_thread():
    find_rule = functools.partial(custom_type_hint.find_rule, POLICIES["default"])
    seen = []
    default = find_rule("relax.add")
    with CustomTypeHint({"relax.add": never_cast_bias_add}):
        with pytest.raises(KeyError), CustomTypeHint({"relax.add": always_cast_bias_add}):
            assert find_rule("relax.add") is always_cast_bias_add
            raise KeyError
        assert find_rule("relax.add") is never_cast_bias_add
        thread = threading.Thread(target=lambda: seen.append(find_rule("relax.add")))
        thread.start()
        thread.join()
    assert (seen, find_rule("relax.add")) == ([default], default)


def test_ops_without_a_rule_are_listed_together(monkeypatch):
    from amp_ir.amp.hints import RULES

    monkeypatch.delitem(RULES, "relax.add")
    monkeypatch.delitem(RULES, "relax.tanh")
    mod = program(lambda e, x: e(op.add(e(op.tanh(e(op.tanh(x)))), x)), X)
    with pytest.raises(RuleError) as raised:
        autocast(mod)
    message = str(raised.value)
    assert "relax.add (1 call, first: `" in message
    assert "relax.tanh (2 calls, first: `lv` in step (forward))" in message
    assert '@amp_ir.amp.type_hint("relax.add", "relax.tanh")' in message
    assert autocast(mod, on_unknown="float32")["main"].ret_ty == mod["main"].ret_ty


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amp_dtype": "fp16"}, "amp_dtype is 'fp16'; expected one of 'float16', 'bfloat16'"),
        ({"out_dtype": "half"}, "out_dtype is 'half'"),
        ({"placement": "best"}, "placement is 'best'; expected one of 'cut', 'greedy'"),
        ({"on_unknown": "skip"}, "on_unknown is 'skip'"),
    ],
)
def test_a_wrong_option_names_those_accepted(options, message):
    with pytest.raises(OptionError, match=message):
        autocast(program(lambda e, x: e(op.abs(x)), X), **options)


def test_another_dtype_after_autocast_is_refused():
    once = autocast(program(lambda e, x, w: e(op.matmul(x, w)), X, W))
    with pytest.raises(OptionError, match="went through autocast with amp_dtype='float16' already"):
        autocast(once, amp_dtype="bfloat16")


def test_what_is_no_module_is_refused():
    with pytest.raises(OptionError) as error:
        autocast(3)
    assert str(error.value) == (
        "autocast takes a StepModule or an IRModule, got int; make one with mod, args = "
        "amp_ir.trace_step(step, example_batch, model=..., optimizer=...)"
    )


MAIN = (
    "amp_ir reads the Relax function `main`, and the module has {}; give the program's function "
    "this name"
)
STATIC = (
    "{}, and autocast takes tensors of static shape; give every extent a number, as "
    'relax.transform.BindSymbolicVars({{"n": 8}}, "main") does'
)
CALLS = (
    "`made` in `main` is bound to {}, and autocast takes calls of ops and tuples only; inline "
    "functions, and take out branches and what is no tensor first"
)
TENSOR = relax.TensorType(X, "float32")
PAIR = relax.TupleType([TENSOR, TENSOR])
SYMBOLIC = relax.TensorType((tirx.Var("n", "int64"), 8), "float32")


def module(expr, ty=TENSOR, name="main", result=None):
    """A module of one function, whose input is a `ty` and whose one call is `expr(input)`."""
    a, made = relax.Var("a", ty), relax.DataflowVar("made", TENSOR if result is None else result)
    block = relax.DataflowBlock([relax.VarBinding(made, expr(a))])
    body = relax.SeqExpr([block], relax.const(1.0))
    function = relax.Function([a], body, relax.TensorType((), "float32"))
    return tvm.IRModule({name: function.with_attr("global_symbol", name)})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: tvm.IRModule({}), MAIN.format("no Relax function")),
        (lambda: module(op.abs, name="step"), MAIN.format("step")),
        (
            lambda: module(lambda a: relax.TupleGetItem(a, 0), PAIR),
            f"input `a` of `main` is {PAIR}, and autocast takes tensors; make each tensor of it an "
            "input of its own",
        ),
        (
            lambda: module(op.abs, SYMBOLIC),
            STATIC.format(f"input `a` of `main` is {SYMBOLIC}"),
        ),
        (
            lambda: module(op.abs, result=relax.TensorType(dtype="float32", ndim=2)),
            STATIC.format('`made` in `main` is R.Tensor(dtype="float32", ndim=2)'),
        ),
        (
            lambda: module(op.shape_of, result=relax.ShapeType([4, 8])),
            "`made` in `main` is R.Shape([4, 8]), and autocast takes calls that return tensors or "
            "tuples of them; take it out of `main` first",
        ),
        (lambda: module(lambda _: relax.ShapeExpr([4, 8])), CALLS.format("ShapeExpr")),
        (
            lambda: module(lambda a: relax.Call(relax.ExternFunc("f"), [a])),
            CALLS.format('a call of R.ExternFunc("f")'),
        ),
    ],
    ids=["empty", "main", "tuple", "symbolic", "unknown", "shape", "alias", "function"],
)
def test_a_module_that_autocast_cannot_read_is_refused_in_words(made, message):
    with pytest.raises(OptionError) as error:
        amp_ir.autocast(made(), amp_dtype="bfloat16")
    assert str(error.value) == message


def test_a_module_of_symbolic_shapes_is_bound_to_numbers_first():
    mod = program(lambda e, x, w: e(op.matmul(x, w)), (SYMBOLIC.shape[0], 8), W)
    bound = relax.transform.BindSymbolicVars({"n": 8}, "main")(mod)
    assert count_casts(amp_ir.autocast(bound, amp_dtype="bfloat16")) == 2


def test_a_power_of_a_small_statistic_does_not_overflow():
    """The gradient of RMSNorm written by hand has 1/sqrt(x)^3, 1.3e5 for x of LLaMA's size."""

    def build(e, x, w):
        variance = e(op.mean(e(op.square(e(op.multiply(x, relax.const(0.02))))), [1], True))
        scale = e(op.rsqrt(variance))
        cube = e(op.multiply(e(op.multiply(scale, scale)), scale))
        y = e(op.multiply(e(op.matmul(x, w)), cube))
        return [e(op.sum(e(op.matmul(e(op.multiply(y, relax.const(1e-6))), w)))), cube]

    out = autocast(program(build, X, W), amp_dtype="float16")
    total, cube = interpret(out, [torch.ones(X), torch.eye(8)])
    assert cube.max() > 65504
    assert torch.isfinite(total)
