# SPDX-License-Identifier: Apache-2.0
"""Runs a program in PyTorch and compiled, and says what became of it.

The oracle is the program in float64. How far PyTorch's own run in the program's precision is from
it, and how far the oracle moves when its parameters and batch are rounded otherwise, say what an
error of ours may be: rounding in another order is not a bug, and a program may magnify it.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from fuzz.program import Program
from fuzz.roundings import RandomRounding, moved

# Two roundings of one calculation differ by as much as either differs from the exact one; that of a
# third, in another order, is met by 8 of it in nearly all programs.
ERROR_FACTOR = 8.0
# Units in the last place of a tensor's largest number, where PyTorch's error is 0 by luck.
FEW_ULP = 32.0
# What cancels to 0 in PyTorch keeps the rounding of a product here, which a kernel adds unrounded
# (x * w - max in a softmax over one number); such numbers are of about 1, but seldom large.
LEAST_SCALE = 2.0**-6
# Roundings that are tried. The error of one number is about normal, so that a few may all lie near
# 0 by luck: 4 of them below a third of its deviation 0.3 % of the time, 16 never.
FEW_ROUNDINGS, MANY_ROUNDINGS = 3, 15
_UNIT = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
Tensors = dict[str, torch.Tensor]


@attrs.frozen
class Outcome:
    """What became of a program.

    `kind` is ok, refused, wrong, crash, internal, timeout, or invalid where PyTorch raises. `key`
    is the same for failures of the same cause, as far as can be told.
    """

    kind: str
    key: str = ""
    text: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether amp_ir is at fault."""
        return self.kind in ("wrong", "crash", "internal", "timeout")


class Wrong(Exception):
    """The compiled step and PyTorch differ."""


def run_program(program: Program) -> Outcome:
    """Run it three steps and compare; raises nothing."""
    from amp_ir.errors import AmpIrError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scope: dict[str, Any] = {}
            exec(compile(program.source(), "<program>", "exec"), scope)
            limits = _limits(program, scope, FEW_ROUNDINGS)
        except Exception as error:
            return Outcome("invalid", type(error).__name__, f"{error}"[:300])
        try:
            _compare_twice(program, scope, limits)
        except AmpIrError as error:
            kind = "internal" if "bug in amp_ir" in str(error) else "refused"
            return Outcome(kind, type(error).__name__, str(error))
        except Wrong as error:
            return Outcome("wrong", "wrong", str(error))
        except Exception as error:
            return Outcome(
                "internal", _place(error), "".join(traceback.format_exception(error))[-3000:]
            )
    return Outcome("ok")


def _compare_twice(
    program: Program, scope: dict[str, Any], limits: list[dict[str, _Limit]]
) -> None:
    """Compare; where the two differ, again with limits from more roundings, of all arithmetic."""
    try:
        _compare(program, scope, limits)
    except Wrong:
        _compare(program, scope, _limits(program, scope, MANY_ROUNDINGS))


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames if "amp_ir" in one.filename] or frames
    return f"{type(error).__name__} in {ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].name}"


@attrs.frozen
class _Limit:
    """The oracle's value, and how far ours may be from it; None where anything may be."""

    expected: torch.Tensor
    most: float | None


def _limits(program: Program, scope: dict[str, Any], roundings: int) -> list[dict[str, _Limit]]:
    """For each step, of each tensor that `_seen` names."""
    unit = _UNIT[str(program.jit.get("amp_dtype", program.dtype))]
    # What rounding to nearest moves a number by, at most, is half of this.
    eps = torch.finfo(getattr(torch, str(program.jit.get("amp_dtype", program.dtype)))).eps
    oracle = _eager(program, scope, torch.float64)
    own = _eager(program, scope, getattr(torch, program.dtype), is_autocast=True)
    many = roundings > FEW_ROUNDINGS
    others = [
        _eager(program, scope, torch.float64, unit=eps, seed=1 + k, rounds_all=many)
        for k in range(roundings)
    ]
    return [
        {name: _limit(tuple(run[name] for run in runs), unit) for name in runs[0]}
        for runs in zip(oracle, own, *others, strict=True)
    ]


def _limit(values: tuple[torch.Tensor, ...], unit: float) -> _Limit:
    oracle, own, *others = (one.double() for one in values)
    if not all(bool(one.isfinite().all()) for one in values):
        same = torch.equal(oracle.isfinite(), own.isfinite())
        return _Limit(oracle, 0.0 if same and not oracle.isfinite().any() else None)
    if oracle.numel() == 0:
        return _Limit(oracle, 0.0)
    error = max(float((one - oracle).abs().max()) for one in (own, *others))
    scale = max(float(oracle.abs().max()), LEAST_SCALE)
    return _Limit(oracle, ERROR_FACTOR * error + FEW_ULP * unit * scale)


def _eager(
    program: Program, scope: dict[str, Any], dtype: torch.dtype, *,
    is_autocast: bool = False, unit: float = 0.0, seed: int = 0, rounds_all: bool = False,
) -> list[Tensors]:  # fmt: skip
    model, optimizer, scaler, step = scope["build"](dtype)
    generator = torch.Generator().manual_seed(seed)
    low = program.jit.get("amp_dtype") if is_autocast else None
    found = []
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(moved(one, unit, generator))
    for batch in scope["batches"](dtype):
        batch = tuple(moved(one, unit, generator) for one in batch)
        context: Any = contextlib.nullcontext()
        if low is not None:
            context = torch.autocast("cpu", getattr(torch, str(low)))
        elif rounds_all:
            context = RandomRounding(unit, generator)
        buffers = {name: one.clone() for name, one in model.named_buffers()}
        scale = scaler.get_scale() if scaler is not None else 0.0
        with context:
            results = step(*batch)
        if scaler is not None and scaler.get_scale() < scale:
            # Ours leaves running statistics as they were, too.
            for name, one in model.named_buffers():
                one.copy_(buffers[name])
        found.append(_seen(results, model, optimizer, scaler))
    return found


def _seen(results: Any, model: Any, optimizer: Any, scaler: Any) -> Tensors:
    """Copies of everything that a step gives or leaves behind, by name."""
    loss, values = results
    found = {"loss": loss, **{f"values[{k}]": one for k, one in enumerate(values)}}
    found |= _state(model, optimizer)
    if scaler is not None:
        found["scale"] = torch.tensor(scaler.get_scale())
    return {name: one.detach().clone() for name, one in found.items()}


def _state(model: Any, optimizer: Any) -> Tensors:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, one in model.named_parameters():
        for key, value in optimizer.state.get(one, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = value
        if one.grad is not None:
            found[f"{name}.grad"] = one.grad
    return {name: one.detach().clone() for name, one in found.items()}


def _compare(program: Program, scope: dict[str, Any], limits: list[dict[str, _Limit]]) -> None:
    nbytes = _compare_once(program, scope, limits, {})
    share = int(nbytes * program.budget_share)
    if share:  # a program of tensors without elements has an arena of 0 bytes
        from amp_ir.errors import BudgetError

        budget = {"memory_budget": share}
        with contextlib.suppress(BudgetError):
            _compare_once(program, scope, limits, budget)


def _compare_once(
    program: Program, scope: dict[str, Any], limits: list[dict[str, _Limit]], budget: dict[str, int]
) -> int:
    """Returns the bytes of the arena."""
    import amp_ir

    dtype = getattr(torch, program.dtype)
    model, optimizer, scaler, step = scope["build"](dtype)
    options: Any = {**program.jit, **budget}
    train = amp_ir.jit(step, model=model, optimizer=optimizer, scaler=scaler, **options)
    for number, (batch, expected) in enumerate(zip(scope["batches"](dtype), limits, strict=True)):
        before, copied = _state(model, optimizer), copy.deepcopy(batch)
        try:
            results = train(*batch)
        except amp_ir.errors.AmpIrError:
            _check_same(before, _state(model, optimizer), f"step {number} was refused, and state")
            raise
        _check_same(dict(enumerate(copied)), dict(enumerate(batch)), f"step {number}: the batch")
        if scaler is not None and train.skipped:
            kept = {key: one for key, one in before.items() if not key.endswith(".grad")}
            after = _state(model, optimizer)
            _check_same(kept, {key: after[key] for key in kept}, f"skipped step {number}: state")
            # A skipped step leaves gradients as they were, and PyTorch those that are not finite.
            expected = {k: one for k, one in expected.items() if not k.endswith(".grad")}
        _check_near(_seen(results, model, optimizer, scaler), expected, number)
    return int(train.compiled.report.plan.arena_bytes)


def _check_same(before: Mapping[Any, Any], after: Mapping[Any, Any], what: str) -> None:
    wrong = [
        str(key)
        for key in before.keys() | after.keys()
        if key not in before or key not in after or not _is_same(before[key], after[key])
    ]
    if wrong:
        raise Wrong(f"{what} changed: {sorted(wrong)}")


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _check_near(found: Tensors, limits: dict[str, _Limit], step: int) -> None:
    """What PyTorch does not have, such as the state of an optimizer that it skipped, is free."""
    errors = [f"{name} is missing" for name in limits if name not in found]
    for name, limit in limits.items():
        if name in found:
            errors += _far(found[name], limit, name)
    if errors:
        raise Wrong(f"step {step}: " + "; ".join(errors[:4]))


def _far(found: torch.Tensor, limit: _Limit, name: str) -> Iterator[str]:
    expected = limit.expected
    if found.shape != expected.shape:
        yield f"{name} is {list(found.shape)}, expected {list(expected.shape)}"
    elif limit.most is not None and expected.isfinite().all():
        error = (found.double() - expected).abs()
        worst = float(error.max()) if error.numel() else 0.0
        if not worst <= limit.most:
            at = int(error.nan_to_num(float("inf")).argmax())
            yield (
                f"{name} {list(found.shape)} is off by {worst:.3g}, at most "
                f"{limit.most:.3g}: {float(found.flatten()[at]):.9g}, expected "
                f"{float(expected.flatten()[at]):.9g}"
            )
    elif limit.most is not None and bool(found.isfinite().any()):
        yield f"{name} {list(found.shape)} is finite, expected none to be"
