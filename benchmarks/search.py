# SPDX-License-Identifier: Apache-2.0
"""Plans that `amp_ir.search_precision` finds, beside others: `python -m benchmarks.search`.

Each workload gets a budget below the error of autocast's plan: found, the least that brings a plan
within it; kept, the policy "conservative", under which all that torch.autocast keeps in float32 and
every sum and activation is float32; and the step in float32. Times are estimated at this machine's
peaks, and measured in turns, the shortest of several. "overflow" is a model whose activations leave
the range of float16.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import nn

import amp_ir
from amp_ir.api.estimate import estimate_step
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.host.peak_rates import measure_peaks
from amp_ir.rewrites.unroll_loops import unroll_loops
from amp_ir.verification.gradients import StepGradients
from amp_ir.verification.outcome import relative_error

# Name, low dtype, and the budget as a share of the error of autocast's plan; 0: an error itself.
CASES = {
    "bert1": ("bfloat16", 0.7, 0.0),
    "T5": ("bfloat16", 0.7, 0.0),
    "resnet50": ("bfloat16", 0.7, 0.0),
    "overflow": ("float16", 0.0, 5e-3),
}


@attrs.frozen
class Parts:
    """A step with what it needs."""

    model: Any
    optimizer: Any
    step: Any
    batch: tuple[Any, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the searches on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("cases", nargs="*", default=[], help=", ".join(CASES))
    parser.add_argument("--full", action="store_true", help="the workloads' own shapes")
    parser.add_argument("--turns", type=int, default=10, help="timed steps of each")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each search")
    chosen = parser.parse_args(arguments)
    for name in chosen.cases or CASES:
        parts = _parts(name, is_small=not chosen.full)
        print(search(name, parts, turns=chosen.turns, seconds=chosen.seconds), flush=True)
    return 0


def search(name: str, parts: Parts, *, turns: int, seconds: float) -> str:
    """Search the plan of one case and compare it; return the lines of a table."""
    amp_dtype, share, budget = CASES[name]
    mod, args = amp_ir.trace_step(
        parts.step, parts.batch, model=parts.model, optimizer=parts.optimizer
    )
    gradients = StepGradients(mod, [mod.signature.flatten_batch(parts.batch)])
    exact = gradients.exact(0)

    def error(one: amp_ir.StepModule) -> float:
        plain = one.with_ir(unroll_loops(one.ir))
        return relative_error(gradients.evaluated(plain, 0), exact)

    default = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    max_error = budget or share * error(default)
    found = amp_ir.search_precision(
        mod, args, max_error=max_error, amp_dtype=amp_dtype, seconds=seconds
    )
    kept = amp_ir.autocast(mod, args, amp_dtype=amp_dtype, policy="conservative")
    steps = {"autocast": default, "found": found.mod or mod, "kept": kept, "float32": mod}
    compiled = {key: amp_ir.compile(one) for key, one in steps.items()}
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(turns):
        for key, train in compiled.items():
            started = time.perf_counter()
            train(*parts.batch)
            best[key] = min(best[key], (time.perf_counter() - started) * 1e3)
    lines = [f"{name} in {amp_dtype}, budget {max_error:.1e}, {found.plans} plans in "
             f"{found.seconds:.0f} s, {len(found.given_back)} given back"]  # fmt: skip
    peaks = measure_peaks()
    for key, one in steps.items():
        estimated = estimate_step(one, peaks).milliseconds
        lines.append(
            f"  {key:<9} error {error(one):.1e}, estimated {estimated:.4g} ms, measured "
            f"{best[key]:.4g} ms"
        )
    return "\n".join(lines)


def _parts(name: str, *, is_small: bool) -> Parts:
    if name in WORKLOADS:
        training = WORKLOADS[name].make(small=is_small)
        return Parts(training.model, training.optimizer, training.step, training.batch)
    torch.manual_seed(0)
    if name == "overflow":
        return _overflow()
    from benchmarks.programs.listed import PROGRAMS  # noqa: PLC0415 - takes seconds

    made = PROGRAMS[name].make(contextlib.nullcontext)
    return Parts(made.model, made.optimizer, made.step, made.batch(0))


def _overflow() -> Parts:
    """Make a model in which the result of one of three layers is beyond 65504."""
    first, second, last = nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 256)
    model = nn.ModuleList([first, second, last])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = second(torch.tanh(first(x)) * 4e5)
        loss = nn.functional.mse_loss(last(torch.tanh(h * 1e-5)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Parts(model, optimizer, step, (torch.randn(128, 256), torch.randn(128, 256)))


if __name__ == "__main__":
    sys.exit(main())
