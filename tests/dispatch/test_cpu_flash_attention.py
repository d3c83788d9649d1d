# SPDX-License-Identifier: Apache-2.0
"""Attention over long sequences on a CPU: PyTorch's flash attention, which holds no scores."""

from __future__ import annotations

import math

import pytest
import torch
import tvm_ffi
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.dispatch import attention_call
from amp_ir.host import native

pytestmark = pytest.mark.skipif(
    not native.has("amp_ir.torch.attention"), reason="this PyTorch has no flash attention for CPUs"
)
# Sums of at most 900 products of numbers of size 1; bfloat16 rounds the weights and the results.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Attention(nn.Module):
    """One layer over sequences of 8 numbers a position, with two heads."""

    def __init__(self, heads: int = 2, is_causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(8, 24), nn.Linear(8, 8)
        self.heads, self.is_causal, self.dropout = heads, is_causal, dropout

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        n, s, width = x.shape
        q, k, v = self.inward(x).view(n, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(
            q, k, v, mask, self.dropout, is_causal=self.is_causal and mask is None
        )
        return self.outward(y.transpose(1, 2).reshape(n, s, width))


def step_of(model: nn.Module, *extra: torch.Tensor):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x, *extra).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def notes_of(model: nn.Module, columns: int, *extra: torch.Tensor, amp_dtype: str | None = None):
    step, optimizer = step_of(model, *extra)
    batch = (torch.zeros(2, columns, 8),)
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    if amp_dtype is not None:
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    notes = amp_ir.compile(mod).report.dispatched
    return mod, [str(note) for note in notes if "attention" in note.op]


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_sequences_train_as_in_pytorch(
    is_causal: bool, amp_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_call, "_CPU_COLUMNS_LEAST", 40)
    trained = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model = Attention(is_causal=is_causal)
        step, optimizer = step_of(model)
        train = step
        if compiles:
            train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype=amp_dtype)
        torch.manual_seed(1)
        losses = [train(torch.randn(3, 48, 8)) for _ in range(4)]
        if compiles and (amp_dtype is None or attention_call._is_native("bfloat16")):
            notes = [str(n) for n in train.compiled.report.dispatched if "attention" in n.op]
            assert notes == [
                "amp_ir.attention: 1 call -> torch",
                "amp_ir.attention_backward: 1 call -> torch",
            ]
        trained.append((torch.stack(losses), model.inward.weight.detach()))
    tolerance = TOLERANCE[torch.float32 if amp_dtype is None else torch.bfloat16]
    for ours, eager in zip(*trained, strict=True):
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


def test_no_scores_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, peaks = 256, []
    for least in (columns, columns + 1):
        monkeypatch.setattr(attention_call, "_CPU_COLUMNS_LEAST", least)
        mod, _ = notes_of(Attention(), columns)
        peaks.append(amp_ir.memory_report(mod).peak_bytes)
    # Two samples of two heads, in float32, at least once.
    assert peaks[1] - peaks[0] >= 2 * 2 * columns**2 * 4


def test_why_not_is_in_the_report() -> None:
    short = notes_of(Attention(), 16)[1]
    dropped = notes_of(Attention(dropout=0.5), 16)[1]
    masked = notes_of(Attention(), 16, torch.randn(16, 16))[1]
    half = notes_of(Attention(), 16, amp_dtype="float16")[1]
    computes = [one for one in ("float32", "bfloat16") if one == "float32" or
                attention_call._is_native(one)]  # fmt: skip
    for notes, reason in (
        (short, "matmuls are faster than flash attention for 16 columns"),
        (dropped, "flash attention would drop by other random numbers"),
        (masked, "flash attention takes no mask but the causal one"),
        (
            half,
            f"flash attention computes in {' or '.join(computes)} on this CPU, not in float16",
        ),
    ):
        assert notes == [
            f"amp_ir.{op}: 1 call -> matmuls and own kernels, because {reason}"
            for op in ("attention", "attention_backward")
        ]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    n, h, s, d = q.shape
    out, lse = torch.empty(n, s, h, d, dtype=q.dtype), torch.empty(n, h, s)
    layouts = []
    for one in (q, k, v):
        layouts += [tvm_ffi.Shape(tuple(one.shape)), tvm_ffi.Shape(one.stride())]
    flat = [one.as_strided((1 + sum((m - 1) * t for m, t in zip(one.shape, one.stride(),
            strict=True)),), (1,)) for one in (q, k, v)]  # fmt: skip
    call = native.function("amp_ir.torch.attention")
    call(*flat, *layouts, is_causal, 1 / math.sqrt(d), out.view(-1), lse.view(-1))
    expected = (q.float() @ k.float().mT) / math.sqrt(d)
    if is_causal:
        expected = expected.masked_fill(torch.ones(s, s).triu(1).bool(), -math.inf)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(lse, expected.logsumexp(-1), rtol=tolerance, atol=tolerance)
    return out.transpose(1, 2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "columns", "is_causal"), [(7, 7, True), (5, 9, False)])
def test_heads_may_lie_inside_of_rows(
    rows: int, columns: int, is_causal: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, rows, 3, 4).to(dtype).transpose(1, 2)
    k, v = (torch.randn(2, columns, 3, 4).to(dtype).transpose(1, 2) for _ in range(2))
    wanted = functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=is_causal
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        attend(q, k, v, is_causal).double(), wanted, rtol=tolerance, atol=tolerance
    )


def test_what_it_cannot_do_is_refused() -> None:
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4)
    with pytest.raises(ValueError) as refused:
        attend(q, k, k, is_causal=True)
    assert str(refused.value).splitlines()[0] == (
        "amp_ir.torch.attention: q [1, 2, 5, 4], k [1, 2, 6, 4], v [1, 2, 6, 4], causal; "
        "expected [n, h, s, d], [n, h, t, d] twice in one dtype, dense along d, and s = t if causal"
    )
