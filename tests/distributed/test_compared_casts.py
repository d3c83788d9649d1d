# SPDX-License-Identifier: Apache-2.0
"""Ranks that cast otherwise, whose updates are split or whole: no rank trains."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_ir
from amp_ir import errors
from amp_ir.distributed.compared_casts import rules_of_gradients
from amp_ir.rewrites.exchange_gradients import exchange_gradients
from captured_ranks import captured
from data_parallel import WORKLOADS, batches
from rank_processes import ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]
SAID = (
    "the ranks of the process group have different programs: on rank 1, %s. Nothing has changed. "
    "All ranks have to run the same step with the same options; their batches may differ in "
    "values and in shapes"
)


def in_float32(args: Any, ret_type: Any, amp_dtype: str) -> list[Any]:  # noqa: ARG001
    """Stay in float32: this test asks for it."""
    return [amp_ir.amp.PrimType("float32")] * len(args)


def reading_a_number(rank: int) -> amp_ir.CustomTypeHint:
    """One function on both ranks, which reads another number on each."""

    def by_number(args: Any, ret_type: Any, amp_dtype: str) -> list[Any]:  # noqa: ARG001
        """Decide by a number."""
        return [amp_ir.amp.PrimType("float32" if rank else amp_dtype)] * len(args)

    return amp_ir.CustomTypeHint({"relax.nn.gelu": by_number})


def told(rank: int, *, rows: int = 8, shard: str | None = "optimizer", **options: Any) -> str:
    """What a rank says of a step that it casts by these options of its own."""
    one = WORKLOADS["mlp"][0](lambda model: model)
    before = one.digest()
    group = torch.distributed.new_group([0, 1])
    hint = options.pop("hint", contextlib.nullcontext())
    options |= {"data_parallel": True, "process_group": group, "shard": shard}
    train = amp_ir.jit(one.step, model=one.models, optimizer=one.optimizers, **options)
    torch.manual_seed(rank)
    with hint, pytest.raises(errors.RanksDifferError) as error:
        train(torch.randn(rows, 16), torch.randint(0, 4, (rows,)))
    assert one.digest() == before
    return str(error.value)


def unlike(rank: int) -> list[str]:
    low = "bfloat16" if rank else None
    kept = [amp_ir.Override(module="0", to="float32")] if rank else []
    replaced = amp_ir.CustomTypeHint({"relax.nn.gelu": in_float32} if rank else {})
    return [
        told(rank, amp_dtype=low),
        # Batches of other shapes are other programs, of which the options are compared.
        told(rank, amp_dtype=low, rows=8 + rank),
        told(rank, amp_dtype=low, rows=8 + rank, shard=None),
        told(rank, amp_dtype="bfloat16", overrides=kept, rows=8 + rank),
        told(rank, amp_dtype="bfloat16", hint=replaced),
        told(rank, amp_dtype="bfloat16", hint=replaced, rows=8 + rank),
        told(rank, amp_dtype="bfloat16", hint=replaced, rows=8 + rank, shard=None),
        told(rank, amp_dtype="bfloat16", hint=reading_a_number(rank), rows=8 + rank, shard=None),
    ]


def test_ranks_that_cast_otherwise_do_not_train(tmp_path: Path) -> None:
    found, second = ranks(unlike, tmp_path)
    assert found == second
    dtype = SAID % "option of autocast 1 is dtype bfloat16, and on rank 0 nothing"
    assert found[:3] == [dtype] * 3
    assert found[3] == SAID % (
        "option of autocast 3 is Override(to='float32', module='0'), and on rank 0 nothing"
    )
    decided = (
        "cast of your own rules 1 is relax.nn.gelu of 3 (forward) cast by %s, and on rank 0 %s"
    )
    assert found[4:7] == [SAID % (decided % ("in_float32, reading full", "nothing"))] * 3
    low = "relax.nn.gelu of 3 (forward) cast by by_number, reading low"
    assert found[7] == SAID % (decided % ("by_number, reading full", low))


def alike(rank: int) -> list[float]:
    """Rules that decide alike, on batches of other shapes, train."""
    found = []
    for shard in (None, "optimizer"):
        one = WORKLOADS["mlp"][0](lambda model: model)
        group = torch.distributed.new_group([0, 1])
        options = {"data_parallel": True, "process_group": group, "shard": shard}
        train = amp_ir.jit(
            one.step, model=one.models, optimizer=one.optimizers, amp_dtype="bfloat16", **options
        )
        with amp_ir.CustomTypeHint({"relax.nn.gelu": in_float32, "relax.matmul": in_float32}):
            for rows in (8, 8 + rank, 1 + rank):
                train(torch.ones(rows, 16), torch.zeros(rows, dtype=torch.int64))
        found.append(float(next(one.models[0].parameters()).detach().double().sum()))
    return found


def test_rules_that_decide_alike_train_on_batches_of_other_shapes(tmp_path: Path) -> None:
    first, second = ranks(alike, tmp_path)
    assert first == second


@pytest.mark.parametrize("count", [2, 6])
def test_rules_of_gradients_are_alike_whatever_a_rank_holds(count: int) -> None:
    found = []
    for rank in (0, count - 1):
        one = WORKLOADS["bert"][0](lambda model: model)
        batch = batches("bert", 1, 0)[0]
        options: dict[str, Any] = {"rank": rank, "shard": "optimizer"}
        mod = captured(one.step, batch, one.models, one.optimizers, count, **options)
        cast = amp_ir.autocast(exchange_gradients(mod), amp_dtype="bfloat16")
        found.append(rules_of_gradients(cast))
    assert found[0] == found[1] and len(found[0]) > 30
