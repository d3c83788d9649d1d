# SPDX-License-Identifier: Apache-2.0
"""What every test starts from: fixed seeds, no time limit on examples."""

from __future__ import annotations

import gc
import os
import random
import tempfile
from collections.abc import Generator, Iterator

import numpy
import pytest
import torch
from hypothesis import settings

from cuda_emulator.client import FOLDER
from pytorch_as_it_was import pytorch_state

# Tests test compilations, also those in processes that they start; not what earlier ones left.
os.environ["AMP_IR_CACHE"] = "off"

# A million objects of modules stay, and Python would visit all of them after some compilations, and
# new ones after every 700: an eighth of the seconds of compiling tests. What is garbage by then is
# small; tests that watch memory collect it themselves, or have a process of their own.
gc.set_threshold(20_000, 10, 10)

# Examples build and run kernels, whose first call is slow; and a run must be repeatable.
settings.register_profile("amp_ir", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("amp_ir")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same random numbers, whatever ran before it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def pytorch_is_as_it_was() -> Iterator[None]:
    """Whatever a test does, and however its captures end, PyTorch is the same afterwards."""
    before = pytorch_state()
    yield
    now = pytorch_state()
    changed = {name: (before[name], now[name]) for name in now if now[name] != before[name]}
    assert not changed


def pytest_configure(config: pytest.Config) -> None:
    """Let all emulating processes of this run share what they compile, also those of xdist."""
    if FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="amp_ir_emulator_")
        os.environ[FOLDER] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop(FOLDER))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: what the tests' modules make stays, a million of objects.

    To visit all of them again and again took each worker a quarter of this time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none, saying so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; PyTorch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
