# SPDX-License-Identifier: Apache-2.0
"""The options of the backend: `torch.compile(options={...})`, and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs

from amp_ir.amp.overrides import Override
from amp_ir.amp.policies import find_policy
from amp_ir.errors import OptionError
from amp_ir.ir.options import check_limit, check_opt_level, check_rounding, dtype_name, meant_dtype
from amp_ir.runtime.step_variants import DEFAULT_SHAPES

AMP_DTYPE_VARIABLE = "AMP_IR_AMP_DTYPE"
_AMP_DTYPES = ("float16", "bfloat16", "float32")


@attrs.frozen
class BackendOptions:
    """What `amp_ir.jit` takes too; `amp_dtype` None inserts no casts.

    `max_shapes` is for how many shapes a graph of symbolic sizes keeps programs.
    """

    amp_dtype: str | None = attrs.field(default=None, converter=dtype_name)
    policy: str = "default"
    overrides: tuple[Override, ...] = attrs.field(default=(), converter=tuple)
    rounding: str = "fast"
    opt_level: int = 3
    max_shapes: int = DEFAULT_SHAPES

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, mode: str | None = None) -> BackendOptions:
        """Return the options that were passed; the dtype of the environment where none was.

        Raises:
            OptionError: a name or a value is wrong, or `mode=` was given.
        """
        if mode is not None:
            raise OptionError(
                f"torch.compile(mode={mode!r}): the backend amp_ir has no modes; pass options="
            )
        given = dict(options or {})
        known = [one.name for one in attrs.fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise OptionError(
                f"torch.compile(options=): the backend amp_ir does not know {', '.join(unknown)}; "
                f"it knows {', '.join(known)}"
            )
        given.setdefault("amp_dtype", os.environ.get(AMP_DTYPE_VARIABLE) or None)
        made = cls(**given)
        made._check()
        return made

    def _check(self) -> None:
        if self.amp_dtype not in (None, *_AMP_DTYPES):
            meant = meant_dtype(self.amp_dtype, _AMP_DTYPES)
            raise OptionError(
                f"amp_dtype={self.amp_dtype!r} is not supported; expected "
                f"{', '.join(map(repr, _AMP_DTYPES))} or None for no casts, in options= or in the "
                f"environment variable {AMP_DTYPE_VARIABLE}{meant}"
            )
        find_policy(self.policy)
        check_rounding(self.rounding)
        check_opt_level(self.opt_level)
        check_limit("max_shapes", self.max_shapes)
