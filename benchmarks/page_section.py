# SPDX-License-Identifier: Apache-2.0
"""Write what a benchmark measured into a section of a page of the documents."""

from __future__ import annotations

import re


def with_section(page: str, heading: str, section: str) -> str:
    """Return a page with its section of this heading, a whole line, replaced."""
    pattern = re.compile(re.escape(heading) + r".*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if not pattern.search(page):
        raise ValueError(f"the page has no section {heading.strip()!r}")
    return pattern.sub(lambda _found: section + "\n", page)
