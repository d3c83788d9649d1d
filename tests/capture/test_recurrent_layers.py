# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers captured as one op a layer and direction, beside PyTorch's own layers."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from tvm import relax

import amp_ir
from amp_ir.capture.decompositions.recurrent_layers import layers_of
from amp_ir.errors import BudgetError
from amp_ir.ir.location import from_span
from amp_ir.ir.step_graph import VIEWS
from compiled_steps import assert_compiled_alike, compile_training
from step_comparison import Training, assert_trains_alike, normal

KINDS: dict[str, Any] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN_tanh": nn.RNN,
    "RNN_relu": functools.partial(nn.RNN, nonlinearity="relu"),
}
# Sums of up to 100 float64 products in another order.
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def ours(layer: nn.RNNBase, x: torch.Tensor, initial: Any) -> tuple[torch.Tensor, ...] | None:
    """What the capture calls instead of `torch.lstm` and the others: output and last states."""
    found = layers_of(*call_of(layer, x, initial), {})
    return None if found is None else found()


def call_of(layer: nn.RNNBase, x: torch.Tensor, initial: Any) -> tuple[Any, tuple[Any, ...]]:
    options = (
        layer.bias, layer.num_layers, layer.dropout, layer.training, layer.bidirectional,
        layer.batch_first,
    )  # fmt: skip
    functions = {"RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}
    functions |= {"LSTM": torch.lstm, "GRU": torch.gru}
    return functions[layer.mode], (x, initial, layer._flat_weights, *options)


def operands(layer: nn.RNNBase, steps: int, rows: int) -> tuple[torch.Tensor, Any]:
    """A sequence and initial states that need gradients, in the layer's dtype."""
    dtype = layer.weight_ih_l0.dtype
    lengths = (rows, steps) if layer.batch_first else (steps, rows)
    x = torch.randn(*lengths, layer.input_size, dtype=dtype, requires_grad=True)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = [layer.proj_size or layer.hidden_size, layer.hidden_size]
    states = tuple(
        torch.randn(count, rows, width, dtype=dtype, requires_grad=True) for width in widths
    )
    return x, states if isinstance(layer, nn.LSTM) else states[1]


def flat(values: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(values)


def results_and_gradients(
    function: Callable[..., Any], layer: nn.RNNBase, x: torch.Tensor, initial: Any
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    results = flat(function(x, initial))
    weights = [torch.linspace(-1, 1.3, one.numel()).reshape(one.shape) for one in results]
    total = sum((one * weight).sum() for one, weight in zip(results, weights, strict=True))
    return results, torch.autograd.grad(total, [x, *flat(initial), *layer.parameters()])


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(list(KINDS)),
    st.tuples(*(st.integers(1, 4) for _ in range(4))),
    st.integers(1, 3),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_results_and_all_gradients_are_pytorchs(
    kind: str, sizes: tuple[int, ...], layers: int, flags: tuple[bool, ...]
) -> None:
    steps, rows, of_input, width = sizes
    bias, bidirectional, batch_first = flags
    torch.manual_seed(0)
    layer = KINDS[kind](
        of_input, width, layers, bias=bias, bidirectional=bidirectional, batch_first=batch_first
    ).double()
    x, initial = operands(layer, steps, rows)
    found = results_and_gradients(lambda *given: ours(layer, *given), layer, x, initial)
    wanted = results_and_gradients(layer, layer, x, initial)
    torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_projections_are_decomposed_as_pytorchs(bias: bool, bidirectional: bool) -> None:
    layer = nn.LSTM(3, 5, 2, proj_size=2, bias=bias, bidirectional=bidirectional).double()
    x, initial = operands(layer, 4, 2)
    found = results_and_gradients(lambda *given: ours(layer, *given), layer, x, initial)
    torch.testing.assert_close(found, results_and_gradients(layer, layer, x, initial), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients_are_pytorchs(kind: str) -> None:
    layer = KINDS[kind](3, 4, 2).double()
    x, initial = operands(layer, 3, 2)

    def penalty(function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        results = flat(function(x, initial))
        leaves = [x, *flat(initial), *layer.parameters()]
        total = sum(one.square().sum() for one in results)
        gradients = torch.autograd.grad(total, leaves, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in gradients), leaves)

    found = penalty(lambda *given: ours(layer, *given))
    torch.testing.assert_close(found, penalty(layer), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_drawn_between_layers_and_in_training_only(kind: str) -> None:
    layer = KINDS[kind](3, 4, 3, dropout=0.5).double()
    x, initial = operands(layer, 5, 2)
    torch.manual_seed(7)
    found = ours(layer, x, initial)
    torch.manual_seed(7)
    torch.testing.assert_close(found, tuple(flat(layer(x, initial))), **EXACT)
    layer.eval()
    torch.testing.assert_close(ours(layer, x, initial), tuple(flat(layer(x, initial))), **EXACT)


def test_what_is_written_to_the_output_does_not_reach_the_gradient() -> None:
    layer = nn.LSTM(3, 4).double()
    x, initial = operands(layer, 3, 2)

    def doubled(function: Callable[..., Any]) -> Any:
        output, *last = flat(function(x, initial))
        output.mul_(2)
        return output, *last

    found = results_and_gradients(
        lambda *_: doubled(lambda *given: ours(layer, *given)), layer, x, initial
    )
    wanted = results_and_gradients(lambda *_: doubled(layer), layer, x, initial)
    torch.testing.assert_close(found, wanted, **EXACT)


def refused() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Calls that PyTorch answers itself."""
    layer = nn.GRU(3, 4)
    x, initial = operands(layer, 2, 2)
    function, args = call_of(layer, x, initial)
    yield "another function", torch.quantized_gru, args
    packed = (x.flatten(0, 1), torch.tensor([2, 2]), initial, *args[2:-1])
    yield "packed", function, packed
    yield "no steps", function, (x[:0], *args[1:])
    yield "another dtype", function, (x.double(), *args[1:])
    yield "states of other rows", function, (x, initial[:, :1], *args[2:])
    yield "a parameter too few", function, (*args[:2], args[2][:-1], *args[3:])
    yield "no batch", function, (x[0], *args[1:])
    yield "one axis", function, (x[0, 0], *args[1:])


@pytest.mark.parametrize("case", list(refused()), ids=lambda case: case[0])
def test_what_is_left_to_pytorch(case: tuple[str, Any, tuple[Any, ...]]) -> None:
    _, function, args = case
    assert layers_of(function, args, {}) is None
    function, args = call_of(nn.GRU(3, 4), *operands(nn.GRU(3, 4), 2, 2))
    assert layers_of(function, args, {}) is not None
    assert layers_of(function, args[:-1], {"batch_first": False}) is None


class Model(nn.Module):
    """A recurrent layer and a head; `reads` chooses what the head sees of its results."""

    def __init__(self, layer: nn.Module, width: int, reads: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(width, 3)
        self.reads = reads

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.head(self.reads(self.layer, *given))


def training(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Training:
    model = make().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(*given: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        result = model(*(one.to(dtype) for one in given))
        loss = (result * torch.linspace(-1, 1.3, 3, dtype=dtype)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def output(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)[0]


def last_states(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    last = layer(x)[1]
    return torch.cat([one[-1] for one in last], -1) if isinstance(last, tuple) else last[-1]


def carried(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Two halves of a sequence, the second one from where the first one ended."""
    first, state = layer(x[:, :2])
    return torch.cat([first, layer(x[:, 2:], state)[0]], 1)


PROGRAMS: dict[str, tuple[dict[str, Any], int, Callable[..., torch.Tensor]]] = {
    "deep, both ways": (
        {"num_layers": 2, "bidirectional": True, "batch_first": True}, 12, output,
    ),
    "no bias, time first": ({"bias": False}, 6, output),
    "last states": ({"num_layers": 2, "batch_first": True}, 0, last_states),
    "carried on": ({"batch_first": True}, 6, carried),
}  # fmt: skip


def program(kind: str, name: str) -> Callable[[], nn.Module]:
    options, width, reads = PROGRAMS[name]
    width = width or (12 if kind == "LSTM" else 6)
    return lambda: Model(KINDS[kind](5, 6, **options), width, reads)


def sequences(index: int) -> tuple[torch.Tensor, ...]:
    return (normal(index, 3, 4, 5),)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_trains_as_in_eager(kind: str, name: str) -> None:
    assert assert_trains_alike(lambda: training(program(kind, name)), sequences) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_step_trains_as_in_eager(kind: str, dtype: torch.dtype) -> None:
    # float64 on a CPU: functions are within 1e-7 of exact (loops/math.py), sums in another order.
    options = {"rtol": 2e-6, "gradient_rtol": 2e-5, "state_rtol": 2e-5}
    make = program(kind, "deep, both ways")
    assert assert_compiled_alike(lambda: training(make, dtype), sequences, **options) == 1


def ops_of(captured: Any) -> Counter[str]:
    return Counter(str(node.target) for node in captured.graph.graph.nodes)


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_ops_does_not_depend_on_the_number_of_steps(kind: str) -> None:
    short, long = (
        ops_of(training(program(kind, "deep, both ways")).capture((normal(0, 3, steps, 5),)))
        for steps in (2, 9)
    )
    assert short == long
    assert short[f"amp_ir.{kind.lower()}.default"] == 4
    assert short[f"amp_ir.{kind.lower()}_backward.default"] == 4


def test_a_frozen_weight_has_no_gradient() -> None:
    def make() -> nn.Module:
        model = program("LSTM", "no bias, time first")()
        model.layer.weight_hh_l0.requires_grad_(False)
        return model

    both = [
        ops_of(training(one).capture(sequences(0)))
        for one in (make, program("LSTM", "no bias, time first"))
    ]
    assert both[1]["aten.mm.default"] - both[0]["aten.mm.default"] == 1


def low_steps(amp_dtype: str, kind: str, *, in_region: bool) -> tuple[list[float], Any]:
    """Losses of 6 steps: ours in `amp_dtype`, or of the user's own torch.autocast region."""
    torch.manual_seed(0)
    trained = training(program(kind, "deep, both ways"))
    x = sequences(0)[0]
    if not in_region:
        step = compile_training(trained, (x,), amp_dtype)
        return [float(step(x)) for _ in range(6)], step

    def step_in_region(x: torch.Tensor) -> torch.Tensor:
        trained.optimizer.zero_grad()
        with torch.autocast("cpu", getattr(torch, amp_dtype)):
            result = trained.model(x)
        loss = (result.float() * torch.linspace(-1, 1.3, 3)).square().mean()
        loss.backward()
        trained.optimizer.step()
        return loss.detach()

    mod, _ = amp_ir.trace_step(
        step_in_region, (x,), model=trained.model, optimizer=trained.optimizer
    )
    step = amp_ir.compile(mod)
    return [float(step(x)) for _ in range(6)], mod


@pytest.mark.parametrize("in_region", [False, True], ids=["amp_ir.autocast", "torch.autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_trains_as_float32(kind: str, in_region: bool) -> None:
    torch.manual_seed(0)
    exact = training(program(kind, "deep, both ways"), torch.float64)
    x = sequences(0)[0]
    expected = [float(exact.step(x)) for _ in range(6)]
    found, _ = low_steps("bfloat16", kind, in_region=in_region)
    # Each step rounds states and gates to 2^-9; losses are means of squares of them. One that has
    # become small has the errors of the steps before.
    assert found == pytest.approx(expected, rel=2**-6, abs=2**-9 * expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_of_the_users_leaves_the_dtypes_that_pytorch_leaves(kind: str) -> None:
    layer = KINDS[kind](5, 6, 2)
    with contextlib.ExitStack() as stack:
        # oneDNN's own layer of LSTMs returns other dtypes.
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        for x in (normal(0, 4, 3, 5), normal(0, 4, 3, 5).bfloat16()):
            _, state = operands(KINDS[kind](5, 6, 2), 4, 3)
            for given in (state, torch.utils._pytree.tree_map(torch.Tensor.bfloat16, state)):
                found, wanted = flat(ours(layer, x, given)), flat(layer_of(layer, x, given))
                assert [one.dtype for one in found] == [one.dtype for one in wanted]
                # Three roundings to 2^-9 of gates of ordinary size, over four steps.
                torch.testing.assert_close(found, wanted, rtol=2**-5, atol=2**-5)


def layer_of(layer: nn.RNNBase, x: torch.Tensor, given: Any) -> Any:
    function, args = call_of(layer, x, given)
    return function(*args)


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_of_the_users_multiplies_low(kind: str) -> None:
    _, mod = low_steps("bfloat16", kind, in_region=True)
    whole = [one for one in calls(mod) if one.op.name == f"amp_ir.{kind.lower()}"]
    assert len(whole) == 4
    for one in whole:
        assert [str(argument.ty.dtype) for argument in one.args[:3]] == ["bfloat16"] * 3


def calls(mod: Any) -> list[Any]:
    bound = [one.value for one in mod.ir["main"].body.blocks[0].bindings]
    return [one for one in bound if isinstance(one, relax.Call)]


@pytest.mark.parametrize("kind", KINDS)
def test_cells_stay_float32_and_the_rest_is_low(kind: str) -> None:
    trained = training(program(kind, "last states"))
    mod, args = amp_ir.trace_step(
        trained.step, sequences(0), model=trained.model, optimizer=trained.optimizer
    )
    low = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    found = {
        op.name: (op.reads, op.results)
        for op in low.plan.ops
        if op.name.startswith(f"amp_ir.{kind.lower()}")
    }
    half, full = "bfloat16", "float32"
    if kind == "LSTM":
        assert found["amp_ir.lstm"] == ((half, half, half, full), (half, full, half))
        backward = (half, half, full, half, full, half), (half, half, full)
        assert found["amp_ir.lstm_backward"] == backward
    elif kind == "GRU":
        assert found["amp_ir.gru"] == ((half,) * 4, (half,) * 2)
        assert found["amp_ir.gru_backward"] == ((half,) * 5, (half,) * 3)
    else:
        assert found[f"amp_ir.{kind.lower()}"] == ((half,) * 3, (half,))
        assert found[f"amp_ir.{kind.lower()}_backward"] == ((half,) * 4, (half,) * 2)
    modules = {op.module for op in low.plan.ops if op.name.startswith(f"amp_ir.{kind.lower()}")}
    assert modules == {"layer"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_override_by_op_name_keeps_a_layer_in_float32(kind: str) -> None:
    trained = training(program(kind, "last states"))
    mod, args = amp_ir.trace_step(
        trained.step, sequences(0), model=trained.model, optimizer=trained.optimizer
    )
    override = amp_ir.Override(op=f"amp_ir.{kind.lower()}*", to="float32")
    full = amp_ir.autocast(mod, args, amp_dtype="bfloat16", overrides=[override])
    for op in full.plan.ops:
        if op.name.startswith(f"amp_ir.{kind.lower()}"):
            assert set(op.reads) | set(op.results) == {"float32"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_penalty_through_a_layer_is_compiled(kind: str) -> None:
    def build() -> Training:
        model = program(kind, "no bias, time first")()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            x = x.detach().requires_grad_()
            total = model(x).sum()
            (gradient,) = torch.autograd.grad(total, x, create_graph=True)
            loss = total + gradient.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Training(model, optimizer, step)

    assert assert_compiled_alike(build, sequences, steps=2) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_of_a_compiled_step(kind: str) -> None:
    """Half of what the first layer makes is dropped, others at every step; runs repeat."""
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = KINDS[kind](5, 6, 2, dropout=0.5, batch_first=True)
        trained = training(lambda layer=layer: Model(layer, 6, output))
        for group in trained.optimizer.param_groups:
            group["lr"] = 0.0
        step = compile_training(trained, sequences(0))
        losses.append([float(step(*sequences(0))) for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


def test_names_of_layers_are_those_of_the_model() -> None:
    trained = training(program("GRU", "deep, both ways"))
    mod, _ = amp_ir.trace_step(
        trained.step, sequences(0), model=trained.model, optimizer=trained.optimizer
    )
    whole = [one for one in calls(mod) if "gru" in str(one.op.name)]
    places = Counter((from_span(one.span).module, from_span(one.span).phase) for one in whole)
    assert places == {("layer", "forward"): 4, ("layer", "backward"): 4}


def test_every_direction_is_walked_in_its_own_order() -> None:
    """The first step of a forward layer, and of a backward one, sees the initial state."""
    for kind, reverse in itertools.product(KINDS, (False, True)):
        layer = KINDS[kind](3, 4, bidirectional=True).double()
        x, initial = operands(layer, 5, 2)
        changed = x.detach().clone()
        changed[0 if reverse else -1] += 1.0
        before, after = (flat(ours(layer, one, initial))[0] for one in (x, changed))
        half = slice(4, None) if reverse else slice(0, 4)
        same = [torch.equal(a, b) for a, b in zip(before[..., half], after[..., half], strict=True)]
        assert same == ([False] + [True] * 4 if reverse else [True] * 4 + [False])


@pytest.mark.parametrize("kind", KINDS)
def test_inference_keeps_nothing_for_a_gradient(kind: str) -> None:
    model = program(kind, "last states")().eval()
    (x,) = sequences(0)
    mod, _ = amp_ir.trace_model(model, (x,))
    names = Counter(str(one.op.name) for one in calls(mod))
    assert names[f"amp_ir.{kind.lower()}"] == 2 and not any("backward" in one for one in names)
    compiled = amp_ir.compile(mod)
    # float32 sums in another order, functions within 2^-22.
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)


def test_the_plan_and_the_profile_name_the_layer() -> None:
    trained = training(program("LSTM", "last states"))
    mod, args = amp_ir.trace_step(
        trained.step, sequences(0), model=trained.model, optimizer=trained.optimizer
    )
    low = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    plan = amp_ir.explain_plan(low)
    whole = {one.kernel: one for one in plan.ops if one.name.startswith("amp_ir.lstm")}
    # Each is a call of its own, shared with no other op but views of what it makes.
    assert -1 not in whole and len(whole) == 4
    there = [one for one in plan.ops if one.kernel in whole and one.name not in VIEWS]
    assert there == list(whole.values())
    profile = amp_ir.profile_kernels(low, "cpu", args, steps=1, warmup=0)
    modules = {module for call in profile.calls for module in call.modules}
    assert {"layer", "head"} <= modules


def through_functions(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output, and after it functions whose results can be computed again."""
    return (layer(x)[0] @ torch.ones(6, 64)).tanh().exp().sin()


@pytest.mark.parametrize("kind", KINDS)
def test_the_least_memory_budget_changes_no_bit(kind: str) -> None:
    losses, peaks, budget = [], [], None
    for _ in range(2):
        torch.manual_seed(0)
        make = lambda: Model(KINDS[kind](5, 6, batch_first=True), 64, through_functions)  # noqa: E731
        trained = training(make)
        mod, _ = amp_ir.trace_step(
            trained.step, sequences(0), model=trained.model, optimizer=trained.optimizer
        )
        step = amp_ir.compile(mod, memory_budget=budget)
        with pytest.raises(BudgetError) as error:
            amp_ir.compile(mod, memory_budget=1)
        budget = error.value.least_bytes
        peaks.append(step.report.plan.peak_bytes)
        losses.append([float(step(*sequences(0))) for _ in range(3)])
    assert peaks[1] == budget < peaks[0]
    assert losses[0] == losses[1]


def test_an_override_to_low_goes_where_the_rules_choice_goes() -> None:
    """A library takes cells in float32; the override makes them low, and they are widened again."""
    (x,) = sequences(0)
    notes, losses = [], []
    for overrides in ([], [amp_ir.Override(op="amp_ir.lstm*", to="low")]):
        torch.manual_seed(0)
        trained = training(program("LSTM", "last states"))
        mod, args = amp_ir.trace_step(
            trained.step, (x,), model=trained.model, optimizer=trained.optimizer
        )
        low = amp_ir.autocast(mod, args, amp_dtype="bfloat16", overrides=overrides)
        step = amp_ir.compile(low)
        notes.append([str(one) for one in step.report.dispatched if "lstm" in one.op])
        losses.append([float(step(x)) for _ in range(3)])
    assert notes[0] == notes[1]
    # Cells of ordinary size rounded to 2^-9 at each gradient.
    assert losses[0] == pytest.approx(losses[1], rel=2**-6)
