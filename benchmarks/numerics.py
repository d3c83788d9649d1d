# SPDX-License-Identifier: Apache-2.0
"""Gradient errors over seeds beside torch.autocast: `python -m benchmarks.numerics --write`.

Every workload of the demos in small shapes, T5 and two U-Nets are compiled and run for each draw of
weights and batch, beside torch.autocast, both against float64 (`amp_ir.verify`). Rows go to
build/numerics.jsonl as they come; what is there is not run again, unless --again says so. --write
puts the table into docs/numerics.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import amp_ir
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.files.atomic_file import write_text
from amp_ir.vm.build import host_description
from benchmarks.chosen_names import check_names
from benchmarks.page_section import with_section

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "build" / "numerics.jsonl"
PAGE = ROOT / "docs" / "numerics.md"
PROGRAMS = ("T5", "diffusion U-Net", "U-Net segmentation, dice")
HEADING = "## Beside torch.autocast\n"
# Of a normal distribution: the interval in which the mean of the draws' logarithms is.
_DEVIATIONS = 1.96


@attrs.frozen
class Draw:
    """The gradient errors of one draw: compiled, by the plan alone, and torch.autocast's."""

    workload: str
    amp_dtype: str
    seed: int
    ours: float
    strict: float
    torch_autocast: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.numerics",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = (*WORKLOADS, *PROGRAMS)
    parser.add_argument("workloads", nargs="*", default=[], help=", ".join(names))
    parser.add_argument("--seeds", type=int, default=10, help="draws of weights and batch")
    parser.add_argument("--amp-dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--again", action="store_true", help="also what has a row")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="FILE", help="the rows")
    chosen = parser.parse_args(arguments)
    check_names(parser, chosen.workloads, names, "workload")
    draws = {} if chosen.again else read_rows(chosen.rows)
    for name in chosen.workloads or names:
        for seed in range(chosen.seeds):
            if (name, chosen.amp_dtype, seed) not in draws:
                draw = measure(name, chosen.amp_dtype, seed)
                draws[name, chosen.amp_dtype, seed] = draw
                text = "".join(json.dumps(attrs.asdict(one)) + "\n" for one in draws.values())
                chosen.rows.parent.mkdir(parents=True, exist_ok=True)
                write_text(chosen.rows, text)
                print(draw, file=sys.stderr, flush=True)
    machine = f"{host_description()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    text = table([one for one in draws.values() if one.amp_dtype == chosen.amp_dtype], machine)
    print(text)
    if chosen.write:
        write_text(PAGE, with_section(PAGE.read_text(encoding="utf-8"), HEADING, text))
    return 0


def read_rows(file: Path) -> dict[tuple[str, str, int], Draw]:
    """Return the draws that a file holds."""
    if not file.exists():
        return {}
    found = [Draw(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return {(one.workload, one.amp_dtype, one.seed): one for one in found}


def measure(name: str, amp_dtype: str, seed: int) -> Draw:
    """Compile and run one draw of a workload beside torch.autocast."""
    parts = _parts(name, seed)
    found = amp_ir.verify(
        parts["step"], parts["batch"], model=parts["model"], optimizer=parts["optimizer"],
        amp_dtype=amp_dtype, check=False,
    ).draws[0]  # fmt: skip
    errors = (found[one].gradient for one in ("amp_ir low", "amp_ir low, strict", "torch.autocast"))
    return Draw(name, amp_dtype, seed, *errors)


def _parts(name: str, seed: int) -> dict[str, Any]:
    if name in WORKLOADS:
        training = WORKLOADS[name].make(small=True, seed=seed)
        made: Any = training
        batch = training.batch
    else:
        from benchmarks.programs.listed import PROGRAMS as listed  # noqa: PLC0415 - takes seconds

        torch.manual_seed(seed)
        made = listed[name].make(contextlib.nullcontext)
        batch = made.batch(seed)
    return {"step": made.step, "batch": batch, "model": made.model, "optimizer": made.optimizer}


def table(draws: Sequence[Draw], machine: str) -> str:
    """Return the section of the page."""
    seeds = max((one.seed for one in draws), default=-1) + 1
    lines = [
        HEADING,
        f"`python -m benchmarks.numerics --seeds {seeds} --write` writes this section. Each draw "
        "of weights and batch is one step in small shapes. The error",
        "is that of all gradients together against float64, its median over the draws; ratios are "
        "geometric means. Where their 95 % interval begins below 1,",
        'ours is no larger than torch.autocast\'s within the spread of the draws. "Plan" is the '
        'error with every rounding of the plan (`rounding="strict"`):',
        "what kernels add is the difference. Where the input of a ReLU or of a maximum is nearly "
        "0, one rounding decides its gradient: single draws are then",
        f"far above or below. Measured on {machine}.",
        "",
        "| | draws | amp_ir | plan | torch.autocast | ratio | 95 % | smallest to largest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(one.workload for one in draws):
        lines.append(_row(name, [one for one in draws if one.workload == name]))
    return "\n".join(lines) + "\n"


def _row(name: str, draws: Sequence[Draw]) -> str:
    logs = [math.log(one.ours / one.torch_autocast) for one in draws]
    mean = statistics.fmean(logs)
    spread = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    low, high = (math.exp(mean + sign * _DEVIATIONS * spread) for sign in (-1, 1))
    errors = [
        statistics.median(getattr(one, field) for one in draws)
        for field in ("ours", "strict", "torch_autocast")
    ]
    shown = " | ".join(f"{one:.1e}" for one in errors)
    ends = f"{math.exp(min(logs)):.2f} to {math.exp(max(logs)):.2f}"
    interval = f"{low:.2f} to {high:.2f}"
    return f"| {name} | {len(draws)} | {shown} | {math.exp(mean):.2f} | {interval} | {ends} |"


if __name__ == "__main__":
    sys.exit(main())
