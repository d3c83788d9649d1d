# SPDX-License-Identifier: Apache-2.0
"""amp_ir: a mixed-precision training compiler for PyTorch.

    mod, args = amp_ir.trace_step(step, example_batch, model=model, optimizer=optimizer)
    amp_mod = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    train = amp_ir.compile(amp_mod)
    loss = train(*batch)

`pipeline.py` is the map of what happens in between, `public_names.py` the list of names. PyTorch,
TVM and what a jitted step needs are imported when a name of `step_names.py` is first used, the rest
when another name is, and nothing of it by `import amp_ir`.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from amp_ir.host import tvm_import
from amp_ir.host.logs import show_topics
from amp_ir.version import VERSION

if TYPE_CHECKING:
    from amp_ir.public_names import *  # noqa: F403
    from amp_ir.public_names import __all__ as __all__

__version__ = VERSION

if "torch" in sys.modules:
    # A wrong version is refused as early as it can be.
    import amp_ir.host.torch_version  # noqa: F401
tvm_import.on_import()
show_topics()

# A type checker would take any name that `__getattr__` may answer for.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a module of the package, or the list that has a public name (PEP 562)."""
        # Tools ask every module for names such as __wrapped__.
        if not name.startswith("_") or name == "__all__":
            from amp_ir.host.kept_random import kept_random

            with kept_random():
                if PathFinder.find_spec(f"{__name__}.{name}", __path__) is not None:  # noqa: F405
                    # Alone: a module that the public names need may ask for it.
                    return importlib.import_module(f"{__name__}.{name}")
                _take_public(name)
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def _take_public(name: str) -> None:
        """Define the public names of the first list that has `name`; the last one has all."""
        from amp_ir.host.paused_garbage_collection import paused_garbage_collection

        # Of the million objects of PyTorch and TVM an import makes no garbage.
        with paused_garbage_collection():
            found = importlib.import_module(f"{__name__}.step_names")
            if name not in found.__all__:
                found = importlib.import_module(f"{__name__}.public_names")
                globals()["__all__"] = found.__all__
        globals().update({one: getattr(found, one) for one in found.__all__})

    def __dir__() -> list[str]:
        """Return the names of the module, the public ones too."""
        return sorted({*globals(), *__getattr__("__all__")})
