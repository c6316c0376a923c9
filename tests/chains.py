"""What a forger who knows the format does: write a chain of lines anew."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from raydp.privacy import chain
from raydp.search.run_directory import RunDirectory


def rechain(lines: Iterable[bytes], start: str) -> bytes:
    """The lines with their chain digests made to fit; what is no JSON object stays as it is."""
    written = []
    for line in lines:
        try:
            record = json.loads(line)
            record.pop(chain.FIELD, None)
            line, start = chain.link(record, start)
        except (ValueError, AttributeError):
            line = line.rstrip(b"\n") + b"\n"
        written.append(line)
    return b"".join(written)


def forge_ledger(path: Path, lines: Iterable[bytes]) -> None:
    path.write_bytes(rechain(lines, chain.start("raydp ledger")))


def forge_journal(directory: RunDirectory, lines: Iterable[bytes]) -> None:
    (directory.path / "journal.jsonl").write_bytes(rechain(lines, chain.start(json.dumps(directory.header))))
