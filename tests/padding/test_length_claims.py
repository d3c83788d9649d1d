# SPDX-License-Identifier: Apache-2.0
"""Execution bears out what the padding proof claims of masked losses and of ends of sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from padded_lengths import POOLS, masked_losses, packed, reads
from padded_models import POOLED, ROWS, Made, Net, labels, training, vectors, words
from padded_steps import Case, check_claims, proof_of

LOSSES = (({1: 0}, 0.0), ({1: 0}, 0.0), ({1: 0}, 0.0))
LENGTHS = (({1: 0}, 0.0), None)


def test_masked_losses_of_elements_are_proven() -> None:
    check_claims(Case(masked_losses(), LOSSES, lengths=((5,),)))


def test_masked_pools_are_proven() -> None:
    def make(length: int) -> Made:
        def loss_of(m: Any, x: torch.Tensor, k: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(m.mix(x))
            pooled = [m.head(pool(m, x, k)) for pool in POOLS.values()]
            return torch.stack([F.cross_entropy(one, y) for one in pooled]).sum()

        return training(Net(), loss_of, (vectors(length), torch.ones(ROWS, length), labels(ROWS)))

    check_claims(Case(make, POOLED, lengths=((5,),)))


def test_reads_at_the_ends_of_sequences_are_proven() -> None:
    proven = check_claims(Case(reads(), LENGTHS, lengths=((5,), (8,))))
    # Each place that is read, and each limit of a mask, is required of the batch once.
    wanted = {(one.limit.shift, one.least) for one in proven.conditions}
    assert wanted == {(0, 0), (0, None), (1, None)}


def test_places_that_the_proof_knows_are_not_required_of_a_batch() -> None:
    def make(length: int) -> Made:
        def loss_of(m: Net, ids: torch.Tensor) -> torch.Tensor:
            last = (torch.arange(ids.shape[1]) * (ids != 0).int()).argmax(-1)
            return m.head(m.words(ids)[torch.arange(ROWS), last]).square().sum()

        return training(Net(), loss_of, (words(length),))

    assert not check_claims(Case(make, (({1: 0}, 0.0),), lengths=((5,),))).conditions


@pytest.mark.parametrize("name", ["at the last places", "by a mask", "by one hot"])
def test_a_batch_is_asked_whether_its_lengths_reach_padding(name: str) -> None:
    proof = proof_of(Case(reads([name]), LENGTHS))
    conditions = proof.conclusion().conditions
    ids = F.pad(words(5), (0, 3))
    for lengths, is_met in (
        ([5, 3], True),
        ([6, 3], False),
        # 0 less 1 is the last place of the padding.
        ([5, 0], name == "by a mask"),
    ):
        batch = [ids, torch.tensor(lengths)]
        assert all(one.holds(batch, {"dimension 0": 5}) for one in conditions) is is_met


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_are_proven_in_both_directions(kind: Any) -> None:
    pads = (({1: 0}, 0.0), None, ({1: 0}, -100.0))
    check_claims(Case(packed(kind), pads, lengths=((5,),)))


NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "use_cache": False}
SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def gpt2() -> nn.Module:
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 20}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(num_labels=3, **sizes, **no_dropout, **NO_ENDS)
    return transformers.GPT2ForSequenceClassification(config)


def llama() -> nn.Module:
    sizes = {"intermediate_size": 16, "num_key_value_heads": 1, "num_labels": 3}
    config = transformers.LlamaConfig(**SIZES, **sizes, **NO_ENDS)
    return transformers.LlamaForSequenceClassification(config)


@pytest.mark.parametrize("model_of", [gpt2, llama])
def test_a_causal_classifier_is_proven(model_of: Callable[[], nn.Module]) -> None:
    def make(length: int) -> Made:
        def loss_of(
            m: nn.Module, ids: torch.Tensor, mask: torch.Tensor, y: torch.Tensor
        ) -> torch.Tensor:
            return m(input_ids=ids, attention_mask=mask, labels=y).loss

        mask = torch.ones(ROWS, length, dtype=torch.int64)
        return training(model_of(), loss_of, (words(length), mask, labels(ROWS)))

    assert not check_claims(Case(make, POOLED, lengths=((5,),))).conditions


@pytest.mark.parametrize("end", [2, 19], ids=["largest id", "end of text"])
def test_a_text_encoder_that_pools_at_its_end_is_proven(end: int) -> None:
    config = transformers.CLIPTextConfig(
        intermediate_size=16, max_position_embeddings=32, eos_token_id=end, pad_token_id=0, **SIZES
    )

    def make(length: int) -> Made:
        def loss_of(
            m: nn.Module, ids: torch.Tensor, mask: torch.Tensor, y: torch.Tensor
        ) -> torch.Tensor:
            pooled = m(input_ids=ids, attention_mask=mask).pooler_output
            return F.cross_entropy(pooled[:, :3], y)

        ids = words(length).clamp(max=18)
        ids[:, -1] = 19
        mask = torch.ones(ROWS, length, dtype=torch.int64)
        return training(transformers.CLIPTextModel(config), loss_of, (ids, mask, labels(ROWS)))

    check_claims(Case(make, POOLED, lengths=((5,),)))


def test_targets_of_a_speech_model_are_proven() -> None:
    """Whisper tells packed sequences by the places that it makes, and masks by comparing them."""
    sides = ("encoder", "decoder")
    sizes = {f"{one}_{name}": k for one in sides for name, k in (("layers", 1), ("ffn_dim", 16))}
    heads = {f"{one}_attention_heads": 2 for one in sides}
    places = {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 32}
    ends = {"bos_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 2, "pad_token_id": 0}
    config = transformers.WhisperConfig(
        vocab_size=20, d_model=16, dropout=0.0, use_cache=False, **sizes, **heads, **places, **ends
    )

    def make(length: int) -> Made:
        def loss_of(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return m(input_features=x, labels=y).loss

        model = transformers.WhisperForConditionalGeneration(config)
        return training(model, loss_of, (torch.randn(ROWS, 4, 16), words(length)))

    check_claims(Case(make, (None, ({1: 0}, -100.0)), lengths=((5,),)))
