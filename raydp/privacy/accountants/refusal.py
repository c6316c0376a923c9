"""A back end's refusal: it has no finite bound within bounded time and memory."""

from __future__ import annotations

from raydp.errors import RaydpError


class Refused(RaydpError):
    """An accountant cannot answer; the text says why. Another one is asked, and the interval records it."""
