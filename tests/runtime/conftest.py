# SPDX-License-Identifier: Apache-2.0
"""What the tests of running steps share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tvm_ffi

from amp_ir.host import native
from failing_steps import InjectedError


@pytest.fixture
def failing_matmul() -> Iterator[dict[str, Any]]:
    """oneDNN's matmul as a function that raises at its call number `at["count"]`."""
    name = "amp_ir.onednn.matmul"
    if not native.has(name):
        pytest.skip("onednn is not in this build")
    original = native.function(name)
    at: dict[str, Any] = {"count": -1, "error": InjectedError("could not execute a primitive")}

    def matmul(*arguments: Any) -> None:
        if at["count"] == 0:
            # It counts itself where it begins.
            native.function("amp_ir.step.call_begins")()
            raise at["error"]
        at["count"] -= 1
        original(*arguments)

    tvm_ffi.register_global_func(name, matmul, override=True)
    yield at
    tvm_ffi.register_global_func(name, original, override=True)
