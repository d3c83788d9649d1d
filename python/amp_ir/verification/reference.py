# SPDX-License-Identifier: Apache-2.0
"""What the float64 evaluation of a step must be for an error to be relative to it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from amp_ir.errors import ArgumentError, OptionError


def check_reference(exact: Mapping[str, torch.Tensor], tool: str) -> None:
    """Require exact gradients, or results, that an error can be relative to.

    Raises:
        OptionError: there are none.
        ArgumentError: they are not finite, or all 0, on this batch.
    """
    if not exact:
        raise OptionError(
            f"the step has no gradient, and none of its results is a floating-point tensor: there "
            f"is no error to measure; give {tool} a step that calls backward() or returns one"
        )
    wrong = [name for name, one in exact.items() if not bool(torch.isfinite(one).all())]
    if wrong:
        shown = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        raise ArgumentError(
            f"in float64 {len(wrong)} of the {len(exact)} gradients or results of the step are not "
            f"finite ({shown}), so that there is nothing to compare with: a parameter or the batch "
            "holds a NaN or an infinity, or an op makes one in any precision; "
            "train.find_overflow(*batch) says which, after train(*batch)"
        )
    if not any(bool(one.any()) for one in exact.values()):
        raise ArgumentError(
            "in float64 all gradients or results of the step are 0 on this batch, so that no error "
            f"is relative to anything; give {tool} a batch that trains something"
        )
