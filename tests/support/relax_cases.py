# SPDX-License-Identifier: Apache-2.0
"""A call of each Relax op of a step, with its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tvm
from tvm import relax
from tvm.relax import op as R

Types = list[tuple[tuple[int, ...], str]]


def module(types: Types, body: Callable[..., Any]) -> tvm.IRModule:
    """A module whose `main` returns what `body(*parameters)` emits."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{k}", relax.TensorType(list(s), d)) for k, (s, d) in enumerate(types)]
    with builder.function("main", params):
        with builder.dataflow():
            value = body(builder, *params)
            fields = value if isinstance(value, tuple) else (value,)
            result = builder.emit_output(relax.Tuple([builder.emit(one) for one in fields]))
        builder.emit_func_output(result)
    return builder.get()


X = torch.linspace(-2.0, 2.0, 24).reshape(2, 3, 4)


IDS = torch.tensor([[2, -1], [0, 1]])


RELAX_CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor], torch.Tensor]] = {
    "sum-axes": (lambda x: R.sum(x, [0, 2]), [X], X.sum((0, 2))),
    "sum-all": (R.sum, [X], X.sum()),
    "mean-keepdims": (lambda x: R.mean(x, 1, True), [X], X.mean(1, keepdim=True)),
    "max": (lambda x: R.max(x, -1), [X], X.amax(-1)),
    "min": (lambda x: R.min(x, 0), [X], X.amin(0)),
    "prod": (lambda x: R.prod(x, [1, 2]), [X], X.prod(2).prod(1)),
    "argmax": (lambda x: R.argmax(x, 1), [X], X.argmax(1)),
    "argmin-all": (R.argmin, [X], X.argmin()),
    "cumsum": (lambda x: R.cumsum(x, 1), [X], X.cumsum(1)),
    "cumsum-exclusive": (
        lambda x: R.cumsum(x, 2, exclusive=True),
        [X],
        X.cumsum(2) - X,
    ),
    "cumprod": (lambda x: R.cumprod(x, 2), [X], X.cumprod(2)),
    "sort": (lambda x: R.sort(x, 1, True), [X], X.sort(1, True)[0]),
    "argsort": (
        lambda x: R.argsort(x, 0, dtype="int64"),
        [-X],
        (-X).argsort(0),
    ),
    "topk": (
        lambda x: R.topk(x, 2, 1, "values"),
        [X],
        X.topk(2, 1)[0],
    ),
    "reshape": (lambda x: R.reshape(x, (6, 4)), [X], X.reshape(6, 4)),
    "permute": (lambda x: R.permute_dims(x, [2, 0, 1]), [X], X.permute(2, 0, 1)),
    "permute-reverse": (R.permute_dims, [X], X.permute(2, 1, 0)),
    "broadcast": (lambda x: R.broadcast_to(x, (5, 2, 3, 4)), [X], X.expand(5, 2, 3, 4)),
    "concat": (lambda x, y: R.concat([x, y], 1), [X, X], torch.cat([X, X], 1)),
    "slice": (
        lambda x: R.strided_slice(x, [1, 2], [0, 1], [2, 4], [1, 2]),
        [X],
        X[:, 0:2, 1:4:2],
    ),
    "slice-backwards": (
        lambda x: R.strided_slice(x, [2], [3], [-100], [-2]),
        [X],
        X[:, :, [3, 1]],
    ),
    "flip": (lambda x: R.flip(x, 1), [X], X.flip(1)),
    "full": (
        lambda: R.full((2, 3), relax.const(1.5), "float32"),
        [],
        torch.full((2, 3), 1.5),
    ),
    "arange": (lambda: R.arange(1, 9, 3, "int64"), [], torch.arange(1, 9, 3)),
    "tril": (lambda x: R.tril(x, 1), [X], X.tril(1)),
    "triu": (lambda x: R.triu(x, -1), [X], X.triu(-1)),
    "take": (lambda x, i: R.take(x, i, 1), [X, IDS], X[:, IDS]),
    "gather": (
        lambda x, i: R.gather_elements(x, i, 0),
        [X[0, :, :2], IDS % 3],
        X[0, :, :2].gather(0, IDS % 3),
    ),
    "scatter": (
        lambda x, i, u: R.scatter_elements(x, i, u, 0, "add"),
        [X[0, :, :2], IDS % 3, X[1, :2, :2]],
        X[0, :, :2].scatter_add(0, IDS % 3, X[1, :2, :2]),
    ),
    "where": (
        lambda c, x, y: R.where(c, x, y),
        [X > 0, X, -X],
        X.abs(),
    ),
    # As C's: the sign of the dividend; floor_mod has the divisor's, as Python's.
    "mod": (lambda x, y: R.mod(x, y), [X, X * 0 + 0.7], X.fmod(0.7)),
    "floor_mod": (lambda x, y: R.floor_mod(x, y), [X, X * 0 + 0.7], X % 0.7),
    "divide-int": (
        lambda x, y: R.divide(x, y),
        [torch.tensor([-7, 7]), torch.tensor([2, 2])],
        torch.tensor([-3, 3]),
    ),
    "leakyrelu": (
        lambda x: R.nn.leakyrelu(x, 0.1),
        [X],
        torch.nn.functional.leaky_relu(X, 0.1),
    ),
    "log_softmax": (lambda x: R.nn.log_softmax(x, 1), [X], X.log_softmax(1)),
    "gelu_tanh": (
        R.nn.gelu_tanh,
        [X],
        torch.nn.functional.gelu(X, approximate="tanh"),
    ),
}
