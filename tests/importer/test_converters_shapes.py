# SPDX-License-Identifier: Apache-2.0
"""Views, rearrangements and tensors made from numbers, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from amp_ir.capture.functional import FUSED_OPS
from import_checks import ALSO_FUSED, check, imported

X = torch.arange(24.0).reshape(2, 3, 4) / 7 - 1.5
Y = torch.arange(12.0).reshape(3, 4)

ONE = {
    "reshape": lambda x: x.reshape(4, -1) * 2,
    "view of a transpose": lambda x: x.transpose(0, 2).reshape(-1, 3) * 2,
    "flatten": lambda x: x.flatten(1) * 2,
    "unflatten": lambda x: x.unflatten(-1, (2, 2)) * 2,
    "unsqueeze": lambda x: x.unsqueeze(-2) * 2,
    "squeeze": lambda x: x[:1].squeeze() * 2,
    "squeeze dim": lambda x: x[:, :1].squeeze(1).squeeze(-1) * 2,
    "squeeze dims": lambda x: torch.squeeze(x[:1, :1], (0, 1)) * 2,
    "permute": lambda x: x.permute(2, 0, -2) * 2,
    "permute back": lambda x: x.permute(2, 0, 1).permute(1, 2, 0) * 2,
    "transpose": lambda x: x.transpose(-1, 0) * 2,
    "t": lambda x: x[0].t() * x[0, 0, 0],
    "movedim": lambda x: x.movedim(0, -1) * 2,
    "expand": lambda x: x[:, :1].expand(-1, 5, -1) * 2,
    "expand new axis": lambda x: x.expand(2, 2, 3, 4) * 2,
    "broadcast_to": lambda x: torch.broadcast_to(x[0, 0], (3, 2, 4)) * 2,
    "repeat": lambda x: x.repeat(2, 1, 3, 1) * 2,
    "tile": lambda x: x.tile((2, 3)) * 2,
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1) * 2,
    "slice": lambda x: x[:, 1:, -3:-1] * 2,
    "slice with step": lambda x: x[..., ::2] * 2,
    "slice with step and offset": lambda x: x[:, 1::2, 1:4:2] * 2,
    "slice beyond the end": lambda x: x[:, 1:100] * 2,
    "empty slice": lambda x: torch.cat([x[:, 3:], x], 1) * 2,
    "select": lambda x: x[1, -1] * 2,
    "select dim": lambda x: x.select(2, -2) * 2,
    "narrow": lambda x: x.narrow(-1, 1, 2) * 2,
    "split": lambda x: [part * k for k, part in enumerate(x.split(3, -1), 2)],
    "split with sizes": lambda x: [part * k for k, part in enumerate(x.split([1, 3], -1), 2)],
    "chunk": lambda x: [part * k for k, part in enumerate(x.chunk(2, 1), 2)],
    "unbind": lambda x: [part * k for k, part in enumerate(x.unbind(1), 2)],
    "tensor_split": lambda x: [part * k for k, part in enumerate(x.tensor_split(3, 2), 2)],
    "cat": lambda x: torch.cat([x, x * 2, x[:1]]),
    "cat negative dim": lambda x: torch.cat([x, x[..., :1]], -1),
    "cat with an empty vector": lambda x: torch.cat([torch.zeros(0), x]),
    "stack": lambda x: torch.stack([x, x * 2], -1),
    "hstack": lambda x: torch.hstack([x[0], x[1]]),
    "flip": lambda x: x.flip(0, -1) * 2,
    "roll": lambda x: x.roll(2, -1) * 2,
    "roll several": lambda x: x.roll((1, -1), (0, 2)) * 2,
    "roll flat": lambda x: x.roll(5) * 2,
    "rot90": lambda x: torch.rot90(x[0]) * 2,
    "tril": lambda x: x.tril() * 2,
    "tril below": lambda x: x.tril(-1) * 2,
    "triu": lambda x: x.triu(1) * 2,
    "diagonal": lambda x: x.diagonal(0, 1, 2) * 2,
    "diagonal offset": lambda x: x.diagonal(1, -2, -1) * 2,
    "diag_embed": lambda x: torch.diag_embed(x[0]) * 2,
    "unfold": lambda x: x.unfold(-1, 2, 1) * 2,
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 3), 2) * 2,
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.reshape(1, 1, 6, 4), 2) * 2,
    "channel_shuffle": lambda x: F.channel_shuffle(x.reshape(1, 4, 2, 3), 2) * 2,
    "im2col": lambda x: F.unfold(x[None], 2, padding=1, stride=1) * 2,
    "pad": lambda x: F.pad(x, (1, 2), value=1.5) * 2,
    "pad and crop": lambda x: F.pad(x, (-1, 2, 0, -1)) * 2,
    "pad reflect": lambda x: F.pad(x, (1, 2), mode="reflect") * 2,
    "pad reflect 2d": lambda x: F.pad(x[None], (1, 2, 1, 0), mode="reflect") * 2,
    "pad replicate": lambda x: F.pad(x, (2, 1), mode="replicate") * 2,
    "pad replicate 2d": lambda x: F.pad(x[None], (1, 2, 1, 3), mode="replicate") * 2,
    "pad replicate 3d": lambda x: F.pad(x[None, None], (1, 2, 1, 3, 1, 0), mode="replicate") * 2,
    "pad circular": lambda x: F.pad(x, (2, 1), mode="circular") * 2,
    "assign a slice": lambda x: _assigned(x),
    "assign a stepped slice": lambda x: _assigned_with_step(x),
    "assign a row": lambda x: _assigned_row(x),
    "swap halves as rotary embeddings do": lambda x: torch.cat((-x[..., 2:], x[..., :2]), -1),
}  # fmt: skip


def _assigned(x):
    y = x * 1
    y[:, 1:, :2] = x[:, :2, 2:] * 3
    return y


def _assigned_with_step(x):
    y = x * 1
    y[..., 1::2] = x[..., ::2] * 3
    return y


def _assigned_row(x):
    y = torch.zeros(2, 3, 4)
    y[1] = x[0] * 2
    y[:, 2] = 5.0
    return y


@pytest.mark.parametrize("name", ONE)
def test_rearrangement(name):
    check(ONE[name], X.clone().requires_grad_())


@pytest.mark.parametrize(
    "name",
    [
        "slice",
        "select",
        "split",
        "chunk",
        "unbind",
        "stack",
        "roll",
        "roll flat",
        "tril",
        "triu",
        "t",
        "transpose",
        "repeat",
        "diagonal",
        "squeeze",
        "pad reflect",
        "pad reflect 2d",
        "pad replicate 2d",
        "pad replicate 3d",
        "assign a stepped slice",
        "assign a row",
    ],
)
def test_rearrangement_kept_whole(name):
    check(ONE[name], X.clone().requires_grad_(), whole=FUSED_OPS | ALSO_FUSED)


@pytest.mark.parametrize("name", ["reshape", "slice with step", "roll", "pad", "stack"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_rearrangement_of_other_dtypes(name, dtype):
    function = ONE[name]
    check(lambda x: function(x), X.to(dtype))


MADE = {
    "zeros": lambda x: torch.zeros(2, 3) + x[0, 0, 0],
    "ones_like": lambda x: torch.ones_like(x) * x,
    "full": lambda x: torch.full((3,), 2.5) * x[0, :, 0],
    "full of int64": lambda x: torch.full((3,), 7),
    "full_like of another dtype": lambda x: torch.full_like(x, 3, dtype=torch.int32),
    "full of bool": lambda x: torch.full((2,), True),
    "full of infinity": lambda x: torch.full((2, 2), float("-inf")),
    "new_full": lambda x: x.new_full((2,), 1.5),
    "new_zeros": lambda x: x.new_zeros(2, 3),
    "arange": lambda x: torch.arange(4) * 2,
    "arange down": lambda x: torch.arange(7, -2, -3),
    "arange of floats": lambda x: torch.arange(0.1, 1.0, 0.1) * x[0, 0, 0],
    "arange as float32": lambda x: torch.arange(5, dtype=torch.float32) / 3,
    "linspace": lambda x: torch.linspace(-1, 2, 7),
    "eye": lambda x: torch.eye(3) @ x[0],
    "eye of another shape": lambda x: torch.eye(2, 3),
    "scalar_tensor": lambda x: x * torch.tensor(0.3),
    "closure constant": lambda x: x[0] + Y,
    "tril_indices": lambda x: torch.tril_indices(3, 3),
    "triu_indices": lambda x: torch.triu_indices(3, 4, 1),
    "causal mask": lambda x: torch.ones(3, 3, dtype=torch.bool).tril(),
    "one_hot": lambda x: F.one_hot(torch.arange(4) % 3, 3).float() @ x[0],
    "zeros_like of int": lambda x: torch.zeros_like(torch.arange(3)) + 1,
    "meshgrid": lambda x: torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij"),
}


@pytest.mark.parametrize("name", MADE)
def test_tensor_from_numbers(name):
    check(MADE[name], X)


@pytest.mark.parametrize(
    "name", ["eye", "eye of another shape", "linspace", "ones_like", "new_full", "new_zeros"]
)
def test_tensor_from_numbers_kept_whole(name):
    check(MADE[name], X, whole=FUSED_OPS | ALSO_FUSED)


def test_bfloat16_and_large_constants_keep_their_bits():
    low = torch.tensor([1e-30, 3.14159, 65504.0, float("inf")], dtype=torch.bfloat16)
    large = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    integers = torch.tensor([2**62, -1])
    check(lambda x: (low.float(), large * x, integers + 0), torch.tensor(1.0))


def test_what_is_not_written_is_zero():
    mod = imported(lambda x: torch.empty(3) * 0 + x, torch.ones(3))
    assert "full" in mod.script()


def test_views_of_views_are_one_op():
    script = imported(lambda x: x.permute(1, 0, 2).permute(1, 0, 2).reshape(6, 4) * 2, X).script()
    assert "R.reshape(batch0, " in script
    assert script.count("R.reshape(") == 1


def test_gradients_of_slices_are_concatenations():
    mod = imported(
        lambda x: torch.autograd.grad((x[:, 1:2] * 3).sum(), x),
        X.clone().requires_grad_(),
        whole=FUSED_OPS | ALSO_FUSED,
    )
    assert "R.concat(" in mod.script()
