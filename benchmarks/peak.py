# SPDX-License-Identifier: Apache-2.0
"""The peak of a step's memory, measured in a process of its own: the one way that tables use.

In a process that has run other steps the C library holds their memory. `malloc_trim` gives back
what is free then; but the arena of a compiled step is allocated when it is compiled, may have been
cut from such memory, and its pages are resident before the step has touched them: the peak of
unet after another workload was 23 MiB, where its state and its arena alone take 92. So the process
is fresh, and the arena too: compilation leaves memory behind as well.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

import amp_ir
from amp_ir.api import compile_into
from amp_ir.demo.workloads import WORKLOADS, Training
from amp_ir.ir.step_module import StepModule
from amp_ir.runtime.arena import Arena
from benchmarks.peers import make_peer
from benchmarks.resident import measured_bytes, tensors_of
from benchmarks.workloads.further import ALL

OURS = "ours"
FIRST_STEPS = 3  # PyTorch may compile again when an optimizer has made its state
MEBIBYTE = 2**20
# What may be missing of a plan. Gaps of the arena are never touched, nor all that a library may
# take (up to 0.5 % of the plans of the workloads), and small tensors lie in pages that are there.
_MISSING_SHARE = 0.02
_MISSING_BYTES = MEBIBYTE


class PeakError(RuntimeError):
    """A peak could not be measured, or what was measured cannot be true."""


def measured_peak(
    workload: str, dtype: str, variant: str = OURS, layout: str = "contiguous", *, small: bool
) -> int:
    """Return the bytes in use at most during two steps, measured in a process of its own.

    `variant` is `OURS` or one of PyTorch's, which has run some steps before; see `make_peer`.

    Raises:
        PeakError: the step does not run, or ours took less than its plan.
    """
    command = [sys.executable, "-m", "benchmarks.peak", workload, dtype, variant, layout]
    done = subprocess.run(command + ["--small"] * small, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise PeakError(f"the peak of {variant} was not measured: {why}")
    return int(done.stdout.splitlines()[-1])


def check_peak(measured: int, planned: int) -> None:
    """Refuse a measured peak of ours that is below the plan.

    Raises:
        PeakError: it is.
    """
    if measured < planned - max(_MISSING_SHARE * planned, _MISSING_BYTES):
        raise PeakError(
            f"measured {measured / MEBIBYTE:.1f} MiB, below the {planned / MEBIBYTE:.1f} MiB of "
            "the plan: some of the memory was resident before, and did not count"
        )


def captured(training: Training, dtype: str) -> StepModule:
    """Return the step of a training, with casts except in float32."""
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    return mod if dtype == "float32" else amp_ir.autocast(mod, args, amp_dtype=dtype)


def peak_of_ours(training: Training, dtype: str) -> int:
    """Return the bytes in use at most during the first two steps, as we compile them.

    Raises:
        PeakError: they are fewer than those of the plan.
    """
    arena = Arena()
    train = compile_into(arena, captured(training, dtype))
    train.module.hooks.install_state()
    with arena.lock:
        arena.forget()  # the first step allocates it, and so inside of the measurement
    known = list(tensors_of(training, with_optimizer=True))
    measured = measured_bytes(lambda: train(*training.batch), known)
    check_peak(measured, train.report.plan.peak_bytes)
    return measured


def _peak_of_peer(workload: str, dtype: str, variant: str, layout: str, *, small: bool) -> int:
    peer = make_peer(ALL[workload], dtype, variant, layout, small=small)
    for _ in range(FIRST_STEPS):
        peer.step()  # the compiler's own memory is not that of a step
    return measured_bytes(peer.step, list(tensors_of(peer.training, with_optimizer=True)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the bytes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peak", description=__doc__)
    parser.add_argument("workload", choices=ALL)
    parser.add_argument("dtype")
    parser.add_argument("variant", help='"ours", or a variant of benchmarks/peers.py')
    parser.add_argument("layout", nargs="?", default="contiguous")
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    chosen = parser.parse_args(arguments)
    name, dtype, small = chosen.workload, chosen.dtype, chosen.small
    if chosen.variant == OURS:
        # Code that any step needs.
        first = WORKLOADS["mlp"].make(small=True)
        amp_ir.compile(captured(first, dtype))(*first.batch)
        print(peak_of_ours(ALL[name].make(small=small), dtype))
    else:
        print(_peak_of_peer(name, dtype, chosen.variant, chosen.layout, small=small))


if __name__ == "__main__":
    main()
