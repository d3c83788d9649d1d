# SPDX-License-Identifier: Apache-2.0
"""Small models of HuggingFace's transformers with random weights, and batches for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the models are in the `demo` extra")


IDS = torch.tensor([[3, 14, 15, 92, 65, 35], [8, 97, 93, 23, 84, 62]])


IMAGES = torch.linspace(-2, 2, 2 * 3 * 16 * 16).sin().reshape(2, 3, 16, 16)


CLASSES = torch.tensor([0, 1])


def bert(dropout: float = 0.0) -> tuple[Any, dict[str, torch.Tensor]]:
    """One layer with a head over the vocabulary, and a batch with padding."""
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    return (
        transformers.BertForMaskedLM(config),
        {"input_ids": IDS, "labels": IDS, "attention_mask": mask},
    )


def distilbert() -> tuple[Any, dict[str, torch.Tensor]]:
    """One layer."""
    config = transformers.DistilBertConfig(
        vocab_size=100, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=16,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return transformers.DistilBertForMaskedLM(config), {"input_ids": IDS, "labels": IDS}


def gpt2() -> tuple[Any, dict[str, torch.Tensor]]:
    """One layer; the head shares the embedding."""
    config = transformers.GPT2Config(
        vocab_size=100, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), {"input_ids": IDS, "labels": IDS}


def llama() -> tuple[Any, dict[str, torch.Tensor]]:
    """One layer with grouped queries, rotary positions and RMSNorm."""
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": IDS, "labels": IDS}


def t5() -> tuple[Any, dict[str, torch.Tensor]]:
    """One encoder and one decoder layer with relative positions."""
    config = transformers.T5Config(
        vocab_size=100, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return (
        transformers.T5ForConditionalGeneration(config),
        {"input_ids": IDS, "labels": IDS[:, :4].contiguous()},
    )


def vit() -> tuple[Any, dict[str, torch.Tensor]]:
    """Patches of an image and one layer."""
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    return model, {"pixel_values": IMAGES, "labels": CLASSES}


def resnet() -> tuple[Any, dict[str, torch.Tensor]]:
    """A stem, two bottleneck stages and a pooled head."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="bottleneck"
    )
    model = transformers.ResNetForImageClassification(config)
    return model, {"pixel_values": IMAGES, "labels": CLASSES}
