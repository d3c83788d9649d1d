# SPDX-License-Identifier: Apache-2.0
"""A busy machine is said where times are measured."""

from __future__ import annotations

import os

import pytest

from amp_ir.host.machine_load import load_warning


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (2.5, ""),
        (3.0, "The machine is busy (load 3.0 on 2 CPUs): times are not its best."),
    ],
)
def test_a_load_above_the_processors_is_said(
    load: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert load_warning() == text


def test_a_system_without_a_load_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getloadavg", raising=False)
    assert load_warning() == ""
