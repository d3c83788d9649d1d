# SPDX-License-Identifier: Apache-2.0
"""Indexing, gather and scatter, and matmuls, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from amp_ir.capture.functional import FUSED_OPS
from import_checks import ALSO_FUSED, check, evaluated

X = torch.arange(24.0).reshape(2, 3, 4) / 7 - 1.5
Y = torch.arange(24.0).flip(0).reshape(2, 3, 4) / 5
IDS = torch.tensor([[2, 0, 1, 1], [0, 0, 2, -1]])
WRAPPED = IDS % 3
ROWS = torch.tensor([[[2]], [[0]]])
DEEP = WRAPPED.reshape(2, 1, 4).repeat(1, 2, 1)

READS = {
    "index": lambda x, i: x[:, i[0]] * 2,
    "index with negative ids": lambda x, i: x[:, i] * 2,
    "index two axes": lambda x, i: x[:, i, i % 4] * 2,
    "index separate axes": lambda x, i: x[i[0] % 2, :, i[0]] * 2,
    "index and None": lambda x, i: x[i % 2, None, :, 1] * 2,
    "index by int32": lambda x, i: x[:, i.int()] * 2,
    "index_select": lambda x, i: x.index_select(-2, i[0]) * 2,
    "gather": lambda x, i: x.gather(1, (i % 3).reshape(2, 1, 4)) * 2,
    "gather fewer": lambda x, i: x.gather(-1, (i % 4)[:1, None, :3].expand(1, 2, 3)) * 2,
    "take_along_dim": lambda x, i: torch.take_along_dim(x, (i % 3).reshape(2, 1, 4), 1) * 2,
    "embedding": lambda x, i: F.embedding(i % 3, x[0]) * 2,
    "embedding with padding": lambda x, i: F.embedding(i % 3, x[0], padding_idx=1) * 2,
    "one_hot": lambda x, i: F.one_hot(i % 3, 3).float() @ x[0],
    "take": lambda x, i: torch.take(x, i + 3) * 2,
    "rows and columns": lambda x, i: x[torch.arange(2), torch.tensor([2, 1])] * 2,
    "last tokens": lambda x, i: x[torch.arange(2), (i[:, 0] % 3)] * 2,
}  # fmt: skip
WRITES = {
    "index_put": lambda x, y, i: x.index_put((torch.tensor([1, 0]),), y[:1]) * 2,
    "index_put accumulating": lambda x, y, i: (x * 1).index_put(
        (torch.tensor([1, 1, 0]), torch.tensor([0, 0, 2])), y[0, :3], accumulate=True
    ),
    "assign at ids": lambda x, y, i: _assign(x, y),
    "assign at a mask": lambda x, y, i: _assign_mask(x, y),
    "assign a row at a mask": lambda x, y, i: _assign_row(x, y),
    "masked_fill at a mask": lambda x, y, i: x.masked_fill(y > 2, 0.5) * 2,
    "masked_scatter": lambda x, y, i: x.masked_scatter(y > 2, y) * 2,
    "scatter": lambda x, y, i: x.scatter(1, ROWS.expand(2, 1, 4), y[:, :1]) * 2,
    "scatter a value": lambda x, y, i: x.scatter(1, DEEP, -1.5) * y,
    "scatter_add": lambda x, y, i: x.scatter_add(1, DEEP, y[:, 1:]) * 2,
    "scatter_add on the last axis": lambda x, y, i: x.scatter_add(-1, DEEP, y[:, 1:]) * 2,
    "scatter_reduce sum": lambda x, y, i: x.scatter_reduce(1, DEEP, y[:, 1:], "sum") * 2,
    "index_add": lambda x, y, i: x.index_add(1, torch.tensor([2, 2, 0]), y, alpha=0.5) * 2,
    "index_copy": lambda x, y, i: x.index_copy(2, torch.tensor([3, 1]), y[..., :2]) * 2,
    "index_fill": lambda x, y, i: x.index_fill(-1, torch.tensor([0, 2]), 7.0) * y,
    "put": lambda x, y, i: x.put(torch.tensor([[5, 1]]), y[0, :1, :2]) * 2,
    "select_scatter": lambda x, y, i: x.select_scatter(y[0], 0, 1) * 2,
    "slice_scatter": lambda x, y, i: x.slice_scatter(y[..., :2], 2, 0, 4, 2) * 2,
    "diagonal_scatter": lambda x, y, i: x[0].diagonal_scatter(y[0, 0, :3], 1) * 2,
}  # fmt: skip


def _assign(x, y):
    result = x * 1
    result[:, torch.tensor([2, 0])] = y[:, :2]
    result[0, 1] += 3
    return result


def _assign_mask(x, y):
    result = x * 1
    result[y > 2] = 0.25
    return result


def _assign_row(x, y):
    result = x * 1
    result[y[..., 0] > 2] = torch.arange(4.0)
    return result


@pytest.mark.parametrize("name", READS)
def test_read(name):
    check(READS[name], X.clone().requires_grad_(), IDS)


@pytest.mark.parametrize("name", WRITES)
def test_write(name):
    check(WRITES[name], X.clone().requires_grad_(), Y.clone().requires_grad_(), IDS)


@pytest.mark.parametrize("name", ["index_add", "select_scatter", "slice_scatter"])
def test_write_kept_whole(name):
    inputs = X.clone().requires_grad_(), Y.clone().requires_grad_(), IDS
    check(WRITES[name], *inputs, whole=FUSED_OPS | ALSO_FUSED)


@pytest.mark.parametrize("reduce", ["prod", "amax", "amin"])
def test_scatter_reduce(reduce):
    check(lambda x, y: x.scatter_reduce(1, DEEP, y, reduce), X, Y)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "amax", "amin"])
def test_scatter_reduce_and_its_gradients(reduce, include_self):
    options = {"reduce": reduce, "include_self": include_self}
    inputs = X.clone().requires_grad_(), Y.clone().requires_grad_()
    check(lambda x, y: x.scatter_reduce(1, DEEP[:, :1], y[:, :1], **options), *inputs)


@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin"])
def test_scatter_reduce_of_integers_without_self(reduce):
    check(
        lambda x, y: x.scatter_reduce(1, DEEP[:, :1], y, reduce, include_self=False),
        (7 * X).to(torch.int32), (5 * Y).to(torch.int32),
    )  # fmt: skip


def test_a_mean_of_many_counts_in_float32():
    x, source = torch.zeros(1, dtype=torch.bfloat16), torch.ones(300, dtype=torch.bfloat16)
    ids = torch.zeros(300, dtype=torch.int64)
    (mean,) = evaluated(lambda x, y: x.scatter_reduce(0, ids, y, "mean"), x, source)
    # 300 / 301, in the 8 bits of bfloat16.
    assert abs(float(mean) - 1) <= 2**-8


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("name", ["index", "gather", "index_select"])
def test_read_of_other_dtypes(name, dtype):
    function = READS[name]
    check(
        lambda x, i: function(x, i), (X > 0).to(dtype) if dtype == torch.bool else X.to(dtype), IDS
    )


PRODUCTS = {
    "mm": lambda x, y: x[0] @ y[0].t(),
    "bmm": lambda x, y: torch.bmm(x, y.transpose(1, 2)),
    "batched by a matrix": lambda x, y: x @ y[0].t(),
    "batched by broadcasting": lambda x, y: x[:, None] @ y[None].mT,
    "matrix by a vector": lambda x, y: x[0] @ y[0, 0],
    "vector by a matrix": lambda x, y: y[0, 0] @ x[0].t(),
    "dot": lambda x, y: torch.dot(x[0, 0], y[0, 0]),
    "outer": lambda x, y: torch.outer(x[0, 0], y[0, 0]),
    "addmm": lambda x, y: torch.addmm(y[0, :, :3], x[0], y[0].t(), beta=0.5, alpha=2),
    "addmm without bias": lambda x, y: torch.addmm(
        y[0, :, :3] * float("nan"), x[0], y[0].t(), beta=0
    ),
    "addbmm": lambda x, y: torch.addbmm(y[0, :, :3], x, y.mT, beta=0.25, alpha=0.5),
    "baddbmm": lambda x, y: torch.baddbmm(y[:, :, :3], x, y.mT, beta=0.25, alpha=0.5),
    "addmv": lambda x, y: torch.addmv(y[0, :, 0], x[0], y[0, 0]),
    "einsum": lambda x, y: torch.einsum("bij,bkj->bik", x, y),
    "einsum with a sum": lambda x, y: torch.einsum("bij,bij->i", x, y),
    "einsum over three": lambda x, y: torch.einsum("bij,bkj,bkl->bil", x, y, x),
    "tensordot": lambda x, y: torch.tensordot(x, y, dims=([1, 2], [1, 2])),
    "linear": lambda x, y: F.linear(x, y[0], y[0, :, 0]),
    "bilinear": lambda x, y: F.bilinear(x[:, 0], y[:, 0], torch.ones(2, 4, 4)),
    "chain": lambda x, y: torch.linalg.multi_dot([x[0], y[0].t(), x[1]]),
    "cross": lambda x, y: torch.linalg.cross(x, y, dim=1),
    "cumulative attention": lambda x, y: torch.softmax(x @ y.mT, -1).cumsum(-1) @ y,
    "kron": lambda x, y: torch.kron(x[0, :2, :2], y[0, :2, :2]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name):
    # Sums of up to 24 products of values up to 10, in another order.
    inputs = X.clone().requires_grad_(), Y.clone().requires_grad_()
    check(PRODUCTS[name], *inputs, atol=1e-4)


@pytest.mark.parametrize("name", ["dot", "addmv", "matrix by a vector", "addmm"])
def test_product_kept_whole(name):
    inputs = X.clone().requires_grad_(), Y.clone().requires_grad_()
    check(PRODUCTS[name], *inputs, atol=1e-4, whole=FUSED_OPS | ALSO_FUSED)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_product_of_other_dtypes(dtype):
    check(lambda x, y: x @ y.mT, (X * 7).to(dtype), (Y * 5).to(dtype))
