# SPDX-License-Identifier: Apache-2.0
"""Large tensors ask the system for huge pages; small ones are as PyTorch makes them."""

from __future__ import annotations

import re
import sys

import pytest
import torch

import amp_ir
from amp_ir.host import huge_pages
from amp_ir.host.huge_pages import empty_in_huge_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/smaps")
CPU = torch.device("cpu")


def _is_advised(tensor: torch.Tensor) -> bool:
    """Return whether the mapping of the middle of a tensor has the flag of MADV_HUGEPAGE."""
    middle = tensor.data_ptr() + tensor.untyped_storage().nbytes() // 2
    is_inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                first, end = (int(one, 16) for one in header.groups())
                is_inside = first <= middle < end
            elif is_inside and line.startswith("VmFlags:"):
                return "hg" in line.split()
    raise AssertionError("the tensor lies in no mapping")


@pytest.fixture(autouse=True)
def _system_has_huge_pages() -> None:
    """Skip where the kernel was built without them: the advice is declined there."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled"):
            pass
    except OSError:
        pytest.skip("this system has no transparent huge pages")


def test_large_tensors_ask_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    made = empty_in_huge_pages((33, 1 << 20), torch.bool, CPU)
    assert made.shape == (33, 1 << 20) and made.dtype is torch.bool and made.is_contiguous()
    assert _is_advised(made)

    def refused(_name: None) -> None:
        raise AssertionError("a small tensor asks")

    # The mapping says nothing of a small one: it may lie where NumPy asked before.
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", refused)
    assert empty_in_huge_pages(1 << 20, torch.uint8, CPU).shape == (1 << 20,)
    with pytest.raises(AssertionError, match="a small tensor asks"):
        empty_in_huge_pages((33, 1 << 20), torch.bool, CPU)


def test_tensors_of_other_devices_are_pytorchs() -> None:
    made = empty_in_huge_pages((1 << 26,), torch.uint8, torch.device("meta"))
    assert made.device.type == "meta" and made.shape == (1 << 26,)


def test_large_results_lie_in_huge_pages_and_belong_to_the_caller() -> None:
    model = torch.nn.Linear(1, 4200)
    converted = amp_ir.convert_model(model, torch.randn(2048, 1), "float32")
    first_samples, second_samples = torch.randn(2048, 1), torch.randn(2048, 1)
    first = converted(first_samples)
    kept = first.clone()
    second = converted(second_samples)
    assert _is_advised(first)
    # One product and one sum: at most rounded once more than PyTorch's, where it fuses the two.
    torch.testing.assert_close(second, model(second_samples), rtol=1e-6, atol=1e-6)
    assert torch.equal(first, kept) and first.data_ptr() != second.data_ptr()
    first.resize_(4096, 4200)  # PyTorch's own memory: it grows as any tensor's
    assert torch.equal(first[:2048], kept)
