# SPDX-License-Identifier: Apache-2.0
"""`AmpIrTrainer` logs and trains what `transformers.Trainer` does, with one program a step."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import amp_ir
from amp_ir.errors import OptionError
from amp_ir.integrations.hf import AmpIrTrainer

KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss", "step", "epoch")


class Tagger(nn.Module):
    """A model that takes the number of labels of all batches of a step, as language models do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 5)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, **known: Any
    ) -> dict[str, torch.Tensor]:
        logits = self.head(self.dropout(self.table(input_ids)).tanh())
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = known.get("num_items_in_batch")
        return {
            "loss": loss / (labels.ne(-100).sum() if count is None else count),
            "logits": logits,
        }


def data(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(20, (count, 6), generator=generator)
    labels = ids % 5
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]


def trained(
    kind: Any, folder: Path, *, resume: str | None = None, dropout: float = 0.0, **options: Any
) -> Any:
    transformers.set_seed(0)
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.02,
        "warmup_steps": 2,
        "max_grad_norm": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 3,
        **options,
    }
    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **given
    )
    trainer = kind(model=Tagger(dropout), args=args, train_dataset=data(20), eval_dataset=data(8))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Any) -> list[dict[str, Any]]:
    return [{key: one[key] for key in KEYS if key in one} for one in trainer.state.log_history[:-1]]


def test_logs_and_parameters_are_trainers(tmp_path: Path) -> None:
    # Five batches an epoch: the third optimizer step has one batch, the others have two.
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}
    ours = trained(AmpIrTrainer, tmp_path / "ours", **options)
    theirs = trained(transformers.Trainer, tmp_path / "theirs", **options)
    found, wanted = logged(ours), logged(theirs)
    assert len(wanted) == 8
    for one, other in zip(found, wanted, strict=True):
        # Float32 rounding of sums in another order, over six steps.
        assert one == pytest.approx(other, rel=1e-4)
    assert {one["grad_norm"] for one in found if "grad_norm" in one} != {0.0}
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert ours.args.logging_nan_inf_filter


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"bf16": True, "dropout": 0.2, "save_strategy": "steps"}
    options["save_steps"] = 4
    whole = trained(AmpIrTrainer, tmp_path, **options)
    first = str(tmp_path / "checkpoint-4")
    again = trained(AmpIrTrainer, tmp_path / "again", resume=first, **options)
    assert again.state.global_step == whole.state.global_step == 10
    # Bit for bit, dropout included.
    for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert whole.compiled_step.compiled.module.plan.amp_dtype == "bfloat16"


def test_an_overflow_in_float16_skips_the_step_and_the_schedule(tmp_path: Path) -> None:
    class Overflowing(AmpIrTrainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._scaler = amp_ir.GradScaler(init_scale=2.0**24, growth_interval=1000)

    trainer = trained(
        Overflowing, tmp_path, fp16=True, lr_scheduler_type="constant_with_warmup", warmup_steps=4
    )
    logs = [one for one in trainer.state.log_history if "loss" in one]
    skipped = [not math.isfinite(one["grad_norm"]) for one in logs]
    assert 0 < sum(skipped) < len(skipped)
    # Each step that was taken before advances the warm-up by a quarter.
    taken = [k - sum(skipped[:k]) for k in range(len(logs))]
    rates = [0.02 * min(count / 4, 1) for count in taken]
    assert [one["learning_rate"] for one in logs] == pytest.approx(rates)
    assert trainer._scaler.get_scale() == 2.0**24 / 2 ** sum(skipped)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_loss_that_is_not_finite_is_logged_as_the_mean_so_far(tmp_path: Path) -> None:
    trainer = trained(AmpIrTrainer, tmp_path, max_steps=1)
    trainer._tr_loss, trainer._globalstep_last_logged = torch.tensor(3.0), 0
    trainer.state.global_step = 2
    assert trainer._filters_losses
    assert trainer._filtered(torch.tensor(torch.nan)) == 1.0
    assert trainer._filtered(torch.tensor(torch.inf)) == 1.0
    assert trainer._filtered(torch.tensor(5.0)) == 5.0


def test_what_one_step_on_one_device_cannot_do_is_refused(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, torch_compile=True, torch_empty_cache_steps=3
    )
    with pytest.raises(OptionError) as caught:
        AmpIrTrainer(model=Tagger(), args=args, train_dataset=data(4))
    assert str(caught.value) == (
        "AmpIrTrainer compiles the whole step, for one device of one process; it cannot do "
        "torch_compile=True; torch_empty_cache_steps. Use transformers.Trainer for these, with "
        'torch.compile(model, backend="amp_ir") where that is enough'
    )


def test_a_model_that_something_wraps_is_refused(tmp_path: Path) -> None:
    class Wrapping(AmpIrTrainer):
        def _wrap_model(self, model: Any, *_: Any, **__: Any) -> nn.Module:
            return nn.Sequential(model)

    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(OptionError) as caught:
        Wrapping(model=Tagger(), args=args, train_dataset=data(4)).train()
    assert str(caught.value) == (
        "the model was wrapped in Sequential; AmpIrTrainer compiles the model itself, on one "
        "device of one process: leave out what wraps it, such as accelerate's dynamo_backend or a "
        "_wrap_model of your own"
    )


def test_another_loop_of_transformers_is_refused_at_import() -> None:
    script = (
        "import transformers; del transformers.Trainer._clip_grad_norm; "
        "import amp_ir.integrations.hf"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "amp_ir.errors.VersionError: AmpIrTrainer is written for the loop of transformers 5.20 to "
        f"5.23, and transformers {transformers.__version__} has another one; install "
        "'transformers>=5.20,<5.24', or "
        'compile the model: torch.compile(model, backend="amp_ir")'
    )
