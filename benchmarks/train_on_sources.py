# SPDX-License-Identifier: Apache-2.0
"""Train a small BERT for 200 steps with transformers' Trainer and with AmpIrTrainer.

    python benchmarks/train_on_sources.py

The data ships with Python: of which module of the standard library is this line of source? The
model reads bytes and begins from random weights, for nothing can be downloaded; dropout is off, so
that the float32 runs take the same steps. Prints a Markdown table with the accuracy on held-out
lines; docs/integrations.md has it.
"""

from __future__ import annotations

import argparse
import asyncio.base_events
import http.client
import inspect
import logging
import random
import tarfile
import tempfile
import time
import unittest.mock
import zipfile
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from amp_ir.integrations.hf import AmpIrTrainer

MODULES: tuple[Any, ...] = (
    asyncio.base_events,
    http.client,
    inspect,
    logging,
    tarfile,
    unittest.mock,
    argparse,
    zipfile,
)
LENGTH = 64
VARIANTS = (
    ("Trainer, eager float32", Trainer, False),
    ("AmpIrTrainer, float32", AmpIrTrainer, False),
    ("Trainer, eager bfloat16 autocast", Trainer, True),
    ("AmpIrTrainer, bfloat16", AmpIrTrainer, True),
)


def examples() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return lines of source as bytes with the number of their module: to train, and held out."""
    found: dict[str, int] = {}
    for number, module in enumerate(MODULES):
        lines = {one.strip() for one in inspect.getsource(module).splitlines()}
        for line in sorted(one for one in lines if len(one) >= 30)[:500]:
            found.setdefault(line, number)
    data = [
        {
            "input_ids": torch.tensor(list(line.encode()[:LENGTH].ljust(LENGTH, b" "))),
            "labels": torch.tensor(number),
        }
        for line, number in found.items()
    ]
    random.Random(0).shuffle(data)
    held = len(data) // 5
    return data[held:], data[:held]


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of lines whose module has the highest score."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def run(kind: Any, low: bool, steps: int) -> tuple[float, float, float]:
    """Train; return the loss of the last 20 steps, the held-out accuracy and the seconds."""
    set_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=256,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=LENGTH,
            num_labels=len(MODULES),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    train, held = examples()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            bf16=low,
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=1e-3,
            warmup_steps=20,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_drop_last=True,
        )
        trainer = kind(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=held,
            compute_metrics=accuracy,
        )
        begin = time.process_time()
        trainer.train()
        seconds = time.process_time() - begin
        logs = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        return logs[-1], trainer.evaluate()["eval_accuracy"], seconds


def main() -> None:
    """Run the variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    print(f"| {steps} steps of 32 lines | last loss | held-out accuracy | processor seconds |")
    print("|---|---|---|---|")
    for name, kind, low in VARIANTS:
        loss, share, seconds = run(kind, low, steps)
        print(f"| {name} | {loss:.4f} | {share:.3f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
