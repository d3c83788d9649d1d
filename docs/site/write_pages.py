# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of the site, for Sphinx: those of docs/, and pages made of lessons and rules.

    python docs/site/write_pages.py build/site-pages

A page of docs/ links to files of the repository, as its reader needs it. On the site these files
are pages too: a lesson as prose and code, any other file as its text.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import amp_ir
from amp_ir.amp.hints import RULES
from amp_ir.amp.policies import POLICIES, list_ops

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted((ROOT / "tutorials").glob("[0-9][0-9]_*.py"))
REFUSED = sorted(p for p in (ROOT / "docs" / "refused").glob("*.md") if p.stem != "README")
# Files of the repository that are pages of the site under another name.
RENAMED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LANGUAGES = {".py": "python", ".cc": "cpp", ".h": "cpp", ".toml": "toml", ".json": "json"}
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
KINDS = {
    "low": "Read low: where the time is",
    "float32": "Computed and stored in float32",
    "free": "Free: the placement chooses the dtype",
    "untouched": "Not changed by autocast",
}
# The order of the pages. Every other page is found by a link and the search.
CONTENTS = {
    "Start": ["install", *(f"tutorials/{path.stem}" for path in LESSONS)],
    "Guide": """guide plans loss_scaling memory profiling lengths distributed inference integrations
        gpu compile_cache features""".split(),
    "What can go wrong": [
        "frozen", "refused/README", *(f"refused/{path.stem}" for path in REFUSED), "reliability",
        "troubleshooting", "coverage", "numerics",
    ],
    "Coming from": [f"coming_from_{name}" for name in "torch_amp apex mxnet r_torch raf".split()],
    "Reference": ["api", "policies", "changelog"],
    "Design": ["design/README", "design/add_an_op", "design/add_a_pass", "contributing"],
}  # fmt: skip


def main(folder: Path) -> None:
    """Write every page below `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    for page, text in pages().items():
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(with_links_to_pages(page, text))
    shutil.copytree(ROOT / "docs" / "images", folder / "images")


def pages() -> dict[str, str]:
    """Return the text of every page, with links as they are in the repository."""
    docs = ROOT / "docs"
    found = {path.relative_to(docs).as_posix(): path.read_text() for path in docs.rglob("*.md")}
    found |= {page: (ROOT / name).read_text() for name, page in RENAMED.items()}
    found |= {f"tutorials/{path.stem}.md": lesson(path.read_text()) for path in LESSONS}
    found |= {"policies.md": policies(), "api.md": api()}
    found["index.md"] += contents()
    sources = {target for page, text in found.items() for target in linked(page, text)}
    for target in sorted(sources):
        if (page := page_of(target)).startswith("source/"):
            found[page] = source(target)
    return found


def contents() -> str:
    """Return the tables of contents that are the navigation of the site."""
    parts = []
    for caption, names in CONTENTS.items():
        lines = ["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```"]
        parts.append("\n".join(lines))
    return "\n" + "\n\n".join(parts) + "\n"


def with_links_to_pages(page: str, text: str) -> str:
    """Return a page whose links to files of the repository lead to the pages of these files."""

    def rewritten(link: re.Match[str]) -> str:
        target = target_of(page, link[1])
        if not (ROOT / target).exists():
            return link[0]
        here = posixpath.dirname(page) or "."
        return f"]({posixpath.relpath(page_of(target), here)}{link[2] or ''})"

    return LINK.sub(rewritten, text)


def linked(page: str, text: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to."""
    for link in LINK.finditer(text):
        target = target_of(page, link[1])
        if (ROOT / target).exists():
            yield target


def target_of(page: str, link: str) -> str:
    """Return the file of the repository that a link of a page names, from the root."""
    names = {made: name for name, made in RENAMED.items()}
    # Where the page stands in the repository.
    stands = names.get(page, page if page.startswith("tutorials/") else f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(stands), link))


def page_of(target: str) -> str:
    """Return the page of the site that shows a file of the repository."""
    if target in RENAMED:
        return RENAMED[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if re.fullmatch(r"tutorials/\d\d_\w+\.py", target):
        return target.removesuffix(".py") + ".md"
    return f"source/{target}.md"


def source(target: str) -> str:
    """Return the page of a file, or of a folder: a list of what is in it."""
    path = ROOT / target
    head = f"---\norphan: true\n---\n\n# {target}\n\n"
    if path.is_dir():
        names = sorted(one.name for one in path.iterdir() if not one.name.startswith(("_", ".")))
        return head + "\n".join(f"- `{name}`" for name in names) + "\n"
    text = path.read_text()
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{head}{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def lesson(text: str) -> str:
    """Return a lesson in percent format as prose and code."""
    title = re.search(r'"""(.*?)\.?"""', text, re.DOTALL)
    parts = [f"# {title[1]}"] if title else []
    for cell in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        kind, _, body = cell.partition("\n")
        if "[markdown]" in kind:
            prose = re.sub(r"^# ?", "", body.strip("\n"), flags=re.MULTILINE)
            # The page has its title already.
            parts.append(re.sub(r"^# ", "## ", prose, flags=re.MULTILINE))
        elif body.strip():
            parts.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def policies() -> str:
    """Return the page of the policies: which op may do what, and why."""
    parts = [
        "# Policies",
        "Which op may be low, and why: a row a rule of "
        "[type_hints.py](../python/amp_ir/amp/type_hints.py) and "
        "[policies.py](../python/amp_ir/amp/policies.py), whose docstring is the reason. "
        "`amp_ir.list_ops(policy, kind)` returns the same lists, and [plans](plans.md) says how to "
        "change them. Sums accumulate float32 in every policy.",
    ]
    lists = list_ops()
    assert isinstance(lists, dict)
    for kind, title in KINDS.items():
        parts += [f"## {title}", rule_table({op: RULES[op] for op in lists[kind]})]
    for policy in POLICIES.values():
        if policy.rules:
            parts += [f'## `policy="{policy.name}"`', f"{policy.summary}. What differs:"]
            parts += [rule_table(policy.rules)]
    return "\n\n".join(parts) + "\n"


def rule_table(rules: dict[str, Any]) -> str:
    """Return a table with a row for each rule: its ops and its reason."""
    ops: dict[Any, list[str]] = {}
    for op, rule in rules.items():
        ops.setdefault(rule, []).append(f"`{op}`")
    rows = [
        f"| {', '.join(sorted(names))} | {escaped(rule.__doc__ or '')} |"
        for rule, names in ops.items()
    ]
    return "\n".join(["| ops | reason |", "|---|---|", *rows])


def escaped(docstring: str) -> str:
    """Return a docstring as one line of a table's cell."""
    return re.sub(r"([|*_<])", r"\\\1", " ".join(docstring.split()))


def api() -> str:
    """Return the page of the public names, from their docstrings."""
    parts = ["# API", "Every public name. [The guide](guide.md) says which one you want."]
    classes = [name for name in amp_ir.__all__ if isinstance(getattr(amp_ir, name), type)]
    functions = [
        name
        for name in amp_ir.__all__
        if name not in classes and not isinstance(getattr(amp_ir, name), ModuleType)
    ]
    parts += ["## Functions", *(directive("autofunction", name) for name in functions)]
    parts += ["## Classes", *(directive("autoclass", name) for name in classes)]
    parts += ["## Testing", directive("automodule", "testing")]
    parts += ["## Errors", "[What is refused](refused/README.md) shows each of them."]
    parts += [directive("automodule", "errors")]
    return "\n\n".join(parts) + "\n"


def directive(kind: str, name: str) -> str:
    """Return Sphinx's directive for the docstring of `amp_ir.<name>`."""
    options = "" if kind == "autofunction" else ":members:\n"
    return f"```{{eval-rst}}\n.. {kind}:: amp_ir.{name}\n   {options}```"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
