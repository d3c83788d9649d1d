# SPDX-License-Identifier: Apache-2.0
"""OpenMP in a forked process: its threads are not copied, and GNU's runtime waits for them forever.

PyTorch's data loaders compute on one thread in their workers for this reason, and so does a step.
"""

from __future__ import annotations

import logging
import os

import torch

_is_fresh_fork = False


def _note_fork() -> None:
    global _is_fresh_fork
    _is_fresh_fork = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def use_threads_that_exist() -> None:
    """Compute on one thread from now on, if this process was forked since the last call."""
    global _is_fresh_fork
    if not _is_fresh_fork:
        return
    _is_fresh_fork = False
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        logging.getLogger("amp_ir").warning(
            "steps of this forked process compute on one thread: the others were not copied by "
            "the fork; start it with the spawn method to have them all"
        )
