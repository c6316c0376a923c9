"""Reports: figures of a result, and one page that a person can read anywhere.

:func:`write` makes one self-contained HTML file of one search or several, with every figure as SVG and PNG beside it.
It reads run directories, finished or not, and changes nothing in them but the files that it writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from raydp.errors import InvalidValue, RaydpError
from raydp.search import comparison
from raydp.search.report.charts import Chart, Drawing, NotShown, Table, png_of, svg_of
from raydp.search.report.page import Figures, figures, page, shared_figures
from raydp.search.results import Result
from raydp.search.run_directory import atomic_file
from raydp.search.tracking import REPORT


def write(
    results: Sequence[Result],
    out: Path,
    *,
    pairs: Sequence[tuple[str, str]] = (),
    pictures: bool = True,
) -> list[Path]:
    """Write the page, and every figure as SVG and PNG into the directory ``<out without its suffix>_figures``.

    Args:
        results: of one search or several.
        out: the HTML file; its directory is made.
        pairs: further pairs of hyperparameters to show the first objective over.
        pictures: False writes the page alone.

    Returns:
        The files that were written, the page first.

    Raises:
        InvalidValue: no result, one twice, or a pair of hyperparameters that no search varies.
        RaydpError: a file cannot be written.
    """
    if not results:
        raise InvalidValue("DIR", [], "must be one or more run directories", "Name the directory of a search.")
    comparison.refuse_twins(results)
    _check_pairs(results, pairs)
    names = comparison.labels(results)
    drawn = [figures(result, pairs) for result in results]
    shared = shared_figures(list(zip(names, results, strict=True))) if len(results) > 1 else None
    content = page(results, drawn, shared)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(out) as temporary:
            temporary.write_text(content, encoding="utf-8")
        written = [out]
        if pictures:
            groups = {"": shared, **dict(zip(names, drawn, strict=True))} if shared else {"": drawn[0]}
            written += _pictures(out.with_name(f"{out.stem}_figures"), groups)
    except OSError as error:
        raise RaydpError(f"{out} cannot be written ({error.strerror or error}). Choose another --out.") from error
    return written


def _pictures(folder: Path, groups: Mapping[str, Figures | None]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    written = []
    for name, found in groups.items():
        prefix = re.sub(r"[^\w.-]+", "_", f"{name}_") if name else ""
        for chart in found.charts if found else ():
            for suffix, content in (
                ("svg", svg_of(chart.figure, name=chart.name, ground="white").encode()),
                ("png", png_of(chart.figure)),
            ):
                path = folder / f"{prefix}{chart.name}.{suffix}"
                path.write_bytes(content)
                written.append(path)
    return written


def _check_pairs(results: Sequence[Result], pairs: Sequence[tuple[str, str]]) -> None:
    from raydp import _validate

    known = sorted({name for result in results for trial in result.trials for name in trial.config})
    for names in pairs:
        for name in names:
            _validate.one_of("--pair", name, known)


__all__ = [
    "REPORT",
    "Chart",
    "Drawing",
    "Figures",
    "NotShown",
    "Table",
    "figures",
    "page",
    "png_of",
    "shared_figures",
    "svg_of",
    "write",
]
