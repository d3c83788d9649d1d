# SPDX-License-Identifier: Apache-2.0
"""torch.nn's usual layers, with the gradients of their inputs and parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from import_checks import check, check_module, imported


def values(*shape: int) -> torch.Tensor:
    """Normal numbers, the same for a shape in every run."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator).requires_grad_()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


CONVOLUTIONS = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    "conv1d without bias": (lambda: nn.Conv1d(4, 6, 3, bias=False), (2, 4, 9)),
    "conv1d unbatched": (lambda: nn.Conv1d(4, 6, 3), (4, 9)),
    "conv1d same": (lambda: nn.Conv1d(2, 3, 3, padding="same"), (2, 2, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 5)),
    "conv2d strides": (lambda: nn.Conv2d(3, 4, (3, 2), (2, 1), padding=(1, 0)), (2, 3, 7, 5)),
    "conv2d grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding=2), (2, 4, 7, 7)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), (1, 4, 5, 5)),
    "conv2d valid": (lambda: nn.Conv2d(3, 4, 2, padding="valid"), (1, 3, 4, 4)),
    "conv2d reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (1, 2, 5, 4)),
    "conv2d replicate": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), (1, 2, 5, 4),
    ),
    "conv2d circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (1, 2, 5, 4),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, stride=(1, 2, 1), groups=2), (1, 2, 3, 4, 3)),
    "conv_transpose1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2), (2, 4, 5),
    ),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), (2, 3, 4, 3),
    ),
    "conv_transpose2d dilated": (
        lambda: nn.ConvTranspose2d(3, 4, 2, dilation=2, bias=False), (1, 3, 4, 3),
    ),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (1, 2, 2, 3, 2)),
}  # fmt: skip

NORMALIZATIONS = {
    "batch_norm1d": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "batch_norm1d sequence": (lambda: nn.BatchNorm1d(4, momentum=0.3), (3, 4, 5)),
    "batch_norm2d": (lambda: nn.BatchNorm2d(4, eps=1e-3), (3, 4, 2, 3)),
    "batch_norm2d eval": (lambda: nn.BatchNorm2d(4).eval(), (3, 4, 2, 3)),
    "batch_norm2d without statistics": (
        lambda: nn.BatchNorm2d(4, track_running_stats=False), (3, 4, 2, 3),
    ),
    "batch_norm2d plain": (lambda: nn.BatchNorm2d(4, affine=False), (3, 4, 2, 3)),
    "batch_norm2d plain eval": (lambda: nn.BatchNorm2d(4, affine=False).eval(), (3, 4, 2, 3)),
    "batch_norm3d": (lambda: nn.BatchNorm3d(2), (3, 2, 2, 2, 3)),
    "layer_norm": (lambda: nn.LayerNorm(6), (2, 3, 6)),
    "layer_norm of two axes": (lambda: nn.LayerNorm((3, 6), eps=1e-3), (2, 3, 6)),
    "layer_norm plain": (lambda: nn.LayerNorm(6, elementwise_affine=False), (2, 6)),
    "layer_norm without bias": (lambda: nn.LayerNorm(6, bias=False), (2, 6)),
    "rms_norm": (lambda: nn.RMSNorm(6), (2, 3, 6)),
    "rms_norm with eps": (lambda: nn.RMSNorm(6, eps=1e-2), (2, 3, 6)),
    "rms_norm plain": (lambda: nn.RMSNorm(6, elementwise_affine=False), (2, 3, 6)),
    "group_norm": (lambda: nn.GroupNorm(2, 6), (2, 6, 3)),
    "group_norm plain": (lambda: nn.GroupNorm(3, 6, affine=False), (2, 6, 3, 2)),
    "instance_norm1d": (lambda: nn.InstanceNorm1d(3), (2, 3, 5)),
    "instance_norm2d affine": (lambda: nn.InstanceNorm2d(3, affine=True), (2, 3, 4, 3)),
    "instance_norm2d tracking": (
        lambda: nn.InstanceNorm2d(3, track_running_stats=True), (2, 3, 4, 3),
    ),
    "instance_norm2d eval": (
        lambda: nn.InstanceNorm2d(3, track_running_stats=True).eval(), (2, 3, 4, 3),
    ),
    "instance_norm3d": (lambda: nn.InstanceNorm3d(2), (1, 2, 2, 3, 2)),
    "local_response_norm": (lambda: nn.LocalResponseNorm(2), (2, 4, 3, 3)),
}  # fmt: skip

POOLINGS = {
    "max_pool1d": (lambda: nn.MaxPool1d(3, stride=2), (2, 3, 8)),
    "max_pool2d": (lambda: nn.MaxPool2d(2), (2, 3, 4, 6)),
    "max_pool2d windows": (
        lambda: nn.MaxPool2d((3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 3, 7, 6),
    ),
    "max_pool2d ceil": (lambda: nn.MaxPool2d(2, stride=2, ceil_mode=True), (1, 2, 5, 5)),
    "max_pool2d unbatched": (lambda: nn.MaxPool2d(2), (3, 4, 6)),
    "max_pool3d": (lambda: nn.MaxPool3d(2), (1, 2, 4, 4, 2)),
    "avg_pool1d": (lambda: nn.AvgPool1d(3, stride=2, padding=1), (2, 3, 8)),
    "avg_pool2d": (lambda: nn.AvgPool2d(2), (2, 3, 4, 6)),
    "avg_pool2d ceil": (
        lambda: nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False),
        (1, 2, 6, 5),
    ),
    "avg_pool2d divisor": (lambda: nn.AvgPool2d(2, divisor_override=3), (1, 2, 4, 4)),
    "avg_pool3d": (lambda: nn.AvgPool3d(2, stride=1), (1, 2, 3, 3, 2)),
    "adaptive_avg_pool1d": (lambda: nn.AdaptiveAvgPool1d(3), (2, 3, 7)),
    "adaptive_avg_pool2d": (lambda: nn.AdaptiveAvgPool2d((3, 2)), (2, 3, 7, 4)),
    "adaptive_avg_pool2d to one": (lambda: nn.AdaptiveAvgPool2d(1), (2, 3, 4, 5)),
    "adaptive_avg_pool3d": (lambda: nn.AdaptiveAvgPool3d(2), (1, 2, 3, 4, 5)),
    "adaptive_max_pool1d": (lambda: nn.AdaptiveMaxPool1d(3), (2, 3, 7)),
    "adaptive_max_pool2d": (lambda: nn.AdaptiveMaxPool2d((3, 2)), (2, 3, 7, 4)),
    "adaptive_max_pool3d": (lambda: nn.AdaptiveMaxPool3d(2), (1, 2, 3, 4, 5)),
    "lp_pool1d": (lambda: nn.LPPool1d(2, 2), (1, 2, 6)),
    "lp_pool2d": (lambda: nn.LPPool2d(2, 2), (1, 2, 4, 4)),
}  # fmt: skip


class Resized(nn.Module):
    """Smaller images, each pixel from all that it covers."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        return nn.functional.interpolate(x, antialias=True, **self.options)


UPSAMPLINGS = {
    "nearest 1d": (lambda: nn.Upsample(scale_factor=2), (1, 2, 3)),
    "nearest": (lambda: nn.Upsample(scale_factor=2), (1, 2, 3, 4)),
    "nearest to a size": (lambda: nn.Upsample(size=(5, 7)), (1, 2, 3, 4)),
    "nearest down": (lambda: nn.Upsample(size=(2, 3)), (1, 2, 5, 4)),
    "nearest, extent kept": (lambda: nn.Upsample(scale_factor=1.3), (1, 2, 3, 3)),
    "nearest, extent doubled": (lambda: nn.Upsample(scale_factor=2.2), (1, 2, 4, 3)),
    "nearest, of a larger plane": (lambda: nn.Upsample(scale_factor=1.01), (1, 1, 70, 66)),
    "nearest 3d": (lambda: nn.Upsample(scale_factor=2), (1, 1, 2, 3, 2)),
    "nearest exact": (lambda: nn.Upsample(size=(5, 7), mode="nearest-exact"), (1, 2, 3, 4)),
    "linear": (lambda: nn.Upsample(scale_factor=1.7, mode="linear"), (1, 2, 5)),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 3, 4)),
    "bilinear aligned": (
        lambda: nn.Upsample(size=(5, 7), mode="bilinear", align_corners=True), (1, 2, 3, 4),
    ),
    "bilinear down": (lambda: nn.Upsample(size=(2, 3), mode="bilinear"), (1, 2, 5, 4)),
    "trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), (1, 1, 2, 3, 2)),
    "bicubic": (lambda: nn.Upsample(size=(5, 6), mode="bicubic"), (1, 1, 4, 3)),
    "antialiased": (lambda: Resized(size=(3, 9), mode="bilinear"), (1, 2, 8, 5)),
    "antialiased by a factor": (lambda: Resized(scale_factor=0.4, mode="bicubic"), (1, 2, 9, 7)),
}  # fmt: skip

RECURRENT = {
    "rnn": (lambda: nn.RNN(3, 4, batch_first=True), (2, 3, 3)),
    "rnn relu": (lambda: nn.RNN(3, 4, nonlinearity="relu"), (3, 2, 3)),
    "lstm": (lambda: nn.LSTM(3, 4, num_layers=2), (3, 2, 3)),
    "lstm both ways": (lambda: nn.LSTM(3, 2, bidirectional=True, batch_first=True), (2, 3, 3)),
    "lstm with projection": (lambda: nn.LSTM(3, 4, proj_size=2), (3, 2, 3)),
    "gru": (lambda: nn.GRU(3, 4, num_layers=2, bias=False), (3, 2, 3)),
    "lstm cell": (lambda: nn.LSTMCell(3, 4), (2, 3)),
    "gru cell": (lambda: nn.GRUCell(3, 4), (2, 3)),
}

OTHERS = {
    "linear": (lambda: nn.Linear(4, 5), (2, 3, 4)),
    "linear without bias": (lambda: nn.Linear(4, 5, bias=False), (2, 4)),
    "linear of a vector": (lambda: nn.Linear(4, 5), (4,)),
    "prelu": (lambda: nn.PReLU(3), (2, 3, 4)),
    "rrelu": (lambda: nn.RReLU(0.2, 0.2), (2, 3)),
    "rrelu eval": (lambda: nn.RReLU().eval(), (2, 3)),
    "dropout eval": (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)).eval(), (3, 4)),
    "dropout of zero": (lambda: nn.Dropout(0.0), (3, 4)),
    "reflection_pad1d": (lambda: nn.ReflectionPad1d(2), (1, 2, 4)),
    "replication_pad2d": (lambda: nn.ReplicationPad2d((1, 2, 0, 1)), (1, 2, 3, 3)),
    "zero_pad2d": (lambda: nn.ZeroPad2d(1), (1, 2, 3, 3)),
    "pixel_shuffle": (lambda: nn.PixelShuffle(2), (1, 4, 2, 3)),
    "unfold": (lambda: nn.Unfold(2), (1, 2, 3, 3)),
    "fold": (lambda: nn.Fold((4, 5), 2), (1, 8, 12)),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (2, 4),
    ),
    "transformer encoder layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (2, 3, 4),
    ),
    "transformer encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(
            4, 2, 8, dropout=0.0, norm_first=True, activation="gelu"
        ),
        (3, 2, 4),
    ),
}  # fmt: skip

LAYERS = {
    f"{family}: {name}": case
    for family, table in {
        "convolution": CONVOLUTIONS,
        "normalization": NORMALIZATIONS,
        "pooling": POOLINGS,
        "upsampling": UPSAMPLINGS,
        "recurrent": RECURRENT,
        "other": OTHERS,
    }.items()
    for name, case in table.items()
}


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    make, shape = LAYERS[name]
    check_module(make(), values(*shape))


def test_batch_norm_with_statistics_other_than_the_first():
    module = nn.BatchNorm2d(3).eval()
    module.running_mean.copy_(torch.tensor([0.5, -1.0, 2.0]))
    module.running_var.copy_(torch.tensor([0.25, 4.0, 1.5]))
    check_module(module, values(2, 3, 2, 2))


def test_max_pool_gives_its_indices():
    pool = nn.MaxPool2d(2, return_indices=True)
    check(lambda x: pool(x), values(1, 2, 4, 4))


def test_max_unpool():
    pool, unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
    check(lambda x: unpool(*pool(x)), values(1, 2, 4, 4))


def test_multi_head_attention():
    module = nn.MultiheadAttention(4, 2, batch_first=True)
    mask = torch.tensor([[False, False, True], [False, False, False]])

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, query, keys, mask):
            return self.attention(query, keys, keys, key_padding_mask=mask, need_weights=True)

    check_module(Masked(), values(2, 2, 4), values(2, 3, 4), mask)


def test_embedding_with_padding():
    module = nn.Embedding(6, 3, padding_idx=1)
    check_module(module, torch.tensor([[0, 1, 5], [5, 2, 1]]))


def test_embedding_of_int32_ids():
    check_module(nn.Embedding(6, 3), torch.tensor([3, 3, 0], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["conv2d", "batch_norm2d", "layer_norm", "group_norm", "max_pool2d", "bilinear"]
)
def test_layer_in_another_dtype(name, dtype):
    # bfloat16: PyTorch rounds parts of the normalizations' gradients; 2^-5 of values near 1.
    tolerance = 1e-9 if dtype == torch.float64 else 2**-5
    make, shape = next(case for key, case in LAYERS.items() if key.endswith(f": {name}"))
    x = values(*shape).detach().to(dtype).requires_grad_()
    check_module(make().to(dtype), x, rtol=tolerance, atol=tolerance)


def test_inference_batch_norm_is_elementwise():
    module = nn.BatchNorm2d(3).eval()
    script = imported(lambda x: module(x).detach(), values(1, 3, 2, 2).detach()).script()
    assert "amp_ir" not in script
