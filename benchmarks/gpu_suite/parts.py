# SPDX-License-Identifier: Apache-2.0
"""The parts of the suite, most valuable first: each is a command and a limit of time."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from amp_ir.demo.workloads import WORKLOADS
from benchmarks.gpu_suite.summary import rows_in
from benchmarks.gpu_suite.turn import Turn

ROOT = Path(__file__).resolve().parents[2]
# What CUDA machines lack is warned of, and a warning fails a test.
_WITHOUT_ONEDNN = "ignore:some native libraries of amp_ir are missing:RuntimeWarning"
# Kernels in the emulator: that the command works is what a rehearsal shows.
_REHEARSED_TESTS = "tests/cuda/test_cuda_emulator.py"
KINDS = ("machine", "build", "smoke", "tests", "row", "profile", "sanitizer")
# torch.compile compiles in a row's time, "reduce-overhead" once more, and other rows beside it.
_ROW_SECONDS = 400


@attrs.frozen(kw_only=True)
class SuiteOptions:
    """What the command line asks for: `kinds` of parts, and the number of `profiles`."""

    out: Path
    workloads: tuple[str, ...]
    precisions: tuple[str, ...]
    is_rehearsal: bool
    profiles: int
    kinds: tuple[str, ...] = KINDS

    @property
    def turns(self) -> Path:
        """Return the folder of the files by which rows take turns, which must be empty."""
        return self.out / "turns"


@attrs.frozen
class Part:
    """A command that runs for `limit_seconds` at most, and not with less than `least_seconds`.

    Its name begins with its kind, one of KINDS. With a `turn` it sets up beside others, and the
    limit is that of setting up.
    """

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    least_seconds: float = 5.0
    turn: Turn | None = None


@attrs.frozen
class Together:
    """Parts that run side by side, but for the turns of those that have one."""

    parts: tuple[Part, ...]


def parts_of(options: SuiteOptions) -> Iterator[Part | Together]:
    """Yield the chosen parts in order; what is profiled is decided when the rows are there."""
    yield from _chosen(_first(options), options)
    if beside := tuple(_chosen(_beside(options), options)):
        yield Together(beside)
    yield from _chosen(_profiles(options), options)


def _chosen(parts: Iterable[Part], options: SuiteOptions) -> Iterator[Part]:
    return (part for part in parts if part.name.partition("-")[0] in options.kinds)


def _first(options: SuiteOptions) -> Iterator[Part]:
    yield Part("machine", _machine(options), 30)
    yield Part("build", (sys.executable, "setup.py", "-q", "build_ext", "--inplace"), 240)
    yield Part("smoke", _smoke(options), 90)


def _beside(options: SuiteOptions) -> Iterator[Part]:
    yield Part("tests", _tests(options), 240)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is not None and not options.is_rehearsal:
        watched = (sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *_smoke(options))
        yield Part("sanitizer", watched, 240, least_seconds=40)
    for precision in options.precisions:
        for workload in options.workloads:
            name = f"row-{workload}-{precision}"
            turn = Turn(options.turns / name)
            out = str(options.out / f"{name}.json")
            row = _module("row", workload, precision, out, "--turn", str(turn.path))
            yield Part(name, _shrunk(row, options), _ROW_SECONDS, least_seconds=20, turn=turn)


def _profiles(options: SuiteOptions) -> Iterator[Part]:
    python, out = sys.executable, options.out
    known = [row for row in rows_in(out) if row.workload in WORKLOADS]
    slowest = sorted(known, key=lambda row: row.ratio, reverse=True)
    for row in slowest[: options.profiles]:
        # Whether float32 may be rounded to TF32 is PyTorch's setting, and changes matmuls alone.
        dtype = "float32" if row.precision == "tf32" else row.precision
        name = f"profile-{row.workload}-{row.precision}"
        files = ("--json", str(out / f"{name}.json"), "--trace", str(out / f"{name}-trace.json"))
        command = (python, "-m", "amp_ir", "profile", row.workload, "--amp-dtype", dtype, *files)
        device = () if options.is_rehearsal else ("--device", "cuda")
        yield Part(name, _small((*command, *device), options), 90, least_seconds=20)


def _machine(options: SuiteOptions) -> tuple[str, ...]:
    return _module("machine", str(options.out / "machine.json"))


def _smoke(options: SuiteOptions) -> tuple[str, ...]:
    return _module("smoke", "cpu" if options.is_rehearsal else "cuda")


def _tests(options: SuiteOptions) -> tuple[str, ...]:
    pytest = (sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider")
    if options.is_rehearsal:
        return (*pytest, _REHEARSED_TESTS)
    going_on = ("--continue-on-collection-errors", "-W", _WITHOUT_ONEDNN)
    # pytest-benchmark, where it is installed, warns of workers, and a warning ends the run.
    workers = ("-n", "8", "--dist", "worksteal", "-p", "no:benchmark")
    return (*pytest, "-m", "gpu", *going_on, *workers)


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"benchmarks.gpu_suite.{name}", *arguments)


def _shrunk(command: tuple[str, ...], options: SuiteOptions) -> tuple[str, ...]:
    return (*command, "--device", "cpu", "--small") if options.is_rehearsal else command


def _small(command: tuple[str, ...], options: SuiteOptions) -> tuple[str, ...]:
    return (*command, "--small") if options.is_rehearsal else command
