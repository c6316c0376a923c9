"""Ctrl-C while a search runs: once stops it gracefully, twice stops it now. Nothing is lost either way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupts:
    """Stands between Ctrl-C and Ray Tune's own handler, which says nothing and gives way after the first one.

    The first interrupt is passed on to Tune, which ends the search after the step that it is at, and what happens is
    said. The second one raises KeyboardInterrupt at once. Every event is in the journal before it is acted on, and each
    report is durable before it is seen, so what is cut short is found again by a resume.

    Args:
        say: tells a person. Called from another thread: a signal may arrive in the middle of a write to the terminal.
        resume: the command that goes on with the search.
    """

    def __init__(self, say: Callable[[str], None], resume: str) -> None:
        self._say, self._resume = say, resume
        self._tune: Any = None
        self.count = 0
        self.spoken: threading.Thread | None = None

    def stand_between(self) -> None:
        """Take the place of the handler that is installed; in the main thread, once Tune has installed its own."""
        if self._tune is None and threading.current_thread() is threading.main_thread():
            self._tune = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        if callable(self._tune):
            self._tune(number, frame)
        signal.signal(signal.SIGINT, self._handle)  # Tune has put back what was there before it
        text = f"Stopping; trials keep what they have reported. Ctrl-C again stops now. Resume with: {self._resume}"
        self.spoken = threading.Thread(target=self._say, args=(text,), daemon=True)
        self.spoken.start()


__all__ = ["Interrupts"]
