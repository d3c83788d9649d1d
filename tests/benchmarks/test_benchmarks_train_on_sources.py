# SPDX-License-Identifier: Apache-2.0
"""The data of the training on Python's sources: held-out lines are not among those to train."""

from __future__ import annotations

from benchmarks.train_on_sources import LENGTH, MODULES, examples


def test_held_out_lines_are_new_and_every_module_has_some() -> None:
    train, held = examples()
    assert {len(one["input_ids"]) for one in (*train, *held)} == {LENGTH}
    assert {int(one["labels"]) for one in held} == set(range(len(MODULES)))
    # Lines differ, and most of them in the bytes that the model reads too.
    seen = {tuple(one["input_ids"].tolist()) for one in train}
    again = sum(tuple(one["input_ids"].tolist()) in seen for one in held)
    assert len(held) > 500 and again < len(held) / 50
    assert [one["input_ids"].tolist() for one in examples()[1]] == [
        one["input_ids"].tolist() for one in held
    ]
