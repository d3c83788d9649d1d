# SPDX-License-Identifier: Apache-2.0
"""Look-up of table rows by number, and the gradient of the table."""

from __future__ import annotations

import torch

from amp_ir.dialect.define import FLOAT_DTYPES, Tensor, check_choice, define
from amp_ir.errors import OptionError


def _embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return weight[ids.long()]


@define("amp_ir.embedding", "weight", "ids", reference=_embedding)
def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Gather rows: weight f[rows, width], ids int32 or int64[...] in [0, rows) -> f[..., width]."""
    weight.expect_float()
    ids.expect_index()
    if weight.ndim != 2:
        weight.refuse("shape", "(rows, width)")
    return weight.with_shape(ids.shape + weight.shape[1:])


def _embedding_backward(
    grad: torch.Tensor,
    ids: torch.Tensor,
    *,
    num_embeddings: int,
    padding_idx: int | None,
    out_dtype: str | None,
) -> torch.Tensor:
    rows = grad.reshape(-1, grad.shape[-1])
    flat = ids.reshape(-1).long()
    if padding_idx is not None:
        rows = rows * (flat != padding_idx)[:, None]
    return rows.new_zeros(num_embeddings, rows.shape[1]).index_add_(0, flat, rows)


@define("amp_ir.embedding_backward", "grad", "ids", reference=_embedding_backward)
def embedding_backward(
    grad: Tensor,
    ids: Tensor,
    *,
    num_embeddings: int,
    padding_idx: int | None = None,
    out_dtype: str | None = None,
) -> Tensor:
    """Return dweight: grad f[..., width], ids[...] -> out_dtype[num_embeddings, width].

    Rows are added in float32 in the order of `ids`, so the result is deterministic. The row
    `padding_idx` gets no gradient; None (PyTorch's -1) means that there is no such row.
    """
    op = "amp_ir.embedding_backward"
    grad.expect_float()
    ids.expect_index()
    grad.expect_shape(ids.shape + grad.shape[-1:])
    check_choice(op, "out_dtype", out_dtype, (None, *FLOAT_DTYPES))
    if padding_idx is not None and not 0 <= padding_idx < num_embeddings:
        raise OptionError(
            f"{op}: option padding_idx is {padding_idx}, expected None or a row below "
            f"{num_embeddings}"
        )
    return Tensor((num_embeddings, grad.shape[-1]), out_dtype or grad.dtype)
