# SPDX-License-Identifier: Apache-2.0
"""Lesson 10: a LightningModule, trained by Lightning's Trainer with compiled steps."""

# %% [markdown]
# # One argument of the Trainer
#
# `AmpIrPrecision` is a precision plugin: `plugins=[AmpIrPrecision("bf16-mixed")]` stands where
# `precision="bf16-mixed"` stood. Each batch is then one compiled program: training_step, backward,
# clipping and optimizer. Module, callbacks, logs, schedules, checkpoints and evaluation stay.

# %% A module as you have it: it logs, clips and schedules.
import tempfile
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from amp_ir.integrations.lightning import AmpIrPrecision


class Classifier(LightningModule):
    """Tell which quarter of a circle a point lies in."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log a norm of the gradients, which are there as in Lightning."""
        self.log("norm", self.net[0].weight.grad.norm())

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Log the accuracy."""
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(-1) == y).float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        """Return AdamW with a warm-up of ten steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def trainer(max_epochs: int) -> Trainer:
    """Return a Trainer of this lesson."""
    return Trainer(
        max_epochs=max_epochs,
        plugins=[AmpIrPrecision("bf16-mixed")],  # was: precision="bf16-mixed"
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


# %% Train for 60 steps of two batches each.
warnings.filterwarnings("ignore", ".*does not have many workers.*")
seed_everything(0, verbose=False)
points = torch.rand(640, 2) * 2 - 1
quarters = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
data = TensorDataset(points, quarters)
train, held_out = DataLoader(data, 32), DataLoader(data, 320)
seed_everything(1, verbose=False)
module, whole = Classifier(), trainer(6)
whole.fit(module, train, held_out)
print("accuracy:", round(whole.callback_metrics["accuracy"].item(), 3))
assert whole.global_step == 60 and whole.callback_metrics["accuracy"] > 0.9
assert whole.callback_metrics["norm"] > 0

# %% A batch that accumulates and one that updates are a program each; the plan says what ran low.
step = whole.precision_plugin.compiled_step
print(step)
assert len(step.recompiles) == 1
print(step.compiled.module.plan.list_casts().splitlines()[0])

# %% A run that is stopped and resumed is the run that was not, bit for bit, dropout included.
with tempfile.TemporaryDirectory() as folder:
    seed_everything(1, verbose=False)
    first = trainer(3)
    first.fit(Classifier(), train, held_out)
    file = Path(folder) / "half.ckpt"
    first.save_checkpoint(file, weights_only=False)
    resumed, again = Classifier(), trainer(6)
    again.fit(resumed, train, held_out, ckpt_path=file)
assert again.global_step == 60
parameters = zip(module.parameters(), resumed.parameters(), strict=True)
assert all(torch.equal(one, other) for one, other in parameters)
