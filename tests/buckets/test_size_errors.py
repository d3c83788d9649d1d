# SPDX-License-Identifier: Apache-2.0
"""Errors of steps that cannot have the size of a bucket say so, and what to add or leave out."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.errors import CaptureError, IndexOutOfRangeError, PaddingError

WORDS, PLACES, WIDTH = 20, 40, 8
PAD = {"ids": 0, "mask": 0}


class Classifier(nn.Module):
    """Attention with a mask, over a sequence of at most PLACES entries."""

    def __init__(self, places: str = "none") -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.table = nn.Embedding(PLACES, WIDTH)
        self.scores = nn.Linear(WIDTH, 2)
        self.places = places

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if self.places == "sliced":
            x = x + self.table.weight[: ids.shape[1]]
        elif self.places == "looked up":
            x = x + self.table(torch.arange(ids.shape[1]))
        heads, seen = x[:, None], mask[:, None, None].bool()
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen)
        return self.scores(mixed[:, 0, 0])


def jitted(model: nn.Module, sizes: dict[str, tuple[int, ...]]):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids, mask, labels):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids, mask), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    buckets = {name: {1: one} for name, one in sizes.items()}
    pad = {name: PAD[name] for name in sizes}
    return amp_ir.jit(step, model=model, optimizer=optimizer, buckets=buckets, pad=pad)


def batch_of(length: int) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(1, WORDS, (3, length))
    return ids, torch.ones_like(ids), torch.randint(0, 2, (3,))


def text_of(error: Exception) -> str:
    """Return the message without the names and lines of files."""
    return re.sub(r"/\S+:\d+", "FILE", str(error))


def test_a_mask_that_was_forgotten_is_named_and_nothing_else_is_said(capfd):
    train = jitted(Classifier(), {"ids": (8, 16)})
    hint = (
        "has {} entries too, and buckets= does not pad it: if it is the same dimension, add "
        "'mask': {{1: (8, 16)}} to buckets=, and for 'mask' a number to pad=, such as 0 for a mask "
        "or -100 for labels"
    )
    where = "the step failed while it was traced, at step (forward), FILE: RuntimeError: attn_mask"
    with pytest.raises(CaptureError) as short:
        train(*batch_of(5))
    assert text_of(short.value) == (
        "the step can be captured on this batch, but not padded to its bucket (8 for axis 1 of "
        f"ids, which has 5 entries): {where} of scaled_dot_product_attention has shape "
        "(3, 1, 1, 5), expected one that broadcasts to (3, 1, 8, 8). Axis 1 of mask "
        + hint.format(5)
    )
    with pytest.raises(PaddingError) as whole:
        train(*batch_of(8))
    assert text_of(whole.value) == (
        "the step cannot be captured with other lengths (7 for axis 1 of ids), so that nothing can "
        f"be proven of its padding: {where} of scaled_dot_product_attention has shape "
        "(3, 1, 1, 8), expected one that broadcasts to (3, 1, 7, 7). Axis 1 of mask "
        + hint.format(8)
    )
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("places", "kind", "why"),
    [
        (
            "sliced",
            CaptureError,
            "the step failed while it was traced, at step (forward), FILE: RuntimeError: "
            "Attempting to broadcast a dimension of length 40 at -2! Mismatching argument at index "
            "1 had torch.Size([40, 8]); but expected shape should be broadcastable to [3, 64, 8]",
        ),
        (
            "looked up",
            IndexOutOfRangeError,
            "the step always uses the index 63, expected 0 to 39, for amp_ir.embedding in table "
            "(forward), FILE. Nothing was run and nothing has changed",
        ),
    ],
)
def test_a_size_beyond_a_table_is_the_one_at_fault(places, kind, why):
    train = jitted(Classifier(places), {"ids": (8, 64), "mask": (8, 64)})
    with pytest.raises(kind) as raised:
        train(*batch_of(20))
    assert text_of(raised.value) == (
        "the step can be captured on this batch, but not padded to its bucket (64 for axis 1 of "
        f"ids, which has 20 entries): {why}. If the step has a largest length, as a table of "
        "positions does, give buckets= no larger size"
    )
    if places == "sliced":
        train(*batch_of(5))


def test_sizes_of_one_dimension_that_differ_are_named():
    train = jitted(Classifier(), {"ids": (8,), "mask": (16,)})
    with pytest.raises(CaptureError) as raised:
        train(*batch_of(5))
    assert str(raised.value).endswith(
        ". Axis 1 of ids and axis 1 of mask have 5 entries each and are padded to 8 and 16: if "
        "they are one dimension, give them the same sizes in buckets="
    )
    jitted(Classifier(), {"ids": (8,), "mask": (8,)})(*batch_of(5))


def test_a_pad_id_beyond_the_table_is_named(monkeypatch):
    for number in (WORDS, -1):
        monkeypatch.setitem(PAD, "ids", number)
        train = jitted(Classifier(), {"ids": (8,), "mask": (8,)})
        with pytest.raises(IndexOutOfRangeError) as raised:
            train(*batch_of(5))
        assert text_of(raised.value) == (
            f"batch0 holds the index {number}, expected 0 to {WORDS - 1}, for amp_ir.embedding in "
            "words (forward), FILE. Nothing was run and nothing has changed. pad= fills ids with "
            f"{number}: give it an index that there is, such as 0"
        )


def test_a_step_that_fails_without_padding_too_says_its_own_error():
    train = jitted(Classifier("sliced"), {"ids": (8, 64), "mask": (8, 64)})
    with pytest.raises(CaptureError) as raised:
        train(*batch_of(50))
    assert text_of(raised.value).startswith("the step failed while it was traced, at step")
    assert "its bucket" not in str(raised.value)


def test_what_the_hint_adds_works_and_a_recompilation_lists_all_its_seconds():
    train = jitted(Classifier(), {"ids": (8, 16), "mask": (8, 16)})
    train(*batch_of(5))
    train(*batch_of(12))
    (record,) = train.recompiles
    assert list(record.stages)[:4] == ["capture", "padding", "autocast", "checks"]
    assert record.stages == train.report.seconds
    assert sum(record.stages.values()) <= record.seconds


FLATTENED = (
    "axis {axis} of a result has 16 entries with padding and 10 without, so that its data cannot "
    "be sliced out. Return it as it was before the axis was flattened, joined or pooled"
)


def pooled(y):
    return functional.avg_pool1d(y.transpose(1, 2), 4, ceil_mode=True).transpose(1, 2)


@pytest.mark.parametrize(
    ("body", "told", "hinted"),
    [
        (
            lambda y, noise: y * torch.rand_like(y),
            'pad_check="values" cannot compare this step: it draws random numbers, which are other '
            "ones with padding than without. Draw them before the step and pass them",
            lambda y, noise: y * noise,
        ),
        (
            lambda y, noise: y.flatten(0, 1),
            FLATTENED.format(axis=0),
            lambda y, noise: y,
        ),
        (
            lambda y, noise: torch.cat([y, y], 1),
            FLATTENED.format(axis=1),
            lambda y, noise: (y, y),
        ),
        (
            lambda y, noise: pooled(y),
            "axis 1 of a result has 2 entries, or 1 where the batch is padded to another size, so "
            "that its data cannot be sliced out. Return it as it was before the axis was "
            "flattened, joined or pooled",
            lambda y, noise: y,
        ),
        (
            lambda y, noise: y.sum() + y.new_ones(y.shape).sum(),
            "padding changes what the step computes, by the numbers of this batch:\n"
            "  result0 differs by N, where its largest number is N\n"
            'Without pad_check="values" the error says by which ops padding reaches them',
            None,
        ),
    ],
    ids=["draws", "flattens", "joins", "pools", "counts"],
)
def test_what_cannot_be_compared_by_values(body, told, hinted):
    model = nn.Linear(3, 3)
    noise = torch.rand(2, 5, 3)

    def jitted(body, **options):
        def step(x, noise):
            return body(model(x), noise)

        buckets = {0: {1: (8,)}, 1: {1: (8,)}}
        return amp_ir.jit(step, model=model, buckets=buckets, pad={0: 0, 1: 0}, **options)

    x = torch.randn(2, 5, 3)
    with pytest.raises(PaddingError) as refused:
        jitted(body, pad_check="values")(x, noise)
    assert re.sub(r"(?<=differs by )\S+(?=,)|(?<=number is )\S+", "N", str(refused.value)) == told
    if hinted is None:
        with pytest.raises(PaddingError, match="elements are added over axis 1"):
            jitted(body)(x, noise)
        return
    found = jitted(hinted, pad_check="values")(x, noise)
    expected = hinted(model(x), noise)
    # float32, sums of three products.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_length_that_the_step_returns_is_refused():
    model = nn.Linear(3, 3)

    def jitted(length):
        return amp_ir.jit(
            lambda x: (model(x[:, 0]), length(x)), model=model, buckets={0: {1: (8,)}}, pad={0: 0}
        )

    x = torch.randn(2, 5, 3)
    with pytest.raises(PaddingError) as refused:
        jitted(lambda x: x.shape[1])(x)
    assert str(refused.value) == (
        "a plain value that the step returns depends on the padded length (8, or 3); return "
        "tensors, or take it from the batch"
    )
    jitted(lambda x: x[:, 0].sum())(x)  # the hint: and the length is x.shape[1], outside
