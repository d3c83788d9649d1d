# SPDX-License-Identifier: Apache-2.0
"""`amp-ir doctor` finds what is planted, says what to do, and exits with what it found."""

from __future__ import annotations

import json
import re

import pytest
import torch

from amp_ir.cli import main
from amp_ir.host import native
from amp_ir.loops.lowering_registry import LOWERINGS
from amp_ir.verification import doctor
from amp_ir.verification.doctor import NOTE, OK, WRONG, Diagnosis, Finding


def one(part, topic: str) -> Finding:
    (found,) = (finding for finding in part() if finding.topic == topic)
    return found


def test_the_command_lists_this_machine(capsys, tmp_path):
    file = tmp_path / "doctor.json"
    generator = torch.get_rng_state()
    assert main(["doctor", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ok +amp_ir +\S+ in ", text, re.MULTILINE)
    assert re.search(r"^ok +small step +compiled and run in .* s, as PyTorch's$", text, re.M)
    assert re.search(r"^0 wrong, \d+ to note$", text, re.MULTILINE)
    topics = {entry["topic"] for entry in json.loads(file.read_text())}
    assert {"torch", "apache-tvm", "CPU", "threads", "libraries", "CUDA", "compile cache"} <= topics
    assert torch.equal(torch.get_rng_state(), generator)


def test_something_wrong_is_the_exit_code(capsys, monkeypatch):
    wrong = Finding("disk", "full", WRONG, "make room")
    monkeypatch.setattr(doctor, "PARTS", (lambda: iter([Finding("CPU", "fast"), wrong]),))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == (
        "ok    CPU   fast\nWRONG disk  full\n            -> make room\n1 wrong, 0 to note\n"
    )


def test_another_version_than_the_pinned_one_is_wrong(monkeypatch):
    monkeypatch.setattr(doctor, "_pins", lambda: {"apache-tvm-ffi": "0.0.1", "nothing": "1"})
    found = one(doctor.versions, "apache-tvm-ffi")
    assert (found.status, found.remedy) == (WRONG, "pip install 'apache-tvm-ffi==0.0.1'")
    assert found.value.endswith(", and amp_ir needs 0.0.1")
    assert one(doctor.versions, "torch").status == OK


def test_more_threads_than_cpus_are_noted(monkeypatch):
    monkeypatch.setattr(doctor, "usable_cpus", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    found = one(doctor.processor, "threads")
    assert found == Finding(
        "threads",
        "8, on 1 CPUs that this process may use",
        NOTE,
        "set OMP_NUM_THREADS=1, or call torch.set_num_threads(1)",
    )


@pytest.mark.parametrize(("text", "cpus"), [("150000 100000", 2), ("50000 100000", 1)])
def test_a_control_group_limits_the_cpus(tmp_path, text, cpus):
    file = tmp_path / "cpu.max"
    file.write_text(text + "\n")
    assert doctor._quota(file) == cpus


def test_a_control_group_without_a_limit(tmp_path):
    file = tmp_path / "cpu.max"
    file.write_text("max 100000\n")
    assert doctor._quota(file) is None
    assert doctor._quota(tmp_path / "nothing") is None


def test_a_missing_library_is_noted_with_what_it_costs(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: {"onednn": "not built", "passes": "no such file"})
    assert one(doctor.libraries, "onednn") == Finding(
        "onednn",
        "not built: matmul and convolution run through PyTorch, whose float32 is slower",
        NOTE,
        native.remedy_of("onednn"),
    )
    assert one(doctor.libraries, "passes").status == WRONG
    assert "onednn" not in one(doctor.libraries, "libraries").value


def test_the_cache_off_or_not_writable_is_noted(monkeypatch, tmp_path):
    assert one(doctor.caches, "compile cache").value == "off"
    monkeypatch.setenv("AMP_IR_CACHE", "relative")
    found = one(doctor.caches, "compile cache")
    assert found.status == WRONG
    assert "AMP_IR_CACHE=relative is not an absolute path" in found.value
    monkeypatch.setenv("AMP_IR_CACHE", str(tmp_path / "kept"))
    assert one(doctor.caches, "compile cache").value == f"{tmp_path / 'kept'}: 0 steps, 0.0 MiB"
    assert not (tmp_path / "kept").exists()
    monkeypatch.setattr(doctor, "_why_not_writable", lambda _: "Read-only file system")
    assert one(doctor.caches, "compile cache").status == NOTE


def test_variables_that_change_something_are_listed(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS=3" in one(doctor.variables, "environment").value


def test_a_wrong_kernel_is_seen(monkeypatch):
    monkeypatch.setitem(LOWERINGS, "relax.tanh", LOWERINGS["relax.sigmoid"])
    found = one(doctor.small_step, "small step")
    assert found.status == WRONG
    assert "off PyTorch's" in found.value
    assert not Diagnosis((found,)).is_good
