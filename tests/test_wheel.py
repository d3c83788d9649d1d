# SPDX-License-Identifier: Apache-2.0
"""The wheel: what is in it, and that it works where there is no compiler and no repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from amp_ir.host import native
from amp_ir.selftest import FAILED, OK, SKIPPED, CheckError, Skip, run_check

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, linked from the objects of the editable package."""
    folder = tmp_path_factory.mktemp("wheel")
    places = ["build", "--build-base", str(folder / "build"), "egg_info", "-e", str(folder)]
    command = [sys.executable, "setup.py", "--quiet", *places, "bdist_wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_one_wheel_serves_every_python_and_holds_the_package_alone(wheel):
    assert "-py3-none-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    libraries = {f"amp_ir/lib/{path.name}" for path in native.LIBRARY_DIRECTORY.glob("*.so")}
    assert libraries <= names and {"amp_ir/py.typed", "amp_ir/selftest.py"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"amp_ir"}


def test_the_installed_wheel_passes_its_selftest_without_a_compiler(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    # What it depends on is where this Python has it; the editable amp_ir is not on that path.
    path = os.pathsep.join([str(site), sysconfig.get_path("purelib")])
    environment = {**os.environ, "PYTHONPATH": path, "PATH": str(tmp_path)}
    # -S: without the .pth file that makes this checkout importable.
    command = [sys.executable, "-S", "-m", "amp_ir.selftest"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"in {site / 'amp_ir'}\n" in done.stdout
    assert " passed, 0 failed, " in done.stdout.splitlines()[-1]
    assert "there is no g++, gcc, clang++ or clang on the path" in done.stdout


def test_a_check_is_ok_skipped_or_failed():
    def raises(error: Exception) -> str:
        raise error

    assert run_check("a", lambda: "fine").status == OK
    assert run_check("a", lambda: raises(Skip("no GPU"))).status == SKIPPED
    outcome = run_check("a", lambda: raises(CheckError("the loss differs")))
    assert outcome.status == FAILED and outcome.detail == "CheckError: the loss differs"
    assert run_check("a", lambda: raises(KeyError("x"))).detail == "KeyError: 'x'"
