# SPDX-License-Identifier: Apache-2.0
"""The layers and losses of torch.nn, with inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from step_comparison import integers, normal

Make = Callable[[int], torch.Tensor]


# A layer and what makes its inputs.
Case = tuple[Callable[[], nn.Module], tuple[Make, ...]]


class Function(nn.Module):
    """A function of some layers and the inputs, as a layer."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*self.layers, *inputs)


def floats(*shape: int, seed: int = 0) -> Make:
    return lambda index: normal(index + 1000 * seed, *shape)


def ids(high: int, *shape: int) -> Make:
    return lambda index: integers(index, high, *shape)


def layer(kind: type[nn.Module], *arguments: Any, x: Make, **options: Any) -> Case:
    return lambda: kind(*arguments, **options), (x,)


def function(body: Callable[..., Any], *inputs: Make) -> Case:
    return lambda: Function(body), inputs


SPACES = {1: (9,), 2: (7, 6), 3: (5, 6, 4)}


def of_dimension(name: str, d: int) -> type[nn.Module]:
    return getattr(nn, f"{name}{d}d")


def convolutions(d: int) -> dict[str, Case]:
    conv, transposed = of_dimension("Conv", d), of_dimension("ConvTranspose", d)
    x = floats(2, 4, *SPACES[d])
    return {
        "plain": layer(conv, 4, 6, 3, padding=1, x=x),
        "groups": layer(conv, 4, 8, 3, groups=2, stride=2, bias=False, x=x),
        "depthwise": layer(conv, 4, 4, 3, groups=4, padding=1, x=x),
        "dilated": layer(conv, 4, 5, 2, dilation=2, padding=1, x=x),
        "pointwise": layer(conv, 4, 3, 1, x=x),
        "transposed": layer(transposed, 4, 6, 3, stride=2, padding=1, output_padding=1, x=x),
        "transposed_groups": layer(transposed, 4, 6, 2, groups=2, bias=False, x=x),
    }


def poolings(d: int) -> dict[str, Case]:
    largest, mean = of_dimension("MaxPool", d), of_dimension("AvgPool", d)
    x = floats(2, 3, *SPACES[d])
    return {
        "max": layer(largest, 2, x=x),
        "max_padded": layer(largest, 3, 2, 1, x=x),
        "max_ceil": layer(largest, 3, 2, ceil_mode=True, x=x),
        "mean": layer(mean, 3, 2, 1, x=x),
        "mean_inside": layer(mean, 3, 2, 1, count_include_pad=False, ceil_mode=True, x=x),
        "adaptive_mean": layer(of_dimension("AdaptiveAvgPool", d), 3, x=x),
        "global_mean": layer(of_dimension("AdaptiveAvgPool", d), 1, x=x),
        "adaptive_max": layer(of_dimension("AdaptiveMaxPool", d), 2, x=x),
    }


def norms(d: int) -> dict[str, Case]:
    x = floats(4, 3, *SPACES[d])
    batch, instance = of_dimension("BatchNorm", d), of_dimension("InstanceNorm", d)
    return {
        "batch": layer(batch, 3, x=x),
        "batch_bare": layer(batch, 3, affine=False, track_running_stats=False, x=x),
        "batch_eval": (lambda: batch(3).eval(), (x,)),
        "batch_cumulative": layer(batch, 3, momentum=None, x=x),
        "batch_cumulative_eval": (lambda: batch(3, momentum=None).eval(), (x,)),
        "instance": layer(instance, 3, x=x),
        "instance_tracking": layer(instance, 3, affine=True, track_running_stats=True, x=x),
        "padded": layer(of_dimension("ReflectionPad", d), 1, x=x),
        "circular": layer(of_dimension("CircularPad", d), 1, x=x),
        "enlarged": layer(nn.Upsample, scale_factor=2, x=x),
    }


ROWS = floats(3, 4, 7)


OTHER_NORMS: dict[str, Case] = {
    "group": layer(nn.GroupNorm, 2, 4, x=floats(3, 4, 5, 6)),
    "group_one": layer(nn.GroupNorm, 1, 4, x=floats(3, 4, 7)),
    "group_bare": layer(nn.GroupNorm, 4, 4, affine=False, x=floats(3, 4, 5)),
    "layer": layer(nn.LayerNorm, 7, x=ROWS),
    "layer_two": layer(nn.LayerNorm, (4, 7), x=ROWS),
    "layer_no_bias": layer(nn.LayerNorm, 7, bias=False, x=ROWS),
    "layer_bare": layer(nn.LayerNorm, 7, elementwise_affine=False, x=ROWS),
    "rms": layer(nn.RMSNorm, 7, x=ROWS),
    "rms_bare": layer(nn.RMSNorm, 7, eps=1e-3, elementwise_affine=False, x=ROWS),
    "batch_of_rows": layer(nn.BatchNorm1d, 5, x=floats(6, 5)),
    "local_response": layer(nn.LocalResponseNorm, 2, x=floats(2, 4, 5, 5)),
}


ACTIVATIONS: dict[str, Case] = {
    name: layer(getattr(nn, name), x=floats(2, 3, 5, 4))
    for name in (
        "ELU Hardshrink Hardsigmoid Hardtanh Hardswish LeakyReLU LogSigmoid PReLU ReLU ReLU6 SELU "
        "CELU GELU Sigmoid SiLU Mish Softplus Softshrink Softsign Tanh Tanhshrink Softmax2d"
    ).split()
} | {
    "RReLU": (lambda: nn.RReLU().eval(), (floats(2, 17),)),
    "Threshold": layer(nn.Threshold, 0.1, 2.0, x=floats(2, 17)),
    "GLU": layer(nn.GLU, x=floats(2, 6)),
    "GELU_tanh": layer(nn.GELU, "tanh", x=floats(2, 17)),
    "PReLU_channels": layer(nn.PReLU, 3, x=floats(2, 3, 5)),
    "Softmin": layer(nn.Softmin, 1, x=floats(3, 7)),
    "Softmax_rows": layer(nn.Softmax, 0, x=floats(4, 3)),
    "LogSoftmax": layer(nn.LogSoftmax, -1, x=floats(4, 3)),
}


def recurrent(kind: str) -> dict[str, Case]:
    made, cell = getattr(nn, kind), getattr(nn, kind + "Cell")
    x = floats(2, 3, 4)

    def deep() -> nn.Module:
        return Function(lambda one, x: one(x), made(4, 5, 2, batch_first=True, bidirectional=True))

    first = (lambda one, x: one(x)[0]) if kind == "LSTM" else (lambda one, x: one(x))
    return {"deep": (deep, (x,)), "cell": (lambda: Function(first, cell(4, 5)), (floats(2, 4),))}


def attends(body: Callable[..., Any], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Function(body, nn.MultiheadAttention(8, 2, batch_first=True, **options))


X, MEMORY = floats(2, 5, 8), floats(2, 3, 8, seed=1)


HEADS, KEYS, VALUES = floats(1, 2, 5, 4), floats(1, 2, 6, 4, seed=1), floats(1, 2, 6, 3, seed=2)


ATTENTION: dict[str, Case] = {
    "weights": (attends(lambda one, x: one(x, x, x)), (X,)),
    "plain": (attends(lambda one, x: one(x, x, x, need_weights=False)[0]), (X,)),
    "other_keys": (
        attends(
            lambda one, x, y: one(x, y, y, need_weights=False)[0],
            kdim=6, vdim=6, add_bias_kv=True, add_zero_attn=True,
        ),
        (X, floats(2, 3, 6)),
    ),
    "causal": function(
        lambda q: F.scaled_dot_product_attention(q, q * 2, q - 1, is_causal=True), HEADS
    ),
    "masked": function(
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3),
        HEADS, KEYS, VALUES, floats(5, 6),
    ),
    "encoder": layer(
        nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0, batch_first=True, norm_first=True,
        activation="gelu", x=X,
    ),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (X, MEMORY),
    ),
}  # fmt: skip


TABLES: dict[str, Case] = {
    "embedding": layer(nn.Embedding, 9, 5, x=ids(9, 2, 4)),
    "padded": layer(nn.Embedding, 9, 5, padding_idx=3, x=ids(9, 2, 4)),
    "bilinear": (lambda: nn.Bilinear(4, 5, 3), (floats(2, 4), floats(2, 5))),
    "linear": layer(nn.Linear, 5, 7, x=floats(2, 3, 5)),
    "fold": layer(nn.Fold, (4, 5), (2, 2), x=floats(1, 12, 12)),
    "unfold": layer(nn.Unfold, (2, 2), padding=1, x=floats(1, 3, 4, 5)),
    "shuffle": layer(nn.PixelShuffle, 2, x=floats(1, 8, 3, 3)),
    "bilinear_corners": layer(
        nn.Upsample, scale_factor=2, mode="bilinear", align_corners=True, x=floats(1, 2, 4, 5)
    ),
    "bilinear_size": layer(nn.Upsample, (7, 9), mode="bilinear", x=floats(1, 2, 4, 5)),
    "similar": (lambda: nn.CosineSimilarity(), (floats(3, 5), floats(3, 5, seed=1))),
    "distant": (lambda: nn.PairwiseDistance(), (floats(3, 5), floats(3, 5, seed=1))),
    "unpooled": (
        lambda: Function(
            lambda pool, back, x: back(*pool(x)),
            nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2),
        ),
        (floats(1, 2, 4, 4),),
    ),
}  # fmt: skip


ROW, PARTS, AT = floats(3, 5), floats(3, 4, seed=1), ids(5, 3, 4)


PLACES: dict[str, Case] = {
    "gather": function(lambda x, i: x.gather(1, i), ROW, AT),
    "scatter": function(lambda x, s, i: x.scatter_add(1, i, s), ROW, PARTS, AT),
    "largest": function(lambda x, s, i: x.scatter_reduce(1, i, s, "amax"), ROW, PARTS, AT),
    "means": function(
        lambda x, s, i: (
            x.scatter_reduce(1, i, s, "mean", include_self=False),
            x.scatter_reduce(1, i, s, "amin", include_self=False),
        ),
        ROW,
        PARTS,
        AT,
    ),
    "medians": function(lambda x: (x.median(1)[0], x.kthvalue(2, 0)[0]), floats(3, 7)),
    "angles": function(lambda x, y: torch.atan2(x, y), floats(3, 7), floats(3, 7, seed=1)),
    "one_constant_place": function(
        lambda x: (
            x.index_fill(0, torch.tensor([1]), 0.0),
            x[:, torch.tensor([2])] * x.gather(1, torch.tensor([[0]]).expand(5, 1)),
            x * torch.tensor([2.0]).cumsum(0),
        ),
        floats(5, 3),
    ),
    "index_add": function(
        lambda x, s, i: x.index_add(0, i, s), floats(5, 3), floats(7, 3), ids(5, 7)
    ),
    "index_put": function(
        lambda x, s, i: x.index_put((i,), s, accumulate=True), floats(5, 3), floats(7, 3), ids(5, 7)
    ),
    "advanced": function(lambda x, i: x[i, :, i % 4], floats(5, 3, 4), ids(5, 6)),
    "sums": function(lambda x: (x.cumsum(1), x.cumsum(0)), floats(3, 7)),
    "products": function(lambda x: x.cumprod(1), floats(3, 7)),
    "sorted": function(lambda x: (x.sort(1)[0], x.sort(0, descending=True)[0]), floats(3, 7)),
    "positions": function(lambda x: x + x.argsort(1), floats(3, 7)),
    "topk": function(lambda x: (x.topk(3)[0], x.topk(2, dim=0, largest=False)[0]), floats(4, 7)),
    "double": function(lambda x, y: (x.double() @ y.double()).float(), floats(3, 4), floats(4, 5)),
    "integers": function(lambda x, i, j: x + (i @ j), floats(3, 5), ids(9, 3, 4), ids(9, 4, 5)),
}  # fmt: skip


LOGITS, CLASSES, FIVE = floats(4, 5), ids(5, 4), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.1])


def chances(index: int) -> torch.Tensor:
    return normal(index, 4, 5).sigmoid()


def shares(index: int) -> torch.Tensor:
    return normal(index + 1, 4, 5).softmax(1)


def log_shares(index: int) -> torch.Tensor:
    return normal(index, 4, 5).log_softmax(1)


def signs(*shape: int) -> Make:
    return lambda index: normal(index + 3, *shape).sign().long()


def losses(reduction: str) -> dict[str, Case]:
    inputs = {
        "L1Loss": (LOGITS, chances), "MSELoss": (LOGITS, chances),
        "CrossEntropyLoss": (LOGITS, CLASSES), "NLLLoss": (log_shares, CLASSES),
        "SmoothL1Loss": (LOGITS, chances), "HuberLoss": (LOGITS, chances),
        "BCELoss": (chances, shares), "BCEWithLogitsLoss": (LOGITS, shares),
        "KLDivLoss": (log_shares, shares), "PoissonNLLLoss": (LOGITS, chances),
        "SoftMarginLoss": (LOGITS, signs(4, 5)), "HingeEmbeddingLoss": (LOGITS, signs(4, 5)),
        "MultiMarginLoss": (LOGITS, CLASSES), "MultiLabelSoftMarginLoss": (LOGITS, shares),
        "CosineEmbeddingLoss": (LOGITS, chances, signs(4)),
        "TripletMarginLoss": (LOGITS, chances, shares),
        "MarginRankingLoss": (floats(4), floats(4, seed=1), signs(4)),
    }  # fmt: skip
    return {
        name: (lambda name=name: getattr(nn, name)(reduction=reduction), made)
        for name, made in inputs.items()
    }


LOSS_OPTIONS: dict[str, Case] = {
    "smoothed": (
        lambda: nn.CrossEntropyLoss(label_smoothing=0.1, weight=FIVE.clone()),
        (LOGITS, CLASSES),
    ),
    "ignoring": (lambda: nn.CrossEntropyLoss(ignore_index=2), (LOGITS, CLASSES)),
    "of_shares": (lambda: nn.CrossEntropyLoss(), (LOGITS, shares)),
    "of_images": (lambda: nn.CrossEntropyLoss(), (floats(2, 5, 3, 3), ids(5, 2, 3, 3))),
    "weighted": (lambda: nn.NLLLoss(FIVE.clone(), ignore_index=1), (log_shares, CLASSES)),
    "positive": (lambda: nn.BCEWithLogitsLoss(pos_weight=FIVE.clone()), (LOGITS, shares)),
    "binary": (lambda: nn.BCELoss(weight=FIVE.clone()), (chances, shares)),
    "log_target": (
        lambda: nn.KLDivLoss(log_target=True, reduction="sum"),
        (log_shares, lambda index: log_shares(index + 5)),
    ),
    "huber": (lambda: nn.HuberLoss(delta=0.5), (LOGITS, chances)),
    "smooth": (lambda: nn.SmoothL1Loss(beta=0.3), (LOGITS, chances)),
    "poisson": (lambda: nn.PoissonNLLLoss(log_input=False, full=True), (chances, chances)),
}


FAMILIES: dict[str, dict[str, Case]] = {
    **{f"conv{d}": convolutions(d) for d in SPACES},
    **{f"pool{d}": poolings(d) for d in SPACES},
    **{f"norm{d}": norms(d) for d in SPACES},
    "norms": OTHER_NORMS,
    "activations": ACTIVATIONS,
    **{kind.lower(): recurrent(kind) for kind in ("RNN", "LSTM", "GRU")},
    "attention": ATTENTION,
    "tables": TABLES,
    "places": PLACES,
    **{f"losses_{reduction}": losses(reduction) for reduction in ("mean", "sum", "none")},
    "loss_options": LOSS_OPTIONS,
}


def weighted(values: Any) -> torch.Tensor:
    """A scalar that depends on every element of the results differently."""
    total = torch.zeros(())
    for value in torch.utils._pytree.tree_leaves(values):
        weights = torch.linspace(-1, 1.3, value.numel()).reshape(value.shape) + 0.05
        total = total + (value * weights).sum()
    return total
