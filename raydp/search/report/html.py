"""Pieces of HTML: escaped text, sortable tables, figures. Nothing here knows what a search is."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from raydp.search.records import finite
from raydp.search.report.charts import INK, LINE, MUTED, Chart, Table, number, svg_of

_LONG = 48  # characters; longer cells wrap


def text(value: object) -> str:
    """Escaped."""
    return html.escape(str(value))


def figure(chart: Chart, *, prefix: str = "", level: int = 3) -> str:
    """The picture with its title (a heading of that level), caption, text alternative, and the numbers behind it."""
    name = f"{prefix}{chart.name}"
    svg = svg_of(chart.figure, name=re.sub(r"[^\w-]", "-", name))
    for colour, variable in ((INK, "ink"), (MUTED, "muted"), (LINE, "line")):
        svg = svg.replace(colour, f"var(--{variable})")
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{text(chart.alt)}" ', 1)
    kind = ' class="wide"' if chart.wide else ""
    label = f"{chart.title}: figure"
    return (
        f'<figure{kind} id="{text(name)}"><h{level}>{text(chart.title)}</h{level}>'
        f'<div class="drawing scroll" tabindex="0" role="group" aria-label="{text(label)}">{svg}</div>'
        f"<figcaption>{text(chart.caption)}</figcaption>"
        + (details("Numbers", table(chart.table, label=f"{chart.title}: numbers")) if chart.table else "")
        + "</figure>"
    )


def picture(png: bytes, what: str) -> str:
    """A PNG inside the page, with its text alternative as the caption."""
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<figure class="wide"><img src="data:image/png;base64,{data}" alt="{text(what)}">'
        f"<figcaption>{text(what)}.</figcaption></figure>"
    )


def details(summary: str, content: str) -> str:
    """Something to open."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def table(
    content: Table, *, label: str, caption: str | None = None, best: int | None = None, classes: str = "scroll tall"
) -> str:
    """A table that any column can sort; a column of numbers is aligned to the right.

    Args:
        content: headings and cells.
        label: what a screen reader calls it.
        caption: a line above it.
        best: position of the row that is set in bold.
        classes: of the box that scrolls.
    """
    numeric = [
        all(isinstance(_value(row[index]), int | float) or row[index] is None for row in content.rows)
        for index in range(len(content.columns))
    ]
    head = "".join(
        f'<th scope="col"{_aligned(right)}><button type="button">{_breakable(name)}</button></th>'
        if name
        else "<th></th>"
        for name, right in zip(content.columns, numeric, strict=True)
    )
    lines = []
    for place, row in enumerate(content.rows):
        cells = "".join(_cell(cell, right) for cell, right in zip(row, numeric, strict=True))
        lines.append(f"<tr{' class=best' if place == best else ''}>{cells}</tr>")
    said = f"<caption><span>{text(caption)}</span></caption>" if caption else ""
    return (
        f'<div class="{classes}" tabindex="0" role="region" aria-label="{text(label)}">'
        f"<table>{said}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def facts(items: Mapping[str, str]) -> str:
    """A list of terms and what they are; the values are HTML already."""
    return f'<dl class="facts">{"".join(f"<dt>{text(k)}</dt><dd>{v}</dd>" for k, v in items.items())}</dl>'


def code(value: object) -> str:
    """What one types, or a path."""
    return f"<code>{text(value)}</code>"


def listed(items: Sequence[str]) -> str:
    """A list; the items are HTML already."""
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _value(cell: Any) -> Any:
    value = cell[0] if isinstance(cell, tuple) else cell
    return str(value) if isinstance(value, bool) else value


def _breakable(name: str) -> str:
    """A heading that may be broken after each underscore, on paper."""
    return text(name).replace("_", "_<wbr>")


def _aligned(right: bool) -> str:
    return " class=n" if right else ""


def _cell(cell: Any, right: bool) -> str:
    value = _value(cell)
    if isinstance(cell, tuple):
        shown = str(cell[1])
    elif value is None:
        shown = "–"
    else:
        shown = number(value) if isinstance(value, float) else str(value)
    exact = "" if value is None or (isinstance(value, float) and finite(value) is None) else str(value)
    data = "" if exact == shown else f' data-v="{text(exact)}"'
    kind = " class=long" if len(shown) > _LONG else _aligned(right)
    return f"<td{kind}{data}>{text(shown)}</td>"
