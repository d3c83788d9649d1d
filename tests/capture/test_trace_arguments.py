# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of a capture: one table, full messages, all errors at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.capture.trace import capture_step
from amp_ir.errors import ArgumentError
from square_steps import square_step

X = torch.ones(2, 6)


def shared_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    return model


def quantized() -> nn.Module:
    return nn.Sequential(torch.ao.nn.quantized.Quantize(0.1, 0, torch.quint8))


def scripted() -> nn.Module:
    class Scripted(torch.jit.ScriptModule):
        pass

    return Scripted()


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


class Counting(torch.amp.GradScaler):
    """Counts its updates."""

    updates = 0

    def update(self, new_scale: Any = None) -> None:
        self.updates += 1
        super().update(new_scale)


def wrong(**changes: Any) -> dict[str, Any]:
    """Arguments of capture_step that are right but for the changes."""
    model = changes.get("model", nn.Linear(6, 3))
    right = {"step": lambda x: x, "example_batch": (X,), "model": model, "optimizer": None}
    return {**right, **changes}


def compiled_step() -> Any:
    return torch.compile(lambda x: x)


def with_model(model: Any) -> dict[str, Any]:
    return wrong(model=model)


def same_optimizer_twice() -> dict[str, Any]:
    model = nn.Linear(6, 3)
    optimizer = sgd(model)
    return wrong(model=model, optimizer=[optimizer, optimizer])


def parameter_twice() -> dict[str, Any]:
    model = nn.Linear(6, 3)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([model.weight, model.bias, model.weight], lr=0.1, momentum=0.9)
    return wrong(model=model, optimizer=optimizer)


def optimizer_of(kind: Any) -> dict[str, Any]:
    model = nn.Linear(6, 3)
    return wrong(model=model, optimizer=kind(model.parameters()))


TABLE: list[tuple[str, Callable[[], dict[str, Any]], str]] = [
    (
        "step is not callable",
        lambda: wrong(step=3),
        "step= is a int, expected a function that makes one training step",
    ),
    (
        "compiled step",
        lambda: wrong(step=compiled_step()),
        "step= was made by torch.compile; pass the plain function instead",
    ),
    (
        "batch is not a tuple",
        lambda: wrong(example_batch=X),
        "example_batch= is a Tensor, expected the tuple of the step's arguments: (inputs, "
        "targets), or (batch,) for a single one",
    ),
    (
        "numpy array",
        lambda: wrong(example_batch=(X, {"y": numpy.zeros(3)})),
        "example_batch[1]['y'] is a numpy.ndarray, expected a tensor; torch.from_numpy makes a "
        "tensor of an array",
    ),
    (
        "unknown object",
        lambda: wrong(example_batch=(X, {3})),
        "example_batch[1] is a builtins.set, expected a tensor; pass tensors and plain values in "
        "tuples, lists, dicts and dataclasses",
    ),
    (
        "batch with a graph",
        lambda: wrong(example_batch=(X.clone().requires_grad_() * 2,)),
        "example_batch[0] is the result of another computation with gradients; pass it detached",
    ),
    (
        "sparse batch",
        lambda: wrong(example_batch=(X.to_sparse(),)),
        "example_batch[0] is sparse (torch.sparse_coo); only dense tensors can be captured, use "
        ".to_dense()",
    ),
    (
        "complex batch",
        lambda: wrong(example_batch=(X.to(torch.complex64),)),
        "example_batch[0] is complex (torch.complex64); keep torch.view_as_real of it, and call "
        "torch.view_as_complex in the step",
    ),
    (
        "quantized batch",
        lambda: wrong(example_batch=(torch.quantize_per_tensor(X, 0.1, 0, torch.quint8),)),
        "example_batch[0] is quantized; train in floating point",
    ),
    (
        "meta batch",
        lambda: wrong(example_batch=(X.to("meta"),)),
        "example_batch[0] is on the meta device and has no values; materialise it (to_empty) "
        "first; tensors are on different devices (weight on cpu, the example batch on meta); move "
        "all to one with .to(device)",
    ),
    (
        "nested batch",
        lambda: wrong(example_batch=(torch.nested.nested_tensor([X[0]], layout=torch.jagged),)),
        "example_batch[0] is a nested tensor; pad it to a dense one",
    ),
    (
        "model is a function",
        lambda: with_model(print),
        "model= has a builtin_function_or_method, expected torch.nn.Module",
    ),
    (
        "no model",
        lambda: with_model([]),
        "model= is an empty list; pass the torch.nn.Module that the step trains",
    ),
    (
        "data parallel",
        lambda: with_model(nn.DataParallel(nn.Linear(6, 3))),
        "model= (itself) is a DataParallel, whose copies on other devices a compiled step does not "
        "run; start a process for each device with torchrun, and use DistributedDataParallel or "
        "data_parallel=True",
    ),
    (
        "compiled model",
        lambda: with_model(torch.compile(nn.Linear(6, 3))),
        "model= (itself) was made by torch.compile; pass the plain module (._orig_mod)",
    ),
    (
        "scripted model",
        lambda: with_model(scripted()),
        "model= (itself) is a TorchScript module; pass the Python module",
    ),
    (
        "quantized model",
        lambda: with_model(quantized()),
        "model= (0) is the quantized module Quantize; train in floating point",
    ),
    (
        "sparse embedding",
        lambda: with_model(nn.Sequential(nn.Embedding(3, 2, sparse=True))),
        "model= (0) has sparse gradients; make the Embedding with sparse=False, and an Adam "
        "where there was a SparseAdam",
    ),
    (
        "lazy model",
        lambda: with_model(nn.LazyLinear(3)),
        "weight is not initialised; run the lazy module once on an example; bias is not "
        "initialised; run the lazy module once on an example",
    ),
    (
        "meta model",
        lambda: with_model(nn.Linear(6, 3, bias=False, device="meta")),
        "weight is on the meta device and has no values; materialise it (to_empty) first",
    ),
    (
        "complex model",
        lambda: with_model(nn.Linear(6, 3, bias=False, dtype=torch.complex64)),
        "weight is complex (torch.complex64); keep torch.view_as_real of it, and call "
        "torch.view_as_complex in the step",
    ),
    (
        "shared memory",
        lambda: with_model(shared_memory()),
        "1.weight and 0.weight share memory but are two tensors; tie them by assigning the same "
        "Parameter to both",
    ),
    (
        "optimizer is a list of parameters",
        lambda: wrong(optimizer="adam"),
        "optimizer= has a str, expected torch.optim.Optimizer",
    ),
    (
        "optimizer of another model",
        lambda: wrong(optimizer=sgd(nn.Linear(2, 2))),
        "2 of the 2 parameters of optimizer 0 (SGD) are in no model; pass every module that it "
        "trains in model=[...], for a parameter in no module torch.nn.ParameterList([p]), or, "
        "where parameters were replaced (load_state_dict(assign=True), a new layer), make the "
        "optimizer anew",
    ),
    (
        "optimizer with a parameter twice",
        parameter_twice,
        "optimizer 0 (SGD) holds 1 of its parameters twice, which PyTorch warns of; make it anew "
        "with each once, as of dict.fromkeys(parameters)",
    ),
    (
        "scaler with an update of its own",
        lambda: wrong(scaler=Counting("cpu")),
        "scaler= has a Counting whose own update() a compiled step would not call; use "
        "amp_ir.GradScaler, whose options decide how the scale changes",
    ),
    (
        "optimizer twice",
        same_optimizer_twice,
        "optimizer= holds the same SGD twice",
    ),
    (
        "closure optimizer",
        lambda: optimizer_of(torch.optim.LBFGS),
        (
            "LBFGS calls its closure as often as the numbers decide; jit the forward and backward "
            "pass without optimizer=, and call that in the closure, or use another optimizer"
        ),
    ),
    (
        "sparse optimizer",
        lambda: optimizer_of(torch.optim.SparseAdam),
        "SparseAdam needs sparse gradients; use Adam",
    ),
    (
        "the same scaler twice",
        lambda: wrong(scaler=[torch.amp.GradScaler("cpu")] * 2),
        "scaler= holds the same GradScaler twice",
    ),
    (
        "scaler of another kind",
        lambda: wrong(scaler=2.0),
        "scaler= has a float, expected an amp_ir.GradScaler",
    ),
    (
        "all at once",
        lambda: wrong(step=None, example_batch=[], model=None),
        "step= is a NoneType, expected a function that makes one training step; example_batch= is "
        "a list, expected the tuple of the step's arguments: (inputs, targets), or (batch,) for a "
        "single one; model= has a NoneType, expected torch.nn.Module",
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("arguments", "message"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_wrong_arguments(arguments: Callable[[], dict[str, Any]], message: str) -> None:
    given = arguments()
    with pytest.raises(ArgumentError) as caught:
        capture_step(given.pop("step"), given.pop("example_batch"), **given)
    assert str(caught.value) == message


def test_a_disabled_scaler_is_accepted() -> None:
    model = nn.Linear(6, 3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    capture_step(lambda x: model(x), (X,), model=model, scaler=scaler)


def test_an_embedding_without_sparse_gradients_trains_with_adam() -> None:
    model = torch.nn.Embedding(6, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    step = square_step(model, optimizer)

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    ids = torch.tensor([1, 2])
    assert train(ids) > train(ids)
