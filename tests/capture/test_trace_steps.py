# SPDX-License-Identifier: Apache-2.0
"""Steps as users write them are captured as written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_ir.capture.trace import capture_model
from amp_ir.ir.step_module import Role
from captured_runner import CapturedRunner
from step_comparison import Training, assert_trains_alike, integers, normal
from user_steps import Optimizer, adversaries, batch, classifier, momentum, perceptron


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x)).mean(1)


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.scale = torch.full((3,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean = self.mean * 0.9 + y.detach().mean(0)
        return y * self.scale


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda value: torch.tanh(self.first(value)), x, use_reentrant=False)
        return checkpoint(self.second, x, use_reentrant=True)


def frozen() -> nn.Module:
    model = perceptron()
    model[0].requires_grad_(False)
    return model


def with_hook() -> nn.Module:
    model = perceptron()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    return model


def normalised_weights() -> nn.Module:
    first = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
    second = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))
    return nn.Sequential(first, second)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


@pytest.mark.parametrize(
    "make", [perceptron, frozen, PartlyUsed, with_hook, normalised_weights, RunningMean,
             Checkpointed],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", [momentum, torch.optim.AdamW], ids=["sgd", "adamw"])
def test_models_train_as_in_eager(make: Callable[[], nn.Module], optimizer: Optimizer) -> None:
    assert assert_trains_alike(lambda: classifier(make, optimizer), batch, steps=2) == 1


def test_tied_weights_are_one_input() -> None:
    ids = lambda index: (integers(index, 7, 4, 3), integers(index, 7, 4))  # noqa: E731
    assert assert_trains_alike(lambda: classifier(Tied), ids) == 1
    inputs = classifier(Tied).capture(ids(0)).inputs
    assert [x.name for x in inputs if x.role is Role.PARAMETER] == ["embedding.weight"]


def test_batch_norm_updates_its_statistics_in_the_graph() -> None:
    images = lambda index: (normal(index, 4, 3, 8, 8), integers(index, 3, 4))  # noqa: E731
    assert assert_trains_alike(lambda: classifier(convolutions), images) == 1
    outputs = classifier(convolutions).capture(images(0)).outputs
    updated = [x.name for x in outputs if x.role is Role.BUFFER]
    assert updated == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


@pytest.mark.parametrize("clear", ["before", "after", "never", "to_zero"])
def test_gradients_are_left_as_pytorch_leaves_them(clear: str) -> None:
    def build() -> Training:
        trained = classifier(perceptron)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if clear == "before":
                trained.model.zero_grad()
            loss = F.cross_entropy(trained.model(x), y)
            loss.backward()
            trained.optimizer.step()
            if clear in ("after", "to_zero"):
                trained.optimizer.zero_grad(set_to_none=clear == "after")
            return loss

        return Training(trained.model, trained.optimizer, step)

    captures = assert_trains_alike(build, batch, steps=4)
    # Gradients that were not there at the first capture are inputs of a second.
    assert captures == (1 if clear in ("before", "after") else 2)


def test_gradients_are_accumulated_over_micro_batches_and_clipped() -> None:
    def build() -> Training:
        trained = classifier(perceptron, torch.optim.AdamW)
        parameters = list(trained.model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
            total = torch.zeros(())
            for some_x, some_y in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = F.cross_entropy(trained.model(some_x), some_y) / 2
                loss.backward()
                total += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            torch.nn.utils.clip_grad_value_(parameters, 0.05)
            trained.optimizer.step()
            trained.optimizer.zero_grad()
            return {"loss": total, "norm": norm, "micro_batches": 2}

        return Training(trained.model, trained.optimizer, step)

    assert assert_trains_alike(build, batch) == 1


def test_several_losses_are_walked_back_one_after_the_other() -> None:
    def build() -> Training:
        trained = classifier(perceptron)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            trained.optimizer.zero_grad()
            logits = trained.model(x)
            first, second = F.cross_entropy(logits, y), logits.pow(2).mean()
            first.backward(retain_graph=True)
            second.backward()
            trained.optimizer.step()
            return first, [second, "two losses", None, 3]

        return Training(trained.model, trained.optimizer, step)

    assert assert_trains_alike(build, batch) == 1


def test_two_models_with_two_optimizers() -> None:
    noise = lambda index: (normal(index, 4, 6), normal(index + 50, 4, 4))  # noqa: E731
    assert assert_trains_alike(adversaries, noise) == 1
    names = [entry.name for entry in adversaries().capture(noise(0)).inputs]
    assert "0.weight" in names and "model1.0.weight" in names
    assert "optimizer1.model1.0.weight.square_avg" in names


@pytest.mark.parametrize("of_inputs", [False, True])
def test_a_gradient_penalty_is_differentiated_twice(of_inputs: bool) -> None:
    def build() -> Training:
        trained = classifier(perceptron)
        parameters = list(trained.model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_(of_inputs)
            loss = F.cross_entropy(trained.model(x), y)
            wanted = [x] if of_inputs else parameters
            gradients = torch.autograd.grad(loss, wanted, create_graph=True)
            loss = loss + 0.1 * sum(g.pow(2).sum() for g in gradients).sqrt()
            loss.backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
            return loss

        return Training(trained.model, trained.optimizer, step)

    assert assert_trains_alike(build, batch) == 1


def test_casts_of_the_users_own_autocast_region_are_kept() -> None:
    def build() -> Training:
        trained = classifier(perceptron)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                logits = trained.model(x)
            loss = F.cross_entropy(logits.float(), y)
            loss.backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
            return loss, logits.dtype

        return Training(trained.model, trained.optimizer, step)

    # bfloat16 has 8 significant bits; sums of such products may come in another order.
    assert assert_trains_alike(build, batch, rtol=1e-2, atol=1e-3) == 1
    graph = build().capture(batch(0)).graph.graph
    casts = [node for node in graph.nodes if "_to_copy" in str(node.target)]
    assert {node.kwargs["dtype"] for node in casts} == {torch.bfloat16, torch.float32}


def test_averaged_copies_and_foreach_ops() -> None:
    def build() -> Training:
        trained = classifier(perceptron)
        average = copy.deepcopy(trained.model).requires_grad_(False)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = trained.step(x, y)
            with torch.no_grad():
                torch._foreach_lerp_(
                    list(average.parameters()), list(trained.model.parameters()), 0.1
                )
            return loss

        return Training([trained.model, average], trained.optimizer, step)

    assert assert_trains_alike(build, batch) == 1


@pytest.mark.parametrize("assigns", [False, True])
def test_a_hand_written_update_needs_no_optimizer(assigns: bool) -> None:
    def build() -> Training:
        model = perceptron()
        parameters = list(model.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for parameter in parameters:
                if assigns:
                    parameter.data = parameter.data - 0.1 * parameter.grad
                else:
                    parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
            return loss

        return Training(model, None, step)

    assert assert_trains_alike(build, batch) == 1


def test_dropout_is_one_op_and_its_backward() -> None:
    make = lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))  # noqa: E731
    graph = classifier(make).capture(batch(0)).graph.graph
    ops = [str(node.target) for node in graph.nodes]
    assert ops.count("aten.native_dropout.default") == 1
    assert ops.count("aten.native_dropout_backward.default") == 1


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_train_as_in_eager(kind: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = getattr(nn, kind)(6, 5, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(10, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(x)[0][:, -1])

    sequences = lambda index: (normal(index, 4, 3, 6), integers(index, 3, 4))  # noqa: E731
    assert assert_trains_alike(lambda: classifier(Recurrent), sequences, steps=2) == 1
    graph = classifier(Recurrent).capture(sequences(0)).graph.graph
    ops = [str(node.target) for node in graph.nodes]
    # One op a layer and direction, and its gradient.
    name = "rnn_tanh" if kind == "RNN" else kind.lower()
    assert ops.count(f"amp_ir.{name}.default") == 4
    assert ops.count(f"amp_ir.{name}_backward.default") == 4


def test_a_transformer_layer_keeps_attention_whole() -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(18, 3))

    sequences = lambda index: (normal(index, 4, 3, 6), integers(index, 3, 4))  # noqa: E731
    assert assert_trains_alike(lambda: classifier(make), sequences, steps=2) == 1
    graph = classifier(make).capture(sequences(0)).graph.graph
    ops = [str(node.target) for node in graph.nodes]
    assert "amp_ir.attention.default" in ops and "amp_ir.attention_backward.default" in ops


def test_freezing_a_layer_between_steps_captures_again() -> None:
    def freeze(trained: Training) -> None:
        trained.model[0].requires_grad_(False)

    assert assert_trains_alike(lambda: classifier(perceptron), batch, between=freeze) == 2


def test_evaluation_between_steps_changes_nothing() -> None:
    def evaluate(trained: Training) -> None:
        trained.model.eval()
        with torch.no_grad():
            trained.model(torch.ones(4, 6))
        trained.model.train()

    assert assert_trains_alike(lambda: classifier(perceptron), batch, between=evaluate) == 1


def test_a_learning_rate_that_is_returned_is_read_at_every_call() -> None:
    trained = classifier(perceptron)

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
        return trained.step(x, y), trained.optimizer.param_groups[0]["lr"]

    runner = CapturedRunner(Training(trained.model, trained.optimizer, step).capture(batch(0)))
    trained.optimizer.param_groups[0]["lr"] = 0.025
    rate = runner(*batch(0))[1]
    assert type(rate) is float and rate == 0.025


def test_a_model_alone_is_captured_forward_only() -> None:
    model = perceptron().eval()
    captured = capture_model(model, batch(0)[:1])
    assert all(output.role is Role.RESULT for output in captured.outputs)
    torch.testing.assert_close(CapturedRunner(captured)(normal(3, 4, 6)), model(normal(3, 4, 6)))


def test_notes_name_tensors_from_outside() -> None:
    notes = classifier(RunningMean).capture(batch(0)).notes
    assert notes[0] == (
        "1 tensors from outside of the model are read at every call: attribute 'scale' of module "
        "(the model itself)."
    )
