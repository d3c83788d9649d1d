# SPDX-License-Identifier: Apache-2.0
"""The importer as a whole: signature, names, places, diagnostics, and captured steps of models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tvm import relax
from tvm.ir import Op

from amp_ir.errors import UnsupportedOpError
from amp_ir.importer.converters import CONVERTERS
from amp_ir.importer.import_step import import_step
from amp_ir.ir.captured_step import CapturedInput
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.location import META_KEY, Location, from_span
from amp_ir.ir.step_module import InputSpec, Role, StepModule
from import_checks import Runner, imported, traced

X = torch.ones(2, 3)


def ops_of(mod: StepModule) -> list[tuple[str, Location]]:
    """(name, place) of every op of the module, in order."""
    return [
        (binding.value.op.name, from_span(binding.value.span))
        for binding in mod.ir["main"].body.blocks[0].bindings
        if isinstance(binding.value, relax.Call) and isinstance(binding.value.op, Op)
    ]


def test_signature_and_state_are_those_of_the_capture():
    weight = torch.zeros(3)
    captured = traced(lambda x, w: (x * w, w + 1), [X, weight])
    captured = attrs.evolve(
        captured,
        inputs=(captured.inputs[0], CapturedInput("layer.weight", Role.PARAMETER, weight)),
        outputs=(
            captured.outputs[0],
            attrs.evolve(captured.outputs[1], role=Role.PARAMETER, updates=1),
        ),
        notes=("a note",),
    )
    mod = import_step(captured)
    assert mod.signature.inputs == (
        InputSpec("batch0", Role.BATCH, (2, 3), "float32"),
        InputSpec("layer.weight", Role.PARAMETER, (3,), "float32"),
    )
    assert [(one.shape, one.updates) for one in mod.signature.outputs] == [
        ((2, 3), None),
        ((3,), 1),
    ]
    assert mod.state["layer.weight"] is weight
    assert "batch0" not in mod.state
    assert mod.notes == ("a note",)
    assert mod.hooks is captured.hooks


def test_parameters_are_named_like_the_inputs():
    captured = traced(lambda *xs: sum(xs[1:], xs[0]), [X] * 5)
    names = ["a.b", "a_b", "0.weight", "random_state", "x"]
    inputs = [
        attrs.evolve(one, name=name) for one, name in zip(captured.inputs, names, strict=True)
    ]
    mod = import_step(attrs.evolve(captured, inputs=tuple(inputs)))
    assert [str(p.name) for p in mod.ir["main"].params] == [
        "a_b", "a_b_2", "p_0_weight", "random_state_2", "x",
    ]  # fmt: skip
    assert [one.name for one in mod.signature.inputs] == names


def test_every_op_knows_its_place():
    captured = traced(lambda x: torch.softmax(x * 2, -1).sum(), [X])
    places = {}
    for line, node in enumerate(captured.graph.graph.nodes):
        node.meta[META_KEY] = Location("encoder.layer", "backward", "model.py", line)
        places[node.name] = line
    found = ops_of(import_step(captured))
    assert [name for name, _ in found] == ["relax.multiply", "relax.nn.softmax", "relax.sum"]
    assert [place for _, place in found] == [
        Location("encoder.layer", "backward", "model.py", line) for line in (1, 2, 3)
    ]


def test_an_input_that_is_returned_and_a_constant_result():
    mod = imported(lambda x: (x, torch.ones(2), x), X)
    assert [tuple(one.shape) for one in interpret(mod, [X])] == [(2, 3), (2,), (2, 3)]


def test_dead_code_is_not_imported():
    mod = imported(lambda x: (x.exp() * 0 + x.max(0).values, x.sin())[0], X)
    assert "relax.argmax" not in [name for name, _ in ops_of(mod)]


# Diagnostics.


def test_all_unsupported_ops_are_listed_at_once():
    def step(x):
        return (
            torch.poisson(x), torch.randint(0, 2**50, (3,)), torch.poisson(x * 2),
            torch.fft.fft(x),
        )  # fmt: skip

    captured = traced(step, [X])
    for line, node in enumerate(captured.graph.graph.nodes, 10):
        node.meta[META_KEY] = Location("encoder.layer.0", "forward", "model.py", line)
    with pytest.raises(UnsupportedOpError) as error:
        import_step(captured)
    place = "first in encoder.layer.0 (forward), model.py"
    assert str(error.value) == (
        "the step has 3 kinds of op that amp_ir cannot import:\n"
        "  aten.poisson.default: draws random numbers from a generator that a compiled step lacks "
        f"(2 calls, {place}:11)\n"
        "  aten.randint.low: 1125899906842624 different integers; the generator gives 2**48 (1 "
        f"call, {place}:12)\n"
        "  aten._fft_r2c.default: leaves the step with dtype torch.complex64; return "
        f"torch.view_as_real of it (1 call, {place}:15)\n"
        "Write that part of the step with other PyTorch ops, or compute it before the step and "
        "pass the result in the batch."
    )


REFUSED = {
    "complex input": (
        lambda x: x.real * 2,
        torch.ones(2, dtype=torch.complex64),
        "input arg0_1: dtype torch.complex64",
    ),
    "many integers": (
        lambda x: torch.randint(0, 2**50, (3,)),
        X,
        "1125899906842624 different integers; the generator gives 2**48",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_says_what_is_not_supported(name):
    function, x, reason = REFUSED[name]
    with pytest.raises(UnsupportedOpError) as error:
        imported(function, x)
    assert reason in str(error.value)


EXTERNAL = {
    "embedding by frequency": (
        lambda w: torch.autograd.grad(
            F.embedding(torch.tensor([1, 1]), w, scale_grad_by_freq=True).sum(), w
        ),
        torch.ones(2, 3, requires_grad=True),
        "aten::embedding_dense_backward.default",
    ),
    "scatter_reduce mean of integers": (
        lambda x: x.scatter_reduce(0, torch.tensor([[0, 0, 0]]), x, "mean"),
        torch.ones(2, 3, dtype=torch.int64),
        "aten::scatter_reduce.two",
    ),
}


@pytest.mark.parametrize("name", EXTERNAL)
def test_what_a_converter_cannot_do_is_an_external_call(name):
    function, x, op = EXTERNAL[name]
    assert op in imported(function, x).script()


def test_a_wrong_converter_is_found_at_import(monkeypatch):
    op = torch.ops.aten.sin.default
    monkeypatch.setitem(CONVERTERS, op, lambda ops, x: ops.reshape(x, (6,)))
    with pytest.raises(UnsupportedOpError) as error:
        imported(torch.sin, X)
    assert "its converter gives float32[6] and PyTorch float32[2, 3]; this is a bug" in str(
        error.value
    )


# Captured steps.


class TinyTransformer(nn.Module):
    """Embeddings, one encoder layer, a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.tokens(ids)))


class Recurrent(nn.Module):
    """A two-layer LSTM and a head on its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def images() -> nn.Module:
    """Convolution, BatchNorm, pooling and a head."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 3),
    )  # fmt: skip


def mlp() -> nn.Module:
    """Two linear layers with LayerNorm and GELU."""
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def classes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy over the last axis."""
    scores = model(x)
    return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), y.reshape(-1))


def clipped(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As `classes`; the step clips the gradients after it."""
    return classes(model, x, y)


def penalized(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy and the squared norm of its gradient in x (a double backward)."""
    x = x.detach().requires_grad_()
    loss = classes(model, x, y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW with a weight decay."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum and Nesterov's step."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)


IDS = torch.tensor([[3, 1, 4, 1, 0], [5, 9, 2, 6, 0]])
BATCHES = {
    "mlp": (torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 2, 1, 1, 0])),
    "images": (torch.linspace(-1, 1, 216).sin().reshape(2, 3, 6, 6), torch.tensor([0, 2])),
    "recurrent": (torch.linspace(-1, 1, 24).cos().reshape(2, 3, 4), torch.tensor([1, 2])),
    "transformer": (IDS, (IDS + 1) % 11),
}
STEPS = {
    "mlp with SGD": (mlp, sgd, classes, "mlp"),
    "mlp with Adagrad": (mlp, torch.optim.Adagrad, classes, "mlp"),
    "mlp with RMSprop, clipped": (mlp, torch.optim.RMSprop, clipped, "mlp"),
    "mlp with a gradient penalty": (mlp, sgd, penalized, "mlp"),
    "images with SGD": (images, sgd, classes, "images"),
    "recurrent with Adam": (Recurrent, torch.optim.Adam, classes, "recurrent"),
    "transformer with AdamW": (TinyTransformer, adamw, classes, "transformer"),
}


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """The usual step."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        if loss_of is clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_a_model_are_pytorchs(name):
    make, make_optimizer, loss_of, batch_name = STEPS[name]
    batch = BATCHES[batch_name]
    model = make()
    reference = copy.deepcopy(model)
    optimizers = make_optimizer(model.parameters()), make_optimizer(reference.parameters())
    step = training_step(model, optimizers[0], loss_of)
    runner = Runner(step, batch, model=model, optimizer=optimizers[0])
    expected = training_step(reference, optimizers[1], loss_of)
    for _ in range(3):
        # float32 sums in another order; the first steps of Adam and RMSprop divide by gradients.
        torch.testing.assert_close(runner(*batch), expected(*batch).detach(), rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(
        dict(model.named_buffers()), dict(reference.named_buffers()), rtol=1e-5, atol=1e-6
    )


def test_phases_and_modules_reach_the_ir():
    model = mlp()
    optimizer = sgd(model.parameters())
    runner = Runner(
        training_step(model, optimizer, classes), BATCHES["mlp"], model=model, optimizer=optimizer
    )
    found = ops_of(runner.mod)
    assert {place.phase for _, place in found} == {"forward", "backward", "optimizer"}
    gelu = [place for name, place in found if name == "relax.nn.gelu"]
    gradient = [place for name, place in found if name == "amp_ir.gelu_backward"]
    assert [place.module for place in gelu + gradient] == ["2", "2"]
    assert [place.phase for place in gelu + gradient] == ["forward", "backward"]


def test_dropout_of_a_captured_step_changes_with_the_counter():
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        y = model(x)
        y.sum().backward()
        optimizer.step()
        return y

    x = BATCHES["mlp"][0]
    runner = Runner(step, (x,), model=model, optimizer=optimizer)
    first, second = runner(x), runner(x)
    assert not torch.equal(first == 0, second == 0)
    assert runner.mod.state["random_state"].tolist()[1] == 2
    bias = model[0].bias.grad
    assert bias is not None
    torch.testing.assert_close(bias, 2.0 * (second != 0).sum(0))
