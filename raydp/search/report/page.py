"""The page: what a search found, what it spent, and where every number comes from, in one file."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from raydp.errors import RaydpError
from raydp.privacy.plan import Plan
from raydp.privacy.selection import Composition
from raydp.search import comparison
from raydp.search.comparison import Difference
from raydp.search.records import TrialRecord
from raydp.search.report import epsilon_charts, facts, html, search_charts, trial_charts
from raydp.search.report.charts import Chart, NotShown, Table, number, spread
from raydp.search.report.trial_charts import duration
from raydp.search.results import INSECURE, Result
from raydp.search.run_directory import RunDirectory
from raydp.search.spending import OF_MEMBERS
from raydp.search.statement import TEXT_FILE
from raydp.tasks.denoising import SAMPLES

SPLITS = ("warmup_fraction", "warmup_share")
_LARGEST_PICTURE = 1_000_000  # bytes
_LONG = 40  # rows; a longer table scrolls in a box of its own
_GROUPS = {
    "What worked": ("methods", "distances", "importance", "slices", "parallel", "tradeoff"),
    "How the search went": ("progress", "curves", "cost"),
    "Inside the methods": ("budget", "schedule", "support"),
}


_SECTIONS = {
    "leaderboard": "Leaderboard",
    "what-worked": "What worked",
    "privacy": "Privacy",
    "sources": "Where the numbers come from",
}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one result, and what is not shown with its reason.

    Attributes:
        charts: in the order of the page.
        absent: title -> why there is no such figure.
    """

    charts: tuple[Chart, ...]
    absent: Mapping[str, str]


def figures(result: Result, pairs: Sequence[tuple[str, str]] = ()) -> Figures:
    """Every figure that this result can fill.

    Args:
        result: finished or not.
        pairs: further pairs of hyperparameters to show the metric over.
    """
    makers: dict[str, Callable[[], Chart]] = {
        "methods": lambda: search_charts.methods(result),
        **{
            f"{x} × {y}": lambda x=x, y=y: search_charts.pair(result, x, y)  # type: ignore[misc]
            for x, y in dict.fromkeys((*_pairs(result), *pairs))
        },
        "hyperparameters": lambda: search_charts.slices(result),
        "importance": lambda: search_charts.importance(result),
        "parallel coordinates": lambda: search_charts.parallel(result),
        "trade-off": lambda: search_charts.tradeoff(result),
        "distances of generated images": lambda: epsilon_charts.distances([(str(result.search.get("name")), result)]),
        "progress": lambda: search_charts.progress(result),
        "learning curves": lambda: trial_charts.curves(result),
        "cost": lambda: trial_charts.cost([(str(result.search.get("name")), result)]),
        "budget": lambda: trial_charts.budget(result),
        "clamping schedule": lambda: trial_charts.schedule(result),
        "support": lambda: trial_charts.support(result),
    }
    charts, absent = [], {}
    for title, make in makers.items():
        try:
            charts.append(make())
        except NotShown as reason:
            absent[title] = str(reason)
        except RaydpError as error:  # a damaged metrics.jsonl must not hide the rest
            absent[title] = f"an error: {error}"
    return Figures(charts=tuple(charts), absent=absent)


def _pairs(result: Result) -> list[tuple[str, str]]:
    """The splits where both vary; else the two numeric hyperparameters that mattered most, if there are two."""
    names = facts.numeric(result.ranked, facts.varying(result))
    if all(name in names for name in SPLITS):
        return [(SPLITS[0], SPLITS[1])]
    leading = search_charts.leading_pair(result)
    return [leading] if leading else []


def shared_figures(results: Sequence[tuple[str, Result]]) -> Figures:
    """Figures over several searches: metrics against epsilon, and hours."""
    makers: dict[str, Callable[[], Chart]] = {}
    metric = results[0][1].objectives[0][0]
    if metric not in epsilon_charts.DISTANCES:
        makers[f"{metric} against ε"] = lambda: epsilon_charts.against_epsilon(results, metric)
    makers["distances of generated images against ε"] = lambda: epsilon_charts.distances(results)
    charts, absent = [], {}
    data = {(str(result.search.get("data")), result.search.get("data_limit")) for _, result in results}
    for title, make in makers.items():
        try:
            if len(data) > 1:
                raise NotShown("the searches are on different data")
            charts.append(make())
        except NotShown as reason:
            absent[title] = str(reason)
    try:
        charts.append(trial_charts.cost(results))
    except NotShown as reason:
        absent["cost"] = str(reason)
    return Figures(charts=tuple(charts), absent=absent)


def page(results: Sequence[Result], drawn: Sequence[Figures], shared: Figures | None = None) -> str:
    """The HTML of one search or several. It asks the network for nothing.

    Args:
        results: one or more.
        drawn: :func:`figures` of each.
        shared: :func:`shared_figures`, where there are several.
    """
    names, alone = comparison.labels(results), len(results) == 1
    title = names[0] if alone else f"{len(names)} searches"
    body = []
    if not alone:
        body.append(_together(names, results, shared))
    for index, (name, result, found) in enumerate(zip(names, results, drawn, strict=True)):
        body.append(_search(name, result, found, prefix="" if alone else f"s{index}-"))
    lead = _cards(results[0]) if alone else ""
    subtitle = _subject(results[0]) if alone else ", ".join(names)
    banner = f'<p class="banner"><strong>{html.text(INSECURE)}</strong></p>' if any(r.insecure for r in results) else ""
    links = _SECTIONS if alone else {f"s{index}-top": name for index, name in enumerate(names)}
    nav = "".join(f'<li><a href="#{anchor}">{html.text(word)}</a></li>' for anchor, word in links.items())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.text(title)} – raydp report</title><style>{_asset('page.css')}</style></head><body>"
        '<a class="skip" href="#main">Skip to the results</a>'
        f'<header><h1>{html.text(title)}</h1><p class="muted">{html.text(subtitle)}</p>{banner}{lead}'
        f'<nav aria-label="Sections"><ul>{nav}</ul></nav></header><main id="main">{"".join(body)}</main>'
        "<footer><p>Written by <code>raydp report</code> from the run directories that it names.</p></footer>"
        f"<script>{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("raydp.search.report").joinpath(name).read_text(encoding="utf-8")


def _subject(result: Result) -> str:
    methods = list(dict.fromkeys(comparison.method_of(result, trial) for trial in result.trials))
    what = ", ".join(methods) or str(result.search.get("method"))
    budget = result.budget
    return (
        f"{what} on {_data(result)}. Every trial spends (ε, δ) = ({budget.epsilon:g}, {budget.delta:g}), "
        f"{budget.adjacency}."
    )


def _data(result: Result) -> str:
    """The data's name; of a path, its last part."""
    limit = result.search.get("data_limit")
    name = str(result.search.get("data")).rstrip("/").rsplit("/", 1)[-1]
    return f"{name} ({limit} examples)" if limit else name


def _cards(result: Result) -> str:
    """The answer at a glance: the best trial, both epsilons, what it took."""
    cards = []
    metric, mode = result.objectives[0]
    if len(result.objectives) == 1 and result.best is not None:
        best = result.best
        settings = ", ".join(f"{name} = {_short(value)}" for name, value in best.config.items())
        seeds = len(best.metrics[metric])
        cards.append(
            (
                f"Best {metric} ({'highest' if mode == 'max' else 'lowest'}), {best.key}",
                spread(best.mean(metric), best.std(metric)),
                f"{settings}. {seeds} seed{'s' if seeds > 1 else ''}; measured on {best.measured_on}.",
            )
        )
    elif result.pareto:
        keys = ", ".join(trial.key for trial in result.pareto[:8])
        cards.append(("Pareto front", f"{len(result.pareto)} trials", keys))
    else:
        cards.append(("Best trial", "none", "No trial is complete; the leaderboard says what happened to each."))
    trial = result.epsilon_trial
    budget = result.budget
    spent = f"at most {_up(trial.upper)}" if trial else "none"
    cards.append(("ε of the trial that you would release", spent, f"of {budget.epsilon:g}, δ = {budget.delta:g}"))
    whole = f"at most {_up(result.epsilon_released.upper)}"
    if isinstance(result.selection, Composition):
        ran = f"everything that ran: {result.runs} runs of {len(result.trials)} trials"
        ran += f"; {OF_MEMBERS}" if result.family else ""
        ran += f"; earlier searches: {result.carried_line()}" if result.earlier else ""
        cards.append(("ε of the whole search", whole, ran))
    else:
        cards.append(("ε of the released result", whole, f"selection {result.selection.rule}"))
    counts = result.counts()
    cards.append(("Cost", duration(comparison.hours(result.trials)), counts))
    inner = "".join(
        f'<div class="card"><dt>{html.text(term)}</dt><dd class="big">{html.text(big)}</dd>'
        f"<dd>{html.text(small)}</dd></div>"
        for term, big, small in cards
    )
    return f'<dl class="cards">{inner}</dl>'


def _search(name: str, result: Result, found: Figures, *, prefix: str) -> str:
    """One search; ``prefix`` of its anchors where the page has several."""
    parts = []
    if prefix:
        parts.append(f'<h2 id="{prefix}top">{html.text(name)}</h2><p>{html.text(_subject(result))}</p>{_cards(result)}')
    inner = "h3" if prefix else "h2"
    parts.append(_section(f"{prefix}leaderboard", "Leaderboard", _leaderboard(result), inner))
    by_name = {chart.name: chart for chart in found.charts}
    pairs = [chart for chart in found.charts if chart.name.startswith("pair_")]
    for title, members in _GROUPS.items():
        charts = [by_name[member] for member in members if member in by_name]
        charts = [*pairs, *charts] if title == "What worked" else charts
        if charts:
            level = 4 if prefix else 3
            drawn = "".join(html.figure(chart, prefix=prefix, level=level) for chart in charts)
            content = f'<div class="figures">{drawn}</div>'
            parts.append(_section(f"{prefix}{title}", title, content, inner))
    pictures = _generated(result)
    if pictures:
        parts.append(_section(f"{prefix}generated", "Generated images", pictures, inner))
    parts.append(_section(f"{prefix}privacy", "Privacy", _privacy(result), inner))
    parts.append(_section(f"{prefix}sources", "Where the numbers come from", _sources(result, found), inner))
    return "".join(parts)


def _section(anchor: str, title: str, content: str, heading: str) -> str:
    anchor = anchor.replace(" ", "-").lower()
    return (
        f'<section aria-labelledby="{html.text(anchor)}"><{heading} id="{html.text(anchor)}">{html.text(title)}'
        f"</{heading}>{content}</section>"
    )


def _generated(result: Result) -> str:
    """Images that the best trial's generative model left beside its runs."""
    shown = []
    for trial in result.ranked[:1]:
        for seed, path in RunDirectory.open(result.directory).runs(trial.key):
            picture = path / SAMPLES
            if picture.is_file() and picture.stat().st_size < _LARGEST_PICTURE:
                what = f"Images generated by {trial.key}, seed {seed}"
                shown.append(html.picture(picture.read_bytes(), what))
    return "".join(shown)


def _leaderboard(result: Result) -> str:
    metrics = [metric for metric, _ in result.objectives]
    extra = sorted({n for t in result.ranked for n in t.metrics} & {"loss", "auroc", "kid"} - set(metrics))[:2]
    names = facts.varying(result)
    place = {trial.key: index for index, trial in enumerate(result.ranked, start=1)}
    order = [*result.ranked, *(trial for trial in result.trials if trial.key not in place)]
    reasons = any(trial.reason for trial in order)
    rows = []
    for trial in order:
        row: list[Any] = [place.get(trial.key), trial.key, trial.state]
        row += [_scored(trial, metric) for metric in (*metrics, *extra)]
        row += [trial.config.get(name) for name in names]
        bounds = trial.epsilon.get(result.accountant)
        row.append((bounds.upper, _up(bounds.upper)) if bounds else None)
        row.append(None if trial.seconds is None else (trial.seconds, duration(trial.seconds / 3600)))
        rows.append((*row, trial.reason or "") if reasons else tuple(row))
    columns = ("rank", "trial", "state", *metrics, *extra, *names, "ε at most", "time")
    seeds = int(result.search.get("seeds") or 1)
    caption = f"{len(order)} trials; mean ± std over {seeds} seed{'s' if seeds > 1 else ''}. Any heading sorts."
    whole = Table(columns=(*columns, "reason") if reasons else columns, rows=tuple(rows))
    box = "scroll tall" if len(order) > _LONG else "scroll"
    parts = [html.table(whole, label="Leaderboard", caption=caption, best=0 if place else None, classes=box)]
    if not order:
        parts = ["<p>No trial has been proposed yet.</p>"]
    differences = comparison.method_differences(result)
    if differences:
        parts.append(_differences(differences))
    return "".join(parts)


def _scored(trial: TrialRecord, metric: str) -> Any:
    mean = trial.mean(metric)
    if mean is None:
        return None if metric not in trial.metrics else (None, "not finite")
    return mean, spread(mean, trial.std(metric))


def _differences(found: Sequence[Difference]) -> str:
    """Paired differences, each with its interval and what it says."""
    word = {"first": "ahead", "second": "behind", "unclear": "unclear"}
    rows = tuple(
        (
            f"{item.first} − {item.second}",
            (item.mean, f"{item.mean:+.4g}"),
            "–" if item.low is None or item.high is None else f"{item.low:+.3g} to {item.high:+.3g}",
            ", ".join(f"{value:+.3g}" for value in item.values) or "not paired",
            word[item.better],
        )
        for item in found
    )
    content = Table(columns=("difference", found[0].metric, "95 % interval", "by seed", "says"), rows=rows)
    caption = (
        "Each method at its best trial, paired by seed; the interval is Student's t. The best trials were chosen on "
        "the examples that measure them, which flatters each."
    )
    shown = html.table(content, label="Differences between methods", classes="scroll")
    return f'<h3 class="spaced">Differences between methods</h3><p class="muted">{html.text(caption)}</p>{shown}'


def _together(names: Sequence[str], results: Sequence[Result], shared: Figures | None) -> str:
    found = comparison.compare(results)
    rows = tuple(
        (
            item["name"],
            item["method"] or "–",
            item["data"].rstrip("/").rsplit("/", 1)[-1] if item["data"] else "–",
            (item["budget"] or {}).get("epsilon"),
            None if item["mean"] is None else (item["mean"], f"{spread(item['mean'], item['std'])} {item['metric']}"),
            item["best"] or "–",
            f"{item['complete']}/{item['trials']}",
            (item["epsilon_search"]["upper"], _up(item["epsilon_search"]["upper"])),
            (item["hours"], duration(item["hours"])),
        )
        for item in found["searches"]
    )
    columns = ("search", "method", "data", "ε of a trial", "best", "trial", "complete", "ε of the search", "time")
    parts = [html.table(Table(columns=columns, rows=rows), label="Searches", classes="scroll")]
    if found["differences"]:
        listed = []
        for item in found["differences"]:
            interval = "" if item["low"] is None else f" (95 % interval {item['low']:+.3g} to {item['high']:+.3g})"
            notes = f" Note: {'; '.join(item['notes'])}." if item["notes"] else ""
            gain = f"{item['mean']:+.4g} {item['metric']}{interval}"
            kind = "paired by seed" if item["paired"] else "not paired"
            listed.append(html.text(f"{item['first']} − {item['second']}: {gain}, {kind}.{notes}"))
        parts.append(f"<h3>Differences of the best trials</h3>{html.listed(listed)}")
    if found["not_comparable"]:
        listed = [
            html.text(f"{i['first']} and {i['second']}: {'; '.join(i['reasons'])}") for i in found["not_comparable"]
        ]
        parts.append(f"<h3>Not comparable</h3>{html.listed(listed)}")
    if shared and shared.charts:
        parts.append(f'<div class="figures">{"".join(html.figure(c, prefix="all-") for c in shared.charts)}</div>')
    parts.append(
        "<p>Several searches on the same private data add up: the ε of all of them together is that of composing what "
        "each one ran, which is more than any number in this table.</p>"
    )
    return _section("together", "Side by side", "".join(parts), "h2")


def _privacy(result: Result) -> str:
    lines = result.summary().splitlines()[-2:]
    chosen = result.ranked[0] if result.ranked else None
    parts = [
        f"<p><strong>{html.text(lines[0])}</strong><br>What someone learns at most who sees this one trial's model and "
        "metrics. Every trial was calibrated to the same budget, so it does not depend on which one you choose.</p>",
        f"<p><strong>{html.text(lines[1])}</strong><br>What someone learns at most from what the search releases. "
        "Choosing the best of many trials looks at the data many times; this is the number to state when the choice "
        f"itself was made on private data.<br>It rests on: {html.text(result.selection.theorem)}</p>",
    ]
    measured = sorted({trial.measured_on for trial in result.ranked})
    if measured:
        noised = result.epsilon_holdout is not None
        parts.append(
            f"<p>Metrics were measured on: {html.text('; '.join(measured))}. "
            + (
                f"{html.text(result.holdout_line())}.</p>"
                if noised
                else "They carry no noise: on private examples they are not private.</p>"
            )
        )
    if chosen is not None and chosen.plan is not None:
        parts.append(_plan(chosen.key, chosen.plan))
    statement = _statement(result)
    if statement:
        parts.append(f"<h3>Privacy statement</h3><pre>{html.text(statement)}</pre>")
    return "".join(parts)


def _plan(key: str, plan: Plan) -> str:
    rows = tuple(
        (
            phase.name,
            (phase.noise_multiplier, f"{phase.noise_multiplier:.4f}"),
            phase.sample_rate,
            phase.steps,
            phase.clip_norm,
            phase.spec.share,
        )
        for phase in plan.phases
    )
    columns = ("phase", "noise multiplier σ", "sample rate q", "steps T", "clip norm C", "nominal share of ε")
    bounds = "; ".join(
        f"{name} {number(bound.lower, 5)} to {_up(bound.upper)}" for name, bound in plan.certificate.items()
    )
    phases = html.table(
        Table(columns=columns, rows=rows), label=f"Plan of {key}", caption=f"The plan of {key}", classes="scroll"
    )
    return f"{phases}<p class=muted>Certified bounds of its ε, by accountant: {html.text(bounds)}.</p>"


def _statement(result: Result) -> str | None:
    """The privacy statement in the run directory, if one was written."""
    path = result.directory / TEXT_FILE
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None


def _sources(result: Result, found: Figures) -> str:
    header = RunDirectory.open(result.directory).header
    quoted = shlex.quote(str(result.directory))
    software = ", ".join(f"{name} {version}" for name, version in (header.get("software") or {}).items())
    fixed = ", ".join(f"{name} = {_short(value)}" for name, value in (result.search.get("fixed") or {}).items())
    sampler = f"{result.search.get('sampler')}, seed {result.search.get('seed')}"
    items = {
        "Run directory": html.code(result.directory),
        "Begun": html.text(header.get("created", "–")),
        "Held fixed": html.text(fixed or "nothing"),
        "Sampler": html.text(sampler),
        "This page": html.code(f"raydp report {quoted}"),
        "Check every ε from the ledgers": html.code(f"raydp verify {quoted}"),
        "Privacy statement": html.code(f"raydp statement {quoted}"),
        "Same runs in MLflow": html.code(f"raydp ui {quoted}"),
        "Software": html.text(software or "–"),
        "Numbers": html.text(
            "journal.jsonl (states, metrics, seconds), trials/*/plan.json (noise), trials/*/seed-*/ledger.jsonl (what "
            "ran), trials/*/seed-*/metrics.jsonl (curves); all in the run directory"
        ),
    }
    absent = [html.text(f"{title}: {reason}.") for title, reason in found.absent.items()]
    more = html.details(f"Figures that are not shown ({len(absent)})", html.listed(absent)) if absent else ""
    return html.facts(items) + more


def _up(value: float) -> str:
    """An upper bound for people: rounded up, so that what is stated holds."""
    from raydp.search.display import upward

    return upward(value, 5)


def _short(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)
