"""Tables for notebooks: small, escaped, aligned to the left, as notebooks align cells to the right."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

_LEFT = 'style="text-align:left;vertical-align:top"'


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with a heading above each column."""
    top = "".join(f'<th scope="col" {_LEFT}>{html.escape(name)}</th>' for name in head)
    lines = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"


def facts(title: str, items: Mapping[str, str]) -> str:
    """A table of terms and what they are, without those that are empty; a line of a value is a line there."""
    lines = "".join(
        f'<tr><th scope="row" {_LEFT}>{html.escape(term)}</th>{_cell(value)}</tr>'
        for term, value in items.items()
        if value
    )
    return f"<table><caption {_LEFT}>{html.escape(title)}</caption><tbody>{lines}</tbody></table>"


def _cell(value: object) -> str:
    return f"<td {_LEFT}>{html.escape(str(value)).replace(chr(10), '<br>')}</td>"
