# SPDX-License-Identifier: Apache-2.0
"""Gradient errors against float64 beside torch.autocast's: `python -m benchmarks.precision`.

The interpreter evaluates every workload of the demos, in small shapes, in bfloat16 and float16, op
by op, and rounds exactly where the plan says: no hardware for either dtype is needed. A few draws
also run as compiled kernels, which may round less: a fused kernel rounds what it stores. For each
workload, the table lists the five ops whose roundings affect the gradients most: only that op
rounds, everything else is evaluated in float64. Tables are printed and saved under
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median

import attrs
import torch
from rich.console import Console
from rich.table import Table
from tvm import relax

import amp_ir
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.files.atomic_file import write_text
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.location import from_span
from benchmarks.chosen_names import check_names
from benchmarks.record import add_results_option
from benchmarks.workloads.further import ALL

DTYPES = ("bfloat16", "float16")
Gradients = dict[str, torch.Tensor]


@attrs.frozen
class Contribution:
    """The effect of one op's roundings on the gradients: a relative error."""

    op: str
    error: float


@attrs.frozen
class Row:
    """One workload in one dtype; errors are relative, in the Euclidean norm over all gradients.

    They are medians over seeds. `ratio_of_draws` is the geometric mean of ours over
    torch.autocast's, draw by draw. `compiled` is of the first seeds only, and `compiled_ratio` is
    it over torch.autocast's there.
    """

    workload: str
    dtype: str
    seeds: int
    ours: float
    torch_autocast: float
    ratio_of_draws: float
    compiled: float | None
    compiled_ratio: float | None
    worst: tuple[Contribution, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=__doc__)
    parser.add_argument("workloads", nargs="*", default=[], help=", ".join(ALL))
    parser.add_argument("--seeds", type=int, default=25, help="draws of weights and batch")
    parser.add_argument("--worst", type=int, default=5, help="ops to name; 0 for none")
    parser.add_argument("--compiled", type=int, default=3, help="draws to compile and run, too")
    add_results_option(parser)
    chosen = parser.parse_args(arguments)
    check_names(parser, chosen.workloads, ALL, "workload")
    rows: list[Row] = []
    for name in chosen.workloads or WORKLOADS:
        rows += measure(name, seeds=chosen.seeds, worst=chosen.worst, compiled=chosen.compiled)
        save(rows, chosen.results / "precision.json")
    show(rows, chosen.results / "precision.txt")


def measure(name: str, *, seeds: int, worst: int, compiled: int) -> list[Row]:
    """Measure medians over some seeds, the worst ops for the first seed; return a row a dtype.

    Many seeds, since a relu activation that changes sign changes one draw by 0.1 and more: in one
    draw, ours may be half or twice the error of torch.autocast.
    """
    ours: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    theirs: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    run: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    contributions: dict[str, tuple[Contribution, ...]] = dict.fromkeys(DTYPES, ())
    for seed in range(seeds):
        case = Case(name, seed)
        for dtype in DTYPES:
            ours[dtype].append(relative_error(case.gradients(dtype), case.exact))
            theirs[dtype].append(relative_error(case.torch_gradients(dtype), case.exact))
            if seed < compiled:
                run[dtype].append(relative_error(case.compiled_gradients(dtype), case.exact))
            if seed == 0 and worst:
                contributions[dtype] = tuple(case.contributions(dtype)[:worst])
    return [
        Row(
            name,
            dtype,
            seeds,
            median(ours[dtype]),
            median(theirs[dtype]),
            geometric_mean([a / b for a, b in zip(ours[dtype], theirs[dtype], strict=True)]),
            median(run[dtype]) if run[dtype] else None,
            median(run[dtype]) / median(theirs[dtype][: len(run[dtype])]) if run[dtype] else None,
            contributions[dtype],
        )
        for dtype in DTYPES
    ]


class Case:
    """One workload with one draw of weights and batch, cast to each of `dtypes`."""

    def __init__(self, name: str, seed: int, dtypes: Sequence[str] = DTYPES) -> None:
        self._make = lambda: ALL[name].make(small=True, seed=seed)
        self._training = training = self._make()

        def step(*batch: torch.Tensor) -> torch.Tensor:
            loss = training.loss(*batch)
            loss.backward()
            return loss

        # Without the optimizer: p.grad holds the gradients, as outputs of the step.
        mod, args = amp_ir.trace_step(step, training.batch, model=training.model)
        self._low = {dtype: amp_ir.autocast(mod, args, amp_dtype=dtype) for dtype in dtypes}
        self._full = mod
        self._inputs = list(_inputs(mod, training.batch))
        self.exact = self._run(mod, float_dtype=torch.float64)

    def gradients(self, dtype: str) -> Gradients:
        """Return the gradients with every rounding of the plan."""
        return self._run(self._low[dtype])

    def compiled_gradients(self, dtype: str) -> Gradients:
        """Return the compiled step's p.grad; also in float32, without casts."""
        model = self._training.model
        model.zero_grad()
        amp_ir.compile(self._low.get(dtype, self._full))(*self._training.batch)
        return {
            f"{name}.grad": one.grad
            for name, one in model.named_parameters()
            if one.grad is not None
        }

    def torch_gradients(self, dtype: str) -> Gradients:
        """Return the gradients of PyTorch's own autocast, which does nothing in float32."""
        training = self._make()
        # Without oneDNN, which has no float16 on most CPUs: PyTorch's own kernels always run.
        with (
            torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"),
            torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
        ):
            loss = training.loss(*training.batch)
        loss.backward()
        return {
            f"{name}.grad": one.grad
            for name, one in training.model.named_parameters()
            if one.grad is not None
        }

    def contributions(self, dtype: str) -> list[Contribution]:
        """Return the error caused by each op's roundings alone, the worst first."""
        found = []
        for label, variables in roundings(self._low[dtype]).items():
            on_value = _rounding(variables, getattr(torch, dtype))
            got = self._run(self._low[dtype], float_dtype=torch.float64, on_value=on_value)
            found.append(Contribution(label, relative_error(got, self.exact)))
        return sorted(found, key=lambda one: -one.error)

    def _run(self, mod: amp_ir.StepModule, **options: object) -> Gradients:
        outputs = interpret(mod, self._inputs, **options)  # type: ignore[arg-type]
        specs = mod.signature.outputs
        return {
            spec.name: value
            for spec, value in zip(specs, outputs, strict=True)
            if spec.role is amp_ir.Role.GRADIENT
        }


def relative_error(got: Gradients, exact: Gradients) -> float:
    """Return |got - exact| / |exact| of all gradients together; infinite if `got` is not finite."""
    error = sum(float(((got[name].double() - exact[name]) ** 2).sum()) for name in exact)
    size = sum(float((one**2).sum()) for one in exact.values())
    return float("inf") if error != error else (error / size) ** 0.5


def roundings(mod: amp_ir.StepModule) -> dict[str, set[relax.Var]]:
    """Return the rounded variables of a step, by the op and module that they come from."""
    maker: dict[relax.Var, str] = {}
    found: dict[str, set[relax.Var]] = {}
    names = [one.name for one in mod.signature.inputs]
    for parameter, name in zip(mod.ir["main"].params, names, strict=True):
        maker[parameter] = f"input {name}"
    for block in mod.ir["main"].body.blocks:
        for binding in block.bindings:
            label = _label(binding.value, maker)
            maker[binding.var] = label
            if _is_rounded(binding):
                found.setdefault(label, set()).add(binding.var)
    return found


# Ops that only move elements or rename tensors do not round.
_MOVES = ("amp_ir.cast", "relax.reshape", "relax.permute_dims", "relax.broadcast_to")


def _label(value: relax.Expr, maker: dict[relax.Var, str]) -> str:
    if isinstance(value, relax.TupleGetItem):
        return maker.get(value.tuple_value, "constant")
    if not isinstance(value, relax.Call):
        return maker.get(value, "constant") if isinstance(value, relax.Var) else "constant"
    if value.op.name in _MOVES:
        source = value.args[0]
        return maker.get(source, "constant") if isinstance(source, relax.Var) else "constant"
    place = from_span(value.span)
    return f"{value.op.name} in {place.module or 'step'} ({place.phase})"


def _is_rounded(binding: relax.VarBinding) -> bool:
    value, ty = binding.value, binding.var.ty
    if not isinstance(ty, relax.TensorType) or str(ty.dtype) not in DTYPES:
        return False
    return not isinstance(value, relax.Call) or value.op.name not in _MOVES[1:]


def _rounding(
    variables: set[relax.Var], dtype: torch.dtype
) -> Callable[[relax.Var, torch.Tensor], torch.Tensor]:
    def on_value(variable: relax.Var, value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype).to(value.dtype) if variable in variables else value

    return on_value


def _inputs(mod: amp_ir.StepModule, batch: tuple[object, ...]) -> Iterator[torch.Tensor]:
    tensors = iter(mod.signature.flatten_batch(batch))
    for spec in mod.signature.inputs:
        value = mod.state[spec.name] if spec.is_state else next(tensors)
        yield value.detach().clone() if isinstance(value, torch.Tensor) else value()


def save(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as JSON."""
    path.parent.mkdir(exist_ok=True, parents=True)
    write_text(path, json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n")


def show(rows: Sequence[Row], path: Path) -> None:
    """Print errors of all workloads, then the worst ops of each, and save both as text."""
    names = ("workload", "dtype", "draws", "ours", "torch.autocast", "ratio", "ratio of draws",
             "compiled", "ratio")  # fmt: skip
    errors = Table(*names, box=None)
    for row in rows:
        numbers = (f"{row.ours:.2e}", f"{row.torch_autocast:.2e}")
        compiled = ("", "")
        if row.compiled is not None:
            compiled = (f"{row.compiled:.2e}", f"{row.compiled_ratio:.2f}")
        ratios = (f"{row.ours / row.torch_autocast:.2f}", f"{row.ratio_of_draws:.2f}")
        errors.add_row(row.workload, row.dtype, str(row.seeds), *numbers, *ratios, *compiled)
    worst = Table("workload", "dtype", "error alone", "op whose roundings", box=None)
    for row in rows:
        for one in row.worst:
            worst.add_row(row.workload, row.dtype, f"{one.error:.2e}", one.op)
    console = Console(record=True, width=140)
    console.print(errors)
    console.print(worst)
    path.parent.mkdir(exist_ok=True, parents=True)
    write_text(path, console.export_text(styles=False))


if __name__ == "__main__":
    main()
