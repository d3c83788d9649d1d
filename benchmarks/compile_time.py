# SPDX-License-Identifier: Apache-2.0
"""Seconds of compilation: `python -m benchmarks.compile_time [WORKLOAD ...]`.

Seconds of each stage up to the end of the first step, beside torch.compile's from a cold cache, and
the compiler's peak memory. "bert-N" is BERT-base with N layers: its rows show how compile time
grows with a program; "rnn-N", "lstm-N" and "decoder-N" are recurrent networks of N steps, whose
program should not. Each measurement has its own process, one after the other. Seconds are wall
time, except the processor's, which count compilation without the first run: load on the machine
increases the wall time and not the processor's, so compare growth by the latter. Each row is saved
under benchmarks/results/ as it is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.table import Table

import amp_ir
from amp_ir.demo.workloads import WORKLOADS, Training, Workload
from amp_ir.files.atomic_file import write_text
from benchmarks.peers import cold_compiler, make_peer
from benchmarks.record import RESULTS, describe_machine
from benchmarks.resident import rise_of_peak

LAYERS = (1, 3, 6, 12)
DTYPES = ("float32", "bfloat16")
RECURRENT = ("rnn-512", "lstm-512", "decoder-512")
STAGES = (
    "capture", "amp", "checks", "decompose", "dispatch", "loops", "memory", "vm", "first run"
)  # fmt: skip
MEBIBYTE = 2**20


@attrs.frozen
class Compiled:
    """Our compiler's cost: seconds by stage, processor seconds before the first run, bytes."""

    seconds: dict[str, float]
    processor_seconds: float
    nbytes: int
    kernels: int

    @property
    def total(self) -> float:
        """Return the seconds up to the end of the first step."""
        return sum(self.seconds.values())


@attrs.frozen
class Row:
    """One workload in one dtype; torch.compile's seconds are None where it reached its limit.

    A limit of 0 means that it was not measured.
    """

    workload: str
    dtype: str
    ours: Compiled
    torch_seconds: float | None
    torch_limit: float

    @property
    def torch_text(self) -> str:
        """Return torch.compile's seconds as text."""
        if self.torch_seconds is not None:
            return f"{self.torch_seconds:.1f}"
        return f"over {self.torch_limit:.0f}" if self.torch_limit else "not run"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__)
    parser.add_argument("workloads", nargs="*", default=[], help=", ".join(NAMES))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    parser.add_argument(
        "--limit", type=float, default=600, help="seconds for torch.compile; 0 leaves it out"
    )
    parser.add_argument("--save", metavar="NAME", help="file under benchmarks/results/")
    parser.add_argument("--measure", nargs=2, metavar=("WHO", "DTYPE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    names = chosen.workloads or [name for name in NAMES if name not in RECURRENT]
    if chosen.measure:
        who, dtype = chosen.measure
        measured = measure_ours if who == "ours" else measure_torch
        print(json.dumps(measured(names[0], dtype, small=chosen.small)))
        return
    rows: list[Row] = []
    for name in names:
        for dtype in chosen.dtypes:
            rows.append(measure(name, dtype, small=chosen.small, limit=chosen.limit))
            print(f"{name} {dtype}: {rows[-1].ours.total:.1f} s", file=sys.stderr, flush=True)
            if chosen.save:
                save(rows, chosen.save)  # at once: the rest may take minutes
    Console(width=max(Console().width, 160)).print(table_of(rows))


def workload_of(name: str) -> Workload:
    """Return a workload of the demos, or one of `SIZED` with its number."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    kind, _, count = name.partition("-")
    if kind not in SIZED or not count.isdigit():
        raise SystemExit(f"workload {name!r} is not known; expected one of {', '.join(NAMES)}")
    description, make = SIZED[kind]

    def build(*, small: bool, dropout: float) -> Training:
        del dropout
        return make(int(count), small=small)

    return Workload(name, description.format(count), build)


def deep_bert(layers: int, *, small: bool) -> Training:
    """Return the BERT workload with another number of layers."""
    import transformers

    batch, length, vocabulary = (2, 8, 96) if small else (8, 128, 30522)
    shape: dict[str, Any] = {"vocab_size": vocabulary, "num_hidden_layers": layers}
    if small:
        shape |= {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape
    )
    model = transformers.BertForMaskedLM(config)
    ids, labels = (torch.randint(0, min(vocabulary, 10000), (batch, length)) for _ in range(2))

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = model(ids).logits
        return torch.nn.functional.cross_entropy(scores.view(-1, vocabulary), labels.view(-1))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.01)
    return Training(model, optimizer, loss, (ids, labels))


class AttentionDecoder(torch.nn.Module):
    """A cell, and attention to what it has seen, at every step of a loop in Python."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = torch.nn.LSTMCell(2 * width, width)
        self.query = torch.nn.Linear(width, width)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f[rows, steps, width]."""
        rows, steps, width = x.shape
        hidden, cell = x.new_zeros(rows, width), x.new_zeros(rows, width)
        context, found = x.new_zeros(rows, width), []
        for t in range(steps):
            hidden, cell = self.cell(torch.cat([x[:, t], context], 1), (hidden, cell))
            weights = (self.query(hidden)[:, None] @ x.mT).softmax(-1)
            context = self.drop((weights @ x)[:, 0])
            found.append(hidden + context)
        return torch.stack(found, 1)


class _Outputs(torch.nn.Module):
    """A recurrent layer of PyTorch's, of which the outputs count."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f[rows, steps, width]."""
        found: torch.Tensor = self.layer(x)[0]
        return found


def recurrent(model: torch.nn.Module, steps: int, *, small: bool) -> Training:
    """Return the training of a model of sequences, width 64, on `steps` steps of 8 samples."""
    batch = torch.randn(2 if small else 8, steps, 64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, (batch,))


def _rnn(steps: int, *, small: bool) -> Training:
    return recurrent(_Outputs(torch.nn.RNN(64, 64, batch_first=True)), steps, small=small)


def _lstm(steps: int, *, small: bool) -> Training:
    return recurrent(_Outputs(torch.nn.LSTM(64, 64, batch_first=True)), steps, small=small)


def _decoder(steps: int, *, small: bool) -> Training:
    return recurrent(AttentionDecoder(64), steps, small=small)


# What a name with a number builds: a description, and the function that takes the number.
SIZED: dict[str, tuple[str, Callable[..., Training]]] = {
    "bert": ("BERT-base with {} layers, batch 8 x 128, SGD", deep_bert),
    "rnn": ("nn.RNN(64), batch 8 x {}, SGD", _rnn),
    "lstm": ("nn.LSTM(64), batch 8 x {}, SGD", _lstm),
    "decoder": ("LSTMCell(64) with attention and dropout, batch 8 x {}, SGD", _decoder),
}
NAMES = (
    *WORKLOADS,
    *(f"bert-{count}" for count in LAYERS),
    *RECURRENT,
)


def measure(name: str, dtype: str, *, small: bool, limit: float) -> Row:
    """Measure both compilers on one workload; stop torch.compile after `limit` seconds, if any."""
    workload_of(name)  # an unknown name raises here
    ours = _in_a_process(name, "ours", dtype, small=small, limit=None)
    assert ours is not None
    peer = _in_a_process(name, "torch", dtype, small=small, limit=limit) if limit else None
    return Row(name, dtype, Compiled(**ours), None if peer is None else peer["seconds"], limit)


def _in_a_process(
    name: str, who: str, dtype: str, *, small: bool, limit: float | None
) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "benchmarks.compile_time", name, "--measure", who, dtype]
    try:
        done = subprocess.run(
            command + ["--small"] * small, check=True, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_ours(name: str, dtype: str, *, small: bool) -> dict[str, Any]:
    """Return the fields of `Compiled`; bytes are the rise of the resident set while it compiles.

    The optimizer's state that is made then, and the arena, are not touched before the first step.
    """
    training = workload_of(name).make(small=small)
    seconds: dict[str, float] = {}
    compiled: list[amp_ir.CompiledStep] = []

    def compile_it() -> None:
        started = time.perf_counter()
        mod, args = amp_ir.trace_step(
            training.step, training.batch, model=training.model, optimizer=training.optimizer
        )
        seconds["capture"] = time.perf_counter() - started
        started = time.perf_counter()
        if dtype != "float32":
            mod = amp_ir.autocast(mod, args, amp_dtype=dtype)
        seconds["amp"] = time.perf_counter() - started
        compiled.append(amp_ir.compile(mod))

    processor = time.process_time()
    rise = rise_of_peak(compile_it)
    processor = time.process_time() - processor
    (train,) = compiled
    seconds |= train.report.seconds
    started = time.perf_counter()
    train(*training.batch)
    seconds["first run"] = time.perf_counter() - started
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "nbytes": rise,
        "kernels": train.report.kernel_count,
    }


def measure_torch(name: str, dtype: str, *, small: bool) -> dict[str, float]:
    """Return seconds of torch.compile's first step from a cold cache."""
    with cold_compiler():
        peer = make_peer(workload_of(name), dtype, "compile", "contiguous", small=small)
        started = time.perf_counter()
        peer.step()
        return {"seconds": time.perf_counter() - started}


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as text."""
    table = Table(title="seconds to the end of the first step, by stage")
    for heading in ("workload", "dtype"):
        table.add_column(heading)
    for heading in (
        *STAGES,
        "total",
        "processor's",
        "a layer",
        "torch.compile",
        "ratio",
        "kernels",
        "peak MiB",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        ours, peer = row.ours, row.torch_seconds
        _, _, layers = row.workload.partition("bert-")
        table.add_row(
            row.workload,
            row.dtype,
            *(f"{ours.seconds.get(stage, 0.0):.1f}" for stage in STAGES),
            f"{ours.total:.1f}",
            f"{ours.processor_seconds:.1f}",
            f"{ours.processor_seconds / int(layers):.2f}" if layers else "",
            row.torch_text,
            "" if peer is None else f"{ours.total / peer:.2f}",
            str(ours.kernels),
            f"{ours.nbytes / MEBIBYTE:.0f}",
        )
    return table


def save(rows: Sequence[Row], name: str) -> None:
    """Write the rows and the machine's description as JSON."""
    document = {"machine": describe_machine(), "rows": [attrs.asdict(row) for row in rows]}
    write_text(RESULTS / f"{name}.json", json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
