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
    """Complete trials over two hyperparameters, coloured by the metric's mean over the seeds; the best is ringed.

    Args:
        result: of a search that varies both.
        x, y: numeric hyperparameters; by default the two splits of TP-TopK, E1/E and epsilon1/epsilon.
        metric: None takes the first objective.

    Raises:
        UnknownName: no trial has that hyperparameter or metric.
        InvalidValue: no trial is complete, or a value is not a number.
    """
    chosen = result.objectives[0][0] if metric is None else metric
    done = [trial for trial in result.trials if trial.state == "complete" and trial.mean(chosen) is not None]
    if not done:
        raise InvalidValue("metric", chosen, "is known for no complete trial", "Wait for trials, or choose another.")
    names = sorted({name for trial in done for name in trial.config})
    points = []
    for name in (x, y):
        _validate.one_of("hyperparameter", name, names)
        values = [trial.config.get(name) for trial in done]
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            raise InvalidValue(name, values[0], "must be a number in every trial", "Choose a numeric hyperparameter.")
        points.append([float(value) for value in values])  # type: ignore[arg-type]
    scores = [trial.mean(chosen) or 0.0 for trial in done]
    largest = dict(result.objectives).get(chosen, "max") == "max"
    best = scores.index(max(scores) if largest else min(scores))
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    drawn = axes.scatter(
        points[0], points[1], c=scores, s=90, cmap="viridis" if largest else "viridis_r", edgecolors="white"
    )
    axes.scatter(points[0][best], points[1][best], s=260, facecolors="none", edgecolors="crimson", linewidths=2)
    axes.annotate(done[best].key, (points[0][best], points[1][best]), textcoords="offset points", xytext=(12, 8))
    figure.colorbar(drawn, label=chosen)
    axes.set(xlabel=x, ylabel=y, title=f"{result.search['name']}: {len(done)} trials, best ringed")
    return figure


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
    figure = Figure(figsize=(6, 1.8 * len(shown) + 0.6), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for panel, name in zip(panels, shown, strict=True):
        drawn = [(line["step"], line["metrics"][name]) for line in lines if name in line["metrics"]]
        panel.plot(*zip(*drawn, strict=True), marker="o", markersize=3)
        panel.set_ylabel(name)
    panels[-1].set_xlabel("logical step")
    figure.suptitle(f"{result.search['name']}, {key}, seed {seed}")
    return figure
