# SPDX-License-Identifier: Apache-2.0
"""Lesson 9: a Hugging Face model, trained by transformers' Trainer with compiled steps."""

# %% [markdown]
# # Two lines of a Trainer script
#
# `AmpIrTrainer` is `transformers.Trainer` with each optimizer step as one compiled program:
# forward, backward, clipping and optimizer. Import it, and use it where `Trainer` stood. Arguments,
# callbacks, logs, schedules, evaluation and checkpoints are the Trainer's own.

# %% Real text: of which module of the standard library is this docstring?
import inspect
import json
import tempfile
import textwrap

import numpy
import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, set_seed

from amp_ir.integrations.hf import AmpIrTrainer  # 1 of 2: was `from transformers import Trainer`

MODULES, LENGTH = (inspect, json, tempfile, textwrap), 64
set_seed(0)


def examples() -> list[dict[str, torch.Tensor]]:
    """Return lines of the modules' sources as bytes, with the number of the module."""
    found = []
    for number, module in enumerate(MODULES):
        lines = [one.strip() for one in inspect.getsource(module).splitlines()]
        for line in [one for one in lines if len(one) > 30][:60]:
            text = line.encode("ascii", "replace")[:LENGTH].ljust(LENGTH, b" ")
            ids = torch.from_numpy(numpy.frombuffer(text, numpy.uint8).astype("int64"))
            found.append({"input_ids": ids, "labels": torch.tensor(number)})
    return [found[k] for k in torch.randperm(len(found)).tolist()]


# %% A small model, and the arguments of any Trainer. `bf16=True` chooses amp_ir's rules.
config = BertConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=LENGTH,
    num_labels=len(MODULES),
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        bf16=True,
        max_steps=24,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        logging_steps=8,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        dataloader_drop_last=True,
    )
    data = examples()
    trainer = AmpIrTrainer(  # 2 of 2: was `Trainer(`
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=data[32:],
        eval_dataset=data[:32],
    )
    trainer.train()
    print("evaluation:", round(trainer.evaluate()["eval_loss"], 3))

# %% The log has what Trainer logs, gradient norms and the schedule's rates included.
logs = [one for one in trainer.state.log_history if "loss" in one]
assert [one["step"] for one in logs] == [8, 16, 24]
assert logs[-1]["loss"] < logs[0]["loss"] and all(one["grad_norm"] > 0 for one in logs)

# %% What was compiled is a jitted step; what ran low, and why, is in its plan as always.
compiled = trainer.compiled_step.compiled
print(compiled)
print(compiled.module.plan.list_casts().splitlines()[0])
