# SPDX-License-Identifier: Apache-2.0
"""The parts of the suite, most valuable first: each is a command and a limit of time."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs

from benchmarks.gpu_suite.summary import rows_in

ROOT = Path(__file__).resolve().parents[2]
# What CUDA machines lack is warned of, and a warning fails a test.
_WITHOUT_ONEDNN = "ignore:some native libraries of amp_ir are missing:RuntimeWarning"
# Kernels in the emulator: that the command works is what a rehearsal shows.
_REHEARSED_TESTS = "tests/cuda/test_cuda_emulator.py"
KINDS = ("machine", "build", "smoke", "tests", "row", "profile", "sanitizer")
# torch.compile compiles in a row's time, "reduce-overhead" once more.
_ROW_SECONDS = 150


@attrs.frozen(kw_only=True)
class SuiteOptions:
    """What the command line asks for: `kinds` of parts, and the number of `profiles`."""

    out: Path
    workloads: tuple[str, ...]
    precisions: tuple[str, ...]
    is_rehearsal: bool
    profiles: int
    kinds: tuple[str, ...] = KINDS


@attrs.frozen
class Part:
    """A command that runs for `limit_seconds` at most, and not with less than `least_seconds`.

    Its name begins with its kind, one of KINDS.
    """

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    least_seconds: float = 5.0


def parts_of(options: SuiteOptions) -> Iterator[Part]:
    """Yield the chosen parts in order; what is profiled is decided when the rows are there."""
    for part in _all_parts(options):
        if part.name.partition("-")[0] in options.kinds:
            yield part


def _all_parts(options: SuiteOptions) -> Iterator[Part]:
    python, out = sys.executable, options.out
    yield Part("machine", _machine(options), 30)
    yield Part("build", (python, "setup.py", "-q", "build_ext", "--inplace"), 240)
    yield Part("smoke", _smoke(options), 90)
    yield Part("tests", _tests(options), 240)
    for precision in options.precisions:
        for workload in options.workloads:
            name = f"row-{workload}-{precision}"
            row = _module("row", workload, precision, str(out / f"{name}.json"))
            yield Part(name, _shrunk(row, options), _ROW_SECONDS, least_seconds=20)
    slowest = sorted(rows_in(out), key=lambda row: row.ratio, reverse=True)
    for row in slowest[: options.profiles]:
        # Whether float32 may be rounded to TF32 is PyTorch's setting, and changes matmuls alone.
        dtype = "float32" if row.precision == "tf32" else row.precision
        name = f"profile-{row.workload}-{row.precision}"
        files = ("--json", str(out / f"{name}.json"), "--trace", str(out / f"{name}-trace.json"))
        command = (python, "-m", "amp_ir", "profile", row.workload, "--amp-dtype", dtype, *files)
        device = () if options.is_rehearsal else ("--device", "cuda")
        yield Part(name, _small((*command, *device), options), 90, least_seconds=20)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is not None and not options.is_rehearsal:
        watched = (sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *_smoke(options))
        yield Part("sanitizer", watched, 240, least_seconds=40)


def _machine(options: SuiteOptions) -> tuple[str, ...]:
    return _module("machine", str(options.out / "machine.json"))


def _smoke(options: SuiteOptions) -> tuple[str, ...]:
    return _module("smoke", "cpu" if options.is_rehearsal else "cuda")


def _tests(options: SuiteOptions) -> tuple[str, ...]:
    pytest = (sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider")
    if options.is_rehearsal:
        return (*pytest, _REHEARSED_TESTS)
    going_on = ("--continue-on-collection-errors", "-W", _WITHOUT_ONEDNN)
    return (*pytest, "-m", "gpu", *going_on)


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"benchmarks.gpu_suite.{name}", *arguments)


def _shrunk(command: tuple[str, ...], options: SuiteOptions) -> tuple[str, ...]:
    return (*command, "--device", "cpu", "--small") if options.is_rehearsal else command


def _small(command: tuple[str, ...], options: SuiteOptions) -> tuple[str, ...]:
    return (*command, "--small") if options.is_rehearsal else command
