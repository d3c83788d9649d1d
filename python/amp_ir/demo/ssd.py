# SPDX-License-Identifier: Apache-2.0
"""SSD-512 on a ResNet-50, in plain PyTorch.

Liu et al. 2016, with the layers and anchor counts of GluonCV's `ssd_512_resnet50_v1_voc`: heads at
strides 16 and 32 of the backbone and on four further layers that halve the side each time.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

ANCHORS = (4, 6, 6, 6, 4, 4)
_NEGATIVES_A_POSITIVE = 3


def _conv(inner: int, outer: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outer))


class Bottleneck(nn.Module):
    """A residual block of ResNet-50 (He et al. 2015): 1x1, 3x3 and 1x1 convolutions."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.reduce = _conv(inner, width, 1)
        self.middle = _conv(width, width, 3, stride)
        self.expand = _conv(width, outer, 1)
        is_same = inner == outer and stride == 1
        self.shortcut = nn.Identity() if is_same else _conv(inner, outer, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map f32[n, inner, h, w] to f32[n, 4 width, h / stride, w / stride]."""
        y = functional.relu(self.reduce(x))
        y = functional.relu(self.middle(y))
        return functional.relu(self.expand(y) + self.shortcut(x))


def _stage(inner: int, width: int, depth: int, stride: int) -> nn.Sequential:
    blocks = [Bottleneck(inner, width, stride)]
    blocks += [Bottleneck(4 * width, width, 1) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


def _further(inner: int, outer: int) -> nn.Sequential:
    """Halve the side. There is no BatchNorm: the last map of one image has one value a channel."""
    return nn.Sequential(
        nn.Conv2d(inner, outer // 2, 1),
        nn.ReLU(),
        nn.Conv2d(outer // 2, outer, 3, 2, 1),
        nn.ReLU(),
    )


class Ssd(nn.Module):
    """SSD: a backbone, further layers that halve the side, and heads for boxes and classes.

    Args:
        classes: kinds of objects; class 0 is the background and comes on top.
        width: channels of the stem, 64 in ResNet-50.
        depths: residual blocks a stage.
        extra: channels of each further layer.
    """

    def __init__(
        self,
        classes: int = 20,
        width: int = 64,
        depths: tuple[int, int, int, int] = (3, 4, 6, 3),
        extra: tuple[int, int, int, int] = (512, 512, 256, 256),
    ) -> None:
        super().__init__()
        self.classes = classes + 1
        self.stem = nn.Sequential(_conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.stride16 = nn.Sequential(
            _stage(width, width, depths[0], 1),
            _stage(4 * width, 2 * width, depths[1], 2),
            _stage(8 * width, 4 * width, depths[2], 2),
        )
        self.stride32 = _stage(16 * width, 8 * width, depths[3], 2)
        channels = (16 * width, 32 * width, *extra)
        self.further = nn.ModuleList(
            _further(inner, outer) for inner, outer in zip(channels[1:], extra, strict=False)
        )
        pairs = list(zip(channels, ANCHORS, strict=True))
        self.boxes = nn.ModuleList(nn.Conv2d(c, 4 * a, 3, padding=1) for c, a in pairs)
        self.scores = nn.ModuleList(nn.Conv2d(c, self.classes * a, 3, padding=1) for c, a in pairs)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return box offsets f32[n, anchors, 4] and class scores f32[n, anchors, classes + 1].

        `images` is f32[n, 3, side, side]; the number of anchors is `anchors(side)`.
        """
        maps = [self.stride16(self.stem(images))]
        maps.append(self.stride32(maps[-1]))
        for layer in self.further:
            maps.append(layer(maps[-1]))
        boxes = [_by_anchor(head(x), 4) for head, x in zip(self.boxes, maps, strict=True)]
        scores = [
            _by_anchor(head(x), self.classes) for head, x in zip(self.scores, maps, strict=True)
        ]
        return torch.cat(boxes, 1), torch.cat(scores, 1)


def _by_anchor(heads: torch.Tensor, width: int) -> torch.Tensor:
    """Reshape [n, anchors * width, h, w] to [n, h * w * anchors, width]."""
    return heads.permute(0, 2, 3, 1).reshape(len(heads), -1, width)


def anchors(side: int) -> int:
    """Return how many anchors an image of `side` x `side` pixels has; 6132 for 512."""
    sides = [side // 16]
    while len(sides) < len(ANCHORS):
        sides.append((sides[-1] + 1) // 2)
    return sum(one * one * count for one, count in zip(sides, ANCHORS, strict=True))


def multibox_loss(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    target_boxes: torch.Tensor,
    target_classes: torch.Tensor,
) -> torch.Tensor:
    """Return the smooth L1 loss of the matched boxes plus cross entropy with hard negative mining.

    The negatives are the three times as many background anchors with the largest loss, chosen by
    rank so that every shape is fixed.

    Args:
        boxes: f32[n, anchors, 4].
        scores: f32[n, anchors, classes + 1].
        target_boxes: f32[n, anchors, 4].
        target_classes: i64[n, anchors]; 0 is the background.
    """
    is_object = target_classes > 0
    located = functional.smooth_l1_loss(boxes, target_boxes, reduction="none").sum(-1)
    named = functional.cross_entropy(scores.transpose(1, 2), target_classes, reduction="none")
    hardness = named.detach().masked_fill(is_object, 0.0)
    rank = hardness.argsort(1, descending=True).argsort(1)
    is_hard = rank < _NEGATIVES_A_POSITIVE * is_object.sum(1, keepdim=True)
    chosen = (is_object | is_hard).to(named.dtype)
    total = (located * is_object.to(located.dtype)).sum() + (named * chosen).sum()
    return total / is_object.sum().clamp(min=1)
