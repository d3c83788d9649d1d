# SPDX-License-Identifier: Apache-2.0
"""The workloads beyond the demos': `FURTHER`, and `ALL` with the demos' six, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from amp_ir.demo.workloads import WORKLOADS, Training, Workload
from benchmarks.workloads import models


def _transformers() -> Any:
    import transformers

    return transformers


def _adamw(model: nn.Module, lr: float = 3e-4) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def _images(model: nn.Module, rows: int, side: int, labels: int) -> Training:
    """Return the training of a classifier of transformers on random images, with AdamW."""

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(images).logits, labels)

    batch = torch.randn(rows, 3, side, side), torch.randint(0, labels, (rows,))
    return Training(model, _adamw(model), loss, batch)


def _unet(*, small: bool, dropout: float) -> Training:
    del dropout
    rows, side, widths = (2, 16, (8, 16, 16)) if small else (4, 96, (48, 96, 192))
    model = models.UNet(widths)

    def loss(image: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(model(image + noise), noise)

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    batch = torch.randn(rows, 3, side, side), torch.randn(rows, 3, side, side)
    return Training(model, optimizer, loss, batch, max_norm=1.0)


def _convnext(*, small: bool, dropout: float) -> Training:
    del dropout
    sizes: dict[str, Any] = {"depths": [2, 2, 6, 2], "num_labels": 1000}
    if small:
        sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "num_labels": 10}
    library = _transformers()
    model = library.ConvNextForImageClassification(library.ConvNextConfig(**sizes))
    return _images(model, *((2, 64) if small else (8, 128)), sizes["num_labels"])


def _mobilenet(*, small: bool, dropout: float) -> Training:
    sizes: dict[str, Any] = {"num_labels": 1000}
    if small:
        sizes = {"num_labels": 10, "depth_multiplier": 0.25}
    library = _transformers()
    config = library.MobileNetV2Config(classifier_dropout_prob=dropout, **sizes)
    model = library.MobileNetV2ForImageClassification(config)
    return _images(model, *((2, 64) if small else (16, 128)), sizes["num_labels"])


def _vit(*, small: bool, dropout: float) -> Training:
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "num_labels": 1000}
    if small:
        sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
        sizes |= {"intermediate_size": 64, "image_size": 32, "patch_size": 8, "num_labels": 10}
    library = _transformers()
    config = library.ViTConfig(
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes
    )
    model = library.ViTForImageClassification(config)
    return _images(model, *((2, 32) if small else (8, 224)), sizes["num_labels"])


def _dlrm(*, small: bool, dropout: float) -> Training:
    del dropout
    count = 64 if small else 2048
    table_rows, tables = (50, 3) if small else (100_000, 8)
    model = (
        models.Dlrm(table_rows, 8, tables, 16, 16)
        if small
        else models.Dlrm(table_rows, 64, tables, 512, 1024)
    )

    def loss(numbers: torch.Tensor, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(model(numbers, ids), clicked)

    ids = torch.randint(0, table_rows, (count, tables))
    batch = torch.randn(count, 13), ids, torch.randint(0, 2, (count,)).float()
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch)


def _experts(*, small: bool, dropout: float) -> Training:
    del dropout
    tokens, width, classes = (16, 16, 10) if small else (512, 512, 1000)
    model = (
        models.MixtureOfExperts(width, 32, 4, 1, classes)
        if small
        else models.MixtureOfExperts(width, 1024, 8, 2, classes)
    )

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x), labels)

    batch = torch.randn(tokens, width), torch.randint(0, classes, (tokens,))
    return Training(model, _adamw(model), loss, batch)


def _llama(*, small: bool, dropout: float) -> Training:
    rows, length = (2, 8) if small else (2, 256)
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000}
    if small:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    library = _transformers()
    config = library.LlamaConfig(
        num_hidden_layers=2, attention_dropout=dropout, use_cache=False, **sizes
    )
    model = library.LlamaForCausalLM(config)
    ids = torch.randint(0, sizes["vocab_size"], (rows, length))

    def loss(ids: torch.Tensor) -> torch.Tensor:
        scores = model(ids).logits[:, :-1]
        return functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())

    return Training(model, _adamw(model), loss, (ids,), max_norm=1.0)


def _t5(*, small: bool, dropout: float) -> Training:
    rows, length = (2, 8) if small else (8, 128)
    sizes: dict[str, Any] = {"num_layers": 2}
    if small:
        sizes |= {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": 96}
    library = _transformers()
    config = library.T5Config(
        dropout_rate=dropout, use_cache=False, decoder_start_token_id=0, **sizes
    )
    model = library.T5ForConditionalGeneration(config)
    ids, labels = (torch.randint(1, config.vocab_size, (rows, length)) for _ in range(2))

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=labels).loss

    return Training(model, _adamw(model), loss, (ids, labels))


def _diffusion(*, small: bool, dropout: float) -> Training:
    del dropout
    rows, side = (2, 8) if small else (8, 32)
    model = (
        models.DiffusionTransformer(side, 32, 4, 1)
        if small
        else models.DiffusionTransformer(side, 384, 6, 4)
    )

    def loss(image: torch.Tensor, time: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(model(image, time), noise)

    noise = torch.randn(rows, (side // 2) ** 2, 16)
    return Training(model, _adamw(model), loss, (torch.randn(rows, 4, side, side),
                                                 torch.rand(rows) * 1000, noise))  # fmt: skip


def _small_mlp(*, small: bool, dropout: float) -> Training:
    del dropout
    rows, width = (8, 16) if small else (64, 128)
    model = nn.Sequential(
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, 10),
    )

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x), labels)

    batch = torch.randn(rows, width), torch.randint(0, 10, (rows,))
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch)


FURTHER = {
    one.name: one
    for one in (
        Workload("unet", "U-Net, 48 to 192 channels, 4 x 96 x 96, Adam, clipping", _unet),
        Workload("convnext", "ConvNeXt-T with 2-2-6-2 blocks, 8 x 128 x 128, AdamW", _convnext),
        Workload("mobilenetv2", "MobileNetV2, 16 x 128 x 128, AdamW", _mobilenet),
        Workload("vit", "4 layers of ViT-B/16, 8 x 224 x 224, AdamW", _vit),
        Workload("dlrm", "8 tables of 100 000 x 64, batch 2048, SGD", _dlrm),
        Workload("moe", "2 layers of 8 experts of 512 x 1024, 512 tokens, AdamW", _experts),
        Workload("llama", "2 Llama layers of 1024, GQA 16/4, 2 x 256, AdamW, clipping", _llama),
        Workload("t5", "T5-small with 2 + 2 layers, 8 x 128, AdamW", _t5),
        Workload("dit", "4 blocks of a DiT-S/2, 8 x 32 x 32, AdamW", _diffusion),
        Workload("smallmlp", "3 x Linear(128), batch 64, SGD: bound by launches", _small_mlp),
    )
}
ALL = {**WORKLOADS, **FURTHER}
