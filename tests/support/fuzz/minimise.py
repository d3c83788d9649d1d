# SPDX-License-Identifier: Apache-2.0
"""Makes a failing program small: leaves out what it still fails without, in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import attrs

from fuzz.program import Program, Statement
from fuzz.run_program import Outcome

_PLAIN = {
    "clip": "", "scaler": "", "overflow_at": -1, "accumulate": False, "budget_share": 0.0,
    "after_init": (), "dtype": "float32", "zero_first": True, "zero_grad": "optimizer.zero_grad()",
    "optimizer": "torch.optim.SGD(parameters, lr=0.1)",
}  # fmt: skip
_PLAIN_LOSS = "values[{k}].square().mean()"


def minimise(
    program: Program, outcome: Outcome, run: Callable[[Program], Outcome], *, seconds: float = 90.0
) -> tuple[Program, Outcome]:
    """The smallest program found that fails with the same kind and key, and its outcome."""
    if outcome.kind == "timeout":  # each smaller one might take as long
        return program, outcome
    end = time.monotonic() + seconds
    is_smaller = True
    while is_smaller and time.monotonic() < end:
        is_smaller = False
        for candidate in _candidates(program):
            if time.monotonic() > end:
                break
            found = run(candidate)
            if (found.kind, found.key) == (outcome.kind, outcome.key):
                program, outcome, is_smaller = candidate, found, True
                break
    return program, outcome


def _candidates(program: Program) -> Iterator[Program]:
    yield from _shorter(program)
    for field, value in _PLAIN.items():
        if getattr(program, field) != value:
            changed = {field: value, **({"overflow_at": -1} if field == "scaler" else {})}
            yield attrs.evolve(program, **changed)
    for key in program.jit:
        yield attrs.evolve(program, jit={k: v for k, v in program.jit.items() if k != key})
    if len(program.losses) > 1:
        yield attrs.evolve(program, losses=program.losses[:1])
        yield attrs.evolve(program, losses=(program.losses[1],))
    for k, loss in enumerate(program.losses):
        plain = _PLAIN_LOSS.format(k=re.findall(r"values\[(\d)\]", loss)[0])
        if loss != plain:
            yield attrs.evolve(
                program, losses=(*program.losses[:k], plain, *program.losses[k + 1 :])
            )
    yield from _smaller(program)


def _shorter(program: Program) -> Iterator[Program]:
    """Without the last statements, then without each, its readers reading another value."""
    statements = program.statements
    for count in range(1, len(statements)):
        yield attrs.evolve(program, statements=statements[:count])
    for k in range(len(statements) - 1, 0, -1):
        rest = statements[:k] + statements[k + 1 :]
        for other in [one.name for one in reversed(statements[:k])][:3]:
            yield attrs.evolve(program, statements=_renamed(rest, statements[k].name, other))


def _renamed(statements: tuple[Statement, ...], name: str, other: str) -> tuple[Statement, ...]:
    pattern = re.compile(rf"\b{name}\b")
    return tuple(
        attrs.evolve(one, lines=tuple(pattern.sub(other, line) for line in one.lines))
        for one in statements
    )


def _smaller(program: Program) -> Iterator[Program]:
    """With an extent of the batch, and every equal number in the layers, made smaller."""
    extents = sorted({int(n) for n in re.findall(r"\d+", program.batch["x"])}, reverse=True)
    for extent in extents:
        for smaller in (1, 2, 3):
            if extent > smaller:
                yield _with_extent(program, extent, smaller)


def _with_extent(program: Program, extent: int, smaller: int) -> Program:
    pattern = re.compile(rf"(?<![\w.]){extent}(?![\w.])")

    def changed(text: str) -> str:
        return pattern.sub(str(smaller), text)

    statements = tuple(
        attrs.evolve(one, lines=tuple(map(changed, one.lines)), init=tuple(map(changed, one.init)))
        for one in program.statements
    )
    batch = {name: changed(text) for name, text in program.batch.items()}
    return attrs.evolve(program, statements=statements, batch=batch)
