# SPDX-License-Identifier: Apache-2.0
"""The six workloads of the demos: ordinary PyTorch, with random weights and no downloads.

They do not import amp_ir. Transformers' models come from the `demo` extra of the package.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import torch
from torch import nn
from torch.nn import functional

from amp_ir.demo.ssd import Ssd, anchors, multibox_loss

Batch = tuple[torch.Tensor, ...]


@attrs.frozen
class Training:
    """A model, its optimizer, one batch, and the step that a user would write."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[..., torch.Tensor]
    batch: Batch
    max_norm: float | None = None  # of all gradients; None does not clip

    def step(self, *batch: torch.Tensor) -> torch.Tensor:
        """Run one training step; return the loss, f32[]."""
        return self._train(self.loss(*batch))

    def autocast_step(self, *batch: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Run the same step with PyTorch's own mixed precision, as its documentation recommends."""
        with torch.autocast(batch[0].device.type, dtype):
            loss = self.loss(*batch)
        return self._train(loss)

    def _train(self, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class _Make(Protocol):
    def __call__(self, *, small: bool, dropout: float) -> Training: ...


@attrs.frozen
class Workload:
    """One demonstration: `make` builds it, with the same weights and batch for the same seed."""

    name: str
    description: str
    _build: _Make = attrs.field(repr=False)
    _build_for_gpu: _Make | None = attrs.field(default=None, repr=False)

    def make(
        self, *, small: bool = False, dropout: float = 0.0, seed: int = 0, device: str = "cpu"
    ) -> Training:
        """Build the model, its optimizer and its batch.

        Args:
            small: shapes of a test, not of a measurement.
            dropout: probability; 0 so that two runs can be compared.
            seed: of weights and batch; the global random state does not change.
            device: device of model and batch; images are larger, and more, on a GPU.

        Raises:
            MissingPackage: the model is from transformers, which is not installed.
        """
        is_gpu = torch.device(device).type == "cuda"
        build = self._build_for_gpu if is_gpu and self._build_for_gpu else self._build
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            training = build(small=small, dropout=dropout)
        training.model.to(device)
        batch = tuple(one.to(device) for one in training.batch)
        return attrs.evolve(training, batch=batch)


class MissingPackage(ImportError):
    """A demo needs a package that is not installed."""


def _transformers() -> types.ModuleType:
    with contextlib.suppress(ImportError):
        import transformers

        return transformers
    raise MissingPackage(
        "this demo's model comes from the package transformers, which is not installed; "
        'install it with: pip install "amp_ir[demo]" (from a checkout: pip install -e ".[demo]"). '
        "The demos mlp, lstm and ssd need nothing more"
    )


def _sgd(model: nn.Module, lr: float, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def _bert1(*, small: bool, dropout: float) -> Training:
    """Build RAF's AMP example: one layer of BERT-base with its LM head, on random tokens."""
    batch, length, vocabulary = (2, 8, 96) if small else (8, 128, 30522)
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "num_hidden_layers": 1}
    if small:
        sizes |= {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    library = _transformers()
    config = library.BertConfig(
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes
    )
    model = library.BertForMaskedLM(config)
    ids = torch.randint(0, min(vocabulary, 10000), (batch, length))
    labels = torch.randint(0, vocabulary, (batch, length))

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = model(ids).logits
        return functional.cross_entropy(scores.view(-1, vocabulary), labels.view(-1))

    return Training(model, _sgd(model, 0.1, 0.01), loss, (ids, labels))


def _mlp(*, small: bool, dropout: float) -> Training:
    """Build PyTorch's AMP recipe: three large linear layers."""
    rows, width = (8, 32) if small else (512, 4096)
    model = nn.Sequential(
        *(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)),
        *(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(width, width),
    )

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(model(x), target)

    batch = torch.randn(rows, width), torch.randn(rows, width)
    return Training(model, _sgd(model, 0.1), loss, batch)


def _gpt2(*, small: bool, dropout: float) -> Training:
    """Build two layers of GPT-2 for next-token prediction."""
    batch, length = (2, 8) if small else (4, 128)
    sizes: dict[str, Any] = {"n_layer": 2}
    if small:
        sizes |= {"n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 96}
        sizes |= {"bos_token_id": 95, "eos_token_id": 95}
    library = _transformers()
    config = library.GPT2Config(
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False, **sizes
    )
    model = library.GPT2LMHeadModel(config)
    ids = torch.randint(0, config.vocab_size, (batch, length))

    def loss(ids: torch.Tensor) -> torch.Tensor:
        scores = model(ids).logits[:, :-1]
        return functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Training(model, optimizer, loss, (ids,))


def _resnet50(*, small: bool, dropout: float, side: int = 128) -> Training:
    """Build ResNet-50 on images of `side` pixels; it has no dropout."""
    del dropout
    rows, side = (2, 32) if small else (8, side)
    sizes: dict[str, Any] = {"num_labels": 1000}
    if small:
        sizes = {"num_labels": 10, "depths": [1, 1], "hidden_sizes": [16, 32], "embedding_size": 8}
    library = _transformers()
    model = library.ResNetForImageClassification(library.ResNetConfig(**sizes))
    labels = torch.randint(0, sizes["num_labels"], (rows,))

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(images).logits, labels)

    return Training(model, _sgd(model, 0.01, 0.9), loss, (torch.randn(rows, 3, side, side), labels))


def _ssd(*, small: bool, dropout: float, rows: int = 1) -> Training:
    """Build SSD-512 with a ResNet-50 backbone, `rows` images a step; it has no dropout."""
    del dropout
    rows, side, classes = (2, 64, 3) if small else (rows, 512, 20)
    model = Ssd(classes, 8, (1, 1, 1, 1), (16, 16, 8, 8)) if small else Ssd(classes)
    count = anchors(side)
    boxes = torch.randn(rows, count, 4)
    # One anchor in 64 is matched to an object.
    is_object = torch.rand(rows, count) < 1 / 64
    labels = torch.randint(1, classes + 1, (rows, count)) * is_object

    def loss(
        images: torch.Tensor, target_boxes: torch.Tensor, target_classes: torch.Tensor
    ) -> torch.Tensor:
        found_boxes, scores = model(images)
        return multibox_loss(found_boxes, scores, target_boxes, target_classes)

    batch = torch.randn(rows, 3, side, side), boxes, labels
    return Training(model, _sgd(model, 0.001, 0.9), loss, batch)


class _LanguageLstm(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, 2, batch_first=True, dropout=dropout)
        self.scores = nn.Linear(hidden, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scores(self.lstm(self.embedding(ids))[0])


def _lstm(*, small: bool, dropout: float) -> Training:
    """Build a word-level language model: two LSTM layers over 64 steps."""
    rows, length, vocabulary, hidden = (2, 4, 50, 16) if small else (16, 64, 10000, 512)
    model = _LanguageLstm(vocabulary, hidden, dropout)

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(ids).view(-1, vocabulary), labels.view(-1))

    batch = tuple(torch.randint(0, vocabulary, (rows, length)) for _ in range(2))
    return Training(model, _sgd(model, 1.0), loss, batch)


WORKLOADS = {
    one.name: one
    for one in (
        Workload("bert1", "1 BERT layer with LM head, batch 8 x 128, SGD", _bert1),
        Workload("mlp", "3 x Linear(4096) with ReLU, batch 512, SGD", _mlp),
        Workload("gpt2", "2 GPT-2 layers, batch 4 x 128, AdamW", _gpt2),
        Workload(
            "resnet50",
            "ResNet-50, batch 8 x 128 x 128 pixels (GPU: 224), SGD with momentum",
            _resnet50,
            functools.partial(_resnet50, side=224),
        ),
        Workload(
            "ssd",
            "SSD-512 on ResNet-50, 1 image (GPU: 8), SGD with momentum",
            _ssd,
            functools.partial(_ssd, rows=8),
        ),
        Workload("lstm", "2-layer LSTM(512), batch 16 x 64, SGD", _lstm),
    )
}
