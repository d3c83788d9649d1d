# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ shared libraries with CMake and puts them into the package.

Everything else about the package is in pyproject.toml.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Runs CMake in place of a compiler; the one extension stands for all the libraries."""

    def run(self) -> None:
        """Configure and build into python/amp_ir/lib (editable) or the wheel's amp_ir/lib.

        With AMP_IR_SANITIZE=address,undefined in the environment, libraries that check themselves
        are built into build/sanitize instead; see `make sanitize`.
        """
        package_parent = ROOT / "python" if self.inplace else Path(self.build_lib).resolve()
        # One for both: a wheel that is built beside the editable package links the same objects.
        build_dir = ROOT / "build" / "cmake"
        sanitize = os.environ.get("AMP_IR_SANITIZE", "")
        if sanitize:
            build_dir = ROOT / "build" / "sanitize"
            package_parent = build_dir / "python"
        _drop_foreign_cache(build_dir)
        configure = [
            _cmake(),
            f"-S{ROOT}",
            f"-B{build_dir}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DAMP_IR_LIBRARY_DIR={package_parent / 'amp_ir' / 'lib'}",
            f"-DAMP_IR_SANITIZE={sanitize}",
        ]
        ninja = _beside_python("ninja")
        if ninja is not None:
            configure += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        subprocess.run(configure, check=True)
        subprocess.run([_cmake(), "--build", str(build_dir), "--parallel"], check=True)

    def get_outputs(self) -> list[str]:
        """Nothing that setuptools should look for: CMake writes the files to their places."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing to link back into the sources; see get_outputs."""
        return {}


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel for every Python 3 of a platform: the libraries call no function of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tags for Python, its binary interface and the platform."""
        return "py3", "none", super().get_tag()[2]


def _drop_foreign_cache(build_dir: Path) -> None:
    """Remove a CMake cache that another checkout or another Python left behind."""
    cache = build_dir / "CMakeCache.txt"
    if not cache.exists():
        return
    text = cache.read_text()
    home = f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n"
    if home not in text or f"={sys.executable}\n" not in text:
        shutil.rmtree(build_dir)


def _beside_python(tool: str) -> str | None:
    """Return the tool that pip installed into this environment, else one on the search path."""
    installed = Path(sys.executable).parent / tool
    return str(installed) if installed.exists() else shutil.which(tool)


def _cmake() -> str:
    cmake = _beside_python("cmake")
    if cmake is None:
        raise SystemExit("amp_ir needs CMake 3.20 or newer to build: pip install cmake ninja")
    return cmake


setup(
    ext_modules=[Extension("amp_ir.lib.native", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
)
