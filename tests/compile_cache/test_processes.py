# SPDX-License-Identifier: Apache-2.0
"""Processes and the compile cache: a second start builds nothing, two at once are both right."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from cached_steps import TinyTraining, entries

SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = """
import hashlib, logging, sys
logging.basicConfig(level=logging.INFO)
from cached_steps import TinyTraining, entries, is_loaded
from amp_ir.vm import build
if sys.argv[1] == "hot":  # nothing is built
    build.program_and_kernels = build.build_side_by_side = None
print("ready", flush=True)
sys.stdin.readline()
train, found = TinyTraining().train(3)
content = b"".join(one.numpy().tobytes() for one in found)
print(is_loaded(train), hashlib.sha256(content).hexdigest())
"""


def start(mode: str = "cold", **variables: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", PROGRAM, mode]
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.Popen(command, text=True, env=environment, **pipes)


def finish(*processes: subprocess.Popen[str]) -> list[tuple[bool, str, str]]:
    """Let them go at once; return of each whether its step was loaded, its numbers, its log."""
    for one in processes:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in processes:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    found = []
    for one in processes:
        out, err = one.communicate()
        assert one.returncode == 0, err
        loaded, digest = out.split()
        found.append((loaded == "True", digest, err))
    return found


def digest_of(found: list[torch.Tensor]) -> str:
    """As the program has it."""
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in found)).hexdigest()


def test_two_processes_compile_a_step_at_once_and_a_third_loads_it(folder):
    cold = finish(start(), start())
    (hot,) = finish(start("hot"))
    assert hot[0] and {digest for _, digest, _ in cold} == {hot[1]}
    assert len(entries(folder)) == 1
    assert all("not used" not in log for _, _, log in (*cold, hot))


def test_a_process_without_a_home_or_a_cache_trains(folder, tmp_path):
    nowhere = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "", "AMP_IR_CACHE": ""}
    expected = digest_of(TinyTraining().train(3)[1])
    loaded, found, log = finish(start(**nowhere))[0]
    assert not loaded and found == expected
    lines = [line for line in log.splitlines() if "steps are compiled" in line]
    assert len(lines) == 1 and lines[0].startswith(
        "INFO:amp_ir:/proc/nowhere/.cache/amp_ir/programs cannot be used, and steps are compiled "
        "at every start: "
    )


def test_the_cache_is_where_xdg_says(tmp_path, monkeypatch):
    monkeypatch.delenv("AMP_IR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    TinyTraining().compiled()
    assert len(entries(tmp_path / "xdg" / "amp_ir" / "programs")) == 1
