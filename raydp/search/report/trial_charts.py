"""Figures of trials: what they spent, what they reported step by step, what their methods did, and what they cost."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raydp.privacy import accountants
from raydp.privacy.plan import Plan
from raydp.search import comparison
from raydp.search.records import TrialRecord
from raydp.search.report import facts
from raydp.search.report.charts import (
    COLOURS,
    INK,
    MUTED,
    WIDE,
    Chart,
    Drawing,
    NotShown,
    Table,
    canvas,
    number,
    short,
    single,
    spread,
    styled,
    window,
)
from raydp.search.results import Result

_MAX_BARS = 40  # of the trials that are shown one by one, the best ones
_CURVES, _BRIGHT = 200, 5
#: Diagnostics of DP-NGD, with what each says.
SCHEDULE = {
    "lambda_t": "floor λ_t",
    "clamped_fraction": "clamped fraction",
    "d_eff": "effective dimension",
    "step_ratio": "step ratio r_t",
}
_SUPPORT, _NULL = "proxy_concentration", "proxy_concentration_null"


@styled
def budget(result: Result) -> Chart:
    """Where each trial's epsilon went, phase by phase, and what splitting by addition would have wasted.

    A phase's bar is the epsilon that it would spend alone, at the plan's delta. Bars of a trial add up to more than
    the budget, because losses of different phases rarely all go wrong together: the composition of them spends the
    budget exactly. Addition (basic composition, Dwork et al. 2006) would have allowed the last phase only what the
    shares of the others leave.

    Raises:
        NotShown: no trial has a plan of several phases.
    """
    ranked = list(result.ranked) or [trial for trial in result.trials if trial.plan is not None]
    planned = [trial for trial in ranked if trial.plan is not None]
    several = [trial for trial in planned if trial.plan is not None and len(trial.plan.phases) > 1]
    if not several:
        raise NotShown("no trial's budget is split between phases")
    shown = planned[:_MAX_BARS]
    if not any(len(trial.plan.phases) > 1 for trial in shown if trial.plan):
        shown = several[:_MAX_BARS]
    names = list(dict.fromkeys(phase.name for trial in shown if trial.plan for phase in trial.plan.phases))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    figure, axes = single(WIDE, 3.0)
    rows: list[tuple[Any, ...]] = []
    waste = []
    for place, trial in enumerate(shown):
        assert trial.plan is not None
        alone, bottom = _alone(trial.plan), 0.0
        for name, epsilon in alone.items():
            axes.bar(place, epsilon, bottom=bottom, color=colours[name], width=0.72)
            bottom += epsilon
        lost = bottom - trial.plan.budget.epsilon if len(alone) > 1 else 0.0
        waste.append(lost)
        rows.append((trial.key, *(alone.get(name) for name in names), bottom, trial.plan.epsilon.upper, lost))
    planned_epsilon = result.budget.epsilon
    over = [place for place, lost in enumerate(waste) if lost > 0]
    hatch: dict[str, Any] = {"facecolor": "none", "edgecolor": "#ffffff", "hatch": "////", "linewidth": 0}
    axes.bar(over, [waste[place] for place in over], bottom=[planned_epsilon] * len(over), width=0.72, **hatch)
    axes.axhline(planned_epsilon, color=INK, linewidth=1.6)
    for name in names:
        axes.bar(0, 0, color=colours[name], label=name)
    axes.plot([], [], color=INK, linewidth=1.6, label=f"composed: ε = {planned_epsilon:g}")
    figure.legend(loc="outside upper left", ncols=len(names) + 1)
    axes.set_xlim(-0.6, len(shown) - 0.4)
    axes.set_xticks(range(len(shown)), [trial.key for trial in shown], rotation=90 if len(shown) > 12 else 0)
    axes.tick_params(axis="x", length=0, labelsize=7.5)
    axes.set_ylabel("ε of each phase alone")
    axes.grid(axis="y")
    split = [lost for lost, trial in zip(waste, shown, strict=True) if trial.plan and len(trial.plan.phases) > 1]
    low, high = min(split), max(split)
    worth = number(high, 3) if np.isclose(low, high) else f"{number(low, 3)} to {number(high, 3)}"
    which = f"the {len(shown)} best trials" if len(shown) < len(planned) else "every trial"
    text = (
        f"Stacked, the phases alone reach above the line; composed they spend exactly {planned_epsilon:g}. Splitting "
        f"by addition would have wasted what is above it (hatched): ε {worth} a trial."
    )
    return Chart(
        name="budget",
        title="Where the budget went",
        caption=f"{text} Shown: {which}.",
        alt=f"A bar for {which}: epsilon of {', '.join(names)} alone, stacked. {text}",
        figure=figure,
        table=Table(
            columns=(
                "trial",
                *(f"ε {name} alone" for name in names),
                "added up",
                "composed, at most",
                "addition wastes",
            ),
            rows=tuple(rows),
        ),
        wide=True,
    )


def _alone(plan: Plan) -> dict[str, float]:
    """Epsilon of each phase alone, upper bounds: by the plan's accountant at the budget's delta."""
    return {
        phase.name: _epsilon_alone(phase.mechanism, plan.budget.delta, plan.budget.adjacency, plan.accountant)
        for phase in plan.phases
    }


@functools.lru_cache(maxsize=4096)
def _epsilon_alone(mechanism: Any, delta: float, adjacency: Any, accountant: str) -> float:
    return accountants.epsilon([mechanism], delta=delta, adjacency=adjacency, accountant=accountant).upper


@styled
def curves(result: Result, metric: str | None = None) -> Chart:
    """The metric while training: the best trials in colour, the others grey; means over the seeds.

    Raises:
        NotShown: every run reported once.
    """
    name, mode = facts.objective(result, metric)
    ranked = list(result.ranked)
    started = [trial for trial in result.trials if trial not in ranked] if len(ranked) < _BRIGHT else []
    shown = [*ranked, *started][:_CURVES]
    drawn: list[tuple[TrialRecord, list[tuple[int, float]]]] = []
    for trial in shown:
        points = _mean_series(result, trial.key, name)
        if len(points) > 1:
            drawn.append((trial, points))
    if not drawn:
        raise NotShown(f"no run reported {name} more than once (reports = {result.search.get('reports')})")
    figure, axes = single(height=3.2)
    for place, (trial, points) in reversed(list(enumerate(drawn))):
        bright = place < _BRIGHT
        axes.plot(
            *zip(*points, strict=True),
            color=COLOURS[place % len(COLOURS)] if bright else MUTED,
            linewidth=(2.4 if place == 0 else 1.4) if bright else 0.6,
            alpha=1 if bright else 0.35,
            label=trial.key if bright else None,
            zorder=3 if bright else 1,
        )
    low, high, _ = window([value for _, points in drawn for _, value in points], mode)
    axes.set(xlabel="logical step", ylabel=name, ylim=(low, high))
    axes.grid(True)
    handles, texts = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], texts[::-1])
    lead, points = drawn[0]
    return Chart(
        name="curves",
        title="Learning curves",
        caption=f"{name} on the hold-out set, means over the seeds; the {min(_BRIGHT, len(drawn))} best in colour."
        + (f" {len(result.trials) - len(drawn)} trials are not drawn." if len(result.trials) > len(drawn) else ""),
        alt=f"{name} against the logical step for {len(drawn)} trials. The best, {lead.key}, goes from "
        f"{number(points[0][1])} at step {points[0][0]} to {number(points[-1][1])} at step {points[-1][0]}.",
        figure=figure,
        table=Table(
            columns=("trial", "step", name),
            rows=tuple((trial.key, step, value) for trial, points in drawn[:_BRIGHT] for step, value in points),
        ),
    )


def _mean_series(result: Result, key: str, name: str) -> list[tuple[int, float]]:
    """(step, mean over the runs that reported it)."""
    found: dict[int, list[float]] = {}
    for lines in facts.steps(result, key).values():
        for step, value in facts.series(lines, name):
            found.setdefault(step, []).append(value)
    return [(step, float(np.mean(values))) for step, values in sorted(found.items())]


@styled
def schedule(result: Result, key: str | None = None) -> Chart:
    """DP-NGD's clamping while it trains: the floor λ_t, the fraction of eigenvalues below it, d_eff and r_t.

    Args:
        key: of the trial; None takes the best one that reported a floor.

    Raises:
        NotShown: no trial did.
    """
    candidates = [key] if key else [trial.key for trial in [*result.ranked, *result.trials]][:_MAX_BARS]
    for chosen in candidates:
        runs = facts.steps(result, chosen)
        names = [name for name in SCHEDULE if any(facts.series(lines, name) for lines in runs.values())]
        if "lambda_t" in names:
            break
    else:
        raise NotShown("no trial has a clamping schedule (that is DP-NGD's)")
    figure = canvas(WIDE, 4.0)
    panels = figure.subplots(2, 2, sharex=True).flatten()
    rows: list[tuple[Any, ...]] = []
    for panel, name in zip(panels, names, strict=False):
        for seed, lines in runs.items():
            points = facts.series(lines, name)
            panel.plot(*zip(*points, strict=True), "o-", markersize=3, color=COLOURS[seed % len(COLOURS)], alpha=0.85)
        panel.set_ylabel(SCHEDULE[name])
        panel.grid(True)
        values = [value for lines in runs.values() for _, value in facts.series(lines, name)]
        if name == "lambda_t" and min(values) > 0 and max(values) / min(values) > facts.LOGARITHMIC:
            panel.set_yscale("log")
        if name == "clamped_fraction":
            panel.set_ylim(-0.03, 1.03)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    for panel in panels[2:]:
        panel.set_xlabel("logical step")
    for seed, lines in runs.items():
        for line in lines:
            rows.append((seed, int(line["step"]), *(line["metrics"].get(name) for name in names)))
    ends = facts.last(result, chosen, names)
    text = ", ".join(f"{SCHEDULE[name]} {spread(*ends[name])}" for name in names if name in ends)
    mostly = ends.get("clamped_fraction", (0.0, None))[0]
    remark = " Nearly all eigenvalues are clamped: the whitening is close to a scaling." if mostly > 0.99 else ""
    return Chart(
        name="schedule",
        title=f"Clamping schedule of {chosen}",
        caption=f"A line is a seed. At the end: {text}.{remark}",
        alt=f"Clamping schedule of trial {chosen} by logical step. At the end: {text}.{remark}",
        figure=figure,
        table=Table(columns=("seed", "step", *(SCHEDULE[name] for name in names)), rows=tuple(rows)),
        wide=True,
    )


@styled
def support(result: Result) -> Chart:
    """The proxy concentration of each TP-TopK support against what pure noise would give (arXiv 2606.04375, 7.4).

    Raises:
        NotShown: no trial reported one.
    """
    order = [*result.ranked, *(trial for trial in result.trials if trial.state != "complete")]
    rows: list[tuple[TrialRecord, tuple[float, float | None], float]] = []
    for trial in order:
        found = facts.last(result, trial.key, (_SUPPORT, _NULL))
        if len(found) == 2:
            rows.append((trial, found[_SUPPORT], found[_NULL][0]))
        if len(rows) == _MAX_BARS // 2:
            break
    if not rows:
        raise NotShown("no trial reported the scores of a support (that is TP-TopK's)")
    figure, axes = single(height=0.9 + 0.22 * len(rows))
    for place, (_, (mean, std), null) in enumerate(rows):
        axes.plot([null, mean], [place, place], color=MUTED, linewidth=1)
        axes.errorbar(mean, place, xerr=std or 0.0, fmt="o", color=COLOURS[0], markersize=5, capsize=2)
        axes.plot(null, place, "|", color=INK, markersize=11, markeredgewidth=2)
    axes.plot([], [], "o", color=COLOURS[0], label="learned support")
    axes.plot([], [], "|", color=INK, markersize=11, markeredgewidth=2, label="pure noise")
    axes.legend(loc="lower center", ncols=2, bbox_to_anchor=(0.5, 1.0))
    axes.set_yticks(range(len(rows)), [trial.key for trial, _, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("share of the score energy inside the support")
    axes.grid(axis="x")
    above = sum(mean > null for _, (mean, _), null in rows)
    text = f"{above} of {len(rows)} supports hold more score energy than pure noise would."
    return Chart(
        name="support",
        title="Support against its null",
        caption=f"{text} The measure comes from released quantities alone and is a weak one: a support can lie below "
        "its null and still be informative.",
        alt=f"Proxy concentration of the supports of {len(rows)} trials beside its value under pure noise. {text}",
        figure=figure,
        table=Table(
            columns=("trial", "active ratio", "proxy concentration", "under pure noise"),
            rows=tuple(
                (
                    trial.key,
                    trial.config.get("active_ratio", (result.search.get("fixed") or {}).get("active_ratio")),
                    (mean, spread(mean, std)),
                    null,
                )
                for trial, (mean, std), null in rows
            ),
        ),
    )


@styled
def cost(results: Sequence[tuple[str, Result]]) -> Chart:
    """Hours by method, over one search or several (label, result).

    Raises:
        NotShown: no trial is finished, or there is one method only.
    """
    found: dict[str, list[tuple[TrialRecord, int]]] = {}
    for label, result in results:
        for trial in result.trials:
            if trial.seconds is not None:
                method = comparison.method_of(result, trial)
                key = method if len(results) == 1 else f"{label}: {method}"
                found.setdefault(key, []).append((trial, int(result.search.get("seeds") or 1)))
    if not found:
        raise NotShown("no trial is finished")
    if len(found) == 1:
        raise NotShown("the search has one method, and its time stands above")
    rows = []
    for key, members in found.items():
        seconds = [trial.seconds or 0.0 for trial, _ in members]
        runs = sum(seeds for _, seeds in members)
        rows.append((key, len(members), runs, sum(seconds) / 3600, sum(seconds) / runs))
    rows.sort(key=lambda row: -row[3])
    total = sum(row[3] for row in rows)
    figure, axes = single(height=0.9 + 0.34 * min(len(rows), 20))
    axes.barh([short(row[0], 22) for row in rows[:20]], [row[3] for row in rows[:20]], color=COLOURS[0], height=0.62)
    for place, row in enumerate(rows[:20]):
        axes.annotate(duration(row[3]), (row[3], place), xytext=(3, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * rows[0][3] or 1)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)
    text = f"All trials together took {duration(total)}; trials that ran at once count each."
    return Chart(
        name="cost",
        title="What it cost",
        caption=text,
        alt="Hours by method: " + ", ".join(f"{row[0]} {duration(row[3])}" for row in rows[:20]) + f". {text}",
        figure=figure,
        table=Table(
            columns=("method", "trials", "runs", "hours", "seconds a run"),
            rows=tuple(rows),
        ),
    )


@styled
def reported(lines: Sequence[Mapping[str, Any]], names: Sequence[str], *, title: str) -> Drawing:
    """What one run reported against the logical step, a panel a name."""
    figure = canvas(6, 1.8 * len(names) + 0.6)
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for panel, name in zip(panels, names, strict=True):
        drawn = [
            (line["step"], np.nan if (value := line["metrics"][name]) is None else value)
            for line in lines
            if name in line["metrics"]
        ]
        panel.plot(*zip(*drawn, strict=True), marker="o", markersize=3)
        panel.set_ylabel(name)
        panel.grid(True)
    panels[-1].set_xlabel("logical step")
    figure.suptitle(title)
    return figure


def duration(hours: float) -> str:
    """Hours for people."""
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{hours * 60:.1f} min" if hours * 60 >= 1 else f"{hours * 3600:.1f} s"


__all__ = ["budget", "cost", "curves", "duration", "reported", "schedule", "support"]
