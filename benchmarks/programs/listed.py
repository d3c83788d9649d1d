# SPDX-License-Identifier: Apache-2.0
"""All programs of the coverage list, by name."""

from __future__ import annotations

from benchmarks.programs import language_models, other_models, written_steps
from benchmarks.programs.program import Program

PROGRAMS: dict[str, Program] = {
    one.name: one
    for one in (*language_models.PROGRAMS, *other_models.PROGRAMS, *written_steps.PROGRAMS)
}
