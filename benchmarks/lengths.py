# SPDX-License-Identifier: Apache-2.0
"""Batches of every length, in one process: `python -m benchmarks.lengths [MODEL ...]`.

A BERT classifier and a causal language model (GPT-2) train on batches whose lengths are drawn
evenly from 8 to 512. Compared are amp_ir with buckets, eager PyTorch without padding, and
torch.compile(dynamic=True) without padding, with `--amp-dtype` both under torch.autocast: programs
compiled, seconds in all with compiling, and seconds of the steps after the first of each program.
The last column is the time of our steps over that of the same programs on batches that fill their
buckets: what padding, proofs and slicing cost beside the programs. The table is printed, and saved
under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from rich.table import Table

import amp_ir
from amp_ir.files.atomic_file import write_text
from amp_ir.report.wide_console import wide_console
from benchmarks.record import add_results_option, describe_machine

MODELS = ("bert", "gpt2")
WAYS = ("amp_ir", "eager", "torch.compile")
BUCKETS = (64, 128, 192, 256, 384, 512)
ROWS, WORDS, LABELS = 4, 8192, 4


@attrs.frozen
class Row:
    """One model trained in one way; None where it does not apply."""

    model: str
    way: str
    steps: int
    programs: int | None
    seconds: float
    step_milliseconds: float
    arena_nbytes: int | None = None
    over_full: float | None = None


@attrs.frozen
class Task:
    """A model, its step, and batches of it."""

    step: Callable[..., torch.Tensor]
    owners: dict[str, Any]
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    buckets: dict[str, dict[int, tuple[int, ...]]]
    pad: dict[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths", description=__doc__)
    parser.add_argument("models", nargs="*", default=[], help=f"{', '.join(MODELS)} by default")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--amp-dtype", choices=["bfloat16", "float16"], help="float32 by default")
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    add_results_option(parser)
    chosen = parser.parse_args(arguments)
    rows = []
    for name in chosen.models or MODELS:
        rows += measure(name, chosen.steps, small=chosen.small, amp_dtype=chosen.amp_dtype)
    wide_console().print(table_of(rows))
    document = {"machine": describe_machine(), "rows": [attrs.asdict(row) for row in rows]}
    write_text(
        chosen.results / f"lengths-{chosen.amp_dtype or 'float32'}.json",
        json.dumps(document, indent=1) + "\n",
    )


def measure(
    name: str, steps: int, *, small: bool, amp_dtype: str | None = None, ways: Sequence[str] = WAYS
) -> list[Row]:
    """Train one of MODELS in some of WAYS on the same lengths."""
    draws = random.Random(0)
    buckets = (16, 32) if small else BUCKETS
    lengths = [draws.randint(8, buckets[-1]) for _ in range(steps)]
    return [
        _with_buckets(name, lengths, buckets, amp_dtype, small=small)
        if way == "amp_ir"
        else _plain(name, lengths, way, buckets, amp_dtype, small=small)
        for way in ways
    ]


def _with_buckets(
    name: str, lengths: list[int], buckets: tuple[int, ...], amp_dtype: str | None, *, small: bool
) -> Row:
    task = make_task(name, buckets, small=small)
    train = amp_ir.jit(
        task.step, **task.owners, buckets=task.buckets, pad=task.pad, amp_dtype=amp_dtype
    )
    programs: dict[int, list[float]] = {size: [] for size in buckets}
    started = time.perf_counter()
    for length in lengths:
        batch = task.batch(length)
        begun = time.perf_counter()
        train(*batch)
        size = buckets[bisect.bisect_left(buckets, length)]
        programs[size].append(time.perf_counter() - begun)
    seconds = time.perf_counter() - started
    full = 0.0
    for size, times in programs.items():
        batch, runs = task.batch(size), []
        for _ in range(5):
            begun = time.perf_counter()
            train(*batch)
            runs.append(time.perf_counter() - begun)
        full += sorted(runs)[2] * len(times[1:])
    warm = sum(sum(times[1:]) for times in programs.values())
    count = sum(len(times[1:]) for times in programs.values())
    assert train.compiled is not None
    return Row(
        name, "amp_ir", len(lengths), len(train.recompiles) + 1, round(seconds, 1),
        round(1e3 * warm / max(count, 1), 2), train.compiled.report.plan.arena_bytes,
        round(warm / full, 3) if full else None,
    )  # fmt: skip


def _plain(
    name: str,
    lengths: list[int],
    way: str,
    buckets: tuple[int, ...],
    amp_dtype: str | None,
    *,
    small: bool,
) -> Row:
    task = make_task(name, buckets, small=small)
    step, programs = task.step, None
    low = getattr(torch, amp_dtype or "bfloat16")
    if way == "torch.compile":
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        task.owners["model"].compile(dynamic=True)
    times = []
    started = time.perf_counter()
    for length in lengths:
        batch = task.batch(length)
        begun = time.perf_counter()
        with torch.autocast("cpu", low, enabled=amp_dtype is not None):
            step(*batch)
        times.append(time.perf_counter() - begun)
    seconds = time.perf_counter() - started
    if way == "torch.compile":
        programs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # The slowest steps of torch.compile are those that compile.
    warm = sorted(times)[: -len(times) // 50 or None]
    return Row(
        name, way, len(lengths), programs, round(seconds, 1),
        round(1e3 * sum(warm) / max(len(warm), 1), 2),
    )  # fmt: skip


def make_task(name: str, buckets: tuple[int, ...], *, small: bool) -> Task:
    """Build one of MODELS with its step; the same seed gives the same weights."""
    import transformers  # the packages' demo extra

    torch.manual_seed(0)
    sizes = {"vocab_size": 96 if small else WORDS}
    width, layers = (32, 1) if small else (256, 2)
    if name == "bert":
        config = transformers.BertConfig(
            **sizes, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32,
            intermediate_size=4 * width, num_labels=LABELS, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
    else:
        config = transformers.GPT2Config(
            **sizes, n_embd=width, n_layer=layers, n_head=width // 32, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    draws = torch.Generator().manual_seed(1)

    def batch(length: int) -> tuple[torch.Tensor, ...]:
        ids = torch.randint(1, config.vocab_size, (ROWS, length), generator=draws)
        labels = torch.randint(0, LABELS, (ROWS,), generator=draws) if name == "bert" else ids
        return ids, torch.ones_like(ids), labels

    padded = {"ids": 0.0, "mask": 0.0} | ({} if name == "bert" else {"labels": -100.0})
    by_name = {key: {1: buckets} for key in padded}
    return Task(step, {"model": model, "optimizer": optimizer}, batch, by_name, padded)


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    heads = ("model", "steps", "programs", "seconds", "ms a step", "arena MiB", "over full")
    table = Table("", *heads)
    for row in rows:
        table.add_row(
            row.way, row.model, str(row.steps), _text(row.programs), f"{row.seconds:.1f}",
            f"{row.step_milliseconds:.1f}",
            "" if row.arena_nbytes is None else f"{row.arena_nbytes / 2**20:.1f}",
            _text(row.over_full),
        )  # fmt: skip
    return table


def _text(value: object) -> str:
    return "" if value is None else str(value)


if __name__ == "__main__":
    main()
