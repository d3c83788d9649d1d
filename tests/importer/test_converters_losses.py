# SPDX-License-Identifier: Apache-2.0
"""The losses of torch.nn, with the gradients of what they compare."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from import_checks import check

A = torch.tensor([[0.5, -1.25, 2.0], [3.5, -0.75, 0.1]])
B = torch.tensor([[1.5, 0.25, -2.0], [0.5, 4.0, 1.0]])
SIGNS = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]])
SPACE = torch.linspace(-2, 2, 36).reshape(2, 3, 3, 2)
TARGET = torch.tensor([2, 0])
SPACE_TARGET = torch.arange(12).reshape(2, 3, 2) % 3
WEIGHT = torch.tensor([0.2, 1.5, 0.7])

POINTWISE = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.7),
    "huber": lambda x, y, reduction: F.huber_loss(x, y, reduction=reduction, delta=1.3),
    "bce": lambda x, y, reduction: F.binary_cross_entropy(
        torch.sigmoid(x), torch.sigmoid(y), reduction=reduction
    ),
    "bce with weight": lambda x, y, reduction: F.binary_cross_entropy(
        torch.sigmoid(x), torch.sigmoid(y).detach(), torch.tensor([1.0, 0.5, 2.0]),
        reduction=reduction,
    ),
    "bce with logits": lambda x, y, reduction: F.binary_cross_entropy_with_logits(
        x, torch.sigmoid(y), reduction=reduction
    ),
    "bce with logits and weights": lambda x, y, reduction: F.binary_cross_entropy_with_logits(
        x, torch.sigmoid(y), WEIGHT, pos_weight=WEIGHT + 1, reduction=reduction
    ),
    "soft_margin": lambda x, y, reduction: F.soft_margin_loss(x, SIGNS, reduction=reduction),
    "kl_div": lambda x, y, reduction: F.kl_div(
        F.log_softmax(x, -1), F.softmax(y, -1), reduction=reduction
    ),
    "kl_div of logs": lambda x, y, reduction: F.kl_div(
        F.log_softmax(x, -1), F.log_softmax(y, -1), reduction=reduction, log_target=True
    ),
    "poisson_nll": lambda x, y, reduction: F.poisson_nll_loss(x, y.abs(), reduction=reduction),
    "hinge_embedding": lambda x, y, reduction: F.hinge_embedding_loss(
        x * y, SIGNS, reduction=reduction
    ),
    "margin_ranking": lambda x, y, reduction: F.margin_ranking_loss(
        x, y, SIGNS, margin=0.3, reduction=reduction
    ),
    "cosine_embedding": lambda x, y, reduction: F.cosine_embedding_loss(
        x, y, torch.tensor([1, -1]), margin=0.1, reduction=reduction
    ),
    "triplet_margin": lambda x, y, reduction: F.triplet_margin_loss(
        x, y, x * y, reduction=reduction
    ),
    "multi_label_soft_margin": lambda x, y, reduction: F.multilabel_soft_margin_loss(
        x, (y > 0).float(), reduction=reduction
    ),
    "multi_margin": lambda x, y, reduction: F.multi_margin_loss(x + y, TARGET, reduction=reduction),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", POINTWISE)
def test_loss(name, reduction):
    function = POINTWISE[name]
    check(
        lambda x, y: function(x, y, reduction=reduction),
        A.clone().requires_grad_(),
        B.clone().requires_grad_(),
    )


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", sorted(POINTWISE.keys() - {"multi_margin"}))  # PyTorch has none
def test_second_derivatives_by_a_weight_of_the_loss(name, reduction):
    function = POINTWISE[name]

    def gradient(x, y, weight):
        loss = (weight * function(x, y, reduction=reduction)).sum()
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    check(
        gradient,
        A.clone().requires_grad_(),
        B.clone().requires_grad_(),
        torch.tensor(0.7, requires_grad=True),
    )


CLASSES = {
    "plain": (A, TARGET, {}),
    "weighted": (A, TARGET, {"weight": WEIGHT}),
    "ignoring a class": (A, torch.tensor([1, -1]), {"ignore_index": -1}),
    "ignoring, weighted": (A, torch.tensor([1, 0]), {"ignore_index": 0, "weight": WEIGHT}),
    "smoothed": (A, TARGET, {"label_smoothing": 0.1}),
    "smoothed, weighted": (A, TARGET, {"label_smoothing": 0.1, "weight": WEIGHT}),
    "of an image": (SPACE, SPACE_TARGET, {}),
    "of an image, weighted": (SPACE, SPACE_TARGET, {"weight": WEIGHT, "ignore_index": 1}),
    "of one sample": (A[0], torch.tensor(1), {}),
    "of probabilities": (A, torch.softmax(B, -1), {}),
    "of a sequence": (SPACE.reshape(2, 3, 6), SPACE_TARGET.reshape(2, 6), {}),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", CLASSES)
def test_cross_entropy(name, reduction):
    x, target, options = CLASSES[name]
    check(
        lambda x, target: F.cross_entropy(x, target, reduction=reduction, **options),
        x.clone().requires_grad_(),
        target,
    )


def test_nll_loss_of_log_probabilities():
    check(
        lambda x, target: F.nll_loss(F.log_softmax(x, 1), target, weight=WEIGHT),
        SPACE.clone().requires_grad_(),
        SPACE_TARGET,
    )


def test_mean_over_nothing_is_nan_as_in_pytorch():
    check(
        lambda x, target: F.cross_entropy(x, target, ignore_index=1),
        A.clone(),
        torch.tensor([1, 1]),
    )


def test_mse_broadcasts_and_promotes():
    check(lambda x: F.mse_loss(x, torch.zeros(2, 3, dtype=torch.float64)), A.clone())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["mse", "huber", "bce with logits"])
def test_loss_in_another_dtype(name, dtype):
    # PyTorch rounds intermediate bfloat16 values; each 2^-9 of values up to 5.
    tolerance = 1e-12 if dtype == torch.float64 else 2**-6
    function = POINTWISE[name]
    check(
        lambda x, y: function(x, y, reduction="mean"),
        A.to(dtype).requires_grad_(),
        B.to(dtype).requires_grad_(),
        rtol=tolerance,
        atol=tolerance,
    )
