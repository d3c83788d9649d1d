# SPDX-License-Identifier: Apache-2.0
"""Each degree rule proved by scaling: what it says happens, and what it refuses does not scale."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

from amp_ir.dialect import DECLARATIONS, call_op
from amp_ir.ir.relax_reference import RELAX_OPS
from amp_ir.ir.step_module import Role
from amp_ir.loss_scaling.degrees import dialect_rules as dialect_degree_rules  # noqa: F401
from amp_ir.loss_scaling.degrees.check_scale_degrees import check_scale_degrees
from amp_ir.loss_scaling.degrees.degree import Degree, Special, Unknown
from amp_ir.loss_scaling.degrees.relax_rules import GUARD, RULES, rule_for
from dialect_cases import CASES, integers, normal, positive
from scale_programs import FACTOR, ZEROS, Steps, call_step, grows_as, scaled, values_at

Call = Callable[..., relax.Expr]


@attrs.frozen
class Trial:
    """A call of one op, with its arguments; `call(*arguments)`."""

    op: str
    inputs: Callable[[], list[torch.Tensor]] = attrs.field(repr=False)
    call: Call = attrs.field(repr=False)
    note: str = ""

    def __str__(self) -> str:
        """The test's name."""
        return self.op + (f"-{self.note}" if self.note else "")

    def tensors(self) -> list[torch.Tensor]:
        """The same numbers at every call."""
        torch.manual_seed(len(self.op))
        return self.inputs()


def relax_trial(
    name: str, call: Call, inputs: Callable[[], list[torch.Tensor]], note: str = ""
) -> Trial:
    return Trial(f"relax.{name}", inputs, call, note)


def one() -> list[torch.Tensor]:
    return [normal(3, 4)]


def two() -> list[torch.Tensor]:
    return [normal(3, 4), normal(3, 4)]


def flags() -> list[torch.Tensor]:
    return [normal(3, 4) > 0, normal(3, 4) > 0]


def ints() -> list[torch.Tensor]:
    return [integers(1, 5, 9), integers(2, 1, 3)]


def ratios() -> list[torch.Tensor]:
    """Pairs of one ratio each: equal ones, and some on either side of it."""
    x = positive(3, 4)
    return [x, x * torch.tensor([0.25, 1.0, 1.0, 4.0])]


def _inside_unit() -> list[torch.Tensor]:
    return [torch.rand(3, 4) * 0.05 + 0.005]


PLACES = integers(0, 2, 1, 1).reshape(1, 4)
_UNARY = "abs negative sign square exp sin cos tan atan sinh cosh tanh asinh sigmoid erf".split()
_UNARY += "isfinite isinf isnan floor ceil round trunc".split()
_UNARY += ["nn.relu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.softmax", "nn.log_softmax"]
_POSITIVE = "log sqrt rsqrt".split()
_UNIT = "asin acos atanh".split()
_BINARY = "add subtract multiply divide maximum minimum floor_divide mod floor_mod".split()
_COMPARE = "equal not_equal less less_equal greater greater_equal".split()
_LOGICAL = "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor".split()


def _relax_op(name: str) -> Call:
    module = op.nn if name.startswith("nn.") else op
    return getattr(module, name.removeprefix("nn."))


def _concat(*parts: Any) -> relax.Expr:
    return op.concat(list(parts), 0)


def _exponent(number: float) -> Call:
    return lambda x: op.power(x, relax.const(number))


RELAX_TRIALS = [
    *(relax_trial(name, _relax_op(name), one) for name in _UNARY),
    *(relax_trial(name, _relax_op(name), lambda: [positive(3, 4)]) for name in _POSITIVE),
    *(relax_trial(name, _relax_op(name), _inside_unit) for name in _UNIT),
    relax_trial("acosh", op.acosh, lambda: [normal(3, 4).abs() + 20.0]),
    *(relax_trial(name, _relax_op(name), two) for name in _BINARY),
    *(relax_trial(name, _relax_op(name), ratios) for name in _COMPARE),
    *(relax_trial(name, _relax_op(name), flags) for name in _LOGICAL),
    relax_trial("logical_not", op.logical_not, lambda: flags()[:1]),
    relax_trial("bitwise_not", op.bitwise_not, lambda: ints()[:1]),
    *(relax_trial(name, _relax_op(name), ints) for name in ("left_shift", "right_shift")),
    relax_trial("divide", op.divide, ints, "integers"),
    relax_trial("add", lambda x: op.add(x, relax.const(0.0)), one, "zero"),
    relax_trial("minimum", lambda x: op.minimum(x, relax.const(float("inf"))), one, "infinity"),
    relax_trial("maximum", lambda x: op.maximum(x, relax.const(float("-inf"))), one, "infinity"),
    relax_trial("maximum", lambda x: op.maximum(x, relax.const(1.0)), one, "constant"),
    relax_trial("less", lambda x: op.less(x, relax.const(0.0)), one, "zero"),
    *(
        relax_trial("power", _exponent(number), lambda: [positive(3, 4)], str(number))
        for number in (2.0, 3.0, 0.5, -0.25, 0.0, 0.123)
    ),
    relax_trial("power", op.power, lambda: [positive(3, 4), normal(3, 4)], "tensor"),
    relax_trial("astype", lambda x: op.astype(x, "float16"), one),
    relax_trial("astype", lambda x: op.astype(x, "bool"), one, "bool"),
    relax_trial("astype", lambda x: op.astype(x, "int32"), lambda: [normal(3, 4) * 9], "int"),
    relax_trial("where", op.where, lambda: [normal(3, 4) > 0, *two()]),
    relax_trial("matmul", op.matmul, lambda: [normal(3, 4), normal(4, 2)]),
    relax_trial("nn.leakyrelu", lambda x: op.nn.leakyrelu(x, 0.1), one),
    *(
        relax_trial(name, lambda x, name=name: _relax_op(name)(x, [1]), one)
        for name in ("sum", "mean", "max", "min", "prod")
    ),
    *(
        relax_trial(name, lambda x, name=name: _relax_op(name)(x, 1), one)
        for name in ("argmax", "argmin", "argsort", "sort", "cumsum", "cumprod", "flip")
    ),
    *(
        relax_trial("topk", lambda x, kind=kind: op.topk(x, 2, 1, kind), one, kind)
        for kind in ("both", "values", "indices")
    ),
    relax_trial("reshape", lambda x: op.reshape(x, (4, 3)), one),
    relax_trial("permute_dims", op.permute_dims, one),
    relax_trial("broadcast_to", lambda x: op.broadcast_to(x, (2, 3, 4)), one),
    relax_trial("concat", _concat, two),
    relax_trial("strided_slice", lambda x: op.strided_slice(x, [1], [0], [3]), one),
    relax_trial("full", lambda x: op.full((2, 2), x, "float32"), lambda: [normal()]),
    relax_trial("zeros", lambda: op.zeros((2,), "float32"), list),
    relax_trial("ones", lambda: op.ones((2,), "float32"), list),
    relax_trial("arange", lambda: op.arange(0, 3, 1, "int64"), list),
    relax_trial("tril", lambda x: op.tril(x, 0), one),
    relax_trial("triu", lambda x: op.triu(x, 0), one),
    relax_trial("take", lambda x, i: op.take(x, i, 0), lambda: [normal(3, 4), integers(2, 0)]),
    relax_trial(
        "gather_elements", lambda x, i: op.gather_elements(x, i, 0), lambda: [normal(3, 4), PLACES]
    ),
    *(
        relax_trial(
            "scatter_elements",
            lambda x, i, u, how=how: op.scatter_elements(x, i, u, 0, how),
            lambda: [normal(3, 4), PLACES, normal(1, 4)],
            how,
        )
        for how in ("update", "add", "mul", "min", "max")
    ),
]


def _dialect_call(name: str, options: dict[str, Any]) -> Call:
    return lambda *arguments: call_op(name, list(arguments), **options)


UPDATE = {
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "hysteresis": 1,
    "min_scale": 0.0,
    "max_scale": 1e30,
}


def _update_inputs(*, overflow: bool, clean: int) -> list[torch.Tensor]:
    trackers = [torch.tensor(clean, dtype=torch.int32), torch.tensor(1, dtype=torch.int32)]
    return [torch.tensor(8.0), *trackers, torch.tensor(overflow)]


# These take the scale itself, of degree 1; the trials below scale their last or first argument.
SCALER_OPS = {"amp_ir.unscale", "amp_ir.all_finite", "amp_ir.update_scale", "amp_ir.scale_loss"}
DIALECT_TRIALS = [
    *(
        Trial(case.op, case.tensors, _dialect_call(case.op, case.options), case.note)
        for case in CASES
        if case.op not in SCALER_OPS | {"amp_ir.hardsigmoid_backward"}
    ),
    Trial(
        "amp_ir.hardsigmoid_backward",
        lambda: [normal(3, 4), normal(3, 4) * 3],
        _dialect_call("amp_ir.hardsigmoid_backward", {}),
        "wide",
    ),
    Trial(
        "amp_ir.scale_loss",
        lambda: [normal(3, 4), torch.tensor(8.0)],
        _dialect_call("amp_ir.scale_loss", {}),
    ),
    Trial(
        "amp_ir.unscale",
        lambda: [normal(3, 4), torch.tensor(8.0)],
        _dialect_call("amp_ir.unscale", {}),
    ),
    Trial(
        "amp_ir.all_finite",
        lambda: [normal(3, 4), normal(5), torch.tensor(8.0)],
        _dialect_call("amp_ir.all_finite", {}),
    ),
    *(
        Trial(
            "amp_ir.update_scale",
            lambda overflow=overflow, clean=clean: _update_inputs(overflow=overflow, clean=clean),
            _dialect_call("amp_ir.update_scale", UPDATE),
            f"{overflow}-{clean}",
        )
        for overflow, clean in ((True, 0), (False, 0), (False, 2))
    ),
]
TRIALS = RELAX_TRIALS + DIALECT_TRIALS

# Arguments in which these ops are linear, or nearly so, though their rules take nothing scaled
# there: parameters, statistics and class weights, of which no program has scaled ones.
LINEAR_BUT_REFUSED = {
    "amp_ir.layer_norm": {1},
    "amp_ir.group_norm": {1},
    "amp_ir.batch_norm": {1},
    "amp_ir.batch_norm_backward": {2},
    "amp_ir.rms_norm": {1},
    "amp_ir.layer_norm_backward_input": {4},
    "amp_ir.rms_norm_backward_input": {3},
    "amp_ir.layer_norm_backward_weight": {1, 2, 3},
    "amp_ir.rms_norm_backward_weight": {1, 2},
    "amp_ir.group_norm_backward_input": {4},
    "amp_ir.group_norm_backward_weight": {1, 2, 3},
    "amp_ir.nll_loss": {2},
    "amp_ir.nll_loss_backward": {2, 3},
}


def assignments(inputs: Sequence[torch.Tensor]) -> Iterator[tuple[int | str, ...]]:
    """Degrees to try for the arguments; only floating ones have any."""
    floating = sum(tensor.is_floating_point() for tensor in inputs)
    choices: tuple[int | str, ...] = (0, 1, -1, ZEROS) if floating <= 2 else (0, 1, ZEROS)
    if floating > 4:
        choices = (0, 1)
    yield from itertools.product(
        *(choices if tensor.is_floating_point() else (0,) for tensor in inputs)
    )


@functools.cache
def both_scales(
    trial: Trial, degrees: tuple[int | str, ...]
) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
    """(degree, value at scale 1, value at scale FACTOR) of every result."""
    inputs = trial.tensors()
    step = call_step(inputs, degrees, trial.call)
    found = check_scale_degrees(step)
    before, after = (values_at(step, inputs, scale) for scale in (1.0, FACTOR))
    return [
        (found.outputs[spec.name], before[spec.name], after[spec.name])
        for spec in step.signature.outputs
    ]


def is_homogeneous(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether some degree, in quarters, describes the change."""
    degrees = (Degree.of("scaler0", Fraction(k, 4)) if k else Degree() for k in range(-16, 17))
    return any(grows_as(before, after, degree) for degree in degrees)


def is_excused(trial: Trial, degrees: tuple[int | str, ...]) -> bool:
    """Whether a rule refuses these degrees on purpose, though the result may scale."""
    if trial.op in SCALER_OPS or ZEROS in degrees:
        return True
    given = {k for k, degree in enumerate(degrees) if degree}
    return bool(given & LINEAR_BUT_REFUSED.get(trial.op, set()))


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_results_grow_by_the_degree_that_the_rule_says(trial: Trial):
    known = 0
    for degrees in assignments(trial.tensors()):
        for degree, before, after in both_scales(trial, degrees):
            if not isinstance(degree, Unknown):
                known += 1
                assert grows_as(before, after, degree), (degrees, degree)
    assert known


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_what_a_rule_refuses_has_no_degree(trial: Trial):
    for degrees in assignments(trial.tensors()):
        found = both_scales(trial, degrees)
        refused = [one for one in found if isinstance(one[0], Unknown)]
        if refused and not is_excused(trial, degrees):
            assert not all(is_homogeneous(before, after) for _, before, after in refused), degrees


@pytest.mark.parametrize(
    ("name", "position"),
    [(name, position) for name, several in LINEAR_BUT_REFUSED.items() for position in several],
)
def test_each_excuse_is_needed(name: str, position: int):
    """Some trial scales this argument, alone or with others, and the refused result does scale."""
    found = [
        all(is_homogeneous(before, after) for _, before, after in both_scales(trial, degrees))
        for trial in TRIALS
        if trial.op == name and len(trial.tensors()) > position
        for degrees in assignments(trial.tensors())
        if degrees[position] == 1 and ZEROS not in degrees
    ]
    assert any(found)


def test_every_op_has_a_rule_and_a_trial():
    # The body of a loop has degrees of its own: test_loops_under_a_scale.py.
    known = (set(DECLARATIONS) | set(RELAX_OPS)) - {"amp_ir.loop"}
    assert set(RULES) == known
    assert {trial.op for trial in TRIALS} == known


def test_a_rule_is_registered_once():
    with pytest.raises(ValueError, match="amp_ir.conv has two degree rules"):
        rule_for("amp_ir.conv")(lambda op: Degree())


def test_a_guard_changes_a_scaled_value_by_no_more_than_itself():
    """What add and maximum take for a guard: relative to the value, the error is below GUARD."""
    x = positive(3, 4)
    for call in (op.add, op.maximum):
        step = call_step([x], [1], lambda x, call=call: call(x, relax.const(GUARD)))
        found = check_scale_degrees(step)
        assert found.outputs["result0"] == Degree.of("scaler0")
        assert found.notes[0].startswith(
            "step (forward): 1e-05 is taken for a guard against a division by zero beside a value "
            "that is multiplied by the loss scale."
        )
        before, after = (values_at(step, [x], scale)["result0"] for scale in (1.0, FACTOR))
        assert torch.allclose(after, before * FACTOR, rtol=GUARD / 0.5, atol=0)


@pytest.mark.parametrize(("number", "degree"), [(2 * GUARD, 1), (GUARD, -1), (-GUARD, 1)])
def test_no_guard_is_large_or_negative_or_beside_a_value_that_was_divided(number, degree):
    step = call_step([positive(3)], [degree], lambda x: op.add(x, relax.const(number)))
    assert isinstance(check_scale_degrees(step).outputs["result0"], Unknown)


def test_an_op_without_a_rule_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(RULES, "relax.tanh")
    step = call_step([normal(3)], [0], op.tanh)
    found = check_scale_degrees(step)
    assert found.outputs["result0"] == Unknown("step (forward): relax.tanh has no rule")
    assert found.notes == (
        "Cannot tell how the loss scale enters result0: step (forward): relax.tanh has no rule.",
    )


WIDE, SQUARE = (4, 8), (8, 8)


class RandomProgram:
    """Grows a program of [4, 8] tensors that reads the loss scale; `draws` makes every choice."""

    def __init__(self, draws: list[int]) -> None:
        self._draws = iter(draws)
        self.step = Steps()
        shapes = {"x": WIDE, "y": WIDE, "w": SQUARE, "b": (8,)}
        params = {n: self.step.input(n, Role.BATCH, shape) for n, shape in shapes.items()}
        self.values: list[Any] = [params["x"], params["y"]]
        self.w, self.b = params["w"], params["b"]

    def draw(self, below: int) -> int:
        return next(self._draws, 0) % below

    def pick(self) -> Any:
        return self.values[-1 - self.draw(min(len(self.values), 6))]

    def emit(self, expr: relax.Expr) -> Any:
        return self.step.builder.emit(expr)

    def grow(self) -> None:
        builder, scale = self.step.builder, self.step.scales[0]
        x, y = self.pick(), self.pick()
        makers: list[Callable[[], relax.Expr]] = [
            lambda: scaled(builder, x, scale, 1),
            lambda: scaled(builder, x, scale, -1),
            lambda: op.multiply(x, y),
            lambda: op.divide(x, y),
            lambda: op.add(x, y),
            lambda: op.subtract(x, y),
            lambda: op.maximum(x, y),
            lambda: op.minimum(x, relax.const(0.0)),
            lambda: op.matmul(x, self.w),
            lambda: op.add(x, self.b),
            lambda: op.sqrt(self.emit(op.abs(x))),
            lambda: op.square(x),
            lambda: op.where(self.emit(op.less(x, y)), x, self.b),
            lambda: op.where(self.emit(op.less(x, relax.const(0.0))), y, relax.const(0.0)),
            lambda: op.divide(x, self.emit(op.sum(self.emit(op.abs(x)), [1], keepdims=True))),
            lambda: op.tanh(x),
            lambda: op.nn.relu(x),
            lambda: op.nn.softmax(x),
            lambda: op.sign(x),
            lambda: op.concat([self.half(x), self.half(y)], 0),
            lambda: call_op("amp_ir.gelu_backward", [x, y], approximate="none"),
            lambda: call_op("amp_ir.softmax_backward", [x, y], axis=1),
            lambda: call_op("amp_ir.l1_loss_backward", [x, y, x], reduction="none"),
            lambda: call_op("amp_ir.unscale", [x, scale]),
        ]
        self.values.append(self.emit(makers[self.draw(len(makers))]()))

    def half(self, x: Any) -> Any:
        return self.emit(op.strided_slice(x, [0], [0], [2]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2**16), min_size=40, max_size=60))
def test_every_value_of_a_random_program_grows_by_its_degree(draws: list[int]):
    program = RandomProgram(draws)

    def body(_builder: relax.BlockBuilder) -> dict[tuple[str, Role], relax.Expr]:
        for _ in range(12):
            program.grow()
        return {("result0", Role.RESULT): program.values[-1]}

    step = program.step.finish(body)
    inputs = [torch.randn(WIDE), torch.randn(WIDE), torch.randn(SQUARE) / 2, torch.randn(8)]
    degrees = check_scale_degrees(step).degree
    before, after = (values_at(step, inputs, scale) for scale in (1.0, FACTOR))
    for name, value in before.items():
        degree = degrees.get(name)
        if isinstance(degree, Degree) or degree is Special.ANY:
            assert grows_as(value, after[name], degree), (name, degree, step.script())
