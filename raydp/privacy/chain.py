"""Chained lines: JSON lines of which each carries a digest of itself and of everything before it.

The digest of a line is SHA-256 over the digest of the line before and the line's own record, so an edited, deleted,
repeated or moved line breaks the chain where it stands (Haber & Stornetta, "How to time-stamp a digital document",
J. Cryptology 3, 1991). A chain shows nothing about what was cut off its end, and whoever may write the file may write
a whole chain anew: its head has to be noted elsewhere. The journal notes the heads of the ledgers of finished runs, the
privacy statement notes the head of the journal, and a tracker holds a copy of that statement.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from raydp import _validate

FIELD = "chain"


class BrokenChain(ValueError):
    """A line that does not continue the lines before it."""


def start(content: str | bytes) -> str:
    """The digest (hex) that the first line of a chain continues."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def link(record: Mapping[str, Any], previous: str) -> tuple[bytes, str]:
    """The line, with its line feed, that holds the record after the digest ``previous``; and its own digest.

    Raises:
        TypeError, ValueError: the record does not fit into JSON.
    """
    digest = _digest(record, previous)
    return _text({**record, FIELD: digest}) + b"\n", digest


def follow(line: bytes, previous: str) -> tuple[dict[str, Any], str]:
    """Inverse of :func:`link`, for a line without its line feed: the record, and the line's digest.

    Raises:
        BrokenChain: the line is not the one that was written after the digest ``previous``.
        ValueError: it is not a JSON object.
    """
    record = _validate.json_object(line)
    text = _text(record)
    claimed = record.pop(FIELD, None)
    digest = _digest(record, previous)
    if claimed != digest or text != line:
        raise BrokenChain("it does not continue the lines before it: it was edited, or a line was lost or moved")
    return record, digest


def _digest(record: Mapping[str, Any], previous: str) -> str:
    return hashlib.sha256(previous.encode() + b"\n" + _text(record)).hexdigest()


def _text(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode()
