# SPDX-License-Identifier: Apache-2.0
"""Checks that an installed amp_ir computes what PyTorch computes, in some ten seconds.

    python -m amp_ir.selftest

Trains small models on this machine beside PyTorch, and saves, loads and exports. It reads nothing
of the repository, and leaves no file behind. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import tvm
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.api import lower
from amp_ir.compile_cache.cache import CACHE_VARIABLE
from amp_ir.host import native
from amp_ir.ir.target import cpu
from amp_ir.standalone import LoadedStep
from amp_ir.vm.build import compile_executable, host_description
from amp_ir.vm.build_library import missing_linker
from amp_ir.vm.export import export_step, save_state

OK, SKIPPED, FAILED = "ok", "skipped", "FAILED"
STEPS = 3
# Sums of float32 in another order: a few hundred terms of 2^-24 relative error each, over STEPS
# steps of AdamW, whose division by the root of the second moment passes errors on.
FULL_TOLERANCE = 1e-4
# bfloat16 has 8 significant bits: 2^-8 a rounding, and the loss is a mean of many.
LOW_TOLERANCE = 2**-6
# An epsilon for losses near zero.
_TINY = 1e-6


class CheckError(AssertionError):
    """A check found another number than PyTorch's."""


@attrs.frozen
class Outcome:
    """What became of a check: OK, SKIPPED or FAILED, a sentence about it, and its seconds."""

    name: str
    status: str
    detail: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.status:<8}{self.name:<32}{self.seconds:5.1f} s  {self.detail}"


class Skip(Exception):
    """A check cannot be made on this machine; its text says why."""


def main() -> int:
    """Run every check, print a line each as it ends, and return the exit code."""
    print(f"amp_ir {amp_ir.__version__} in {Path(amp_ir.__file__).parent}")
    print(
        f"Python {platform.python_version()}, PyTorch {torch.__version__}, "
        f"TVM {tvm.__version__}, {host_description()}, {torch.get_num_threads()} threads"
    )
    started = time.perf_counter()
    outcomes = []
    with _without_cache():
        for name, check in CHECKS.items():
            outcomes.append(run_check(name, check))
            print(outcomes[-1], flush=True)
    counts = collections.Counter(one.status for one in outcomes)
    print(
        f"{counts[OK]} passed, {counts[FAILED]} failed, {counts[SKIPPED]} skipped "
        f"in {time.perf_counter() - started:.1f} s"
    )
    return 1 if counts[FAILED] else 0


def run_check(name: str, check: Callable[[], str]) -> Outcome:
    """Run one check; whatever it raises is its outcome."""
    started = time.perf_counter()
    try:
        status, detail = OK, check()
    except Skip as reason:
        status, detail = SKIPPED, str(reason)
    except Exception as error:  # the report of a failure is what this program is for
        status, detail = FAILED, f"{type(error).__name__}: {error}"
    return Outcome(name, status, detail, time.perf_counter() - started)


def native_libraries() -> str:
    """Load every native library that is built for this machine."""
    missing = native.load()
    if "passes" in missing:
        raise CheckError(f"the library without which nothing can be planned: {missing['passes']}")
    there = ", ".join(name for name in native.CONSEQUENCES if name not in missing)
    lost = "".join(f"; without {name}: {native.CONSEQUENCES[name]}" for name in missing)
    return there + lost


def train_in_float32() -> str:
    """Train a transformer layer under AdamW and clipping, as PyTorch does."""
    training = _transformer()
    ours, theirs = _both(training, amp_dtype=None)
    _close("loss", ours, theirs, FULL_TOLERANCE)
    return f"losses differ from PyTorch's by {_difference(ours, theirs):.0e} at most"


def train_in_bfloat16() -> str:
    """Train it in bfloat16, as near to PyTorch's float32 as that dtype allows."""
    training = _transformer()
    ours, theirs = _both(training, amp_dtype="bfloat16")
    _close("loss", ours, theirs, LOW_TOLERANCE)
    return f"losses differ from PyTorch's in float32 by {_difference(ours, theirs):.0e} at most"


def skip_an_overflow_in_float16() -> str:
    """Train convolutions under a loss scale; an overflow has to change nothing."""
    model, optimizer, scaler, step, batch = _convolutions()
    train = amp_ir.jit(step, model=model, optimizer=optimizer, scaler=scaler, amp_dtype="float16")
    train(*batch)
    before, scale = copy.deepcopy(model.state_dict()), scaler.get_scale()
    train(batch[0] * torch.inf, batch[1])
    changed = [n for n, one in model.state_dict().items() if not torch.equal(one, before[n])]
    if changed or scaler.get_scale() != scale / 2:
        raise CheckError(
            f"after an overflow {', '.join(changed) or 'nothing'} has changed, expected nothing; "
            f"the scale is {scaler.get_scale()}, expected {scale / 2}"
        )
    loss = float(train(*batch))
    if not loss < 1e3:
        raise CheckError(f"the loss after the skipped step is {loss}")
    return f"the step was skipped, the scale went from {scale:g} to {scaler.get_scale():g}"


def infer_in_bfloat16() -> str:
    """Convert a model for inference; it has to give what it gave in float32."""
    converted, images, expected = _converted()
    got = converted(images)
    _close("output", got, expected, LOW_TOLERANCE)
    return f"outputs differ from float32's by {_difference(got, expected):.0e} at most"


def save_and_load() -> str:
    """Save a converted model and load it; it has to give the same, bit for bit."""
    _need_a_linker()
    converted, images, _ = _converted()
    got = converted(images)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.zip"
        amp_ir.save(converted, path)
        nbytes = path.stat().st_size
        loaded = amp_ir.load(path)(images)
    if not torch.equal(loaded, got):
        raise CheckError("the loaded model computes other numbers than the one that was saved")
    return f"a file of {nbytes / 2**20:.1f} MiB computes the same, bit for bit"


def export_a_step() -> str:
    """Run a step as a file, with TVM's runtime and the installed libraries."""
    _need_a_linker()
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, batch = _mse_step(model, optimizer), (torch.randn(16, 8), torch.randn(16, 4))
    mod, _ = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    target = cpu()
    planned = lower(mod, target=target, host_checks="batch")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.so"
        export_step(compile_executable(planned, target), planned, mod, target, path)
        save_state(mod, path.with_name("state.npz"))
        loaded = LoadedStep(path, state=path.with_name("state.npz"))
    names = [one["name"] for one in loaded.description["main"] if one["role"] == "batch"]
    values = {name: one.numpy() for name, one in zip(names, batch, strict=True)}
    ours = [float(next(iter(loaded.run(values).values()))) for _ in range(STEPS)]
    theirs = [float(step(*batch)) for _ in range(STEPS)]
    _close("loss", torch.tensor(ours), torch.tensor(theirs), FULL_TOLERANCE)
    return "the file trains as PyTorch does"


def train_on_the_gpu() -> str:
    """Train the transformer layer on the GPU, as PyTorch does there."""
    if not torch.cuda.is_available():
        raise Skip("PyTorch sees no GPU")
    training = _transformer("cuda")
    ours, theirs = _both(training, amp_dtype=None, device="cuda")
    _close("loss", ours, theirs, FULL_TOLERANCE)
    return torch.cuda.get_device_name()


CHECKS: dict[str, Callable[[], str]] = {
    "native libraries": native_libraries,
    "training in float32": train_in_float32,
    "training in bfloat16": train_in_bfloat16,
    "an overflow in float16": skip_an_overflow_in_float16,
    "inference in bfloat16": infer_in_bfloat16,
    "inference, saved and loaded": save_and_load,
    "a step as a file": export_a_step,
    "a GPU": train_on_the_gpu,
}


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Compile, and do not load what an earlier run has left on disk."""
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHE_VARIABLE]
        else:
            os.environ[CACHE_VARIABLE] = before


_Training = tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any], tuple[torch.Tensor, ...]]


def _transformer(device: str = "cpu") -> _Training:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(64, 32),
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
            nn.Linear(32, 64),
        ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 64, (4, 16), generator=generator).to(device)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step, (ids,)


def _convolutions() -> tuple[Any, ...]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(8),
            nn.Flatten(), nn.Linear(8, 4),
        )  # fmt: skip
        batch = torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = amp_ir.GradScaler(init_scale=1024.0)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, scaler, step, batch


def _converted() -> tuple[amp_ir.ConvertedModel, torch.Tensor, torch.Tensor]:
    """Return a converted model, its input, and what the model itself returns."""
    model, *_, batch = _convolutions()
    model.eval()
    converted = amp_ir.convert_model(model, (batch[0],), target_dtype="bfloat16")
    with torch.no_grad():
        return converted, batch[0], model(batch[0])


def _need_a_linker() -> None:
    if reason := missing_linker():
        raise Skip(f"{reason}, which links shared libraries")


def _mse_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _both(training: _Training, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of our steps and of PyTorch's from the same state, f32[STEPS] each."""
    model, optimizer, step, batch = training
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train = amp_ir.jit(step, model=model, optimizer=optimizer, **options)
    ours = torch.stack([train(*batch) for _ in range(STEPS)])
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    return ours.cpu(), torch.stack([step(*batch) for _ in range(STEPS)]).cpu()


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    return float((ours - theirs).abs().max() / (theirs.abs().max() + _TINY))


def _close(what: str, ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    found = _difference(ours, theirs)
    if not found <= tolerance:
        raise CheckError(
            f"the {what} differs from PyTorch's by {found:.1e} of the largest, expected at most "
            f"{tolerance:.1e}; got {ours.tolist()}, expected {theirs.tolist()}"
        )


if __name__ == "__main__":
    sys.exit(main())
