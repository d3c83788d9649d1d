# SPDX-License-Identifier: Apache-2.0
"""What amp_ir says through `logging`, and the environment variable AMP_IR_LOG that shows it.

AMP_IR_LOG=recompiles,plan,dispatch,memory writes those to stderr, as TORCH_LOGS does; "all" is each
of them. Without it "amp_ir.recompiles" follows the level of the logger "amp_ir", and the others,
which are many lines a compilation, are silent until their own level is set to INFO.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Mapping

from amp_ir.errors import OptionError

# Name: what it says.
TOPICS: Mapping[str, str] = {
    "recompiles": "why a step was compiled, in how many seconds",
    "plan": "how many ops are low, and the casts",
    "dispatch": "which library each heavy op goes to, and why not to a better one",
    "memory": "the bytes of a compiled step",
}
_VARIABLE = "AMP_IR_LOG"
# Silent where only the logger "amp_ir" is set to INFO.
_DETAILED = ("plan", "dispatch", "memory")
_ALL = "all"


def logger_of(topic: str) -> logging.Logger:
    """Return the logger of one of TOPICS."""
    assert topic in TOPICS, topic
    return logging.getLogger(f"amp_ir.{topic}")


for _topic in _DETAILED:
    logger_of(_topic).setLevel(logging.WARNING)


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that writes to the standard error of the moment, as a test may replace it."""

    @property
    def stream(self) -> object:
        """Return the stream."""
        return sys.stderr

    @stream.setter
    def stream(self, _value: object) -> None:
        """Ignore what `StreamHandler` sets."""


def show_topics(value: str | None = None) -> None:
    """Write the topics that the environment variable, or `value`, names to stderr.

    Raises:
        OptionError: there is no topic of a name; the message lists those that there are.
    """
    named = os.environ.get(_VARIABLE, "") if value is None else value
    names = [one.strip() for one in named.split(",") if one.strip()]
    unknown = [one for one in names if one not in TOPICS and one != _ALL]
    if unknown:
        close = difflib.get_close_matches(unknown[0], TOPICS, n=1)
        maybe = f' (did you mean "{close[0]}"?)' if close else ""
        raise OptionError(
            f"{_VARIABLE}={named!r}: there is no topic {unknown[0]!r}{maybe}. Give some of "
            f"{', '.join((*TOPICS, _ALL))}, with commas between them"
        )
    for name in TOPICS if _ALL in names else names:
        logger = logger_of(name)
        if not any(isinstance(one, _ToStderr) for one in logger.handlers):
            handler = _ToStderr()
            handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
            logger.addHandler(handler)
        logger.setLevel(logging.INFO)
