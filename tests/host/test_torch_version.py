# SPDX-License-Identifier: Apache-2.0
"""Another PyTorch than those that are tested is refused when amp_ir is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from amp_ir.errors import VersionError
from amp_ir.host.torch_version import NEWEST, OLDEST, check

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.12.1+cu130", "2.13.0+cpu", "2.13.0a0+git1a2b3c", "2.13.0.dev20260401"]
)
def test_a_tested_version_is_taken(version):
    check(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.1.0", "2.10.0+cpu", "2.14.0a0", "3.12.0", "new"])
def test_another_version_is_refused(version):
    with pytest.raises(VersionError) as caught:
        check(version)
    assert str(caught.value) == (
        f"amp_ir 0.1.0 works with PyTorch 2.11 to 2.13, and {torch.__file__} is {version}; the "
        "capture and the kernels call functions of PyTorch that change between versions, so "
        "another one could train wrongly without a word; install one of these: pip install "
        "'torch>=2.11,<2.14'"
    )


def test_the_import_refuses_before_it_needs_anything_else_of_pytorch():
    script = "import torch; del torch._decomp; torch.__version__ = '2.10.0'; import amp_ir"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "\namp_ir.errors.VersionError: amp_ir 0.1.0 works with PyTorch 2.11 to" in done.stderr


def test_the_package_asks_pip_for_the_same_versions():
    oldest, newest, beyond = (f"2.{minor}" for minor in (OLDEST[1], NEWEST[1], NEWEST[1] + 1))
    asked = f"torch>={oldest},<{beyond}"
    assert f'"{asked}"' in (ROOT / "pyproject.toml").read_text()
    assert f"\n{asked}\n" in (ROOT / "requirements-dev.txt").read_text()
    assert f"({oldest} to {newest})" in (ROOT / "docs" / "guide.md").read_text()
