# SPDX-License-Identifier: Apache-2.0
"""Data parallel steps, in one run: `python -m benchmarks.distributed [MODEL ...] [--ranks 2]`.

Each rank is a gloo process with one thread. Compared are amp_ir, DistributedDataParallel in eager
PyTorch, and torch.compile of it, with `--amp-dtype` the latter two under torch.autocast. Steps are
taken in turns, and milliseconds are medians of rank 0's, which waits for the others in each. Then
steps of ours say what of their exchange is exposed. The table is printed, and saved under
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import amp_ir
from amp_ir.files.atomic_file import write_text
from amp_ir.report.exchange_profile import ExchangeProfile, exchange_profiles
from amp_ir.report.wide_console import wide_console
from benchmarks.record import RESULTS, describe_machine

WAYS = ("amp_ir", "eager", "torch.compile")
Batch = tuple[torch.Tensor, ...]


@attrs.frozen
class Row:
    """One model: milliseconds a step by way, and rank 0's exchange of a step of ours."""

    model: str
    dtype: str
    ranks: int
    rounds: int
    milliseconds: dict[str, float]
    sent_nbytes: int
    exposed_milliseconds: float
    hidden_milliseconds: float

    @property
    def hidden_share(self) -> float:
        """The share of the exchange in which the step computed meanwhile."""
        whole = self.exposed_milliseconds + self.hidden_milliseconds
        return self.hidden_milliseconds / whole if whole else 0.0


class Words(nn.Module):
    """Two encoder layers between an embedding and a head over a vocabulary."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits f32[rows * length, words]."""
        return self.head(self.layers(self.words(ids))).flatten(0, 1)


def _mlp(*, small: bool) -> tuple[nn.Module, Batch]:
    width, rows = (64, 16) if small else (1024, 256)
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 8)), (
        torch.randn(rows, width),
        torch.randint(0, 8, (rows,)),
    )


def _words(*, small: bool) -> tuple[nn.Module, Batch]:
    width, words, rows, length = (32, 100, 2, 8) if small else (256, 4096, 8, 64)
    ids = torch.randint(0, words, (rows, length))
    return Words(width, words), (ids, ids.flatten())


MODELS: dict[str, Callable[..., tuple[nn.Module, Batch]]] = {"mlp": _mlp, "transformer": _words}


@attrs.frozen(eq=False)
class Training:
    """A step with what it trains."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., torch.Tensor]


def training(model: nn.Module, amp_dtype: str | None, *, casts: bool) -> Training:
    """Return a model's step; with `casts` under torch.autocast."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    low = getattr(torch, amp_dtype) if amp_dtype and casts else None

    def region() -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if low is None else torch.autocast("cpu", low)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with region():
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizer, step)


def _steps(
    model: nn.Module, amp_dtype: str | None, ways: Sequence[str]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each way with its step, on a copy of the model."""
    for way in ways:
        ours = copy.deepcopy(model)
        if way == "amp_ir":
            one = training(ours, amp_dtype, casts=False)
            options = {"model": ours, "optimizer": one.optimizer, "data_parallel": True}
            yield way, amp_ir.jit(one.step, amp_dtype=amp_dtype, **options)
            continue
        wrapped: Any = DistributedDataParallel(ours)
        compiled = torch.compile(wrapped) if way == "torch.compile" else wrapped
        yield way, training(compiled, amp_dtype, casts=True).step


def _of_rank(rank: int, folder: str, asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    ranks, amp_dtype = asked["ranks"], asked["amp_dtype"]
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    rows = []
    for name in asked["models"]:
        torch.manual_seed(0)
        model, batch = MODELS[name](small=asked["small"])
        steps = dict(_steps(model, amp_dtype, asked["ways"]))
        spent: dict[str, list[float]] = {way: [] for way in steps}
        for number in range(asked["warmup"] + asked["rounds"]):
            for way, step in steps.items():
                dist.barrier()
                started = time.perf_counter()
                step(*batch)
                if number >= asked["warmup"]:
                    spent[way].append((time.perf_counter() - started) * 1e3)
        medians = {way: statistics.median(found) for way, found in spent.items()}
        exchanges = exchange_of(steps["amp_ir"], batch, asked["rounds"])
        rows.append(
            Row(
                name,
                amp_dtype or "float32",
                ranks,
                asked["rounds"],
                medians,
                sum(one.nbytes for one in exchanges),
                sum(one.exposed_milliseconds for one in exchanges),
                sum(one.hidden_milliseconds for one in exchanges),
            )
        )
    if rank == 0:
        document = json.dumps([attrs.asdict(row) for row in rows])
        write_text(Path(folder) / "rows.json", document)
    dist.destroy_process_group()


def exchange_of(train: Any, batch: Batch, steps: int) -> Sequence[ExchangeProfile]:
    """Return the profile of each bucket of our step."""
    exchange = train.compiled.program.exchange
    exchange.is_timed = True
    for _ in range(steps):
        train(*batch)
    exchange.is_timed = False
    return exchange_profiles(exchange.traffic)


def measure(
    models: Sequence[str],
    *,
    amp_dtype: str | None = None,
    ranks: int = 2,
    rounds: int = 20,
    warmup: int = 3,
    small: bool = False,
    ways: Sequence[str] = WAYS,
) -> list[Row]:
    """Return a row for each model, of rank 0."""
    asked = {
        "models": list(models), "amp_dtype": amp_dtype, "ranks": ranks, "rounds": rounds,
        "warmup": warmup, "small": small, "ways": list(ways),
    }  # fmt: skip
    return [Row(**one) for one in rows_of_ranks(_of_rank, ranks, asked)]


def rows_of_ranks(
    of_rank: Callable[[int, str, dict[str, Any]], None], ranks: int, asked: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run `of_rank(rank, folder, asked)` in a process for each rank.

    Return what rank 0 left in the folder's rows.json.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_rank, (folder, asked), nprocs=ranks)
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
    return rows


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table(box=None, header_style="bold")
    table.add_column("ms a step")
    columns = ("dtype", "ranks", *WAYS, "MiB sent", "exposed ms", "hidden")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        times = (row.milliseconds.get(way) for way in WAYS)
        table.add_row(
            *(row.model, row.dtype, str(row.ranks)),
            *("" if one is None else f"{one:.1f}" for one in times),
            f"{row.sent_nbytes / 2**20:.2f}",
            f"{row.exposed_milliseconds:.2f}",
            f"{row.hidden_share:.0%}",
        )
    return table


def run_command(
    description: str, measure: Callable[..., list[Any]], table_of: Callable[..., Table], name: str
) -> None:
    """Measure, print and save what a command line asks for."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--amp-dtype", choices=("float16", "bfloat16"))
    parser.add_argument("--small", action="store_true", help="sizes of a test")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    asked = parser.parse_args()
    rows = measure(
        asked.models,
        amp_dtype=asked.amp_dtype,
        ranks=asked.ranks,
        rounds=asked.rounds,
        small=asked.small,
    )
    wide_console().print(table_of(rows))
    if asked.save:
        document = {"machine": describe_machine(), "rows": [attrs.asdict(row) for row in rows]}
        file = RESULTS / f"{name}_{asked.amp_dtype or 'float32'}.json"
        write_text(file, json.dumps(document, indent=1))


if __name__ == "__main__":
    run_command(__doc__, measure, table_of, "distributed")
