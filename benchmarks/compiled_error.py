# SPDX-License-Identifier: Apache-2.0
"""The error of a compiled step's gradients against float64, beside PyTorch's."""

from __future__ import annotations

import math
from statistics import geometric_mean, median

import attrs

from benchmarks.precision import Case, relative_error


@attrs.frozen
class CompiledError:
    """Errors of the gradients of compiled steps, beside PyTorch's.

    `ours` and `torch` are medians over the draws; `ratio` is the geometric mean over the draws of
    ours over PyTorch's: a median of few draws varies with the draw, a ratio within one varies less.
    It is NaN where an error is not finite.
    """

    ours: float
    torch: float
    ratio: float
    draws: int


def compiled_error(name: str, dtype: str, *, draws: int) -> CompiledError:
    """Compile a workload in small shapes for some draws, and compare with float64."""
    ours, theirs = [], []
    for seed in range(draws):
        case = Case(name, seed, () if dtype == "float32" else (dtype,))
        ours.append(relative_error(case.compiled_gradients(dtype), case.exact))
        theirs.append(relative_error(case.torch_gradients(dtype), case.exact))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    # The table shows a gradient that is not finite: no reason to lose the row.
    is_number = all(0 < ratio < math.inf for ratio in ratios)
    ratio = geometric_mean(ratios) if is_number else math.nan
    return CompiledError(median(ours), median(theirs), ratio, draws)
