"""Figures of a result: two hyperparameters against the metric, and what a trial reported step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from raydp import _validate
from raydp.errors import InvalidValue, UnknownName
from raydp.search.run_directory import RunDirectory, read_json_lines

if TYPE_CHECKING:
    from raydp.search.results import Result


def plot_splits(
    result: Result, x: str = "warmup_fraction", y: str = "warmup_share", metric: str | None = None
) -> Figure:
    """The metric over two hyperparameters: a heat map of a grid, or a dot a trial; see :mod:`raydp.search.report`.

    Args:
        result: of a search that varies both.
        x, y: numeric hyperparameters; by default the two splits of TP-TopK, E1/E and epsilon1/epsilon.
        metric: None takes the first objective.

    Raises:
        UnknownName: no complete trial has that hyperparameter.
        NotShown: fewer than three trials are complete, or a hyperparameter is not a number that varies.
    """
    from raydp.search.report import facts, search_charts

    names = sorted({name for trial in facts.scored(result, metric) for name in trial.config})
    for name in (x, y):
        _validate.one_of("hyperparameter", name, names)
    return search_charts.pair(result, x, y, metric).figure


def plot_steps(result: Result, key: str, names: Sequence[str] | None = None, *, seed: int = 0) -> Figure:
    """What one run of a trial reported, against the logical step: metrics and diagnostics such as ``lambda_t``.

    Args:
        key: of the trial.
        names: what to draw, one panel each; None draws everything but the active fractions of single layers.
        seed: position of the run.

    Raises:
        UnknownName: no such trial or name.
        InvalidValue: the run reported nothing.
    """
    from raydp.search.report import trial_charts

    _validate.one_of("trial", key, [trial.key for trial in result.trials])
    path = RunDirectory.open(result.directory).run_path(key, seed) / "metrics.jsonl"
    lines = read_json_lines(path) if path.exists() else []
    if not lines:
        raise InvalidValue("seed", seed, f"is a run of {key} that reported nothing", "Choose another run.")
    known = {name for line in lines for name in line["metrics"]}
    for name in names or ():
        if name not in known:
            raise UnknownName("name", name, known)
    shown = list(names) if names else sorted(name for name in known if not name.startswith("active_fraction."))
    return trial_charts.reported(lines, shown, title=f"{result.search['name']}, {key}, seed {seed}")
