"""Nothing that a library says of private examples gets out: neither its warnings nor its exceptions."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from raydp.errors import LedgerRefusal, MemoryExhausted, RaydpError, WorkerFailed, WorkerLost


@contextlib.contextmanager
def discreet(what: str, *, such_as: str = "") -> Iterator[None]:
    """Run a private query: warnings are dropped, and an exception is told by its type alone.

    A library's message may name the size of a private batch, a norm or a loss. A refusal of the ledger speaks of the
    plan alone and passes, and so does a lack of memory for one example, and the end of another worker, which was told
    there as it may be.

    Args:
        what: failed, for the message.
        such_as: an example of a private number that could be in the exception.

    Raises:
        RaydpError: in place of whatever was raised, which is its cause.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (LedgerRefusal, MemoryExhausted, WorkerFailed, WorkerLost):
        raise
    except Exception as error:
        raise RaydpError(
            f"{what} failed with {type(error).__name__}. What that says may hold private numbers{such_as}, so only the "
            "traceback has it."
        ) from error
