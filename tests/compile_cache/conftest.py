# SPDX-License-Identifier: Apache-2.0
"""A compile cache of each test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from amp_ir.files import cache_directory


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache, which is on; what was logged once may be logged again."""
    monkeypatch.setattr(cache_directory, "_TOLD", set())
    monkeypatch.setenv("AMP_IR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
