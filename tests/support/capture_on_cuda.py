# SPDX-License-Identifier: Apache-2.0
"""Captures workloads whose tensors are on a GPU that is not there; prints what came of each.

A program of its own, since `fake_cuda_device` is loaded before PyTorch: its path is the argument.
"""

from __future__ import annotations

import collections
import ctypes
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

_torch = importlib.util.find_spec("torch")
assert _torch is not None and _torch.origin is not None
ctypes.CDLL(str(Path(_torch.origin).parent / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
_device = ctypes.CDLL(sys.argv[1])

import torch  # noqa: E402

_device.amp_ir_use_fake_guard()
# A build of PyTorch with CUDA would ask cuDNN, which needs a driver, whether it takes a layer.
torch.backends.cudnn.is_acceptable = lambda _tensor: False

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence  # noqa: E402

import amp_ir  # noqa: E402
from amp_ir import pipeline  # noqa: E402
from amp_ir.demo.workloads import WORKLOADS, Training  # noqa: E402
from amp_ir.ir import target, unusable_tensors  # noqa: E402

# The GPU's tensors are fakes here, which users are refused.
unusable_tensors._tensor_errors = lambda _tensor: iter(())
unusable_tensors._needed_bytes = lambda _tensor: 0


class Recurrent(torch.nn.Module):
    """The output of a layer or cell."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]


def recurrent(layers: torch.nn.Module, *shape: int) -> Training:
    model = Recurrent(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(model, optimizer, lambda x: model(x).square().mean(), (torch.randn(shape),))


def packed(layers: torch.nn.Module) -> Training:
    """Sequences of lengths that are data; PyTorch wants them on the CPU."""
    model = Recurrent(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        given = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        return pad_packed_sequence(model(given), total_length=4)[0].square().mean()

    return Training(model, optimizer, loss, (torch.randn(4, 2, 8), torch.tensor([3, 4])))


@torch.library.custom_op("amp_ir_test_gpu::half", mutates_args=(), device_types="cuda")
def half(x: torch.Tensor) -> torch.Tensor:
    """Stand for a Triton op: it has no kernel on a CPU."""
    raise AssertionError("a capture runs no kernel")


half.register_fake(torch.empty_like)
half.register_autograd(lambda ctx, grad: half(grad))


def custom() -> Training:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(
        model, optimizer, lambda x: half(model(x)).square().mean(), (torch.randn(4, 8),)
    )


SMALL: dict[str, Callable[[], Training]] = {
    "custom op": custom,
    "gru": lambda: recurrent(torch.nn.GRU(8, 8, num_layers=2, bidirectional=True), 3, 2, 8),
    "packed": lambda: packed(torch.nn.GRU(8, 8, bidirectional=True)),
    "rnn": lambda: recurrent(torch.nn.RNN(8, 8, bidirectional=True), 3, 2, 8),
    "lstm cell": lambda: recurrent(torch.nn.LSTMCell(8, 8), 2, 8),
}


def moved(training: Training) -> Training:
    """The training on the GPU: tensors of the same shapes without data, plain SGD."""
    made: dict[int, torch.Tensor] = {}

    def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
            is_trained = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = torch.nn.Parameter(empty) if is_trained else empty
        return made[id(tensor)]

    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in training.model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    tensors[name] = None if tensor is None else on_gpu(tensor)
        for module in training.model.modules():
            if isinstance(module, torch.nn.RNNBase):
                module._flat_weights = [
                    getattr(module, name) for name in module._flat_weights_names
                ]
        batch = tuple(map(on_gpu, training.batch))
    return with_sgd(Training(training.model, training.optimizer, training.loss, batch))


def with_sgd(training: Training) -> Training:
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, momentum=0.9)
    return Training(training.model, optimizer, training.loss, training.batch)


def ops_of(training: Training) -> tuple[amp_ir.StepModule, collections.Counter[str]]:
    mod, _ = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    values = [one.value for block in mod.ir["main"].body.blocks for one in block.bindings]
    calls = [value for value in values if hasattr(value, "op")]
    return mod, collections.Counter(str(call.op.name) for call in calls)


def report(name: str) -> dict[str, object]:
    make = SMALL.get(name) or (lambda: WORKLOADS[name].make(small=True))
    mod, ops = ops_of(moved(make()))
    _, expected = ops_of(with_sgd(make()))
    mod = amp_ir.autocast(mod, amp_dtype="bfloat16")
    planned = pipeline.lower(mod, target=target.cuda("sm_90"))
    return {
        "more": dict(ops - expected),
        "fewer": dict(expected - ops),
        "libraries": sorted({note.library for note in planned.dispatched}),
    }


def error_of_a_batch_of_the_host() -> str:
    training = moved(WORKLOADS["mlp"].make(small=True))
    batch = WORKLOADS["mlp"].make(small=True).batch
    try:
        amp_ir.trace_step(training.step, batch, model=training.model, optimizer=training.optimizer)
    except amp_ir.errors.CaptureError as error:
        return str(error)
    return "captured"


def of_a_batch_that_the_step_moves() -> list[str]:
    """The devices of the step's inputs."""
    training = moved(WORKLOADS["mlp"].make(small=True))
    batch = WORKLOADS["mlp"].make(small=True).batch

    def step(*batch: torch.Tensor) -> torch.Tensor:
        return training.step(*(one.to("cuda", non_blocking=True) for one in batch))

    mod, _ = amp_ir.trace_step(step, batch, model=training.model, optimizer=training.optimizer)
    return [one.role.value for one in mod.signature.inputs]


found: dict[str, object] = {name: report(name) for name in sys.argv[2:]}
found["refused"] = error_of_a_batch_of_the_host()
found["moved"] = of_a_batch_that_the_step_moves()
print(json.dumps(found))
