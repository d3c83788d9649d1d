# SPDX-License-Identifier: Apache-2.0
"""The free memory is what Linux says, and something where it says nothing."""

from __future__ import annotations

import pytest

from amp_ir.host import free_memory


def test_it_is_what_linux_says(monkeypatch, tmp_path):
    file = tmp_path / "meminfo"
    file.write_text(
        "MemTotal:       16384 kB\nMemAvailable:    4096 kB\nHugePages_Total:       0\n"
    )
    monkeypatch.setattr(free_memory, "_MEMINFO", file)
    assert free_memory.memory_nbytes() == {"MemTotal": 16 << 20, "MemAvailable": 4 << 20}
    assert free_memory.free_nbytes() == 4 << 20


def test_elsewhere_it_is_taken_for_small(monkeypatch, tmp_path):
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "none")
    assert free_memory.memory_nbytes() == {}
    assert free_memory.free_nbytes() == 1 << 30


@pytest.mark.skipif(not free_memory._MEMINFO.exists(), reason="not Linux")
def test_this_machine_has_some():
    assert 0 < free_memory.free_nbytes() <= free_memory.memory_nbytes()["MemTotal"]
