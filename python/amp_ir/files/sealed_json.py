# SPDX-License-Identifier: Apache-2.0
"""JSON files with their kind, their format, and the digest of their content.

    {"kind": "plan", "format": 2, ..., "sha256": "5f1c..."}

The digest is of the values and not of the bytes: spaces, line ends and the order of keys are free.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NoReturn

from amp_ir.errors import FileFormatError
from amp_ir.files.check_path import check_path

DIGEST = "sha256"


def digest_of(document: dict[str, Any]) -> str:
    """Compute the SHA-256 of a document's values, without its own entry for it."""
    content = {key: value for key, value in document.items() if key != DIGEST}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with its digest."""
    return {**document, DIGEST: digest_of(document)}


def read_document(path: str | os.PathLike[str], *, what: str, remedy: str) -> dict[str, Any]:
    """Read the JSON object in a file; the seal is not checked.

    Args:
        path: the file.
        what: what it should be, for the message: "plan of amp_ir".
        remedy: what to do where it is not, for the message.

    Raises:
        FileFormatError: it is not a JSON object.
        OSError: it cannot be read.
    """
    check_path(path)
    content = Path(path).read_bytes()
    try:
        document = json.loads(content.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is not a {what}: {_reason(error)}; {remedy}") from None
    if not isinstance(document, dict):
        found = type(document).__name__
        message = f"it holds a {found}, and a JSON object was expected"
        raise FileFormatError(f"{path} is not a {what}: {message}; {remedy}")
    return document


def check_seal(
    document: dict[str, Any], path: str | os.PathLike[str], *, what: str, remedy: str, newest: int
) -> None:
    """Refuse a document of a newer format, one that is not a `what`, or one that was altered.

    Raises:
        FileFormatError: says got and expected.
    """
    found = document.get("format")
    if isinstance(found, int) and found > newest:
        raise FileFormatError(
            f"{path} has format {found}, and this version of amp_ir reads up to {newest}; it was "
            f"written by a newer one: use that, or {remedy}"
        )
    kind = document.get("kind")
    if kind != what:
        raise FileFormatError(
            f"{path} is not a {what}: its kind is {kind!r}, expected {what!r}; {remedy}"
        )
    try:
        made = digest_of(document)
    except (ValueError, RecursionError) as error:  # 1e999 is read as an infinity
        made = f"undefined ({_reason(error)})"
    if document.get(DIGEST) != made:
        raise FileFormatError(
            f"{path} was altered or damaged after it was written: the SHA-256 of its content is "
            f"{made}, and it says {document.get(DIGEST)!r}; {remedy}"
        )
    if found != newest:
        raise FileFormatError(f"{path} has format {found!r}, expected {newest}; {remedy}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested more deeply than any such file is"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text (byte {error.start})"
    return str(error)
