# SPDX-License-Identifier: Apache-2.0
"""What `amp_ir.plan_ranks` foretells, beside what is measured: `python -m benchmarks.plan_ranks`.

Each rank is a gloo process with one thread on this machine. The ranks measure their links, then
train, then time the kernels of the plan at the same time, each alone. So the plan knows what one
of several busy cores computes; it does not know that gloo's threads, which exchange, take turns
with those that compute. The table has both, of rank 0, and is saved with `--save`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from rich.table import Table

import amp_ir
from amp_ir.files.atomic_file import write_text
from benchmarks.distributed import MODELS, exchange_of, rows_of_ranks, run_command, training


@attrs.frozen
class Row:
    """One model on some ranks: milliseconds of a step, and of what is exposed of its exchange."""

    model: str
    dtype: str
    ranks: int
    gigabytes_per_second: float
    latency_microseconds: float
    measured_milliseconds: float
    measured_exposed_milliseconds: float
    planned_milliseconds: float
    planned_exposed_milliseconds: float

    @property
    def error(self) -> float:
        """Return by how much of the measured step the planned one is longer."""
        return self.planned_milliseconds / self.measured_milliseconds - 1


def _of_rank(rank: int, folder: str, asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    ranks, amp_dtype, rounds = asked["ranks"], asked["amp_dtype"], asked["rounds"]
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    links = amp_ir.measure_links()
    rows = []
    for name in asked["models"]:
        torch.manual_seed(0)
        model, batch = MODELS[name](small=asked["small"])
        ours = training(model, amp_dtype, casts=False)
        owners = {"model": model, "optimizer": ours.optimizer}
        train = amp_ir.jit(ours.step, amp_dtype=amp_dtype, data_parallel=True, **owners)
        spent = []
        for number in range(3 + rounds):
            dist.barrier()
            started = time.perf_counter()
            train(*batch)
            if number >= 3:
                spent.append((time.perf_counter() - started) * 1e3)
        buckets = exchange_of(train, batch, rounds)
        plan = amp_ir.plan_ranks(
            ours.step, batch, ranks=ranks, links=links, amp_dtype=amp_dtype, steps=rounds, **owners
        )
        rows.append(
            Row(
                name,
                amp_dtype or "float32",
                ranks,
                links.gigabytes_per_second,
                links.latency_microseconds,
                statistics.median(spent),
                sum(one.exposed_milliseconds for one in buckets),
                plan.milliseconds,
                plan.exposed_milliseconds,
            )
        )
        dist.barrier()
    if rank == 0:
        write_text(Path(folder) / "rows.json", json.dumps([attrs.asdict(row) for row in rows]))
    dist.destroy_process_group()


def measure(
    models: Sequence[str],
    *,
    amp_dtype: str | None = None,
    ranks: int = 2,
    rounds: int = 20,
    small: bool = False,
) -> list[Row]:
    """Return a row for each model, of rank 0."""
    asked = {
        "models": list(models), "amp_dtype": amp_dtype, "ranks": ranks, "rounds": rounds,
        "small": small,
    }  # fmt: skip
    return [Row(**one) for one in rows_of_ranks(_of_rank, ranks, asked)]


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table(box=None, header_style="bold")
    table.add_column("ms")
    for name in ("dtype", "ranks", "GB/s", "us", "step", "planned", "error", "exposed", "planned"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(row.model, row.dtype, str(row.ranks)),
            f"{row.gigabytes_per_second:.2f}",
            f"{row.latency_microseconds:.0f}",
            f"{row.measured_milliseconds:.1f}",
            f"{row.planned_milliseconds:.1f}",
            f"{row.error:+.0%}",
            f"{row.measured_exposed_milliseconds:.1f}",
            f"{row.planned_exposed_milliseconds:.1f}",
        )
    return table


if __name__ == "__main__":
    run_command(__doc__, measure, table_of, "plan_ranks")
