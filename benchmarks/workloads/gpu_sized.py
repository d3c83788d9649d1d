# SPDX-License-Identifier: Apache-2.0
"""Workloads of the size that a GPU is bought for: too slow to measure on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from amp_ir.demo.workloads import Training, Workload
from benchmarks.workloads.further import ALL


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def _bert12(*, small: bool, dropout: float) -> Training:
    batch, length, vocabulary = (2, 8, 96) if small else (32, 128, 30522)
    sizes: dict[str, Any] = {"vocab_size": vocabulary}
    if small:
        sizes |= {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
        sizes |= {"num_hidden_layers": 2}
    config = transformers.BertConfig(
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes
    )
    model = transformers.BertForMaskedLM(config)
    ids = torch.randint(0, min(vocabulary, 10000), (batch, length))
    labels = torch.randint(0, vocabulary, (batch, length))

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = model(ids).logits
        return functional.cross_entropy(scores.view(-1, vocabulary), labels.view(-1))

    return Training(model, _adamw(model, 1e-4), loss, (ids, labels), max_norm=1.0)


def _gpt12(*, small: bool, dropout: float) -> Training:
    batch, length = (2, 8) if small else (8, 1024)
    sizes: dict[str, Any] = {}
    if small:
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 96}
        sizes |= {"bos_token_id": 95, "eos_token_id": 95}
    config = transformers.GPT2Config(
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False, **sizes
    )
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, config.vocab_size, (batch, length))

    def loss(ids: torch.Tensor) -> torch.Tensor:
        scores = model(ids).logits[:, :-1]
        return functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())

    return Training(model, _adamw(model, 3e-4), loss, (ids,), max_norm=1.0)


def _resnet64(*, small: bool, dropout: float) -> Training:
    del dropout
    rows, side, classes = (2, 32, 10) if small else (64, 224, 1000)
    sizes: dict[str, Any] = {"num_labels": classes}
    if small:
        sizes |= {"depths": [1, 1], "hidden_sizes": [16, 32], "embedding_size": 8}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(images).logits, labels)

    batch = torch.randn(rows, 3, side, side), torch.randint(0, classes, (rows,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Training(model, optimizer, loss, batch)


GPU_SIZED = {
    one.name: one
    for one in (
        Workload("bert12", "BERT-base with LM head, 32 x 128, AdamW, clipping", _bert12),
        Workload("gpt12", "GPT-2 of 12 layers, 8 x 1024, AdamW, clipping", _gpt12),
        Workload("resnet64", "ResNet-50, 64 x 224 x 224, SGD with momentum", _resnet64),
    )
}
ON_GPU = {**ALL, **GPU_SIZED}
