# SPDX-License-Identifier: Apache-2.0
"""Inference beside torch.autocast, in one process: `python -m benchmarks.inference [MODEL ...]`.

For each model, with its batch and with one sample: milliseconds of the converted model and of the
same model under torch.autocast, in turns; the largest difference of each from float32, relative to
the largest output; and the bytes of the parameters, converted and before. Convolutional networks
run under autocast in channels_last as well, and the faster layout counts. The table is printed, and
saved under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import attrs
import torch
from rich.table import Table

import amp_ir
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.files.atomic_file import write_text
from amp_ir.report.wide_console import wide_console
from benchmarks.compile_time import deep_bert
from benchmarks.record import add_results_option, describe_machine

MODELS = ("resnet50", "bert1", "bert12")


@attrs.frozen
class Row:
    """One model; errors are relative to the largest output of float32."""

    model: str
    samples: int
    dtype: str
    milliseconds: float
    torch_milliseconds: float
    error: float
    torch_error: float
    nbytes: int
    float32_nbytes: int
    convert_seconds: float

    @property
    def ratio(self) -> float:
        """Return our time over PyTorch's."""
        return self.milliseconds / self.torch_milliseconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference", description=__doc__)
    parser.add_argument("models", nargs="*", default=[], help=f"{', '.join(MODELS)} by default")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=10, help="calls of each, in turns")
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    add_results_option(parser)
    chosen = parser.parse_args(arguments)
    rows = [
        measure(name, chosen.dtype, rounds=chosen.rounds, small=chosen.small, single=single)
        for name in chosen.models or MODELS
        for single in (False, True)
    ]
    wide_console().print(table_of(rows))
    document = {
        "machine": describe_machine(),
        "rows": [{**attrs.asdict(row), "ratio": row.ratio} for row in rows],
    }
    write_text(chosen.results / "inference.json", json.dumps(document, indent=1) + "\n")


def measure(name: str, dtype: str, *, rounds: int, small: bool, single: bool) -> Row:
    """Measure one of MODELS in evaluation mode, on a batch or on a single sample."""
    deep = name == "bert12"
    training = deep_bert(12, small=small) if deep else WORKLOADS[name].make(small=small)
    model, samples = training.model.eval(), training.batch[0]
    samples = samples[:1].contiguous() if single else samples
    full_nbytes = sum(one.numel() * one.element_size() for one in model.parameters())
    started = time.perf_counter()
    converted = amp_ir.convert_model(model, (samples,), dtype, cast_optional_params=True)
    convert_seconds = time.perf_counter() - started
    with torch.no_grad():
        exact = _tensor(model(samples))
    runs = [lambda: converted(samples), *_autocast_runs(model, samples, getattr(torch, dtype))]
    error, torch_error = (_error(_tensor(run()), exact) for run in runs[:2])
    ours, *theirs = _in_turns(runs, rounds)
    return Row(
        name, len(samples), dtype, ours, min(theirs), error, torch_error,
        converted.nbytes, full_nbytes, round(convert_seconds, 1),
    )  # fmt: skip


def _autocast_runs(
    model: torch.nn.Module, samples: torch.Tensor, dtype: torch.dtype
) -> list[Callable[[], Any]]:
    """Return the calls of PyTorch: the model as it is, and in channels_last if it has images."""
    variants = [(model, samples)]
    if samples.ndim == 4:
        last: Any = {"memory_format": torch.channels_last}
        variants.append((copy.deepcopy(model).to(**last), samples.to(**last)))

    def run(model: torch.nn.Module, samples: torch.Tensor) -> Any:
        with torch.no_grad(), torch.autocast("cpu", dtype):
            return model(samples)

    return [functools.partial(run, *one) for one in variants]


def _in_turns(runs: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the median milliseconds of each, called one after the other in every round."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for times, run in zip(found, runs, strict=True):
            started = time.perf_counter()
            run()
            times.append((time.perf_counter() - started) * 1e3)
    return [median(times) for times in found]


def _tensor(result: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(result, "logits", result)
    return found


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.float() - exact).abs().max() / exact.abs().max())


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    heads = (
        "model",
        "samples",
        "amp_ir ms",
        "autocast ms",
        "ratio",
        "error",
        "autocast error",
        "MiB",
        "of",
    )
    table = Table(*heads)
    for row in rows:
        times = (f"{row.milliseconds:.1f}", f"{row.torch_milliseconds:.1f}", f"{row.ratio:.2f}")
        errors = (f"{row.error:.1e}", f"{row.torch_error:.1e}")
        nbytes = (f"{row.nbytes / 2**20:.1f}", f"{row.float32_nbytes / 2**20:.1f}")
        table.add_row(f"{row.model} {row.dtype}", str(row.samples), *times, *errors, *nbytes)
    return table


if __name__ == "__main__":
    main()
