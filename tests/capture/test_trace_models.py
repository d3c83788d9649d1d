# SPDX-License-Identifier: Apache-2.0
"""Models of HuggingFace transformers, tiny and with random weights, are captured as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from amp_ir.ir.location import META_KEY
from step_comparison import Training, assert_trains_alike, integers, normal

VOCABULARY = 50
BERT = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def bert(attention: str) -> torch.nn.Module:
    config = hf.BertConfig(vocab_size=VOCABULARY, attn_implementation=attention, **BERT)
    return hf.BertForMaskedLM(config)


def distilbert(attention: str) -> torch.nn.Module:
    config = hf.DistilBertConfig(
        vocab_size=VOCABULARY, dim=16, n_layers=1, n_heads=2, hidden_dim=32, dropout=0.0,
        attention_dropout=0.0, attn_implementation=attention,
    )  # fmt: skip
    return hf.DistilBertForMaskedLM(config)


def gpt2(attention: str) -> torch.nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        attn_implementation=attention,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama(attention: str) -> torch.nn.Module:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def t5(attention: str) -> torch.nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def vit(attention: str) -> torch.nn.Module:
    config = hf.ViTConfig(
        image_size=8, patch_size=4, num_labels=3, attn_implementation=attention, **BERT
    )
    return hf.ViTForImageClassification(config)


def resnet(_attention: str) -> torch.nn.Module:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return hf.ResNetForImageClassification(config)


def tokens(index: int) -> tuple[dict[str, torch.Tensor]]:
    ids = integers(index, VOCABULARY, 2, 7)
    return ({"input_ids": ids, "labels": integers(index + 9, VOCABULARY, 2, 7)},)


def masked_tokens(index: int) -> tuple[dict[str, torch.Tensor]]:
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, 5:] = 0
    return ({**tokens(index)[0], "attention_mask": mask},)


def images(index: int) -> tuple[dict[str, torch.Tensor]]:
    return ({"pixel_values": normal(index, 2, 3, 8, 8), "labels": integers(index, 3, 2)},)


def large_images(index: int) -> tuple[dict[str, torch.Tensor]]:
    return ({"pixel_values": normal(index, 2, 3, 16, 16), "labels": integers(index, 3, 2)},)


def training(make: Callable[[str], torch.nn.Module], attention: str) -> Training:
    model = make(attention).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> Any:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, step)


MODELS = [
    (bert, masked_tokens), (distilbert, masked_tokens), (gpt2, tokens), (llama, masked_tokens),
    (t5, masked_tokens), (vit, images),
]  # fmt: skip


@pytest.mark.parametrize(("make", "batch"), MODELS, ids=[make.__name__ for make, _ in MODELS])
def test_transformers_train_as_in_eager(make: Any, batch: Any) -> None:
    assert assert_trains_alike(lambda: training(make, "sdpa"), batch, steps=2) == 1
    graph = training(make, "sdpa").capture(batch(0)).graph.graph
    ops = [str(node.target) for node in graph.nodes]
    assert "amp_ir.attention.default" in ops
    # T5's self-attention (encoder, decoder) learns a bias of the scores, which the op has no
    # gradient for: it is taken apart.
    assert ops.count("aten._softmax.default") == (2 if make is t5 else 0)


def test_attention_in_parts_stays_in_parts() -> None:
    assert assert_trains_alike(lambda: training(bert, "eager"), masked_tokens, steps=2) == 1


def test_resnet_trains_as_in_eager() -> None:
    build = lambda: training(resnet, "sdpa")  # noqa: E731
    # Batch statistics of few elements amplify the last bits.
    assert assert_trains_alike(build, large_images, steps=2, rtol=1e-4, atol=1e-5) == 1


def test_a_whole_model_output_is_returned() -> None:
    trained = training(bert, "sdpa")
    build = lambda: Training(trained.model, None, lambda batch: trained.model(**batch))  # noqa: E731
    assert assert_trains_alike(build, masked_tokens, steps=1) == 1


def test_every_op_knows_its_module_line_and_phase() -> None:
    graph = training(bert, "sdpa").capture(masked_tokens(0)).graph.graph
    places = [node.meta[META_KEY] for node in graph.nodes if node.op == "call_function"]
    assert {place.phase for place in places} == {"forward", "backward", "optimizer"}
    linear = {
        place.phase
        for place in places
        if place.module == "bert.encoder.layer.0.intermediate.dense"
        and place.file.endswith("modeling_bert.py")
    }
    assert linear == {"forward", "backward"}
    assert all(place.file and place.line for place in places)
    updates = [place for place in places if place.phase == "optimizer"]
    assert {place.file for place in updates} == {__file__}
