# SPDX-License-Identifier: Apache-2.0
"""The garbage collector looks at everything again once a compilation is over."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import amp_ir
from amp_ir.host.paused_garbage_collection import paused_garbage_collection


class Ring:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.own = self


def test_what_was_there_is_set_aside_and_comes_back():
    old = Ring()
    found = weakref.ref(old)
    del old
    with paused_garbage_collection():
        assert gc.get_freeze_count() > 1000
        new = weakref.ref(Ring())
        gc.collect()
        assert new() is None
        assert found() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert found() is None


def test_an_error_brings_it_back_too():
    with pytest.raises(KeyError), paused_garbage_collection():
        raise KeyError("any")
    assert gc.get_freeze_count() == 0


def test_what_someone_else_has_set_aside_stays_so():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with paused_garbage_collection():
            pass
        # Some may have died meanwhile, such as those of a thread that ended.
        assert gc.get_freeze_count() > count // 2
    finally:
        gc.unfreeze()


def test_compiling_leaves_nothing_set_aside():
    model = torch.nn.Linear(4, 2)
    mod, _ = amp_ir.trace_model(model, (torch.randn(3, 4),))
    amp_ir.compile(amp_ir.autocast(mod, amp_dtype="bfloat16"))
    assert gc.get_freeze_count() == 0
