# SPDX-License-Identifier: Apache-2.0
"""`AmpIrPrecision` logs, counts and trains what Lightning's own precision does."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import amp_ir
from amp_ir.errors import OptionError, VersionError

pytest.importorskip("lightning", reason="the package lightning is not installed")

import lightning  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import StochasticWeightAveraging  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from amp_ir.integrations.lightning import AmpIrPrecision, optimization  # noqa: E402

# Lightning's advice about data loaders, and what its libraries say of themselves.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Classifier(LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU())
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(16, 4)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.dropout(self.body(x))), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, True, on_step=True, on_epoch=True)
        self.log_dict({"double": loss * 2, "two": 2.0}, batch_size=3)
        return {"loss": loss, "kept": loss.detach() + 1}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("grad_norm", self.head.weight.grad.norm())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / 10))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warmup, "interval": "step"},
        }


class Rows(Callback):
    """What is seen behind each batch: the loss, the step, the learning rate, what was logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        row = {"rate": rate, "global_step": trainer.global_step}
        row |= {f"output {name}": float(value) for name, value in outputs.items()}
        self.rows.append(row | {k: float(v) for k, v in trainer.callback_metrics.items()})


def fit(plugin: Any = None, *, module: Any = Classifier, ckpt: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    made = module()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 8, generator=generator)
    data = TensorDataset(x, torch.randint(4, (40,), generator=generator))
    rows = Rows()
    given: dict[str, Any] = {
        "gradient_clip_val": 0.5,
        "max_epochs": 12,
        "callbacks": [rows, *options.pop("callbacks", [])],
        "plugins": None if plugin is None else [plugin],
    }
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **given | options,
    )
    trainer.fit(made, DataLoader(data, 8), DataLoader(data, 20), ckpt_path=ckpt)
    trainer.rows = rows.rows
    return trainer


def assert_alike(ours: Any, theirs: Any, tolerance: float) -> None:
    assert len(ours.rows) == len(theirs.rows) > 0
    for one, other in zip(ours.rows, theirs.rows, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
    parameters = ours.lightning_module.parameters(), theirs.lightning_module.parameters()
    for p, q in zip(*parameters, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def test_losses_logs_rates_and_checkpoints_are_lightnings() -> None:
    # Five batches an epoch: every third optimizer step has one batch, the others have two.
    plugin = AmpIrPrecision("32-true")
    ours, theirs = (fit(one, accumulate_grad_batches=2) for one in (plugin, None))
    assert ours.global_step == 36
    # Float32 rounding of sums in another order, over 36 steps of Adam.
    assert_alike(ours, theirs, 1e-4)
    assert {"train_loss_epoch", "double", "two", "grad_norm", "val_loss"} <= ours.rows[-1].keys()
    # A batch that accumulates, one that updates, and one that does both: three programs.
    assert len(plugin.compiled_step.recompiles) == 2
    found, wanted = (one._checkpoint_connector.dump_checkpoint() for one in (ours, theirs))
    assert found.keys() - wanted.keys() == {"AmpIrPrecision"} and wanted.keys() <= found.keys()
    assert found["loops"] == wanted["loops"] and found["lr_schedulers"] == wanted["lr_schedulers"]
    assert found["state_dict"].keys() == wanted["state_dict"].keys()
    states = found["optimizer_states"][0], wanted["optimizer_states"][0]
    assert states[0]["param_groups"] == states[1]["param_groups"]


def test_bfloat16_trains_as_under_autocast() -> None:
    plugin = AmpIrPrecision("bf16-mixed")
    ours, theirs = fit(plugin, max_epochs=7), fit(MixedPrecision("bf16-mixed", "cpu"), max_epochs=7)
    assert ours.global_step == 35 and not plugin.compiled_step.recompiles
    # bfloat16 has 8 significant bits, 2^-8 a rounding, in other places than autocast's.
    assert_alike(ours, theirs, 2e-2)
    assert plugin.compiled_step.compiled.module.plan.amp_dtype == "bfloat16"


def test_an_overflow_in_float16_skips_the_update_and_counts_as_lightning() -> None:
    scaler = amp_ir.GradScaler(init_scale=2.0**26, growth_interval=1000)
    plugin = AmpIrPrecision("16-mixed", scaler=scaler)
    ours = fit(plugin, max_epochs=7)
    skipped = [not math.isfinite(one["grad_norm"]) for one in ours.rows]
    assert 0 < sum(skipped) < 15
    assert scaler.get_scale() == 2.0 ** (26 - sum(skipped))
    # Lightning counts and schedules a skipped step as any other.
    assert ours.global_step == 35
    rates = [0.01 * min(1, (k + 2) / 10) for k in range(35)]
    assert [one["rate"] for one in ours.rows] == pytest.approx(rates)
    found = ours._checkpoint_connector.dump_checkpoint()["AmpIrPrecision"]
    assert found["scaler"] == scaler.state_dict()
    assert ours.rows[-1]["train_loss"] < ours.rows[0]["train_loss"]


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    def dropping() -> Classifier:
        return Classifier(dropout=0.3)

    whole = fit(AmpIrPrecision("bf16-mixed"), module=dropping, max_epochs=4)
    half = fit(AmpIrPrecision("bf16-mixed"), module=dropping, max_epochs=2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    again = fit(
        AmpIrPrecision("bf16-mixed"), module=dropping, max_epochs=4, ckpt=tmp_path / "half.ckpt"
    )
    assert again.global_step == whole.global_step == 20
    # Bit for bit, dropout included.
    keys = ("rate", "global_step", "train_loss", "grad_norm")
    rest = [[{key: row[key] for key in keys} for row in one.rows[-10:]] for one in (again, whole)]
    assert rest[0] == rest[1]
    parameters = again.lightning_module.parameters(), whole.lightning_module.parameters()
    assert all(torch.equal(p, q) for p, q in zip(*parameters, strict=True))


class Overriding(Classifier):
    """A module that reads the trainer's counters and replaces parts of the loop."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * (1 + self.current_epoch + batch_idx / 10)
        return loss * 2 if self.global_step > 1 else loss

    def backward(self, loss: torch.Tensor) -> None:
        (loss + self.head.bias.square().sum()).backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * self.global_step

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm="value"
        )


class Watching(Callback):
    """A callback that reads gradients where Lightning has them."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        module.log("largest", module.head.weight.grad.abs().max())


def test_hooks_of_module_and_callbacks_run_inside_of_the_step() -> None:
    options: dict[str, Any] = {"max_epochs": 1, "gradient_clip_val": 0.05, "limit_train_batches": 3}
    ours, theirs = (
        fit(one, module=Overriding, callbacks=[Watching()], **options)
        for one in (AmpIrPrecision("32-true"), None)
    )
    # Float32 rounding, over three steps.
    assert_alike(ours, theirs, 1e-4)
    assert ours.rows[-1]["largest"] > 0.05 and len(ours.rows) == 3


class InComprehension(Classifier):
    # Python 3.13 loads batch_idx in the instruction that stores `one`.
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum([batch_idx * one for one in (self.loss(batch), 1.0)])


class InVars(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * sum(one for one in vars().values() if isinstance(one, int))


class InEval(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * eval("batch_idx / 10")


@pytest.mark.parametrize("module", [InComprehension, InVars, InEval])
def test_the_number_of_the_batch_is_given_to_every_step_that_reads_it(module) -> None:
    options: dict[str, Any] = {"module": module, "max_epochs": 1, "limit_train_batches": 3}
    ours, theirs = (fit(one, **options) for one in (AmpIrPrecision("32-true"), None))
    assert_alike(ours, theirs, 1e-4)


def test_clipping_by_value_is_lightnings() -> None:
    options: dict[str, Any] = {"max_epochs": 1, "gradient_clip_algorithm": "value"}
    ours, theirs = (
        fit(one, **options, gradient_clip_val=0.01) for one in (AmpIrPrecision("32-true"), None)
    )
    assert_alike(ours, theirs, 1e-4)


def test_what_one_step_on_one_device_cannot_do_is_refused() -> None:
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.LBFGS(self.parameters()), torch.optim.SGD(self.parameters(), 0.1)]

    with pytest.raises(OptionError) as caught:
        fit(AmpIrPrecision(), module=Manual, gradient_clip_val=None)
    assert str(caught.value) == (
        "AmpIrPrecision compiles all of a batch, for one device of one process; it cannot do "
        "automatic_optimization=False; 2 optimizers; LBFGS, which runs a batch several times. "
        "Train these with Lightning's own precision, with torch.compile(module, "
        'backend="amp_ir") where that is enough'
    )


def test_another_loop_of_lightning_is_refused_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(optimization._AutomaticOptimization, "_optimizer_step")
    with pytest.raises(VersionError) as caught:
        runpy.run_path(optimization.__file__)
    assert str(caught.value) == (
        "AmpIrPrecision is written for the loop of Lightning 2.6, and lightning "
        f"{lightning.__version__} has another one; install 'lightning>=2.6,<2.7', or compile the "
        'module: torch.compile(module, backend="amp_ir")'
    )


def test_a_precision_that_there_is_not_and_a_scaler_too_many_are_refused() -> None:
    with pytest.raises(OptionError) as caught:
        AmpIrPrecision("bf16")
    assert str(caught.value) == (
        "precision='bf16' is none that AmpIrPrecision trains in; give one of '32-true', "
        "'bf16-mixed', '16-mixed'"
    )
    with pytest.raises(OptionError) as caught:
        AmpIrPrecision("bf16-mixed", scaler=amp_ir.GradScaler())
    assert str(caught.value) == (
        "precision='bf16-mixed' needs no scaler; leave it out, or give precision=\"16-mixed\""
    )


def test_a_step_without_a_loss_and_an_object_in_the_log_are_refused() -> None:
    class Silent(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"kept": self.loss(batch)}

    class Objects(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("who", torch.nn.Identity())
            return self.loss(batch)

    with pytest.raises(OptionError) as caught:
        fit(AmpIrPrecision(), module=Silent)
    assert str(caught.value) == (
        "training_step returned dict without a tensor loss; a compiled step needs the loss of "
        'every batch, a tensor or {"loss": tensor, ...}: leave out a batch in the data loader, or '
        "in on_train_batch_start"
    )
    with pytest.raises(OptionError) as caught:
        fit(AmpIrPrecision(), module=Objects)
    assert str(caught.value) == (
        "self.log('who', ...) in training_step is given a Identity; a compiled step logs tensors "
        "and numbers: return what the metric needs from training_step, and update and log the "
        "metric in on_train_batch_end"
    )


class Normalized(Classifier):
    """With BatchNorm, for whose statistics StochasticWeightAveraging runs one more epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(torch.nn.BatchNorm1d(16))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log nothing: there are no gradients in the epoch for statistics."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_epoch_for_statistics_of_averaged_weights_updates_nothing() -> None:
    ours, theirs = (
        fit(
            plugin,
            module=Normalized,
            max_epochs=2,
            gradient_clip_val=None,
            callbacks=[StochasticWeightAveraging(0.01, swa_epoch_start=1)],
        )
        for plugin in (AmpIrPrecision("32-true"), None)
    )
    assert len(ours.rows) == 15
    assert_alike(ours, theirs, 1e-4)
    buffers = ours.lightning_module.buffers(), theirs.lightning_module.buffers()
    for one, other in zip(*buffers, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
