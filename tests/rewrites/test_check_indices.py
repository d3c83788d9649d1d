# SPDX-License-Identifier: Apache-2.0
"""Which indices are checked, and where: none that is proven, and none is proven wrongly."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tvm import relax

import amp_ir
import dialect_cases
import indexed_step
from amp_ir.dialect import DECLARATIONS
from amp_ir.errors import IndexOutOfRangeError, SequenceLengthError
from amp_ir.importer.converters.registry import CONVERTERS
from amp_ir.ir.index_uses import INDEX_USES, NEVER_OUT_OF_RANGE
from amp_ir.ir.interpreter import evaluate, interpret
from amp_ir.ir.relax_reference import RELAX_OPS
from amp_ir.rewrites.check_indices import CheckedStep, check_indices
from amp_ir.rewrites.ranges.value_ranges import ValueRanges

IDS, X = torch.tensor([0, 1, 2]), torch.rand(3)
where = torch.where


def checked(
    function: Callable[..., torch.Tensor], *batch: torch.Tensor, on_host: Any = "all"
) -> CheckedStep:
    """A training step around `function(weight f32[5, 4], ids i64[3], x f32[3])`."""
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*given: torch.Tensor) -> torch.Tensor:
        loss = function(model.weight, *given).float().square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    mod, _ = amp_ir.trace_step(step, batch or (IDS, X), model=model, optimizer=optimizer)
    return check_indices(mod.ir, mod.signature, on_host=on_host)


def _as_int8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int8).long()


# Everything that these compute is in range, whatever ids and x are.
PROVEN: list[Callable[..., torch.Tensor]] = [
    lambda w, i, x: w[i.clamp(0, 4)],
    lambda w, i, x: w[x.long().clamp(-5, 4)],
    lambda w, i, x: w.index_select(0, x.long() % 5),
    lambda w, i, x: w[x.long().fmod(5)],
    lambda w, i, x: (lambda k: w.index_select(0, where((k >= 0) & (k < 5), k, 0)))(x.long()),
    lambda w, i, x: (lambda k: w.index_select(0, where((k < 0) | (k > 4), 0, k)))(x.long()),
    lambda w, i, x: (lambda k: w.index_select(0, where(k < 0, k + 5, k)))(x.long().clamp(-5, 4)),
    lambda w, i, x: w[w.argmax(0)],
    lambda w, i, x: w[w.topk(3, 0)[1]],
    lambda w, i, x: w.gather(0, w.sort(0)[1]),
    lambda w, i, x: w[torch.randint(0, 5, (7,))],
    lambda w, i, x: w[torch.randperm(5)],
    lambda w, i, x: w[torch.arange(10) // 2],
    lambda w, i, x: w[(x > 0).long() + (x > 1).long()],
    lambda w, i, x: w[(x > 0).cumsum(0)],
    lambda w, i, x: w.take_along_dim(x.long()[None].expand(5, 3) % 4, 1),
    lambda w, i, x: w[torch.bucketize(x, torch.tensor([0.1, 0.2, 0.3, 0.4]))],
    # From positions alone, as T5's buckets: computed when the step is compiled.
    lambda w, i, x: w[(torch.arange(1, 9).float().log() * 2).long().clamp(max=4)],
    lambda w, i, x: F.grid_sample(w[None, None], x[:2][None, None, None]),
    lambda w, i, x: F.max_unpool2d(*F.max_pool2d(w[None, None, :4], 2, return_indices=True), 2),
    lambda w, i, x: w.masked_scatter(w > 0, torch.ones(30)),
]


def test_what_is_proven_is_not_checked_and_costs_nothing() -> None:
    step = checked(lambda w, i, x: torch.stack([one(w, i, x).sum() for one in PROVEN]))
    assert step.checks.on_host == () and step.checks.in_step == ()


def test_a_step_with_nothing_to_check_in_it_keeps_its_ir() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(ids[:-1]), ids[1:], ignore_index=255)
        loss.backward()
        optimizer.step()
        return loss.detach()

    mod, _ = amp_ir.trace_step(step, (IDS,), model=model, optimizer=optimizer)
    found = check_indices(mod.ir, mod.signature, on_host="all")
    assert found.ir is mod.ir and found.signature is mod.signature
    assert [one.check.op for one in found.checks.on_host] == ["amp_ir.embedding", "amp_ir.nll_loss"]


@pytest.mark.parametrize(
    ("function", "on_host", "in_step"),
    [
        (lambda w, i, x: w[i], 1, 0),
        (lambda w, i, x: w[i[1:]] + w[i[:-1].int()], 2, 0),
        (lambda w, i, x: w[where(i == 255, 0, i)] + w[torch.cat([i, i + 1])].sum(), 3, 0),
        (lambda w, i, x: w[i[i]], 2, 0),
        (lambda w, i, x: w[x.long()], 0, 1),
        # A NaN is clamped to itself.
        (lambda w, i, x: w[x.clamp(0, 4).long()], 0, 1),
        (lambda w, i, x: w[torch.randint(0, 6, (7,))], 0, 1),
        # The condition speaks of other elements than the branch.
        (lambda w, i, x: (lambda k: w[where(k < 5, k.flip(0), 0).clamp(-5)])(x.long()), 0, 1),
        (lambda w, i, x: (lambda k: w[where(k > 4, k, 0).clamp(-5)])(x.long()), 0, 1),
        (lambda w, i, x: w[i.clamp(max=4)] + w[x.long() % 6], 1, 1),
        # Overflow: 2**62 * 4 is 0, and the product of two of these is anything.
        (lambda w, i, x: (lambda k: w.index_select(0, (k * k) % 2**62))(x.long()), 0, 1),
        # 254 is -2 in int8.
        (lambda w, i, x: w.index_select(0, _as_int8((x > 0).long() + 254).clamp(max=4)), 0, 1),
    ],
)
def test_what_may_be_out_of_range_is_checked(
    function: Callable[..., torch.Tensor], on_host: int, in_step: int
) -> None:
    found = checked(function).checks
    assert (len(found.on_host), len(found.in_step)) == (on_host, in_step)
    nowhere = checked(function, on_host="none").checks
    assert nowhere.on_host == () and len(nowhere.in_step) == on_host + in_step


def test_an_index_of_an_index_is_told_once() -> None:
    table = nn.Embedding(5, 4)
    mod, _ = amp_ir.trace_model(_Twice(table), (IDS,))
    run = amp_ir.compile(mod)
    torch.testing.assert_close(run(IDS), table(IDS[IDS]))
    for bad, message in (
        ([0, 3, 1], "batch0 holds the index 3, expected -3 to 2, for amp_ir.index"),
        ([0, 7, 1], "batch0 holds the index 7, expected -3 to 2, for amp_ir.index"),
        ([0, 1, -1], "an index computed from batch0 is -1, expected 0 to 4, for amp_ir.embedding"),
    ):
        with pytest.raises(IndexOutOfRangeError) as caught:
            run(torch.tensor(bad))
        assert str(caught.value).startswith(message)
        assert str(caught.value).count("expected") == 1


def test_a_buffer_is_looked_at_again_when_it_has_changed() -> None:
    model = _Positions()
    run = amp_ir.compile(amp_ir.trace_model(model, (torch.ones(3, 4),))[0])
    for _ in range(2):
        torch.testing.assert_close(run(torch.ones(3, 4)), model.table.weight[:3] + 1)
        # In no way that PyTorch counts.
        model.places.data[1] = 5
        with pytest.raises(IndexOutOfRangeError, match="from places is 5, expected 0 to 4"):
            run(torch.ones(3, 4))
        model.places.data[1] = 1


class _Positions(nn.Module):
    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.register_buffer("places", torch.arange(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(self.places[:3])


class _Twice(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids[ids])


def test_an_index_that_is_always_out_of_range_is_refused_when_compiled() -> None:
    with pytest.raises(IndexOutOfRangeError) as caught:
        checked(lambda w, i, x: w[torch.arange(3) * 3])
    assert str(caught.value).startswith(
        "the step always uses the index 6, expected -5 to 4, for amp_ir.index in step (forward), "
    )


# Random integer programs: what is computed is in the range that is claimed.

_BINARY = [relax.op.add, relax.op.subtract, relax.op.multiply, relax.op.maximum, relax.op.minimum]
_COMPARE = [relax.op.less, relax.op.less_equal, relax.op.greater, relax.op.greater_equal,
            relax.op.equal, relax.op.not_equal]  # fmt: skip
_LOGICAL = [relax.op.logical_and, relax.op.logical_or]


def _number(draw: random.Random) -> relax.Expr:
    return relax.const(draw.randint(-9, 9), "int64")


def _random_call(draw: random.Random, ints: list[Any], bools: list[Any]) -> relax.Call:
    one, other = draw.choice(ints), draw.choice([*ints, _number(draw)])
    return draw.choice(
        [
            lambda: draw.choice(_BINARY)(one, other),
            lambda: draw.choice(_COMPARE)(one, other),
            lambda: draw.choice(_LOGICAL)(draw.choice(bools), draw.choice(bools)),
            lambda: relax.op.logical_not(draw.choice(bools)),
            lambda: relax.op.where(draw.choice(bools), one, other),
            lambda: relax.op.where(draw.choice(bools), relax.op.add(one, _number(draw)), one),
            lambda: draw.choice([relax.op.abs, relax.op.negative, relax.op.sign])(one),
            lambda: relax.op.floor_mod(one, relax.const(draw.randint(1, 9), "int64")),
            lambda: relax.op.floor_divide(one, relax.const(draw.randint(1, 9), "int64")),
            lambda: relax.op.flip(one, 0),
            lambda: relax.op.cumsum(one, 0),
            lambda: relax.op.astype(relax.op.astype(one, "int8"), "int64"),
            lambda: relax.op.astype(draw.choice(bools), "int64"),
        ]
    )()


@pytest.mark.parametrize("seed", range(60))
def test_a_random_value_lies_in_its_range(seed: int) -> None:
    draw = random.Random(seed)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([16], "int64"))
    bindings: list[relax.VarBinding] = []

    def bind(call: relax.Call) -> relax.Var:
        args = [bind(one) if isinstance(one, relax.Call) else one for one in call.args]
        value = builder.normalize(relax.Call(call.op, args, call.attrs))
        variable = relax.Var(f"v{len(bindings)}", value.ty)
        bindings.append(relax.VarBinding(variable, value))
        return variable

    low = bind(relax.op.maximum(x, relax.const(-7, "int64")))
    ints, bools = [bind(relax.op.minimum(low, relax.const(6, "int64")))], []
    bools.append(bind(relax.op.less(ints[0], relax.const(2, "int64"))))
    for _ in range(25):
        made = bind(_random_call(draw, ints, bools))
        (bools if str(made.ty.dtype) == "bool" else ints).append(made)
    ranges = ValueRanges({one.var: one.value for one in bindings})
    torch.manual_seed(seed)
    given = torch.randint(-12, 12, (16,))
    for position, one in enumerate(bindings):
        found = evaluate(one.var, bindings[: position + 1], {x: given})
        known = ranges.of(one.var)
        assert known is not None
        assert known.low <= int(found.min()) and int(found.max()) <= known.high, one


# The tables hold every op.


def test_every_op_that_takes_integers_is_in_a_table() -> None:
    taking = {f"relax.{name.removeprefix('relax.')}" for name in RELAX_OPS}
    for case in dialect_cases.CASES:
        # A mask is not an index.
        if any(
            not one.dtype.is_floating_point and one.dtype != torch.bool for one in case.tensors()
        ):
            taking.add(case.op)
    # The ops of a loop's body are looked at one by one (ir/index_uses.py).
    assert {case.op for case in dialect_cases.CASES} == set(DECLARATIONS) - {"amp_ir.loop"}
    missing = taking - set(INDEX_USES) - set(NEVER_OUT_OF_RANGE)
    assert not missing, f"{sorted(missing)}: to INDEX_USES, or NEVER_OUT_OF_RANGE with a reason"
    assert not set(INDEX_USES) & set(NEVER_OUT_OF_RANGE)
    unknown = (set(INDEX_USES) | set(NEVER_OUT_OF_RANGE)) - set(DECLARATIONS)
    assert all(one.startswith("relax.") for one in unknown)


# Arguments of ATen that hold places or classes -> overloads that are tried against PyTorch in
# test_indices.py under other names, or cannot be out of range.
_PLACES = {"index", "indices", "target"}
_NOT_TRIED = {
    # Of a forward op that is tried, or of a pooling of the same step.
    "aten.embedding_dense_backward", "aten.nll_loss_backward", "aten.nll_loss2d_backward",
    "aten.multi_margin_loss_backward", "aten.max_pool2d_with_indices_backward",
    "aten.max_pool3d_with_indices_backward", "aten.adaptive_max_pool2d_backward",
    "aten.adaptive_max_pool3d_backward",
    # The same converter as without "unsafe", which only PyTorch's own decompositions call.
    "aten._unsafe_index", "aten._unsafe_index_put",
    # The target holds numbers.
    "aten.mse_loss", "aten.mse_loss_backward", "aten.smooth_l1_loss",
    "aten.smooth_l1_loss_backward", "aten.huber_loss", "aten.huber_loss_backward",
    "aten.soft_margin_loss", "aten.soft_margin_loss_backward", "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_backward",
    # A number of Python's, checked when the step is traced.
    "aten.select", "aten.select_scatter",
}  # fmt: skip


def test_every_converter_of_places_is_tried_against_pytorch() -> None:
    tried = set()

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            tried.add(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    training = indexed_step.Training(is_computed=False)
    with Seen():
        training.step(*training.batch())
    of_places = {
        str(overload.overloadpacket)
        for overload in CONVERTERS
        if isinstance(overload, torch._ops.OpOverload)
        and any(argument.name in _PLACES for argument in overload._schema.arguments)
    }
    assert not of_places - tried - _NOT_TRIED, "give each a program in indexed_step.py"


# ignore_index, as PyTorch has it.

LOGITS = torch.linspace(-2, 2, 12).reshape(4, 3)
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0])


def test_ignore_index_may_be_any_number() -> None:
    cases: list[tuple[torch.Tensor, int, Any, float, bool]] = [
        (torch.tensor(target), ignored, weight, smoothing, is_image)
        for ignored in (-100, 0, 2, 255)
        for target in ([0, ignored, 2, 1], [ignored] * 4)
        for weight, smoothing, is_image in (
            (None, 0.0, False), (CLASS_WEIGHTS, 0.0, False), (CLASS_WEIGHTS, 0.1, False),
            (CLASS_WEIGHTS, 0.0, True),
        )
    ]  # fmt: skip

    def trained(is_compiled: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:  # noqa: FBT001
        model = nn.ParameterList([LOGITS.clone() for _ in cases])

        def step(*targets: torch.Tensor) -> torch.Tensor:
            found = [
                losses_of(weight, k, target)
                for k, (weight, target) in enumerate(zip(model, targets, strict=True))
            ]
            total = torch.stack(found)
            total.sum().backward()
            return total.detach()

        def losses_of(weight: torch.Tensor, k: int, target: torch.Tensor) -> torch.Tensor:
            _, ignored, by_class, smoothing, is_image = cases[k]
            logits = weight.t().reshape(1, 3, 2, 2) if is_image else weight
            classes = target.reshape(1, 2, 2) if is_image else target
            return F.cross_entropy(
                logits, classes, by_class, ignore_index=ignored, label_smoothing=smoothing
            )

        targets = tuple(case[0] for case in cases)
        run: Callable[..., torch.Tensor] = step
        if is_compiled:
            run = amp_ir.compile(amp_ir.trace_step(step, targets, model=model)[0])
        return run(*targets), [one.grad for one in model.parameters()]

    found, gradients = trained(True)
    expected, expected_gradients = trained(False)
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(gradients, expected_gradients, equal_nan=True)


class _Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(5, 4)

    def forward(self, offsets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        bags = self.table(torch.tensor([4, 1, 1, 0]), offsets)
        return bags.masked_scatter(mask, torch.ones(3))


def test_offsets_of_bags_and_what_a_mask_takes_are_bounded_as_in_pytorch() -> None:
    model = _Bags()
    few, many = torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool)
    few[0, :3], many[:, 1:3] = True, True
    good = torch.tensor([0, 2])
    run = amp_ir.compile(amp_ir.trace_model(model, (good, few))[0])
    for offsets in (good, torch.tensor([0, 4]), torch.tensor([0, 0])):
        torch.testing.assert_close(run(offsets, few), model(offsets, few))
    for offsets, mask, error in (
        (torch.tensor([1, 2]), few, SequenceLengthError),
        (torch.tensor([0, 5]), few, SequenceLengthError),
        (good, many, IndexOutOfRangeError),
    ):
        with pytest.raises(RuntimeError):
            model(offsets, mask)
        with pytest.raises(error):
            run(offsets, mask)
    torch.testing.assert_close(run(good, few), model(good, few))


def test_one_hot_without_a_number_of_classes_is_refused_by_name() -> None:
    with pytest.raises(amp_ir.errors.CaptureError) as caught:
        checked(lambda w, i, x: F.one_hot(i).float() @ w[:3])
    message = re.sub(r", \S+\.py:\d+", "", str(caught.value))
    assert message == (
        "this step cannot be captured, 1 place:\n"
        "  1. step (forward): one_hot without num_classes has as many columns as the largest class "
        "says, and a compiled step has fixed shapes. Pass num_classes="
    )


# Other ways to run a step.


def test_inference_interpreter_and_profile_refuse_alike() -> None:
    model = nn.Embedding(5, 4)
    mod, args = amp_ir.trace_model(model, (IDS,))
    run = amp_ir.compile(mod)
    bad = torch.tensor([0, 5, 1])
    place = "expected 0 to 4, for amp_ir.embedding in step (forward)"
    with pytest.raises(IndexOutOfRangeError) as caught:
        run(bad)
    assert str(caught.value).startswith(f"batch0 holds the index 5, {place}")
    for profile in (amp_ir.profile_vm_model, amp_ir.profile_kernels):
        with pytest.raises(IndexOutOfRangeError) as caught:
            profile(mod, "cpu", (bad,))
        assert str(caught.value).startswith(f"batch0 holds the index 5, {place}")
    with pytest.raises(IndexOutOfRangeError) as caught:
        interpret(mod, [model.weight.detach(), bad])
    assert str(caught.value).startswith(f"the step computed the index 5, {place}")
    torch.testing.assert_close(run(*args), model(*args))


def test_the_old_name_of_the_error_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning) as caught:
        old = amp_ir.errors.IdError
    assert old is IndexOutOfRangeError and issubclass(old, IndexError)
    assert str(caught[0].message) == (
        "amp_ir.errors.IdError is called amp_ir.errors.IndexOutOfRangeError now; the old name goes "
        "in the next minor version"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AttributeError, match="has no attribute 'Other'"):
            _ = amp_ir.errors.Other
