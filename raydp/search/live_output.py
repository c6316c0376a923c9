"""One output of a notebook cell that is written anew, instead of a line an event."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable

from rich.console import Console, RenderableType

_COLUMNS = 100
_SECONDS = 0.5  # between two updates: each is a message to the browser, and is stored with the notebook


class LiveOutput:
    """Shows what ``render`` returns in place.

    Args:
        render: what to show, drawn anew at each update.
        clock: seconds, for the pace.
    """

    def __init__(self, render: Callable[[], RenderableType], *, clock: Callable[[], float]) -> None:
        from IPython.display import display

        self._render, self._clock = render, clock
        self._lock = threading.Lock()
        self._shown = clock()
        self._handle = display(self._html(), display_id=True)  # type: ignore[no-untyped-call]

    def update(self, *, at_once: bool = False) -> None:
        """Show the present state, unless that was done a moment ago."""
        with self._lock:
            if at_once or self._clock() - self._shown >= _SECONDS:
                self._shown = self._clock()
                if self._handle is not None:  # no notebook after all: a script that has loaded one's packages
                    self._handle.update(self._html())

    def _html(self) -> object:
        from IPython.display import HTML

        drawn = Console(file=io.StringIO(), width=_COLUMNS, record=True, force_jupyter=False, force_terminal=True)
        drawn.print(self._render())
        return HTML(drawn.export_html(inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>"))  # type: ignore[no-untyped-call]


__all__ = ["LiveOutput"]
