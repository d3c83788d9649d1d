# SPDX-License-Identifier: Apache-2.0
"""Batch normalization folded into convolutions: the rewrite, what is left alone, the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.ir.fixed_values import fixed_inputs
from amp_ir.ir.interpreter import interpret
from amp_ir.rewrites.fold_batch_norm import fold_batch_norm
from amp_ir.rewrites.fold_parameters import fold_parameters
from small_programs import calls

X = torch.linspace(-2, 2, 2 * 4 * 6 * 6).sin().reshape(2, 4, 6, 6)
# Weights with three more roundings of 2^-24, in sums of 36 terms of about the result's size.
TOLERANCE = 40 * 2**-24


class _Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def normalization(channels: int = 8, rank: int = 2, **options: bool) -> nn.Module:
    torch.manual_seed(channels)
    layer = (nn.BatchNorm1d if rank == 1 else nn.BatchNorm2d)(channels, **options)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    if layer.affine:
        nn.init.uniform_(layer.weight, 0.5, 2)
        nn.init.normal_(layer.bias)
    return layer


def traced(*layers: nn.Module, x: torch.Tensor = X):
    net = _Net(*layers).eval()
    mod, _ = amp_ir.trace_model(net, (x,))
    return net, mod, mod.with_ir(fold_batch_norm(mod.ir, fixed_inputs(mod)))


def values_of(mod, x: torch.Tensor) -> torch.Tensor:
    inputs = [mod.state.get(one.name, x) for one in mod.signature.inputs]
    inputs = [one() if callable(one) else one for one in inputs]
    return interpret(mod, [one.detach() for one in inputs])[0]


CHAINS = [
    [nn.Conv2d(4, 8, 3, bias=False), normalization()],
    [nn.Conv2d(4, 8, 3, bias=True), normalization()],
    [nn.Conv2d(4, 8, 3, groups=2, stride=2), normalization(), nn.ReLU()],
    [nn.Conv2d(4, 8, 1), normalization(affine=False), nn.ReLU(), nn.Conv2d(8, 8, 1)],
]


@pytest.mark.parametrize("layers", CHAINS, ids=["plain", "bias", "groups", "no_affine"])
def test_one_addition_is_left_behind_the_convolution(layers):
    net, mod, folded = traced(*layers)
    found = fold_parameters(folded, lambda computed: (f"{computed.name}.new", computed.value))
    rest = [
        binding.value.op.name
        for binding in found.ir["main"].body.blocks[0].bindings
        if hasattr(binding.value, "op")
    ]
    assert rest[:2] == ["amp_ir.conv", "relax.add"]
    assert set(rest) <= {"amp_ir.conv", "relax.add", "relax.nn.relu", "relax.reshape"}
    expected = values_of(mod, X)
    torch.testing.assert_close(values_of(found, X), expected, rtol=0, atol=TOLERANCE * 8)
    assert torch.allclose(net(X), expected, atol=1e-5)


def test_what_has_another_reader_stays():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 8, 3, bias=False), normalization()

        def forward(self, x):
            y = self.conv(x)
            return self.norm(y) + y

    _, mod, folded = traced(Two())
    assert folded.ir.same_as(mod.ir)


def test_a_training_batch_norm_stays():
    net = _Net(nn.Conv2d(4, 8, 3), normalization()).train()
    mod, _ = amp_ir.trace_model(net, (X,))
    folded = fold_batch_norm(mod.ir, fixed_inputs(mod))
    assert len(calls(folded, "amp_ir.batch_norm")) == 1


def test_a_bias_alone_is_no_reason_to_fold():
    _, mod, folded = traced(nn.Conv2d(4, 8, 3, bias=True), nn.ReLU())
    assert folded.ir.same_as(mod.ir)


def test_a_layer_that_is_no_convolution_stays():
    x = torch.linspace(-1, 1, 40).reshape(5, 8)
    _, mod, folded = traced(nn.Linear(8, 8), normalization(rank=1), x=x)
    assert folded.ir.same_as(mod.ir)
