# SPDX-License-Identifier: Apache-2.0
"""Sequences of kernel statements."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx


def sequence(statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Join statements into one; TVM rejects a sequence of none or of one."""
    if not statements:
        return tirx.Evaluate(tirx.const(0, "int32"))
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(list(statements))


def statements_of(body: tirx.Stmt) -> list[tirx.Stmt]:
    """Return the statements that were joined into one."""
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
