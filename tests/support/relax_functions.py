# SPDX-License-Identifier: Apache-2.0
"""Functions in Relax from a body of Python, and numbers to call them with."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax


def build(
    shapes: list[tuple[tuple[int, ...], str]], body: Callable[..., relax.Expr]
) -> tvm.IRModule:
    """A module whose `main` returns `body(*parameters)`."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{k}", relax.TensorType(list(s), d)) for k, (s, d) in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            value = body(*params)
            fields = value if isinstance(value, tuple) else (value,)
            result = builder.emit_output(relax.Tuple([builder.emit(field) for field in fields]))
        builder.emit_func_output(result)
    return builder.get()


def sample(shape: tuple[int, ...], dtype: str, *, positive: bool = False) -> torch.Tensor:
    """Numbers of ordinary size; ids are below 5."""
    generator = torch.Generator().manual_seed(sum(shape) + len(dtype))
    if dtype == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.startswith("int"):
        return torch.randint(0, 5, shape, generator=generator, dtype=getattr(torch, dtype))
    numbers = torch.randn(shape, generator=generator)
    numbers = numbers.abs() + 0.1 if positive else numbers
    return numbers.to(getattr(torch, dtype))


def assert_ir_equal(actual, expected):
    """Fail with a diff of the two scripts unless they are structurally equal."""
    if not tvm_ffi.structural_equal(actual, expected, map_free_vars=True):
        lines = expected.script().splitlines(), actual.script().splitlines()
        pytest.fail("\n".join(difflib.unified_diff(*lines, "expected", "actual")), pytrace=False)
