"""What a person sees while a search runs: a live table in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import os
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_CEILING, Context
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raydp.privacy.plan import Interval
from raydp.search.live_output import LiveOutput
from raydp.search.records import TrialRecord

_WIDTH = 80  # plain lines are never longer
_ROWS = 8  # trials in the live table
_PLAIN_MARKS = 4  # a plain line at each quarter of a trial …
_PLAIN_SECONDS = 10.0  # … but not more often than this
_TERSE_SECONDS = 60.0  # how often CI is told where the search stands
_STYLES = {"complete": "green", "failed": "red", "diverged": "red", "infeasible": "yellow", "running": "cyan"}


class Display:
    """Shows the progress of one search. Every method may be called from any thread.

    A live table needs a terminal that can move its cursor. A notebook gets one output that is written anew. Pipes,
    files and dumb terminals get one line an event, at most 80 columns wide; where the variable CI is set, one a trial
    that ended, and where the search stands once a minute.

    Args:
        trials: how many trials the search wants, the denominator of the overall bar.
        metric: name of the (first) objective, or of all objectives.
        varying: the names of a config worth showing; all of them when empty.
        quiet: show nothing at all.
        console: where to; the standard output by default.
        clock: seconds, for the pace of plain lines and the elapsed time.
    """

    def __init__(
        self,
        *,
        trials: int,
        metric: str | Sequence[str],
        varying: Sequence[str] = (),
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trials = trials
        self._metric = metric if isinstance(metric, str) else metric[0]
        self._varying = tuple(varying)
        self._quiet = quiet
        self._console = console or Console()
        self._clock = clock
        self._begun = clock()
        self._lock = threading.RLock()
        self._records: dict[str, TrialRecord] = {}
        self._fraction: dict[str, float] = {}
        self._current: dict[str, float | None] = {}
        self._said: dict[str, tuple[int, float]] = {}  # key -> (mark, time) of its last plain progress line
        self._best: TrialRecord | None = None
        self._trouble: TrialRecord | None = None  # the latest trial that has a reason
        self._totals = {"done": 0, "failed": 0, "infeasible": 0}
        self._epsilon_search: Interval | None = None
        self._eta: float | None = None
        self._live: Live | None = None
        self._notebook: LiveOutput | None = None
        self._terse = os.environ.get("CI", "").lower() not in ("", "0", "false")
        self._stated = -_TERSE_SECONDS  # when where the search stands was said last

    @property
    def is_live(self) -> bool:
        """Whether this display draws a table in place on a terminal rather than printing lines."""
        console = self._console
        drawable = console.is_terminal and not console.is_jupyter and not console.is_dumb_terminal
        return drawable and not self._quiet and not self._terse

    def __enter__(self) -> Self:
        if self._console.is_jupyter and not self._quiet:
            self._notebook = LiveOutput(self.render, clock=self._clock)
        elif self.is_live:
            self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._notebook is not None:
            self._notebook.update(at_once=True)
            self._notebook = None

    def expect(self, trials: int) -> None:
        """How many trials the search wants after all: more when it was extended, fewer when its grid is smaller."""
        with self._lock:
            self._trials = trials

    def proposed(self, record: TrialRecord) -> None:
        """A point was proposed and has a plan."""
        with self._lock:
            self._records[record.key] = record
        self._line(f"{record.key} proposed   {self._config(record.config)}", terse=False)

    def infeasible(self, record: TrialRecord) -> None:
        """A point was proposed and has no plan; nothing was spent."""
        with self._lock:
            self._records[record.key] = self._trouble = record
        self._line(f"{record.key} infeasible {record.reason or ''}")

    def started(self, key: str, attempt: int = 1) -> None:
        """A trial began to train; ``attempt`` counts from 1."""
        with self._lock:
            self._fraction[key] = 0.0
            self._said[key] = (0, self._clock())
        self._line(f"{key} started{f'    attempt {attempt}' if attempt > 1 else ''}", terse=attempt > 1)

    def progress(self, key: str, fraction: float, metric: float | None = None) -> None:
        """A trial has done ``fraction`` in [0, 1] of its steps; ``metric`` is the objective so far, if measured."""
        fraction = min(1.0, max(0.0, fraction))
        with self._lock:
            self._fraction[key], self._current[key] = fraction, metric
            mark, now = int(fraction * _PLAIN_MARKS), self._clock()
            last_mark, last_time = self._said.get(key, (0, self._begun))
            due = mark > last_mark and now - last_time >= _PLAIN_SECONDS and fraction < 1
            if due:
                self._said[key] = (mark, now)
        if due:
            shown = "" if metric is None else f"{self._metric} {_number(metric)}"
            self._line(f"{key} {fraction:4.0%}       {shown}", terse=False)
        elif self._notebook is not None:
            self._notebook.update()

    def finished(self, record: TrialRecord) -> None:
        """A trial ended, in whatever state."""
        with self._lock:
            self._records[record.key] = record
            self._trouble = record if record.reason else self._trouble
            self._fraction.pop(record.key, None)
            self._current.pop(record.key, None)
        what = f"{self._metric} {self._value(record)}  {_epsilon_of(record)}"
        if record.state != "complete":
            what = record.reason or ""
        seconds = "" if record.seconds is None else f"  {_duration(record.seconds)}"
        self._line(f"{record.key} {record.state:10} {what}{seconds}")

    def total(
        self,
        *,
        done: int,
        failed: int,
        infeasible: int,
        best: TrialRecord | None,
        epsilon_search: Interval | None = None,
        eta: float | None = None,
    ) -> None:
        """Where the whole search stands.

        Args:
            done, failed, infeasible: numbers of trials that completed, that failed (or diverged, or were stopped),
                and that had no plan.
            best: the best complete trial so far.
            epsilon_search: bounds of epsilon of everything that ran so far.
            eta: seconds that the rest may take.
        """
        with self._lock:
            self._totals = {"done": done, "failed": failed, "infeasible": infeasible}
            self._best, self._epsilon_search, self._eta = best, epsilon_search, eta
            due = not self._terse or self._clock() - self._stated >= _TERSE_SECONDS or done + failed >= self._trials
            self._stated = self._clock() if due else self._stated
            lines = _joined(self._state(), _WIDTH) if due else []
        for line in lines:
            self._line(line)

    def note(self, text: str) -> None:
        """One message, such as a tracking server that does not answer."""
        with self._lock:
            if not self._quiet:  # never cut: it may end with a command to copy
                self._console.print(Text(text), soft_wrap=self._live is None)

    def finish(self, summary: str) -> None:
        """The end: the table stands still, and the result's own summary follows in full."""
        self.__exit__(None, None, None)
        if not self._quiet:
            with self._lock:
                self._console.print(Text(summary), soft_wrap=True)

    def render(self) -> RenderableType:
        """The live table, the bars of the running trials and the overall bar, as drawn now."""
        with self._lock:
            table = Table(expand=True, box=None, padding=(0, 1), header_style="bold")
            table.add_column("trial", no_wrap=True, min_width=6)
            table.add_column("state", no_wrap=True, min_width=10)
            table.add_column(self._metric, no_wrap=True, justify="right", max_width=16)
            table.add_column("epsilon", no_wrap=True, justify="right")
            table.add_column("config or reason", no_wrap=True, overflow="ellipsis", ratio=1)
            for record in self._shown():
                best = self._best is not None and record.key == self._best.key
                state = "running" if record.key in self._fraction else record.state
                detail = record.reason if record.reason else self._config(record.config)
                table.add_row(
                    Text(f"{record.key}{'*' if best else ''}"),
                    Text(state, style=_STYLES.get(state, "")),
                    Text(self._value(record)),
                    Text(_epsilon_of(record, "")),
                    Text(detail),
                    style="bold" if best else "",
                )
            bars = Table.grid(padding=(0, 1), expand=True)
            for ratio in (None, 1, None):
                bars.add_column(no_wrap=True, ratio=ratio, overflow="ellipsis")
            for key, fraction in sorted(self._fraction.items()):
                current = self._current.get(key)
                shown = "" if current is None else f"{self._metric} {_number(current)}"
                bars.add_row(key, ProgressBar(total=1.0, completed=fraction), Text(f"{fraction:4.0%} {shown}"))
            over = self._totals["done"] + self._totals["failed"]  # infeasible points do not count as trials
            share = 1.0 if not self._trials else min(1.0, over / self._trials)
            bars.add_row("all", ProgressBar(total=1.0, completed=share), Text(f"{over}/{self._trials} trials"))
            width = min(self._console.width, 200)
            below = [Text(line, no_wrap=True, overflow="ellipsis") for line in _joined(self._state(), width)]
            if self._best is not None:
                below += _folded(f"best {self._best.key}: {self._config(self._best.config)}", width)
            if self._trouble is not None:
                below += _folded(f"{self._trouble.key} {self._trouble.state}: {self._trouble.reason}", width)
            return Group(table, bars, *below)

    def _shown(self) -> list[TrialRecord]:
        """The running trials, the latest others, and the best one, by number; not more than the table holds."""
        latest = sorted(self._records.values(), key=lambda record: (record.key not in self._fraction, -record.number))
        shown = latest[:_ROWS]
        best = self._best
        if best is not None and all(record.key != best.key for record in shown):
            shown = [*shown[: _ROWS - 1], best]
        return sorted(shown, key=lambda record: record.number)

    def _state(self) -> list[str]:
        """Where the search stands, in parts that are not to be broken."""
        done, *others = self._totals.items()
        parts = [", ".join([f"{done[1]} of {self._trials} done", *(f"{n} {name}" for name, n in others if n)])]
        if self._best is not None:
            parts.append(f"best {self._value(self._best)} ({self._best.key})")
        if self._epsilon_search is not None:
            parts.append(f"ε search ≤ {upward(self._epsilon_search.upper)}")
        if self._eta is not None:
            parts.append(f"{_duration(self._eta)} left")
        return parts

    def _value(self, record: TrialRecord) -> str:
        mean, std = record.mean(self._metric), record.std(self._metric)
        if mean is None:
            return ""
        return _number(mean) if std is None else f"{_number(mean)} ± {std:.2g}"

    def _config(self, config: Mapping[str, object]) -> str:
        names = [name for name in self._varying if name in config] or sorted(config)
        return " ".join(f"{name}={_number(config[name])}" for name in names)

    def _line(self, text: str, *, terse: bool = True) -> None:
        """One plain line, cut to the width; nothing in a live or quiet display. ``terse``: CI wants it as well."""
        if self._notebook is not None:
            self._notebook.update()
        if self._quiet or self.is_live or self._console.is_jupyter or (self._terse and not terse):
            return
        line = " ".join(text.splitlines()).rstrip()
        line = line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"
        with self._lock:
            self._console.print(Text(line), soft_wrap=True)


def _joined(parts: Sequence[str], width: int) -> list[str]:
    """Parts side by side, in as many lines as they need; none is broken."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f" | {part}"
        else:
            lines.append(part)
    return lines


def _folded(text: str, width: int) -> list[Text]:
    """A text in at most two lines."""
    flat = " ".join(text.split())
    lines = textwrap.wrap(flat, width, max_lines=2, placeholder=" …", subsequent_indent="  ")
    return [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]


def upward(value: float, digits: int = 4) -> str:
    """An upper bound in few digits, rounded up: what is shown must still be a bound."""
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value)
    return f"{rounded.normalize():f}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _epsilon_of(record: TrialRecord, label: str = "ε ") -> str:
    """Upper bound of epsilon of the trial's costliest run, by the accountant that its plan is held against."""
    accountant = record.plan.accountant if record.plan else next(iter(record.epsilon), "")
    return f"{label}{upward(record.epsilon[accountant].upper)}" if accountant in record.epsilon else ""


def _duration(seconds: float) -> str:
    """``42 s``, ``3 min 05 s`` or ``2 h 10 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
