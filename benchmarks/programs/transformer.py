# SPDX-License-Identifier: Apache-2.0
"""A model of HuggingFace's transformers with a small configuration, as a program."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.programs.program import Made, Precision, Program, integers, normal

VOCABULARY = 100
# Set where a configuration has the entry.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "head_dim": 8, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "d_ff": 64,
    "d_kv": 8, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 4, "embedding_size": 32,
    "image_size": 32, "patch_size": 8, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "decoder_start_token_id": 0, "use_cache": False,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
LENGTH, ROWS = 12, 2


def ids(k: int, seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    """Return token ids that are no special ones."""
    return integers(k, VOCABULARY - 5, ROWS, length, seed=seed) + 5


def padding(k: int, length: int = LENGTH) -> torch.Tensor:
    """Return an attention mask with padding in one row."""
    mask = torch.ones(ROWS, length, dtype=torch.int64)
    mask[k % ROWS, -3:] = 0
    return mask


Batch = Callable[[int], dict[str, Any]]


def without_padding(batch: Batch) -> Batch:
    """Return batches without an attention mask."""
    return lambda k: {key: value for key, value in batch(k).items() if key != "attention_mask"}


def language(k: int) -> dict[str, Any]:
    """Return ids and labels."""
    tokens = ids(k)
    return {"input_ids": tokens, "labels": tokens}


def masked(k: int) -> dict[str, Any]:
    """Return ids with padding, and labels of some positions."""
    labels = ids(k, 1)
    labels[:, ::3] = -100
    return {"input_ids": ids(k), "attention_mask": padding(k), "labels": labels}


def classes(k: int) -> dict[str, Any]:
    """Return ids with padding and a class for each row."""
    labels = integers(k, 3, ROWS)
    return {"input_ids": ids(k), "attention_mask": padding(k), "labels": labels}


def tokens(k: int) -> dict[str, Any]:
    """Return ids with padding and a class for each token."""
    labels = integers(k, 3, ROWS, LENGTH)
    return {"input_ids": ids(k), "attention_mask": padding(k), "labels": labels}


def answers(k: int) -> dict[str, Any]:
    """Return ids and the ends of an answer."""
    ends = integers(k, 4, ROWS)
    return {"input_ids": ids(k), "start_positions": ends, "end_positions": ends + 3}


def sequences(k: int) -> dict[str, Any]:
    """Return ids of a source and labels of a target."""
    return {"input_ids": ids(k), "attention_mask": padding(k), "labels": ids(k, 2, 8)}


def images(k: int) -> dict[str, Any]:
    """Return images of 32 x 32 and classes."""
    return {"pixel_values": normal(k, ROWS, 3, 32, 32), "labels": integers(k, 3, ROWS)}


def loss_of(out: Any) -> torch.Tensor:
    """Return the loss of a model's output."""
    loss: torch.Tensor = out.loss
    return loss


def transformer(
    name: str,
    config: str,
    model: str,
    batch: Batch,
    *,
    kind: str,
    loss: Callable[[Any], torch.Tensor] = loss_of,
    lr: float = 0.05,
    at_start: Callable[[torch.nn.Module], None] = lambda _model: None,
    **options: Any,
) -> Program:
    """Return the program that trains a model of transformers with SGD and momentum.

    `at_start` is done to the model before it trains.
    """

    def make(precision: Precision) -> Made:
        net = model_of(config, model, options)
        at_start(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)

        def step(inputs: dict[str, Any]) -> torch.Tensor:
            with precision():
                value = loss(net(**inputs))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        return Made(net, optimizer, step, lambda k: (batch(k),))

    return Program(name, kind, make)


def model_of(config: str, model: str, options: dict[str, Any]) -> torch.nn.Module:
    """Return a model with random weights, in training mode without dropout."""
    library = importlib.import_module("transformers")
    kind = getattr(library, config)
    usual = kind()
    small = {
        key: value
        for key, value in _SMALL.items()
        if hasattr(usual, key)
        and not isinstance(getattr(usual, key), (list, tuple))
        and not isinstance(getattr(kind, key, None), property)
    }
    made = kind(**{**small, "num_labels": 2 if model.endswith("Answering") else 3, **options})
    for one in (made, *(v for v in vars(made).values() if hasattr(v, "to_dict"))):
        for key, value in vars(one).items():
            if "drop" in key and isinstance(value, list):
                setattr(one, key, [0.0] * len(value))
            elif "drop" in key and isinstance(value, (int, float)) and not isinstance(value, bool):
                setattr(one, key, type(value)(0))
    net: torch.nn.Module = getattr(library, model)(made)
    for module in net.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return net.train()
