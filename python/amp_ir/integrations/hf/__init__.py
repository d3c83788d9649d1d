# SPDX-License-Identifier: Apache-2.0
"""Hugging Face: `AmpIrTrainer`, a transformers.Trainer whose steps are compiled."""

from amp_ir.integrations.hf.trainer import AmpIrTrainer

__all__ = ["AmpIrTrainer"]
