# SPDX-License-Identifier: Apache-2.0
"""Reductions, scans, sorting, forward and backward, and their result dtypes."""

from __future__ import annotations

import pytest
import torch

from amp_ir.capture.functional import FUSED_OPS
from import_checks import ALSO_FUSED, check

X = torch.tensor([0.3, -1.7, 2.2, 0.9, -0.4, 1.1, -2.5, 0.7, 3.1, -0.6, 1.9, 0.2]).reshape(2, 3, 2)
INTEGERS = torch.tensor([[3, -1, 2], [0, 5, -2]])
BOOLS = torch.tensor([[True, False, True], [False, False, False]])

ANY_DTYPE = {
    "sum": lambda x: x.sum(),
    "sum dim": lambda x: x.sum(-1),
    "sum keepdim": lambda x: x.sum((0, -1), keepdim=True),
    "sum as float64": lambda x: x.sum(0, dtype=torch.float64),
    "amax": lambda x: x.amax((0, 1)),
    "amin": lambda x: x.amin(-1, keepdim=True),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max dim": lambda x: tuple(x.max(-1)),
    "min dim": lambda x: tuple(x.min(0, keepdim=True)),
    "argmax": lambda x: x.argmax(),
    "argmax dim": lambda x: x.argmax(-1, keepdim=True),
    "argmin": lambda x: x.argmin(0),
    "any": lambda x: (x > 1).any(0) | (x < 0).any(),
    "any dims": lambda x: torch.any(x > 1, dim=(0, 1)),
    "all": lambda x: (x > -2).all(-1),
    "all of all": lambda x: (x > -20).all(),
    "cumsum": lambda x: x.cumsum(-1),
    "count_nonzero": lambda x: torch.count_nonzero(x > 0),
    "sort": lambda x: tuple(x.sort(-1)),
    "sort descending": lambda x: tuple(x.sort(0, descending=True)),
    "stable sort": lambda x: tuple(torch.sort(x, stable=True, dim=0)),
    "argsort": lambda x: torch.argsort(x, dim=-1, stable=True),
}
FLOAT = {
    "mean": lambda x: x.mean(),
    "mean dim": lambda x: x.mean((-1, 0), keepdim=True),
    "prod": lambda x: x.prod(),
    "prod dim": lambda x: x.prod(1),
    "var": lambda x: x.var(),
    "var dim": lambda x: x.var((0, -1), keepdim=True),
    "var biased": lambda x: x.var(1, unbiased=False),
    "var correction": lambda x: torch.var(x, 1, correction=0.5),
    "std": lambda x: x.std(-2),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "std_mean": lambda x: torch.std_mean(x, (0, 1)),
    "norm": lambda x: x.norm(),
    "norm dim": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1, dim=0),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, dim=0),
    "norm inf": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=(0, 1)),
    "frobenius": lambda x: torch.linalg.matrix_norm(x[0]),
    "normalize": lambda x: torch.nn.functional.normalize(x, dim=-1),
    "logsumexp": lambda x: torch.logsumexp(x, (0, -1)),
    "cumprod": lambda x: x.cumprod(1),
    "cosine_similarity": lambda x: torch.cosine_similarity(x, x.flip(0), dim=1),
    "nanmean": lambda x: torch.nanmean(x),
    "topk": lambda x: tuple(x.topk(2, 1)),
    "dist": lambda x: torch.dist(x, x.flip(0) * 2),
    "bucketize": lambda x: torch.bucketize(x.detach(), torch.tensor([-1.0, 0.3, 1.0])),
    "bucketize right": lambda x: torch.bucketize(
        x.detach(), torch.tensor([-1.0, 0.3, 1.0]), right=True, out_int32=True
    ),
    "searchsorted": lambda x: torch.searchsorted(torch.tensor([-1.0, 0.3, 1.0]), x.detach()),
    "searchsorted in rows": lambda x: torch.searchsorted(
        x.detach().sort(-1).values, x.detach() * 0.5, side="right"
    ),
    "kthvalue": lambda x: tuple(x.kthvalue(2, 0)),
    "kthvalue kept": lambda x: tuple(x.kthvalue(1, -1, keepdim=True)),
    "median": lambda x: torch.median(x),
    "median of an axis": lambda x: tuple(x.median(1)),
    "median of an even axis": lambda x: tuple(x[..., :2].median(-1, keepdim=True)),
    "quantile": lambda x: x.quantile(0.3, dim=-1),
    "topk smallest": lambda x: tuple(x.topk(1, -1, largest=False)),
    "0-d": lambda x: x.sum().sum().mean(0) + x.mean().amax() + x.sum().max(0).values,
    "aminmax": lambda x: torch.aminmax(x, dim=0),
    "euclidean distances": lambda x: ((x[0][:, None] - x[1][None]) ** 2).sum(-1),
}


@pytest.mark.parametrize("name", ANY_DTYPE | FLOAT)
def test_reduction_of_floats(name):
    # PyTorch 2.11 has no derivative of aminmax.
    is_trained = name != "aminmax" or torch.__version__ >= (2, 12)
    check((ANY_DTYPE | FLOAT)[name], X.clone().requires_grad_(is_trained))


@pytest.mark.parametrize("name", ["std", "var_mean", "all", "argsort"])
def test_reduction_of_floats_kept_whole(name):
    check((ANY_DTYPE | FLOAT)[name], X.clone().requires_grad_(), whole=FUSED_OPS | ALSO_FUSED)


@pytest.mark.parametrize("name", ANY_DTYPE)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_reduction_of_integers(name, dtype):
    check(ANY_DTYPE[name], (INTEGERS if dtype.is_signed else INTEGERS.abs()).to(dtype))


OF_BOOL = {
    "sum counts": lambda x: x.sum(-1),
    "cumsum counts": lambda x: x.cumsum(0),
    "any": lambda x: x.any(-1),
    "all": lambda x: x.all(0, keepdim=True),
    "amax": lambda x: x.amax(0),
    "argmax": lambda x: x.int().argmax(-1),
    "mean of floats": lambda x: x.float().mean(),
}


@pytest.mark.parametrize("name", OF_BOOL)
def test_reduction_of_bool(name):
    check(OF_BOOL[name], BOOLS)


@pytest.mark.parametrize("name", ["sum", "sum dim", "mean", "amax", "var", "logsumexp", "norm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_reduction_of_other_floats(name, dtype):
    # PyTorch rounds intermediate bfloat16 values of var and norm; 1/128 is two of its roundings.
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    function = (ANY_DTYPE | FLOAT)[name]
    check(function, X.to(dtype).requires_grad_(), rtol=tolerance, atol=tolerance)


def test_low_precision_sum_to_float32_is_not_rounded():
    check(lambda x: x.sum(dtype=torch.float32), X.bfloat16())


def test_ties_go_to_the_first():
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    check(lambda x: (x.max(1).indices, x.argmax(1), x.min(1).indices, x.argmin(0)), x)
