# SPDX-License-Identifier: Apache-2.0
"""The old name of `amp_ir.standalone`, for one minor version."""

import warnings

from amp_ir.standalone import LoadedStep, StepFileError

__all__ = ["LoadedStep", "StepFileError"]

warnings.warn(
    "amp_ir.loaded_step is now amp_ir.standalone; import LoadedStep from there",
    DeprecationWarning,
    stacklevel=2,
)
