# SPDX-License-Identifier: Apache-2.0
"""Lightning: `AmpIrPrecision`, a precision plugin of the Trainer whose steps are compiled."""

from amp_ir.integrations.lightning.precision import AmpIrPrecision

__all__ = ["AmpIrPrecision"]
