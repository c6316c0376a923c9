"""Figures of a search as a whole: its methods, its hyperparameters against the metric, and how it went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from raydp.errors import RaydpError
from raydp.search import comparison
from raydp.search.records import TrialRecord
from raydp.search.report import facts
from raydp.search.report.charts import (
    BEST,
    COLOURS,
    INK,
    LINE,
    MANY,
    MUTED,
    WIDE,
    WIDTH,
    Chart,
    NotShown,
    Table,
    canvas,
    number,
    plain_ticks,
    readable_on,
    short,
    shorts,
    single,
    spread,
    styled,
    window,
)
from raydp.search.results import Result
from raydp.search.spaces import Space

_CMAP = {"max": "viridis", "min": "viridis_r"}
_MAX_PANELS = 6
_MAX_GREY = 400  # lines behind the best ones; more is a grey wall


@styled
def methods(result: Result, metric: str | None = None) -> Chart:
    """Each method at its best trial: every seed a dot, the mean a bar.

    Raises:
        NotShown: the search has one method.
    """
    name, _ = facts.objective(result, metric)
    found = comparison.best_by_method(result)
    if len(found) < 2:
        raise NotShown("the search has one method")
    figure, axes = single(height=0.7 + 0.38 * len(found))
    rows: list[tuple[Any, ...]] = []
    for place, (method, trial) in enumerate(found.items()):
        values = [value for value in trial.metrics[name] if value is not None]
        mean, std = facts.score(trial, name), trial.std(name)
        axes.plot(values, [place] * len(values), "o", color=COLOURS[0], markersize=5.5, alpha=0.8, markeredgewidth=0)
        axes.plot([mean, mean], [place - 0.28, place + 0.28], color=INK, linewidth=2)
        rows.append((method, trial.key, (mean, spread(mean, std)), *values))
    axes.set_yticks(range(len(found)), shorts(list(found), 14))
    axes.invert_yaxis()
    axes.set_xlabel(name)
    axes.grid(axis="x")
    lead, runner_up = list(found)[:2]
    clear = comparison.method_differences(result)[0]
    word = "clearly ahead of" if clear.better == "first" else "first, but not clearly ahead of"
    text = f"{lead} is {word} {runner_up}."
    seeds = max(len(row) - 3 for row in rows)
    return Chart(
        name="methods",
        title="Each method at its best",
        caption=f"A dot is a seed, a bar the mean of the method's best trial. {text}",
        alt=f"{name} of each method at its best trial: "
        + "; ".join(f"{row[0]} {row[2][1]}" for row in rows)
        + f". {text}",
        figure=figure,
        table=Table(
            columns=("method", "best trial", f"{name}, mean ± std", *(f"seed {seed}" for seed in range(seeds))),
            rows=tuple((*row, *[None] * (seeds + 3 - len(row))) for row in rows),
        ),
    )


@styled
def pair(result: Result, x: str, y: str, metric: str | None = None) -> Chart:
    """The metric over two numeric hyperparameters, with the optimum and how sure it is.

    A grid becomes a heat map of means over the trials (and their seeds) of each cell; cells whose mean lies within one
    standard error of the best one's are framed as well. Scattered proposals are drawn one by one; the marked region
    holds the best tenth of them.

    Raises:
        NotShown: fewer than three trials, or a hyperparameter that is no number or does not vary.
    """
    name, mode = facts.objective(result, metric)
    trials = [trial for trial in facts.scored(result, name) if x in trial.config and y in trial.config]
    if len(trials) < 3:
        raise NotShown(f"fewer than three complete trials have {x} and {y}")
    for axis in (x, y):
        if axis not in facts.numeric(trials, [axis]):
            raise NotShown(f"{axis} is not a number that varies")
    sides = [sorted({float(trial.config[axis]) for trial in trials}) for axis in (x, y)]
    cells = {(float(trial.config[x]), float(trial.config[y])) for trial in trials}
    is_grid = len(cells) >= 0.5 * len(sides[0]) * len(sides[1]) and max(map(len, sides)) <= 12
    return (_heat_map if is_grid else _scatter)(result, trials, x, y, name, mode)


def _heat_map(result: Result, trials: Sequence[TrialRecord], x: str, y: str, name: str, mode: str) -> Chart:
    columns, lines = (sorted({float(trial.config[axis]) for trial in trials}) for axis in (x, y))
    cells: dict[tuple[float, float], list[float]] = {}
    for trial in trials:
        values = [value for value in trial.metrics[name] if value is not None]
        cells.setdefault((float(trial.config[x]), float(trial.config[y])), []).extend(values)
    means = {cell: float(np.mean(values)) for cell, values in cells.items()}
    sign = 1 if mode == "max" else -1
    best = max(means, key=lambda cell: sign * means[cell])
    close = [cell for cell in cells if cell != best and _within_error(cells[best], cells[cell])]
    low, high = min(means.values()), max(means.values())
    figure, axes = single(height=1.1 + 0.62 * len(lines))
    image = np.full((len(lines), len(columns)), np.nan)
    for (a, b), mean in means.items():
        image[lines.index(b), columns.index(a)] = mean
    drawn = axes.imshow(image, cmap=_CMAP[mode], aspect="auto", origin="lower", vmin=low, vmax=high)
    rows = []
    for (a, b), values in sorted(cells.items()):
        place = columns.index(a), lines.index(b)
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        colour = readable_on(tuple(drawn.to_rgba(np.asarray(means[a, b])))[:3])
        axes.text(
            *place,
            number(means[a, b]) + ("" if std is None else f"\n± {number(std, 2)}"),
            ha="center",
            va="center",
            fontsize=8.5 if len(columns) <= 5 else 6.5,
            color=colour,
        )
        if (a, b) == best or (a, b) in close:
            style = {"edgecolor": BEST, "linewidth": 3} if (a, b) == best else {"edgecolor": BEST, "linestyle": ":"}
            axes.add_patch(_frame((place[0] - 0.46, place[1] - 0.46), 0.92, 0.92, **{"linewidth": 2, **style}))
        mark = "best" if (a, b) == best else "not told apart from the best" if (a, b) in close else ""
        rows.append((a, b, (means[a, b], spread(means[a, b], std)), len(values), mark))
    axes.set_xticks(range(len(columns)), [number(value, 3) for value in columns])
    axes.set_yticks(range(len(lines)), [number(value, 3) for value in lines])
    axes.set(xlabel=_axis(x), ylabel=_axis(y))
    axes.spines[:].set_visible(False)
    figure.colorbar(drawn, label=name, fraction=0.05, pad=0.03).outline.set_visible(False)
    where = f"{x} = {number(best[0], 3)}, {y} = {number(best[1], 3)}"
    counts = {len(values) for values in cells.values()}
    if len(counts) == 1 and counts == {1}:
        doubt = "Each cell is one run, so nothing says how far chance carried it."
    elif close:
        doubt = f"{len(close)} further cell{'s are' if len(close) > 1 else ' is'} within one standard error (dotted)."
    else:
        doubt = "No other cell is within one standard error."
    edge = [
        axis
        for axis, value, side in ((x, best[0], columns), (y, best[1], lines))
        if len(side) > 2 and value in (side[0], side[-1])
    ]
    border = (
        f" The optimum lies on the border of {' and '.join(edge)}: a wider space may hold a better one." if edge else ""
    )
    return Chart(
        name=f"pair_{x}_{y}",
        title=f"{_axis(x)} × {_axis(y)}",
        caption=f"Mean ± std of {name} over the runs of a cell. Best (framed): {where}. {doubt}{border}",
        alt=f"Heat map of {name} over {x} and {y}. Best {number(means[best])} at {where}; "
        f"worst {number(low if mode == 'max' else high)}. {doubt}{border}",
        figure=figure,
        table=Table(columns=(x, y, f"{name}, mean ± std", "runs", ""), rows=tuple(rows)),
    )


def _within_error(best: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two cells' means differ by no more than the standard error of their difference."""
    if min(len(best), len(other)) < 2:
        return False
    error = math.sqrt(np.var(best, ddof=1) / len(best) + np.var(other, ddof=1) / len(other))
    return abs(float(np.mean(best) - np.mean(other))) <= error


def _scatter(result: Result, trials: Sequence[TrialRecord], x: str, y: str, name: str, mode: str) -> Chart:
    sign = 1 if mode == "max" else -1
    ordered = sorted(trials, key=lambda trial: sign * facts.score(trial, name))  # the best is drawn last
    best = max(trials, key=lambda trial: sign * facts.score(trial, name))
    figure, axes = single(height=3.5)
    drawn = axes.scatter(
        [float(trial.config[x]) for trial in ordered],
        [float(trial.config[y]) for trial in ordered],
        c=[facts.score(trial, name) for trial in ordered],
        s=48 if len(trials) <= 100 else 16,
        cmap=_CMAP[mode],
        norm=_robust([facts.score(trial, name) for trial in ordered], mode),
        linewidths=0.4,
        edgecolors=LINE,
        rasterized=len(trials) > MANY,
    )
    spot = float(best.config[x]), float(best.config[y])
    axes.scatter(*spot, s=170, facecolors="none", edgecolors=BEST, linewidths=2)
    top = ordered[-max(3, round(0.1 * len(ordered))) :]
    ranges = []
    for axis in (x, y):
        values = [float(trial.config[axis]) for trial in top]
        ranges.append((min(values), max(values)))
        if facts.is_logarithmic(result, axis, [float(trial.config[axis]) for trial in trials]):
            axes.set(**{f"{'x' if axis == x else 'y'}scale": "log"})
        plain_ticks(axes.xaxis if axis == x else axes.yaxis)
    (x0, x1), (y0, y1) = ranges
    axes.add_patch(_frame((x0, y0), x1 - x0, y1 - y0, edgecolor=BEST, linestyle=":", linewidth=1.4))
    axes.set(xlabel=_axis(x), ylabel=_axis(y))
    axes.grid(True)
    figure.colorbar(drawn, label=name, fraction=0.05, pad=0.03).outline.set_visible(False)
    where = f"{x} = {number(spot[0], 3)}, {y} = {number(spot[1], 3)}"
    region = f"{x} {number(x0, 3)} to {number(x1, 3)}, {y} {number(y0, 3)} to {number(y1, 3)}"
    return Chart(
        name=f"pair_{x}_{y}",
        title=f"{_axis(x)} × {_axis(y)}",
        caption=f"A dot is a trial. Best (ringed): {where}. The {len(top)} best trials (dotted) span {region}. "
        "Other hyperparameters vary along.",
        alt=f"Scatter of {len(trials)} trials over {x} and {y}, coloured by {name}. Best {scored_as(best, name)} at "
        f"{where}. The {len(top)} best span {region}.",
        figure=figure,
    )


@styled
def slices(result: Result, metric: str | None = None) -> Chart:
    """The metric against each numeric hyperparameter, one colour a method.

    Raises:
        NotShown: no numeric hyperparameter varies.
    """
    name, mode = facts.objective(result, metric)
    trials = facts.scored(result, name)
    names = facts.numeric(trials, facts.varying(result))[:_MAX_PANELS]
    if not names:
        raise NotShown("no numeric hyperparameter varies among the complete trials")
    groups: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        groups.setdefault(comparison.method_of(result, trial), []).append(trial)
    across = min(2, len(names))
    down = math.ceil(len(names) / across)
    figure = canvas(WIDTH if len(names) == 1 else WIDE, 0.8 + 2.3 * down)
    panels = figure.subplots(down, across, squeeze=False, sharey=True).flatten()
    low, high, outside = window([facts.score(trial, name) for trial in trials], mode)
    rows: list[tuple[Any, ...]] = []
    for panel, axis in zip(panels, names, strict=False):
        alone = len(names) == 1
        for place, (method, members) in enumerate(groups.items()):
            members = sorted((t for t in members if axis in t.config), key=lambda t: float(t.config[axis]))
            where = [float(trial.config[axis]) for trial in members]
            means = [facts.score(trial, name) for trial in members]
            colour = COLOURS[place % len(COLOURS)]
            if alone and len(set(where)) == len(where) and members:
                panel.errorbar(
                    where,
                    means,
                    yerr=[trial.std(name) or 0.0 for trial in members],
                    color=colour,
                    marker="o",
                    markersize=4,
                    capsize=2,
                    label=short(method, 14),
                )
            else:
                size = 22 if len(members) <= 100 else 7
                panel.scatter(
                    where,
                    means,
                    color=colour,
                    s=size,
                    alpha=0.7,
                    linewidths=0,
                    label=short(method, 14),
                    rasterized=len(members) > MANY,
                )
            if alone:
                rows += [
                    (method, t.key, float(t.config[axis]), (facts.score(t, name), scored_as(t, name))) for t in members
                ]
        values = [float(trial.config[axis]) for trial in trials if axis in trial.config]
        if facts.is_logarithmic(result, axis, values):
            panel.set_xscale("log")
        plain_ticks(panel.xaxis, values)
        panel.set_ylim(low, high)
        panel.set_xlabel(_axis(axis))
        panel.grid(True)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    panels[0].set_ylabel(name)
    if len(groups) > 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(4, len(groups)))
    best = result.ranked[0] if name == result.objectives[0][0] else max(trials, key=lambda t: facts.score(t, name))
    at = ", ".join(f"{axis} = {number(float(best.config[axis]), 3)}" for axis in names if axis in best.config)
    bars = " Bars are the std over the seeds." if len(names) == 1 else " A dot is a trial."
    return Chart(
        name="slices",
        title=f"{name} against {'each hyperparameter' if len(names) > 1 else _axis(names[0])}",
        caption=f"Best at {at}.{bars}{_outside(outside)}",
        alt=f"{name} against {', '.join(names)} for {', '.join(groups)}. Best {scored_as(best, name)} at {at}.",
        figure=figure,
        table=Table(columns=("method", "trial", names[0], f"{name}, mean ± std"), rows=tuple(rows)) if rows else None,
        wide=len(names) > 1,
    )


@styled
def parallel(result: Result, metric: str | None = None) -> Chart:
    """Parallel coordinates: a line a trial through its hyperparameters to the metric; the best ones in colour.

    Raises:
        NotShown: fewer than two trials or two varying hyperparameters.
    """
    name, mode = facts.objective(result, metric)
    trials = facts.scored(result, name)
    names = _varying(result, trials)
    if len(trials) < 2 or len(names) < 2:
        raise NotShown("it takes two complete trials and two varying hyperparameters")
    sign = 1 if mode == "max" else -1
    ordered = sorted(trials, key=lambda trial: sign * facts.score(trial, name))
    top = max(1, min(10, len(trials) // 10 or 1))
    shown = [*ordered[:-top][-_MAX_GREY:], *ordered[-top:]]
    figure, axes = single(WIDE, 3.6)
    heights = np.empty((len(trials), len(names) + 1))
    position = {trial.key: index for index, trial in enumerate(trials)}
    for column, axis in enumerate(names):
        heights[:, column] = _axis_heights(axes, result, trials, axis, column)
    low, high, _ = window([facts.score(trial, name) for trial in trials], mode)
    values = [min(max(facts.score(trial, name), low), high) for trial in trials]
    heights[:, -1] = _scale(values, logarithmic=False)
    _ticks(axes, len(names), [0, 0.5, 1], [number(_unscale(values, at), 3) for at in (0, 0.5, 1)])
    across = np.arange(len(names) + 1)
    paths = [np.column_stack([across, heights[position[trial.key]]]) for trial in shown]
    thin, alpha = (0.8, 0.4) if len(trials) <= 100 else (0.5, 0.15)
    axes.add_collection(
        LineCollection(paths[:-top], colors=MUTED, linewidths=thin, alpha=alpha, rasterized=len(paths) > MANY)
    )
    axes.add_collection(LineCollection(paths[-top:-1], colors=COLOURS[0], linewidths=1.4, alpha=0.9))
    axes.add_collection(LineCollection(paths[-1:], colors=BEST, linewidths=2.8))
    axes.set(xlim=(-0.15, len(names) + 0.45), ylim=(-0.04, 1.04))
    axes.set_xticks(across, [short(axis, 16) for axis in (*names, name)], rotation=0 if len(names) < 5 else 20)
    axes.tick_params(axis="x", length=0)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    for place in across:
        axes.axvline(float(place), color=MUTED, linewidth=0.7, zorder=0)
    best = ordered[-1]
    settings = ", ".join(f"{axis} {_value(best.config.get(axis))}" for axis in names)
    hidden = len(trials) - len(shown)
    left = f" The {hidden} worst trials are not drawn." if hidden > 0 else ""
    others = f", blue the {top - 1} next" if top > 1 else ""
    return Chart(
        name="parallel",
        title="Parallel coordinates",
        caption=f"A line is a trial; orange is the best{others}. Best: {settings}.{left}",
        alt=f"Parallel coordinates of {len(shown)} trials over {', '.join(names)} and {name}. Best: {settings}, "
        f"{name} {scored_as(best, name)}.",
        figure=figure,
        wide=True,
    )


def _axis_heights(axes: Any, result: Result, trials: Sequence[TrialRecord], axis: str, column: int) -> list[float]:
    """Where each trial crosses a vertical axis, in [0, 1]; draws the axis's labels. Half is for what a trial lacks."""
    values = [trial.config.get(axis) for trial in trials]
    present = [value for value in values if value is not None]
    if all(facts.is_number(value) for value in present) and len(set(present)) > 1:
        numbers = [float(value) for value in present]  # type: ignore[arg-type]
        logarithmic = facts.is_logarithmic(result, axis, numbers)
        scaled = iter(_scale(numbers, logarithmic=logarithmic))
        at = (0, 0.5, 1)
        _ticks(axes, column, at, [number(_unscale(numbers, part, logarithmic=logarithmic), 3) for part in at])
        heights = [next(scaled) if value is not None else -0.03 for value in values]
    else:
        kinds = sorted({str(value) for value in values})
        gap = max(1, len(kinds) - 1)
        _ticks(axes, column, [index / gap for index in range(len(kinds))], shorts(kinds))
        heights = [kinds.index(str(value)) / gap for value in values]
    return heights


def _scale(values: Sequence[float], *, logarithmic: bool) -> list[float]:
    moved = np.log(values) if logarithmic else np.asarray(values, dtype=float)
    low, high = moved.min(), moved.max()
    return list((moved - low) / (high - low) if high > low else np.full(len(moved), 0.5))


def _unscale(values: Sequence[float], part: float, *, logarithmic: bool = False) -> float:
    low, high = min(values), max(values)
    return float(low * (high / low) ** part if logarithmic else low + part * (high - low))


def _ticks(axes: Any, column: int, heights: Sequence[float], texts: Sequence[str]) -> None:
    for height, text in zip(heights, texts, strict=True):
        axes.annotate(
            text, (column, height), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5, color=INK
        )


@styled
def importance(result: Result, metric: str | None = None) -> Chart:
    """How much each hyperparameter mattered, by Optuna's PED-ANOVA (Watanabe et al., IJCAI 2023).

    Raises:
        NotShown: fewer than four complete trials, or Optuna refuses.
    """
    name, mode = facts.objective(result, metric)
    trials = facts.scored(result, name)
    names = _varying(result, trials)
    if len(trials) < 4 or len(names) < 2:
        raise NotShown("it takes four complete trials and two varying hyperparameters")
    found = _importances(result, trials, names, name, mode)
    listed = sorted(found.items(), key=lambda item: item[1])
    figure, axes = single(height=0.8 + 0.34 * len(listed))
    axes.barh([short(axis, 18) for axis, _ in listed], [value for _, value in listed], color=COLOURS[0], height=0.62)
    for place, (_, value) in enumerate(listed):
        axes.annotate(f"{value:.0%}", (value, place), xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.12 * max(found.values()))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
    first = listed[-1]
    few = " With so few trials it is a hint." if len(trials) < 20 else ""
    return Chart(
        name="importance",
        title="Which hyperparameter mattered",
        caption=f"Share of what tells the best tenth of the trials from the rest (Optuna's PED-ANOVA), "
        f"over {len(trials)} trials.{few}",
        alt=f"Importance of each hyperparameter for {name}: "
        + ", ".join(f"{axis} {value:.0%}" for axis, value in reversed(listed))
        + f". {first[0]} mattered most.{few}",
        figure=figure,
        table=Table(
            columns=("hyperparameter", "importance"),
            rows=tuple((axis, (value, f"{value:.1%}")) for axis, value in reversed(listed)),
        ),
    )


def leading_pair(result: Result) -> tuple[str, str] | None:
    """The two numeric hyperparameters that mattered most; None if fewer than two vary."""
    name, mode = facts.objective(result)
    trials = list(result.ranked)
    names = facts.numeric(trials, facts.varying(result))
    if len(names) > 2 and len(trials) >= 4:
        try:
            found = _importances(result, trials, _varying(result, trials), name, mode)
        except NotShown:
            return names[0], names[1]
        names = sorted(names, key=lambda axis: -found.get(axis, 0.0))
    return (names[0], names[1]) if len(names) >= 2 else None


def _varying(result: Result, trials: Sequence[TrialRecord]) -> list[str]:
    """Hyperparameters that vary among these trials."""
    return [axis for axis in facts.varying(result) if len({repr(trial.config.get(axis)) for trial in trials}) > 1]


def _importances(
    result: Result, trials: Sequence[TrialRecord], names: Sequence[str], metric: str, mode: str
) -> dict[str, float]:
    """Optuna's importances, which add up to 1. Raises NotShown where it has none."""
    study = _study(result, trials, names, metric, mode)
    try:
        found = optuna.importance.get_param_importances(study)
    except (ValueError, RuntimeError) as error:
        raise NotShown(f"Optuna cannot tell: {error}") from error
    if not found or not all(map(math.isfinite, found.values())) or sum(found.values()) == 0:
        raise NotShown("Optuna finds no difference between the hyperparameters")
    return found


def _study(result: Result, trials: Sequence[TrialRecord], names: Sequence[str], metric: str, mode: str) -> optuna.Study:
    """The trials as Optuna knows them, with the distributions of the space, or those of the values seen."""
    stored = (result.search.get("space") or {}) if result.search.get("space", {}).get("function") is None else {}
    known: dict[str, Any] = {}
    if stored:
        try:
            known = dict(Space.from_json(stored).distributions)
        except (RaydpError, KeyError, ValueError):  # written by another Optuna
            known = {}
    for axis in names:
        values = [trial.config[axis] for trial in trials if axis in trial.config]
        if axis not in known or not all(known[axis]._contains(known[axis].to_internal_repr(v)) for v in values):
            known[axis] = _seen(values)
    logger = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(direction="maximize" if mode == "max" else "minimize")
    finally:
        optuna.logging.set_verbosity(logger)
    study.add_trials(
        optuna.trial.create_trial(
            params={axis: trial.config[axis] for axis in names if axis in trial.config},
            distributions={axis: known[axis] for axis in names if axis in trial.config},
            value=facts.score(trial, metric),
        )
        for trial in trials
    )
    return study


def _seen(values: Sequence[Any]) -> optuna.distributions.BaseDistribution:
    if len(set(map(repr, values))) > 1 and all(facts.is_number(value) for value in values):
        return optuna.distributions.FloatDistribution(float(min(values)), float(max(values)))
    unique = list({repr(value): value for value in values}.values())
    return optuna.distributions.CategoricalDistribution(unique)


@styled
def progress(result: Result, metric: str | None = None) -> Chart:
    """How the search went: each trial in the order of the proposals, and the best so far.

    Raises:
        NotShown: fewer than five complete trials.
    """
    name, mode = facts.objective(result, metric)
    trials = facts.scored(result, name)
    if len(trials) < 5:
        raise NotShown("it takes five complete trials")
    figure, axes = single(height=2.8)
    numbers, values = [trial.number for trial in trials], [facts.score(trial, name) for trial in trials]
    better = np.maximum if mode == "max" else np.minimum
    axes.scatter(
        numbers,
        values,
        s=20 if len(trials) <= 100 else 6,
        color=COLOURS[0],
        linewidths=0,
        label="trial",
        rasterized=len(trials) > MANY,
    )
    so_far = better.accumulate(values)
    axes.step([*numbers, numbers[-1] + 0.5], [*so_far, so_far[-1]], where="post", color=BEST, label="best so far")
    lost = [trial for trial in result.trials if trial.finished and trial.state != "complete"]
    for state, marker in (("infeasible", "|"), ("failed", "x"), ("diverged", "x")):
        those = [trial.number for trial in lost if trial.state == state]
        if those:
            axes.plot(
                those,
                [0.0] * len(those),
                marker,
                transform=axes.get_xaxis_transform(),
                color=MUTED,
                label=state,
                clip_on=False,
                linestyle="none",
            )
    low, high, outside = window(values, mode)
    axes.set(xlabel="trial", ylabel=name, ylim=(low, high))
    axes.grid(axis="y")
    figure.legend(loc="outside upper left", ncols=4)
    last = int(numbers[int(np.argmax(so_far == so_far[-1]))])
    return Chart(
        name="progress",
        title="Best so far",
        caption=f"The best trial is number {last} of 0 to {result.trials[-1].number}.{_outside(outside)}",
        alt=f"{name} of {len(trials)} complete trials in the order of proposals. The best so far rises from "
        f"{number(so_far[0])} to {number(so_far[-1])}, reached by trial {last}.",
        figure=figure,
    )


@styled
def tradeoff(result: Result) -> Chart:
    """Two objectives against each other, the Pareto front in colour.

    Raises:
        NotShown: the search has one objective, or no trial has both.
    """
    if len(result.objectives) < 2:
        raise NotShown("the search has one objective")
    (a, _), (b, _) = result.objectives[:2]
    if not result.ranked:
        raise NotShown("no trial is complete with finite objectives")
    front = sorted(result.pareto, key=lambda trial: facts.score(trial, a))
    figure, axes = single()
    axes.scatter(
        [facts.score(t, a) for t in result.ranked], [facts.score(t, b) for t in result.ranked], s=16, color=MUTED
    )
    axes.plot([facts.score(t, a) for t in front], [facts.score(t, b) for t in front], "o-", color=BEST)
    axes.set(xlabel=a, ylabel=b)
    axes.grid(True)
    return Chart(
        name="tradeoff",
        title=f"{a} against {b}",
        caption=f"Orange: the {len(front)} trials that no other one beats in both.",
        alt=f"{b} against {a} of {len(result.ranked)} trials; on the front: {', '.join(t.key for t in front)}.",
        figure=figure,
        table=Table(
            columns=("trial on the front", a, b),
            rows=tuple((t.key, facts.score(t, a), facts.score(t, b)) for t in front),
        ),
    )


def _outside(count: int) -> str:
    """What a caption says of collapsed trials."""
    return f" {count} far worse trial{'s lie' if count > 1 else ' lies'} outside the picture." if count else ""


def scored_as(trial: TrialRecord, metric: str) -> str:
    """mean ± std of a trial."""
    return spread(trial.mean(metric), trial.std(metric))


def _frame(corner: tuple[float, float], width: float, height: float, **style: Any) -> Any:
    """An empty rectangle."""
    return Rectangle(corner, width, height, facecolor="none", **style)


def _robust(values: Sequence[float], mode: str) -> Normalize:
    """Colours for the better four fifths: a few collapsed trials must not take the whole scale."""
    low, high = min(values), max(values)
    if mode == "max":
        low = float(np.quantile(values, 0.2)) if len(values) > 9 else low
    else:
        high = float(np.quantile(values, 0.8)) if len(values) > 9 else high
    return Normalize(low, high, clip=True)


def _axis(name: str) -> str:
    """A hyperparameter's name, with the symbol that papers use."""
    symbol = {"warmup_fraction": "E1/E", "warmup_share": "ε1/ε", "active_ratio": "ρ"}.get(name)
    return f"{name} ({symbol})" if symbol else name


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else "–" if value is None else str(value)
