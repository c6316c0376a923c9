"""Ends a process that hangs.

The clock is the interpreter's own (:mod:`faulthandler`): it needs neither the interpreter's lock nor the thread that
hangs. So it also ends a process that waits for another one which hangs.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")


def watched(items: Iterator[Item], limit: float | None, where: Path) -> Iterator[Item]:
    """The items, each of which may take ``limit`` seconds; after that, the process ends without another word.

    Args:
        limit: seconds; None waits for ever.
        where: a file of its own for this process. If the process is ended, it holds the lines of code at which its
            threads were, and no values; if the items come to an end, there is no file.
    """
    if limit is None:
        yield from items
        return
    where.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        while True:
            faulthandler.dump_traceback_later(limit, exit=True, file=descriptor)
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                faulthandler.cancel_dump_traceback_later()
            yield item
    finally:
        where.unlink(missing_ok=True)
        os.close(descriptor)


__all__ = ["watched"]
