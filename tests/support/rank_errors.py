# SPDX-License-Identifier: Apache-2.0
"""What the errors of ranks have in common."""

from __future__ import annotations

import re

TOGETHER = (
    ". Nothing has changed: model, optimizer, scaler and random state are as before the step, but "
    "the ranks cannot go on together: save the state, end the processes, and start them again from "
    "it"
)
NOT_AGAIN = (
    ". The group may have exchanges that did not end, so it is not used again: save the state, end "
    "the processes, and start them again from it"
)
DIFFERENT = "RanksDifferError: the ranks of the process group have different programs"
SAME = (
    "All ranks have to run the same step with the same options; their batches may differ in values "
    "and in shapes"
)
AT_STEPS = "the ranks of the process group are at different steps in its call"
ORDER = "All ranks have to call their steps in the same order, as often"


def plain(text: str) -> str:
    """An error without what differs by layout: lines of files, and numbers of calls in a step."""
    return re.sub(r"call \d+ of \d+", "call N of N", re.sub(r"[^\s(]+\.py:\d+", "LINE", text))
