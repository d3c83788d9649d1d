# SPDX-License-Identifier: Apache-2.0
"""Execution bears out what the padding proof claims of every tensor of a step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from padded_losses import LOSSES, POOLS
from padded_models import (
    POOLED,
    ROWS,
    TAGGED,
    WIDTH,
    Made,
    Net,
    labels,
    pooled,
    tagged,
    training,
    words,
)
from padded_steps import Case, check_claims

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = {"vocab_size": 20, "intermediate_size": 16, "max_position_embeddings": 32, **SIZES}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize("name", POOLS)
def test_a_masked_classifier_is_proven(name: str) -> None:
    check_claims(Case(pooled(POOLS[name]), POOLED, lengths=((5,),)))


@pytest.mark.parametrize("name", LOSSES)
def test_a_masked_tagger_is_proven(name: str) -> None:
    check_claims(Case(tagged(LOSSES[name]), TAGGED, lengths=((5,),)))


def bert(length: int) -> Made:
    model = BertForSequenceClassification(BertConfig(num_labels=3, **SMALL, **NO_DROPOUT))

    def loss_of(
        m: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        return F.cross_entropy(m(input_ids=ids, attention_mask=mask).logits, y)

    mask = torch.ones(2, length, dtype=torch.int64)
    return training(model, loss_of, (words(length), mask, labels(2)))


def language_model(model: torch.nn.Module, length: int) -> Made:
    def loss_of(
        m: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        return m(input_ids=ids, attention_mask=mask, labels=y).loss

    ids = words(length)
    return training(model, loss_of, (ids, torch.ones_like(ids), ids))


def masked_bert(length: int) -> Made:
    return language_model(BertForMaskedLM(BertConfig(**SMALL, **NO_DROPOUT)), length)


def gpt2(length: int) -> Made:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=32, vocab_size=20, **no_dropout)
    config.update({"use_cache": False, "loss_type": "ForCausalLM", **ends})
    return language_model(GPT2LMHeadModel(config), length)


def llama(length: int) -> Made:
    config = LlamaConfig(num_key_value_heads=1, use_cache=False, **SMALL)
    return language_model(LlamaForCausalLM(config), length)


@pytest.mark.parametrize("make", [masked_bert, gpt2, llama])
def test_a_language_model_is_proven(make) -> None:
    check_claims(Case(make, TAGGED, lengths=((5,),)))


def test_a_bert_classifier_is_proven() -> None:
    check_claims(Case(bert, POOLED))


def test_a_causal_model_without_a_mask_is_proven() -> None:
    def make(length: int) -> Made:
        step, model, optimizer, (ids, _, y) = gpt2(length)
        return lambda ids, y: step(ids, None, y), model, optimizer, (ids, y)

    check_claims(Case(make, (({1: 0}, 0.0), ({1: 0}, -100.0)), lengths=((5,),)))


def test_sources_and_targets_are_padded_apart() -> None:
    def make(sources: int, targets: int) -> Made:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        ends = {"pad_token_id": 0, "decoder_start_token_id": 0}
        config = T5Config(vocab_size=20, dropout_rate=0.0, use_cache=False, **sizes, **ends)
        step, model, optimizer, (ids, mask, _) = language_model(
            T5ForConditionalGeneration(config), sources
        )
        return step, model, optimizer, (ids, mask, words(targets))

    pads = (({1: 0}, 0.0), ({1: 0}, 0.0), ({1: 1}, -100.0))
    check_claims(Case(make, pads, sizes=((8, 13), (10, 16)), lengths=((5, 7),)))


def test_rows_and_lengths_are_padded_together() -> None:
    def make(length: int, rows: int) -> Made:
        def loss_of(m: Net, ids: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = m.words(ids)[:, None]
            seen = mask.bool()[:, None, None]
            z = F.scaled_dot_product_attention(x, x, x, attn_mask=seen)[:, 0]
            return F.cross_entropy(m.head(m.norm(z)).transpose(1, 2), y)

        return training(
            Net(), loss_of, (words(length, rows), torch.ones(rows, length), labels(rows, length))
        )

    pads = (({0: 1, 1: 0}, 0.0), ({0: 1, 1: 0}, 0.0), ({0: 1, 1: 0}, -100.0))
    check_claims(Case(make, pads, sizes=((8, 13), (3, 7)), lengths=((5, 2),)))


def test_rows_of_a_batch_are_padded() -> None:
    def make(rows: int) -> Made:
        def loss_of(m: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(m.head(m.norm(m.mix(x).relu())), y)

        return training(Net(), loss_of, (torch.randn(rows, WIDTH), labels(rows)))

    check_claims(Case(make, (({0: 0}, 0.0), ({0: 0}, -100.0)), lengths=((1,), (5,))))


def test_results_are_as_long_as_their_data() -> None:
    def make(length: int) -> Made:
        model = Net()

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = model.mix(x)
            return y, y[:, 1:]

        return step, model, None, (torch.randn(ROWS, length, WIDTH),)

    proven = check_claims(Case(make, (({1: 0}, 0.0),), lengths=((2,), (5,))))
    assert [[(one.axis, one.shift) for one in result] for result in proven.results] == [
        [(1, 0)],
        [(1, -1)],
    ]
    assert proven.least_sizes == {"dimension 0": 2}
