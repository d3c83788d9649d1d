# SPDX-License-Identifier: Apache-2.0
"""The table of gradient errors: its parts on a small workload."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks import precision


@pytest.fixture(scope="module")
def case():
    return precision.Case("bert1", 0)


def test_errors_of_plan_kernels_and_pytorch_are_roundings_of_bfloat16(case):
    for gradients in (
        case.gradients("bfloat16"),
        case.compiled_gradients("bfloat16"),
        case.torch_gradients("bfloat16"),
    ):
        assert set(case.exact) <= set(gradients)
        assert 2**-12 < precision.relative_error(gradients, case.exact) < 2**-5


def test_an_op_alone_disturbs_less_than_all_together_and_the_worst_comes_first(case):
    found = case.contributions("bfloat16")
    errors = [one.error for one in found]
    assert errors == sorted(errors, reverse=True)
    whole = precision.relative_error(case.gradients("bfloat16"), case.exact)
    assert 0 < errors[0] < whole
    assert any(one.op.startswith("input ") for one in found)


def test_the_relative_error_is_over_all_gradients_together():
    exact = {"a": torch.tensor([3.0, 0.0]).double(), "b": torch.tensor([4.0]).double()}
    assert precision.relative_error({k: v.float() for k, v in exact.items()}, exact) == 0
    off = {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0])}
    assert precision.relative_error(off, exact) == pytest.approx(0.1)
    broken = {**off, "b": torch.tensor([math.nan])}
    assert precision.relative_error(broken, exact) == math.inf
