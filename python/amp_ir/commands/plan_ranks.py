# SPDX-License-Identifier: Apache-2.0
"""`amp-ir plan --ranks`: a step on a cluster that is not here."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import amp_ir
from amp_ir.amp.hints import FULL_DTYPE
from amp_ir.api.plan_ranks import BACKENDS
from amp_ir.commands.training import add_casts, add_command, casts_of, owners, training_of
from amp_ir.demo.stage_progress import stages
from amp_ir.distributed.links import ALGORITHMS
from amp_ir.distributed.rank_options import COMM_DTYPES
from amp_ir.distributed.shards import KINDS
from amp_ir.files.atomic_file import write_text
from amp_ir.host.machine_load import load_warning

# Of a gigabyte a second, and of a microsecond.
_BANDWIDTHS = {"MB/s": 1e-3, "GB/s": 1.0, "Mbit/s": 1e-3 / 8, "Gbit/s": 1 / 8}
_LATENCIES = {"ns": 1e-3, "us": 1.0, "ms": 1e3}


def add_plan_ranks(commands: Any) -> None:
    """Add the command, which is `plan` with the option `--ranks`."""
    parser = add_command(
        commands,
        "plan",
        "simulate a data parallel step on ranks that are not here, from kernels measured here",
        "--ranks 1024 --bandwidth 25GB/s --latency 5us train.py",
        "--ranks 64 --bandwidth 100Gbit/s --shard optimizer bert1 --json plan.json",
    )
    add_casts(parser)
    parser.add_argument("--ranks", type=_ranks, required=True, metavar="N", help="how many ranks")
    parser.add_argument(
        "--bandwidth", type=_bandwidth, required=True, metavar="RATE",
        help=f"what a rank sends, and receives, at a time: a number with {_units(_BANDWIDTHS)}",
    )  # fmt: skip
    parser.add_argument(
        "--latency", type=_latency, default=0.0, metavar="TIME",
        help=f"of a message: a number with {_units(_LATENCIES)} (default none)",
    )  # fmt: skip
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, default="ring",
        help="of the exchanges; recursive doubling has less latency on many ranks (default ring)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", choices=BACKENDS, default="gloo",
        help="gloo has no reduce-scatter of its own (default gloo)",
    )  # fmt: skip
    parser.add_argument("--shard", choices=KINDS, help="what is split over the ranks")
    parser.add_argument("--comm-dtype", choices=COMM_DTYPES, help="the dtype between ranks")
    parser.add_argument(
        "--bucket-cap-mb", type=float, metavar="MIB",
        help="gradients sent together (default: up to 25 MiB, smaller at the end)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all of it, for programs")
    parser.set_defaults(run=_plan_ranks)


def _plan_ranks(arguments: argparse.Namespace) -> int:
    casts = casts_of(arguments)
    with stages() as report:
        training = training_of(arguments, report)
        report("compiling and timing")
        found = amp_ir.plan_ranks(
            training.step,
            training.batch,
            **owners(training),
            ranks=arguments.ranks,
            links=amp_ir.Links(
                gigabytes_per_second=arguments.bandwidth,
                latency_microseconds=arguments.latency,
                algorithm=arguments.algorithm,
            ),
            backend=arguments.backend,
            shard=arguments.shard,
            comm_dtype=arguments.comm_dtype,
            bucket_cap_mb=arguments.bucket_cap_mb,
            steps=arguments.steps,
            **(casts if arguments.amp_dtype != FULL_DTYPE else {}),
        )
    print(found)
    warning = load_warning()
    if warning:
        print(warning, file=sys.stderr)
    if arguments.json is not None:
        write_text(arguments.json, found.to_json())
        print(f"wrote {arguments.json}")
    return 0


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks; expected 1 or more")
    return int(text)


def _bandwidth(text: str) -> float:
    found = _with_unit(text, _BANDWIDTHS)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no bandwidth; expected a number above 0 with {_units(_BANDWIDTHS)}, such "
            "as 25GB/s or 200Gbit/s"
        )
    return found


def _latency(text: str) -> float:
    found = _with_unit(text, _LATENCIES)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no latency; expected a number with {_units(_LATENCIES)}, such as 5us"
        )
    return found


def _with_unit(text: str, units: Mapping[str, float]) -> float | None:
    """Read a number with its unit, in the unit that is 1; None where it is none."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([A-Za-z/]+)", text)
    if match is None or match[2] not in units:
        return None
    return float(match[1]) * units[match[2]]


def _units(units: Mapping[str, float]) -> str:
    *first, last = units
    return f"{', '.join(first)} or {last}"
