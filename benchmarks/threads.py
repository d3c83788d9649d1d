# SPDX-License-Identifier: Apache-2.0
"""What depends on the number of threads, bit by bit: `python -m benchmarks.threads resnet50`.

Each workload runs in bfloat16 on one thread and on all, from the same state. Every value of the
step is compared; an op depends on threads if its result differs although what it reads does not.
The cost is that of computing those ops on one thread, which gives the same bits for any number:
their time on one thread less that on all, as a share of the step on all.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Sequence
from typing import Any

import attrs
import torch

import amp_ir
from amp_ir.api.compile import compile_step
from amp_ir.api.replay import run_on
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.ir.dataflow import Dataflow, op_name, variables_of
from amp_ir.verification.plan_check import shown_values, with_results
from benchmarks.chosen_names import check_names


@attrs.frozen
class Row:
    """A workload: how many values differ, the ops that are why, and milliseconds.

    `one_milliseconds` and `all_milliseconds` are those ops on one thread and on all.
    """

    workload: str
    values: int
    differ: int
    ops: dict[str, int]
    one_milliseconds: float
    all_milliseconds: float
    step_milliseconds: float

    @property
    def cost(self) -> float:
        """What one thread for these ops adds to a step, as a share of it."""
        return (self.one_milliseconds - self.all_milliseconds) / self.step_milliseconds

    def __str__(self) -> str:
        """Return the row in one line."""
        ops = ", ".join(f"{count} {name}" for name, count in self.ops.items()) or "none"
        text = f"{self.workload}: {self.differ} of {self.values} values differ; depend: {ops}"
        if not self.ops:
            return text
        return (
            f"{text}; these take {self.all_milliseconds:.3g} ms of {self.step_milliseconds:.3g} ms "
            f"a step, {self.one_milliseconds:.3g} ms on one thread: {self.cost:+.0%}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.threads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workloads", nargs="*", default=[], help=", ".join(WORKLOADS))
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    parser.add_argument("--amp-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    chosen = parser.parse_args(arguments)
    check_names(parser, chosen.workloads, WORKLOADS, "workload")
    threads = torch.get_num_threads()
    if threads < 2:
        parser.error("there is one thread; call it where torch.get_num_threads() is 2 or more")
    try:
        for name in chosen.workloads or WORKLOADS:
            row = measure(name, threads, amp_dtype=chosen.amp_dtype, is_small=chosen.small)
            print(row, flush=True)
    finally:
        torch.set_num_threads(threads)
    return 0


def measure(name: str, threads: int, *, amp_dtype: str, is_small: bool) -> Row:
    """Compare a workload on one thread with the same on all."""
    training = WORKLOADS[name].make(small=is_small)
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    if amp_dtype != "float32":
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    values = [_values(mod, training.batch, count) for count in (1, threads)]
    flow = Dataflow(mod.ir)
    # A NaN is as good as another.
    equal = {
        one: torch.equal(values[0][one].nan_to_num(), values[1][one].nan_to_num())
        for one in values[0]
    }
    ops = collections.Counter(
        op_name(flow.values[one])
        for one in equal
        if not equal[one] and all(equal.get(read, True) for read in variables_of(flow.values[one]))
    )
    del values
    times = [_times(mod, args, count, ops) for count in (1, threads)]
    differ = sum(not one for one in equal.values())
    return Row(name, len(equal), differ, dict(ops), times[0][0], *times[1])


def _values(mod: amp_ir.StepModule, batch: tuple[Any, ...], threads: int) -> dict[Any, Any]:
    """Return every value of the step on so many threads, by its variable."""
    torch.set_num_threads(threads)
    shown = shown_values(mod)
    watched = with_results(mod, shown)
    flat = mod.signature.flatten_batch(batch)
    outputs = run_on(compile_step(watched).program, watched, watched.copied_state(), flat)
    return dict(zip(shown, outputs[len(mod.signature.outputs) :], strict=True))


def _times(
    mod: amp_ir.StepModule, args: Any, threads: int, ops: collections.Counter[str]
) -> tuple[float, float]:
    """Return the milliseconds of these ops and of the step on so many threads."""
    torch.set_num_threads(threads)
    found = amp_ir.profile_kernels(mod, device="cpu", args=args, warmup=1, steps=3)
    names = {name.rpartition(".")[2] for name in ops}
    of_ops = (c.milliseconds for c in found.calls if names & {o.rpartition(".")[2] for o in c.ops})
    return sum(of_ops), found.step_milliseconds


if __name__ == "__main__":
    sys.exit(main())
