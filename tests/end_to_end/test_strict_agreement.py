# SPDX-License-Identifier: Apache-2.0
"""Plan, strict program and interpreter agree on every kind of layer, up to single roundings.

What differs is the order of float32 sums. Of K = 64 terms it moves a sum by at most K 2^-24, which
takes one value in 2^10 over a rounding boundary of bfloat16, by 2^-8 of it: a norm of 2^-13, which
a second layer behind may double. (Deep networks amplify it up to the error of bfloat16 itself.)
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.step_module import Role

BOUND = 2.0**-12


class _Attention(nn.Module):
    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.is_causal = is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).reshape(4, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).reshape(4, 8, 16))


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(16, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


def _between(*layers: nn.Module) -> nn.Module:
    """Layers between two linear ones, so that gradients pass through them."""
    return nn.Sequential(nn.Linear(16, 16, bias=False), *layers, nn.Linear(16, 16, bias=False))


class _OfImages(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        convolutions = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.layers = nn.Sequential(next(convolutions), *layers, next(convolutions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.reshape(4, 4, 4, 8))


LAYERS = {
    "attention": lambda: _Attention(is_causal=False),
    "causal attention": lambda: _Attention(is_causal=True),
    "lstm": lambda: _Recurrent(nn.LSTM),
    "gru": lambda: _Recurrent(nn.GRU),
    "rnn": lambda: _Recurrent(nn.RNN),
    "layer norm": lambda: _between(nn.LayerNorm(16)),
    "rms norm": lambda: _between(nn.RMSNorm(16)),
    "activations": lambda: _between(nn.GELU(), nn.Linear(16, 16, bias=False), nn.SiLU()),
    "softmax": lambda: _between(nn.Softmax(-1)),
    "group norm": lambda: _OfImages(nn.GroupNorm(2, 4), nn.SiLU()),
    "batch norm": lambda: _OfImages(nn.BatchNorm2d(4), nn.ReLU()),
    "pooling": lambda: _OfImages(nn.MaxPool2d(2), nn.Upsample(scale_factor=2.0)),
}


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_a_strict_step_is_what_the_interpreter_computes_from_the_plan(low: str):
    torch.manual_seed(0)
    models = nn.ModuleDict({name: make() for name, make in LAYERS.items()})
    x = torch.randn(4, 8, 16)

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        values = {name: model(x) for name, model in models.items()}
        torch.stack([value.square().mean() for value in values.values()]).sum().backward()
        return values

    mod, _ = amp_ir.trace_step(step, (x,), model=models)
    planned = amp_ir.autocast(mod, amp_dtype=low)
    state = [
        x if spec.role is Role.BATCH else mod.state[spec.name] for spec in mod.signature.inputs
    ]
    inputs = [one.detach().clone() for one in state if isinstance(one, torch.Tensor)]
    outputs = interpret(planned, inputs)
    expected = dict(zip([one.name for one in mod.signature.outputs], outputs, strict=True))
    strict = amp_ir.compile(planned, rounding="strict")(x)
    exact = interpret(planned, inputs, float_dtype=torch.float64)
    error = 0.0
    for k, (name, found) in enumerate(strict.items()):
        result = outputs[k]
        assert (found - result).norm() <= BOUND * result.norm(), name
        error = max(error, float((found - exact[k]).norm() / exact[k].norm()))
    for name, parameter in models.named_parameters():
        gradient, wanted = parameter.grad, expected[f"{name}.grad"]
        assert gradient is not None
        assert (gradient - wanted).norm() <= BOUND * wanted.norm(), name
    # The roundings that they agree on are there.
    assert error > 4 * BOUND if low == "bfloat16" else error > 0
