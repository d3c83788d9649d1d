# SPDX-License-Identifier: Apache-2.0
"""Text that a step makes of a number which does not exist yet when the step is captured."""

from __future__ import annotations

import dis
from types import FrameType

from amp_ir.capture.checked_reads import reader_of
from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.locations import Locator

# In place of the number, where the text can be chosen.
NO_VALUE = "(no value while the step is captured)"
_WHAT = "makes text of a tensor's value, as print, logging, progress bars and f-strings do"
_ADVICE = (
    "Return it, and print or log it after the call, as float(train(x)); nothing of the step runs "
    "at each call but its tensors"
)
# Until Python 3.10, and after it.
_PERCENT = {("BINARY_MODULO", ""), ("INPLACE_MODULO", ""), ("BINARY_OP", "%"), ("BINARY_OP", "%=")}


def refuse_text(diagnostics: Diagnostics, locator: Locator) -> None:
    """Add that the line which is being traced makes text of a number."""
    diagnostics.add(f"{_WHAT}{locator.called_at()}", locator.here(), _ADVICE)


def is_read_for_text(frame: FrameType | None) -> bool:
    """Return whether the value that is read in this frame goes to `"..." % value`.

    The operator takes a double and nothing else, so that no text can stand in its place.
    """
    frame = reader_of(frame)
    if frame is None:
        return False
    instructions = dis.get_instructions(frame.f_code)
    last = next((one for one in instructions if one.offset == frame.f_lasti), None)
    return last is not None and (last.opname, last.argrepr) in _PERCENT
