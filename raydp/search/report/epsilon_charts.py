"""Figures of what privacy costs: a metric against epsilon, over one search or several with different budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from raydp.search import comparison
from raydp.search.records import TrialRecord
from raydp.search.report import facts
from raydp.search.report.charts import (
    COLOURS,
    WIDE,
    WIDTH,
    Chart,
    NotShown,
    Table,
    canvas,
    short,
    single,
    spread,
    styled,
)
from raydp.search.results import Result

#: Distances of generated images from the held-out ones, as they are called in figures; the first one chooses trials.
DISTANCES: Mapping[str, str] = {"frechet": "Fréchet distance", "kid": "KID"}

Lines = Mapping[str, Sequence[tuple[float, TrialRecord]]]


@styled
def against_epsilon(results: Sequence[tuple[str, Result]], metric: str) -> Chart:
    """The best of each method at each budget: how much privacy costs.

    Raises:
        NotShown: the searches have one epsilon.
    """
    lines = _best(results, metric)
    if len(_epsilons(lines)) < 2:
        raise NotShown(f"{metric} is known at one epsilon only")
    figure, axes = single(height=3.2)
    _draw(axes, lines, metric)
    axes.set_ylabel(metric)
    axes.legend()
    rows = _rows(lines, [metric])
    return Chart(
        name=f"epsilon_{metric}",
        title=f"{metric} against ε",
        caption="The best trial of each method at each budget: a dot is a run, the line joins the means.",
        alt=f"{metric} of the best trial by epsilon: " + "; ".join(f"{m} {e:g}: {v[1]}" for m, e, _, v in rows) + ".",
        figure=figure,
        table=Table(columns=("method", "ε", "trial", f"{metric}, mean ± std"), rows=tuple(rows)),
    )


@styled
def distances(results: Sequence[tuple[str, Result]]) -> Chart:
    """How far generated images are from the held-out ones, against epsilon: Fréchet distance and KID.

    At each budget a method stands with the trial whose mean Fréchet distance is least; the KID is of the same trial.

    Args:
        results: (label, result) of searches whose task generates images. One budget gives a point a method.

    Raises:
        NotShown: no complete trial has such a metric.
    """
    names = [name for name in DISTANCES if any(name in t.metrics for _, result in results for t in result.ranked)]
    lines = _best(results, names[0]) if names else {}
    if not lines:
        raise NotShown("no trial generates images (that is the denoising task's)")
    figure = canvas(WIDE if len(names) > 1 else WIDTH, 3.3)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        _draw(panel, lines, name)
        panel.set_ylabel(f"{DISTANCES[name]} (less is better)")
    if len(lines) > 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=4)
    rows = _rows(lines, names)
    said = [
        f"{method} at {epsilon:g}: "
        + ", ".join(f"{DISTANCES[name]} {value[1]}" for name, value in zip(names, values, strict=True) if value)
        for method, epsilon, _, *values in rows
    ]
    title = " and ".join(word.removesuffix(" distance") for word in map(DISTANCES.__getitem__, names))
    return Chart(
        name="distances",
        title=f"{title} against ε",
        caption="A dot is a run, the line joins the means. Each method stands with the trial of the least mean "
        f"{DISTANCES[names[0]]} at each budget. In the vectors of EfficientNet-Lite0: no FID and no KID of other "
        "papers, and to be compared at equal numbers of images only.",
        alt=f"{title} of generated images by epsilon of a trial. " + "; ".join(said) + ".",
        figure=figure,
        table=Table(
            columns=("method", "ε", "trial", *(f"{DISTANCES[name]}, mean ± std" for name in names)), rows=tuple(rows)
        ),
        wide=len(names) > 1,
    )


def _best(results: Sequence[tuple[str, Result]], metric: str) -> dict[str, list[tuple[float, TrialRecord]]]:
    """Method -> (epsilon of a trial, the best trial there by that metric), epsilons rising."""
    best: dict[tuple[str, float], TrialRecord] = {}
    for _, result in results:
        sign = 1 if facts.objective(result, metric)[1] == "max" else -1
        for trial in result.ranked:
            if trial.mean(metric) is None:
                continue
            place = comparison.method_of(result, trial), result.budget.epsilon
            if place not in best or sign * facts.score(trial, metric) > sign * facts.score(best[place], metric):
                best[place] = trial
    lines: dict[str, list[tuple[float, TrialRecord]]] = {}
    for (method, epsilon), trial in best.items():
        lines.setdefault(method, []).append((epsilon, trial))
    return {method: sorted(members, key=lambda item: item[0]) for method, members in lines.items()}


def _epsilons(lines: Lines) -> list[float]:
    return sorted({epsilon for members in lines.values() for epsilon, _ in members})


def _draw(axes: Axes, lines: Lines, metric: str) -> None:
    """A line a method through the means, and a dot a run; methods stand a little apart where they share an epsilon."""
    ticks = _epsilons(lines)
    for index, (method, members) in enumerate(lines.items()):
        colour, factor = COLOURS[index % len(COLOURS)], 1.03 ** (index - (len(lines) - 1) / 2)
        for epsilon, trial in members:
            values = [value for value in trial.metrics.get(metric, ()) if value is not None]
            places = [epsilon * factor] * len(values)
            axes.plot(places, values, "o", color=colour, markersize=4, alpha=0.55, markeredgewidth=0)
        means = [(epsilon * factor, trial.mean(metric)) for epsilon, trial in members if trial.mean(metric) is not None]
        if means:
            axes.plot(
                *zip(*means, strict=True), "_-", color=colour, markersize=12, markeredgewidth=2, label=short(method, 14)
            )
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)
    axes.set_xlabel("ε of a trial")
    axes.grid(True)


def _rows(lines: Lines, metrics: Sequence[str]) -> list[tuple[Any, ...]]:
    """(method, epsilon, trial, and mean ± std of each metric)."""
    return [
        (
            method,
            epsilon,
            trial.key,
            *(
                None if (mean := trial.mean(name)) is None else (mean, spread(mean, trial.std(name)))
                for name in metrics
            ),
        )
        for method, members in lines.items()
        for epsilon, trial in members
    ]


__all__ = ["DISTANCES", "against_epsilon", "distances"]
