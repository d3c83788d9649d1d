# SPDX-License-Identifier: Apache-2.0
"""Plans that `amp_ir.search_precision` finds, beside others: `python -m benchmarks.search --write`.

Each workload gets a budget below the error of autocast's plan. Compared are autocast: the plan that
the search begins with; conservative: the policy under which all that torch.autocast keeps in
float32 and every sum and activation is float32; found: what the search returns; and the step in
float32. All are timed once more after the search, in turns, the shortest of several. "overflow" is
a model whose activations leave the range of float16.

Rows are kept in search.json of --results, and --table shows them without measuring. --write writes
the section of docs/numerics.md. The command fails if a found plan is slower than another one within
the budget by more than 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

import amp_ir
from amp_ir.api.estimate import estimate_step
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.files.atomic_file import write_text
from amp_ir.host.machine_model import measured_cpu
from amp_ir.rewrites.unroll_loops import unroll_loops
from amp_ir.verification.gradients import StepGradients
from amp_ir.verification.measured_plans import measure_plans
from amp_ir.verification.outcome import relative_error
from amp_ir.vm.build import host_description
from benchmarks.chosen_names import check_names
from benchmarks.page_section import with_section
from benchmarks.record import add_results_option

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "numerics.md"
HEADING = "## Plans found, beside others\n"
# Name, low dtype, and the budget as a share of the error of autocast's plan; 0: an error itself.
CASES = {
    "bert1": ("bfloat16", 0.7, 0.0),
    "T5": ("bfloat16", 0.7, 0.0),
    "resnet50": ("bfloat16", 0.7, 0.0),
    "overflow": ("float16", 0.0, 5e-3),
}
# Beyond it a plan is slower; equal programs differ by as much.
_SLOWER = 1.05


@attrs.frozen
class Parts:
    """A step with what it needs."""

    model: Any
    optimizer: Any
    step: Any
    batch: tuple[Any, ...]


@attrs.frozen
class Plan:
    """A plan: its gradient error, and its estimated and measured milliseconds."""

    name: str
    error: float
    estimated: float
    measured: float


@attrs.frozen
class Row:
    """A search and the plans beside it; `returned` is what the search says that it returns."""

    case: str
    amp_dtype: str
    budget: float
    tried: int
    seconds: float
    returned: str
    machine: str
    plans: tuple[Plan, ...]

    @property
    def slower_than(self) -> list[str]:
        """The plans within the budget than which the found one is slower."""
        found = next(one for one in self.plans if one.name == "found")
        within = [one for one in self.plans if one.error <= self.budget]
        return [one.name for one in within if found.measured > _SLOWER * one.measured]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the searches on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", default=[], help=", ".join(CASES))
    parser.add_argument("--full", action="store_true", help="the workloads' own shapes")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each search")
    parser.add_argument("--table", action="store_true", help="show the rows, measure nothing")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    add_results_option(parser)
    chosen = parser.parse_args(arguments)
    check_names(parser, chosen.cases, CASES, "case")
    file = chosen.results / "search.json"
    rows = read_rows(file)
    for name in () if chosen.table else chosen.cases or CASES:
        parts = _parts(name, is_small=not chosen.full)
        rows[name] = measure(name, parts, seconds=chosen.seconds)
        data = [attrs.asdict(row) for row in rows.values()]
        write_text(file, json.dumps(data, indent=1) + "\n")
    ordered = [rows[name] for name in CASES if name in rows]
    print(table(ordered))
    if chosen.write:
        page = PAGE.read_text(encoding="utf-8")
        write_text(PAGE, with_section(page, HEADING, table(ordered)))
    for row in ordered:
        for name in row.slower_than:
            print(f"{row.case}: the found plan is slower than {name}", file=sys.stderr)
    return 1 if any(row.slower_than for row in ordered) else 0


def read_rows(file: Path) -> dict[str, Row]:
    """Return the rows that a file holds, by case."""
    if not file.exists():
        return {}
    data = json.loads(file.read_text(encoding="utf-8"))
    rows = [Row(**{**one, "plans": tuple(Plan(**plan) for plan in one["plans"])}) for one in data]
    return {row.case: row for row in rows}


def table(rows: Sequence[Row]) -> str:
    """Return the section of the page."""
    machines = "; ".join(dict.fromkeys(row.machine for row in rows))
    lines = [
        HEADING,
        "`python -m benchmarks.search --write` makes this section, in small shapes (`--full`: the "
        "workloads' own). The budget is 0.7 times the error of autocast's plan",
        'under the policy "default", for the model that overflows in float16 it is 5e-3. '
        "Milliseconds are the shortest of several steps in turns, measured once more after",
        f"the search. The command fails if the found plan is slower than another one within the "
        f"budget. Measured on {machines}.",
        "",
        "| | dtype | budget | plan | error | estimated ms | measured ms | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for one in row.plans:
            note = "" if one.error <= row.budget else "over the budget"
            if one.name == "found":
                note = f"{row.returned}; {row.tried} plans in {row.seconds:.0f} s"
            lines.append(
                f"| {row.case} | {row.amp_dtype} | {row.budget:.1e} | {one.name} | "
                f"{one.error:.1e} | {one.estimated:.3g} | {one.measured:.3g} | {note} |"
            )
    return "\n".join(lines) + "\n"


def measure(name: str, parts: Parts, *, seconds: float) -> Row:
    """Search the plan of one case and compare it."""
    amp_dtype, share, budget = CASES[name]
    mod, args = amp_ir.trace_step(
        parts.step, parts.batch, model=parts.model, optimizer=parts.optimizer
    )
    batch = mod.signature.flatten_batch(parts.batch)
    gradients = StepGradients(mod, [batch])
    exact = gradients.exact(0)

    def error(one: amp_ir.StepModule) -> float:
        plain = one.with_ir(unroll_loops(one.ir))
        return relative_error(gradients.evaluated(plain, 0), exact)

    default = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    max_error = budget or share * error(default)
    found = amp_ir.search_precision(
        mod, args, max_error=max_error, amp_dtype=amp_dtype, seconds=seconds
    )
    print(found, file=sys.stderr, flush=True)
    kept = amp_ir.autocast(mod, args, amp_dtype=amp_dtype, policy="conservative")
    steps = {"autocast": default, "conservative": kept, "found": found.mod or mod, "float32": mod}
    measured = measure_plans(steps, batch, lambda _text: None)
    machine = measured_cpu(torch.get_num_threads())
    plans = tuple(
        Plan(key, error(one), estimate_step(one, machine).milliseconds, measured.milliseconds[key])
        for key, one in steps.items()
    )
    where = f"{host_description()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return Row(name, amp_dtype, max_error, found.plans, found.seconds, found.returned, where, plans)


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
