# SPDX-License-Identifier: Apache-2.0
"""A busy machine is said where times are measured."""

from __future__ import annotations

import os

import pytest

from amp_ir.host.machine_load import load_warning

BUSY = "The machine is busy (load 3.0 on 2 CPUs): times are not its best."
ADVICE = "OMP_WAIT_POLICY=passive, set before Python starts, lets threads sleep that wait."


@pytest.mark.parametrize(
    ("policy", "load", "text"),
    [
        ("passive", 2.5, ""),
        ("active", 2.5, ""),
        ("PASSIVE", 3.0, BUSY),
        ("active", 3.0, f"{BUSY} {ADVICE}"),
        (None, 3.0, f"{BUSY} {ADVICE}"),
    ],
)
def test_a_load_above_the_processors_is_said(
    policy: str | None, load: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if policy is None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert load_warning() == text


def test_a_system_without_a_load_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getloadavg", raising=False)
    assert load_warning() == ""
