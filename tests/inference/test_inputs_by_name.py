# SPDX-License-Identifier: Apache-2.0
"""Inputs of converted models by name: one program for all ways to call it, and what is wrong."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

import amp_ir
import huggingface_models
from amp_ir.errors import ArgumentError, OptionError

LEFT, RIGHT = torch.arange(8.0).reshape(2, 4), torch.ones(2, 4)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, left: torch.Tensor, right: torch.Tensor, *, scale: float = 1.0
    ) -> torch.Tensor:
        return self.linear(left) - scale * right


EXAMPLES = {
    "a dict": lambda batch: batch,
    "a UserDict": collections.UserDict,
    "call_arguments": lambda batch: amp_ir.call_arguments(**batch),
    "positions": lambda batch: (batch["left"], batch["right"]),
}


@pytest.mark.parametrize("kind", list(EXAMPLES))
def test_calls_by_name_and_by_position_in_any_order_are_one_program(kind, tmp_path):
    model = Pair()
    example = EXAMPLES[kind]({"right": RIGHT, "left": LEFT})
    converted = amp_ir.convert_model(model, example, "float32")
    converted(right=RIGHT, left=LEFT, scale=3.0)
    amp_ir.save(converted, tmp_path / "pair.amp")
    for one in (converted, amp_ir.load(tmp_path / "pair.amp")):
        for got in (
            one(LEFT, RIGHT),
            one(LEFT, right=RIGHT),
            one(left=LEFT, right=RIGHT),
            one(right=RIGHT, left=LEFT),
        ):
            torch.testing.assert_close(got, model(LEFT, RIGHT))
        got = one(scale=3.0, right=RIGHT, left=LEFT)
        torch.testing.assert_close(got, model(LEFT, RIGHT, scale=3.0))
        assert len(one.programs) == 2
        for named, wrong in (
            ({"left": LEFT, "rigth": RIGHT}, "missing a required argument: 'right'"),
            (
                {"left": LEFT, "right": RIGHT, "mask": None},
                "got an unexpected keyword argument 'mask'",
            ),
        ):
            with pytest.raises(ArgumentError) as refused:
                one(**named)
            takes = "(left, right, *, scale=1.0)"
            assert str(refused.value) == f"{wrong}; the arguments are {takes}"
    with pytest.raises(ArgumentError) as refused:
        converted(LEFT)
    assert str(refused.value) == (
        "Pair takes (left, right, *, scale=1.0), and was called with 1 by position: missing a "
        "required argument: 'right'"
    )
    amp_ir.save(converted, tmp_path / "pair.amp", remove_amp_cast=True)
    got = amp_ir.load(tmp_path / "pair.amp")(right=RIGHT, left=LEFT)
    torch.testing.assert_close(got, model(LEFT, RIGHT))


def test_defaults_that_a_file_cannot_hold(tmp_path):
    class Typed(Pair):
        def forward(self, left, dtype=torch.float32, *rest, **named):
            return super().forward(left, named["right"]).to(dtype)

    model = Typed()
    example = amp_ir.call_arguments(LEFT, right=RIGHT)
    amp_ir.save(amp_ir.convert_model(model, example, "float32"), tmp_path / "typed.amp")
    loaded = amp_ir.load(tmp_path / "typed.amp")
    torch.testing.assert_close(loaded(right=RIGHT, left=LEFT), model(LEFT, right=RIGHT))
    with pytest.raises(ArgumentError) as refused:
        loaded(right=RIGHT)
    assert str(refused.value) == (
        "missing a required argument: 'left'; the arguments are (left, dtype=Ellipsis, *rest, "
        "**named)"
    )


def test_the_model_is_called_as_the_example_is():
    """A hook or a decorator of the model may tell names from positions."""

    def by_name_only(module, args, named):
        return (), {"left": named["left"], "right": -named["right"]}

    model = Pair()
    model.register_forward_pre_hook(by_name_only, with_kwargs=True)
    mod, args = amp_ir.trace_model(model, {"right": RIGHT, "left": LEFT})
    assert torch.equal(args[0], LEFT) and torch.equal(args[1], RIGHT) and len(args) == 2
    wanted = model(left=LEFT, right=RIGHT)
    torch.testing.assert_close(amp_ir.compile(mod)(*args), wanted)
    torch.testing.assert_close(amp_ir.compile(mod)(right=RIGHT, left=LEFT), wanted)


def test_a_batch_of_hugging_face():
    model, batch = huggingface_models.bert()
    batch = huggingface_models.transformers.BatchEncoding(batch)
    converted = amp_ir.convert_model(model, batch, "bfloat16")
    with torch.no_grad():
        wanted = model.eval()(**batch).logits
    ids, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
    for got in (
        converted(**batch),
        converted(labels=labels, attention_mask=mask, input_ids=ids),
        converted(ids, mask, labels=labels),
    ):
        # Two roundings of 2^-9 an op, over some ten ops.
        assert float((got.logits - wanted).abs().max()) <= 2e-2 * float(wanted.abs().max())
    assert len(converted.programs) == 1
    assert converted(input_ids=ids, attention_mask=mask).loss is None
    assert len(converted.programs) == 2
    with pytest.raises(ArgumentError) as refused:
        amp_ir.convert_model(model, (batch,), "bfloat16")
    assert str(refused.value).startswith(
        "BertForMaskedLM was called with a BatchEncoding by position, whose keys (input_ids, "
        "labels, attention_mask) are names of its arguments: pass the entries by name, with "
        "**batch, or the mapping itself as the example inputs instead of a tuple. What it raised: "
    )


def test_a_model_that_returns_its_cache_is_saved_without(tmp_path):
    model, batch = huggingface_models.gpt2()
    ids = batch["input_ids"]
    with pytest.raises(OptionError) as refused:
        amp_ir.save(amp_ir.convert_model(model, {"input_ids": ids}, "float32"), tmp_path / "a")
    assert str(refused.value) == (
        "the program takes or returns a DynamicCache, which a file cannot hold; give tuples, lists "
        "and dictionaries. A model of transformers returns no cache when it is converted and "
        'called with "use_cache": False among its inputs'
    )
    inputs = {"input_ids": ids, "use_cache": False}
    amp_ir.save(amp_ir.convert_model(model, inputs, "float32"), tmp_path / "a")
    got = amp_ir.load(tmp_path / "a")(use_cache=False, input_ids=ids)["logits"]
    with torch.no_grad():
        torch.testing.assert_close(got, model.eval()(ids).logits)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (3, "the model's inputs are a int; {taken}"),
        (
            {"left": [1, 2], "right": [3]},
            "the model's inputs hold no tensor; {taken}. A tokenizer makes tensors with "
            'return_tensors="pt"',
        ),
        (
            {"left": LEFT, "labels": RIGHT},
            "Pair takes (left, right, *, scale=1.0), and was called with left=, labels=: missing a "
            "required argument: 'right'",
        ),
        (
            {0: LEFT},
            "the model's inputs have the key 0, and the keys of a dict are names of the model's "
            "arguments; a model that takes a dict is given (batch,)",
        ),
    ],
)
def test_wrong_example_inputs(example, message):
    with pytest.raises(ArgumentError) as refused:
        amp_ir.convert_model(Pair(), example, "bfloat16")
    assert str(refused.value) == message.format(
        taken="pass a tensor, the tuple of the arguments by position, or a dict or BatchEncoding "
        "of the arguments by name"
    )


def test_a_model_that_takes_a_dict_by_position():
    class Sum(nn.Module):
        def forward(self, batch):
            return batch["left"] + batch["right"]

    converted = amp_ir.convert_model(Sum(), ({"left": LEFT, "right": RIGHT},), "float32")
    assert torch.equal(converted({"left": LEFT, "right": RIGHT}), LEFT + RIGHT)
    assert torch.equal(converted(batch={"left": LEFT, "right": RIGHT}), LEFT + RIGHT)
    assert len(converted.programs) == 1
