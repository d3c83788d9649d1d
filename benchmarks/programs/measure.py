# SPDX-License-Identifier: Apache-2.0
"""Three steps of a program, ours beside PyTorch's, both against eager PyTorch in float64."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_map

import amp_ir
from benchmarks.programs.peer_modes import FilledWithinRange, in_double
from benchmarks.programs.program import Made, Precision, Program

STEPS = 3
_SEEDS = 3
DTYPES = ("float32", "bfloat16")
# Ours may be so much further from float64 than PyTorch is, which sums in another order.
_MOST = 1.5
# Below these shares of the numbers compared, an error is a matter of luck: four roundings of
# float32, and half of one of bfloat16.
_FLOOR = {"float32": 4 * 2.0**-24, "bfloat16": 2.0**-9}
RIGHT, WRONG, REFUSED, FAILED, NO_PEER = "right", "wrong", "refused", "failed", "fails in PyTorch"


@attrs.frozen
class Row:
    """The result of one program in one dtype.

    `loss_error` and `update_error` are shares: of the loss, and of the change of all parameters in
    three steps. `peer_*` are PyTorch's own. `external` counts calls of PyTorch's ops.
    """

    name: str
    kind: str
    dtype: str
    status: str
    seconds: float = 0.0
    loss_error: float = 0.0
    update_error: float = 0.0
    peer_loss_error: float = 0.0
    peer_update_error: float = 0.0
    external: int = 0
    note: str = ""


@attrs.frozen
class _Run:
    losses: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


def measure(program: Program, dtype: str) -> Row:
    """Run a program in one dtype and compare it.

    Where the errors of one draw of weights are too large, those of three are taken together.
    """
    row = Row(program.name, program.kind, dtype, FAILED)
    found: list[_Errors] = []
    for seed in range(_SEEDS):
        row, errors = _once(program, row, seed)
        if errors is None:
            return row
        found.append(errors)
        row = _judged(row, found, program)
        if row.status == RIGHT:
            break
    return row


@attrs.frozen
class _Errors:
    """The errors of one draw, ours and PyTorch's, and the floor below which they are luck."""

    loss: float
    update: float
    peer_loss: float
    peer_update: float
    floor: float


def _once(program: Program, row: Row, seed: int) -> tuple[Row, _Errors | None]:
    """Run a program with one draw of weights; no errors where it does not run."""
    dtype = row.dtype
    try:
        exact = _run(_made(program, contextlib.nullcontext, seed, is_double=True))
        peer = _peer(program, dtype, seed)
    except Exception as error:  # noqa: BLE001 - whatever a model raises is a row of the table
        return attrs.evolve(row, status=NO_PEER, note=_text(error)), None
    made = _made(program, contextlib.nullcontext, seed)
    started = time.perf_counter()
    try:
        train = amp_ir.jit(
            made.step,
            model=made.model,
            optimizer=made.optimizer,
            amp_dtype=None if dtype == "float32" else dtype,
        )
        ours, seconds = _run(attrs.evolve(made, step=train), started=started), train.first_seconds
    except amp_ir.errors.AmpIrError as error:
        return attrs.evolve(row, status=REFUSED, note=_text(error)), None
    except Exception as error:  # noqa: BLE001
        return attrs.evolve(row, note=_text(error)), None
    external = sum(one.calls for one in train.report.dispatched if one.is_external)
    if not (exact.after.isfinite().all() and peer.after.isfinite().all()):
        # Any number of ours would do.
        note = "its parameters are not finite after three steps"
        return attrs.evolve(row, status=NO_PEER, note=note), None
    moved = (exact.after - exact.before).norm().clamp_min(1e-30)
    floor = max(_FLOOR[dtype], float(2.0**-22 * exact.after.norm() / moved))
    errors = _Errors(
        *(_loss_error(ours, exact), _update_error(ours, exact)),
        *(_loss_error(peer, exact), _update_error(peer, exact)),
        floor,
    )
    return attrs.evolve(row, seconds=row.seconds or seconds, external=external), errors


def _judged(row: Row, found: Sequence[_Errors], program: Program) -> Row:
    """Return the row with the errors of all draws: the root of their mean square."""
    loss, update, peer_loss, peer_update, floor = (
        math.sqrt(sum(getattr(one, name) ** 2 for one in found) / len(found))
        for name in ("loss", "update", "peer_loss", "peer_update", "floor")
    )
    is_right = (
        loss <= _MOST * peer_loss + _FLOOR[row.dtype] and update <= _MOST * peer_update + floor
    )
    return attrs.evolve(
        row,
        status=RIGHT if is_right else WRONG,
        loss_error=loss,
        update_error=update,
        peer_loss_error=peer_loss,
        peer_update_error=peer_update,
        note="" if is_right else program.reason,
    )


def _peer(program: Program, dtype: str, seed: int) -> _Run:
    """Run eager PyTorch."""
    return _run(_made(program, _low if dtype == "bfloat16" else contextlib.nullcontext, seed))


def _made(program: Program, precision: Precision, seed: int, *, is_double: bool = False) -> Made:
    torch.manual_seed(seed)
    made = program.make(precision)
    for model in made.models if is_double else ():
        model.double()
        config = getattr(model, "config", None)
        if hasattr(config, "_experts_implementation"):
            # Its grouped matmul takes no float64; the loop over experts is the same sum.
            config._experts_implementation = "eager"
    if not is_double:
        return made
    batch = made.batch
    return attrs.evolve(
        made, step=in_double()(made.step), batch=lambda k: tree_map(_doubled, batch(k))
    )


def _doubled(value: Any) -> Any:
    return (
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    )


@contextlib.contextmanager
def _low() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16), FilledWithinRange():
        yield


def _run(made: Made, *, started: float | None = None) -> _Run:
    before, losses = _state(made), []
    for k in range(STEPS):
        losses.append(made.step(*made.batch(k)).detach().double().flatten().clone())
        if started is not None and k == 0:
            made.step.first_seconds = time.perf_counter() - started  # type: ignore[attr-defined]
    return _Run(torch.cat(losses), before, _state(made))


def _state(made: Made) -> torch.Tensor:
    """Return all floating parameters and buffers in one vector."""
    tensors = (one for model in made.models for one in (*model.parameters(), *model.buffers()))
    unique = {id(one): one for one in tensors}.values()
    return torch.cat([x.detach().double().flatten() for x in unique if x.is_floating_point()])


def _loss_error(run: _Run, exact: _Run) -> float:
    return _number((run.losses - exact.losses).norm() / exact.losses.norm().clamp_min(1e-30))


def _update_error(run: _Run, exact: _Run) -> float:
    moved = (exact.after - exact.before).norm().clamp_min(1e-30)
    return _number((run.after - exact.after).norm() / moved)


def _number(value: torch.Tensor) -> float:
    return float(value) if math.isfinite(float(value)) else math.inf


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:600]
