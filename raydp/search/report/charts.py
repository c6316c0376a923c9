"""What a figure of a report is: a picture, what it says in words, and the numbers behind it.

Pictures are drawn without pyplot, so that nothing global changes and threads do not matter. Their greys are
recognisable colours that the page replaces by those of the reader's theme.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from raydp.errors import RaydpError

P = ParamSpec("P")
R = TypeVar("R")

#: Ink, muted ink and lines on white; the page writes its own colours in their place.
INK, MUTED, LINE = "#1b2431", "#57626f", "#d5dbe1"
#: At least 3:1 against white and against the dark theme's ground, and told apart by the colour-blind.
COLOURS = ("#2f7fc1", "#d4691e", "#2a9467", "#a45fc9", "#c9485b", "#8a7a2f", "#3f95a3", "#7c8894")
BEST = "#d4691e"
WIDTH, WIDE = 4.7, 7.2  # inches; the page shows the narrow ones side by side
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",  # text stays text: smaller, selectable, in the page's font
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),  # type: ignore[attr-defined]
}


#: More marks than this are a picture inside the SVG: a browser builds each mark of an SVG one by one.
MANY = 300


class NotShown(RaydpError):
    """There is nothing that this figure could show; the message says why."""


class Drawing(Figure):
    """A matplotlib figure that shows itself in a notebook, whether or not ``%matplotlib`` was set, and once.

    IPython knows plain figures only after ``%matplotlib inline``. Both forms stand on white, as notebooks may be dark;
    an editor that shows no SVG (of a notebook that it does not trust, say) takes the PNG.
    """

    def _repr_svg_(self) -> str:
        return svg_of(self, ground="white")

    def _repr_png_(self) -> bytes:
        return png_of(self)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers behind a figure.

    Attributes:
        columns: headings.
        rows: cells: text, numbers, or None for what is missing; a tuple (value, text) sorts by the value.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure of a report.

    Attributes:
        name: of its files; a-z, 0-9 and '_'.
        title: what it shows, in a few words.
        caption: how to read it, and what it says here.
        alt: the text alternative: what one would say on the telephone.
        figure: the picture.
        table: the numbers, or None where they stand in the leaderboard.
        wide: whether it wants the page's whole width.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure = field(repr=False)
    table: Table | None = field(default=None, repr=False)
    wide: bool = False


def styled(function: Callable[P, R]) -> Callable[P, R]:
    """Draw in the report's style, whatever the user's matplotlib is set to."""

    @functools.wraps(function)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # leaves the backend alone
            matplotlib.rcParams.update(_STYLE)  # type: ignore[arg-type]
            return function(*args, **kwargs)

    return drawn


def canvas(width: float = WIDTH, height: float = 3.2) -> Drawing:
    """An empty figure; inches."""
    return Drawing(figsize=(width, height), layout="constrained")


def single(width: float = WIDTH, height: float = 3.2) -> tuple[Drawing, Axes]:
    """A figure with one panel."""
    figure = canvas(width, height)
    return figure, figure.subplots()


@styled
def svg_of(figure: Figure, *, name: str = "figure", ground: str = "none") -> str:
    """The figure as an SVG element that can stand in a page: no header, ids of its own."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", dpi=220, facecolor=ground, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[a-z]+(?:\.[a-z]+)?_\d+">', "<g>", text)  # nothing refers to these
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return re.sub(r">\s+<", "><", text).strip()


def png_of(figure: Figure) -> bytes:
    """The figure as a PNG on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, facecolor="white")
    return buffer.getvalue()


def plain_ticks(axis: Axis, candidates: Sequence[float] | None = None) -> None:
    """Numbers as people write them, also on a logarithmic scale; at the candidates where they are few."""
    values = sorted(set(candidates or ()))
    if 1 < len(values) <= 6:
        axis.set_major_locator(FixedLocator(values))
        axis.set_minor_locator(NullLocator())
    elif axis.get_scale() == "log":
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def window(values: Sequence[float], mode: str) -> tuple[float, float, int]:
    """(low, high, how many lie outside): what is worth seeing of a metric when a few trials collapsed.

    Tukey's outer fence on the bad side (the lower one for ``max``); everything where there are fewer than ten values.
    """
    low, high = min(values), max(values)
    if len(values) >= 10:
        first, third = np.quantile(values, [0.25, 0.75])
        fence = 3 * (third - first)
        if mode == "max":
            low = min((value for value in values if value >= first - fence), default=low)
        else:
            high = max((value for value in values if value <= third + fence), default=high)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    outside = sum(not low <= value <= high for value in values)
    return low - margin, high + margin, outside


def short(value: object, limit: int = 10) -> str:
    """A value as a tick label; long categories are cut in the middle, where names differ least."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = number(value) if isinstance(value, float) else str(value)
    if len(text) <= limit:
        return text
    head = (limit - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def shorts(values: Sequence[object], limit: int = 10) -> list[str]:
    """:func:`short` for each, made longer until different values look different."""
    longest = max((len(str(value)) for value in values), default=limit)
    while limit < longest and len({short(value, limit) for value in values}) < len(set(map(str, values))):
        limit += 1
    return [short(value, limit) for value in values]


def readable_on(ground: Sequence[float]) -> str:
    """Black or white, whichever contrasts more with a colour (red, green, blue in [0, 1]): at least 4.58 : 1."""
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in ground]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def number(value: float | None, digits: int = 4) -> str:
    """A number for people; – for a missing one."""
    return "–" if value is None else f"{value:.{digits}g}"


def spread(mean: float | None, std: float | None) -> str:
    """mean ± std; the std is left out where there is a single seed."""
    if mean is None:
        return "–"
    return number(mean) if std is None else f"{number(mean)} ± {number(std, 2)}"
