"""Tables that the command line prints: previews, verifications, methods and names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, get_args, get_type_hints

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raydp.cluster import Job
from raydp.methods import Method
from raydp.search.display import upward
from raydp.search.doctor import Finding
from raydp.search.spending import OF_MEMBERS


def describe_method(method: Method) -> dict[str, Any]:
    """The JSON of a method: ``name``, ``summary``, ``hyperparameters[]`` of ``name type default help``."""
    types = get_type_hints(method.hyperparameters)
    return {
        "name": method.name,
        "summary": method.summary,
        "hyperparameters": [
            {
                "name": item.name,
                "type": _type_name(types[item.name]),
                "default": item.default,
                "help": item.metadata.get("help", ""),
            }
            for item in dataclasses.fields(method.hyperparameters)
        ],
    }


def print_method(record: Mapping[str, Any], console: Console | None = None) -> None:
    """The hyperparameters of one method, from :func:`describe_method`."""
    console = console or Console()
    console.print(Text(f"{record['name']}: {record['summary']}"))
    rows = [
        (item["name"], item["type"], "none" if item["default"] is None else str(item["default"]), item["help"])
        for item in record["hyperparameters"]
    ]
    console.print(_table(("hyperparameter", "type", "default", "help"), rows))


def print_names(kind: str, summaries: Mapping[str, str], console: Console | None = None) -> None:
    """Names with one line each."""
    (console or Console()).print(_table((kind, ""), list(summaries.items())))


def print_jobs(jobs: Sequence[Job], console: Console | None = None) -> None:
    """The searches on a cluster: id, status of the latest attempt, when it began, file and run directory."""
    rows = []
    for job in jobs:
        begun = "" if job.started is None else datetime.fromtimestamp(job.started).strftime("%Y-%m-%d %H:%M")
        rows.append((job.id, job.status, str(job.attempt), begun, job.file, job.storage))
    (console or Console()).print(_table(("job", "status", "attempt", "began", "file", "run directory there"), rows))


def print_preview(name: str, preview: Mapping[str, Any], console: Console | None = None) -> None:
    """What ``raydp plan`` found: one row for each phase of each plan, then resources and cost."""
    console = console or Console()
    budget = preview["budget"]
    stops = preview.get("selection", {}).get("rule") == "random_stopping"
    whom = "the released result" if stops else "every trial"
    console.print(
        Text(f"{name}: epsilon {budget['epsilon']:g}, delta {budget['delta']:g}, {budget['adjacency']} for {whom}")
    )
    rows: list[tuple[str, ...]] = []
    accountants = list(dict.fromkeys(name for plan in preview["plans"] for name in plan.get("certificate") or {}))
    for index, plan in enumerate(preview["plans"], start=1):
        label = str(plan.get("point", index))
        phases = plan.get("phases") or []
        if not phases:
            rows.append((label, "no plan", "", "", "", "", *("" for _ in accountants)))
        for position, phase in enumerate(phases):
            bounds = (plan.get("certificate") or {}) if position == len(phases) - 1 else None
            rows.append(
                (
                    label if position == 0 else "",
                    phase["name"],
                    f"{phase['noise_multiplier']:.4f}",
                    f"{phase['sample_rate']:.4g}",
                    str(phase["steps"]),
                    f"{phase['clip_norm']:g}",
                    *("" if bounds is None else _upper(bounds, name) for name in accountants),
                )
            )
    columns = ("plan", "phase", "sigma", "q", "T", "C", *(f"ε {name}" for name in accountants))
    console.print(_table(columns, rows))
    for index, plan in enumerate(preview["plans"], start=1):
        settings = " ".join(f"{key}={_short(value)}" for key, value in (plan.get("config") or {}).items())
        reason = f"  infeasible: {plan['reason']}" if plan.get("reason") else ""
        console.print(Text(f"{plan.get('point', index)}: {settings}{reason}"))
        if seen := plan.get("epsilon_by_adjacency"):
            both = ", ".join(f"{value:.6g} for {adjacency}" for adjacency, value in seen.items())
            console.print(Text(f"  the same noise spends epsilon = {both}"))
    earlier = preview.get("earlier") or {}
    for each in earlier.get("searches", ()):
        added = "added" if each["counted"] else "not added"
        console.print(Text(f"earlier | {each['name']} ({each['path']}): {added}, {each['why']}"))
    preview = {**preview, "earlier": {key: value for key, value in earlier.items() if key != "searches"}}
    for part in ("resources", "cost", "selection", "holdout", "earlier"):
        for key, value in (preview.get(part) or {}).items():
            console.print(Text(f"{part} | {key.replace('_', ' ')}: {_short(value)}"))


def print_verification(report: Mapping[str, Any], console: Console | None = None) -> None:
    """What ``raydp verify`` found: one row a run, the whole search, and the verdict."""
    console = console or Console()
    budget = report["budget"]
    accountants = sorted({name for trial in report["trials"] for name in trial.get("epsilon") or {}})
    rows = [
        (
            trial["key"],
            "-" if trial["seed"] is None else str(trial["seed"]),
            trial["state"],
            *(_upper(trial.get("epsilon") or {}, name) for name in accountants),
            "ok" if trial["ok"] else "NOT OK",
        )
        for trial in report["trials"]
    ]
    columns = ("trial", "seed", "state", *(f"epsilon {name}" for name in accountants), "verdict")
    console.print(_table(columns, rows))
    for trial in report["trials"]:
        if not trial["ok"]:
            seed = "" if trial["seed"] is None else f" seed {trial['seed']}"
            console.print(Text(f"{trial['key']}{seed}: {trial['problem']}", style="red"), soft_wrap=True)
    for problem in report.get("problems", ()):
        console.print(Text(f"search: {problem}", style="red"), soft_wrap=True)
    if held := report.get("holdout"):
        for run in held["runs"]:
            if not run["ok"]:
                console.print(
                    Text(f"hold-out of {run['key']} seed {run['seed']}: {run['problem']}", style="red"), soft_wrap=True
                )
        if held["budget"] is not None:
            listed = ", ".join(f"{name} {_upper(held['epsilon'], name)}" for name in sorted(held["epsilon"]))
            console.print(Text(f"private hold-out, {len(held['runs'])} runs composed: {listed}"))
    if released := report.get("released"):
        console.print(
            Text(f"released result: epsilon {released['epsilon']:.6g}, by {released['theorem']}"), soft_wrap=True
        )
    for each in report.get("earlier", ()):
        added = "added" if each["counted"] else "not added"
        line = f"earlier search {each['name']} ({each['path']}): {added}, {each['why']}; original {each['original']}"
        console.print(Text(line, style="" if each["ok"] else "red"), soft_wrap=True)
        for problem in each["problems"]:
            console.print(Text(f"earlier search {each['name']}: {problem}", style="red"), soft_wrap=True)
    whole = report["search"]["epsilon"]
    listed = ", ".join(f"{name} {_upper(whole, name)}" for name in sorted(whole))
    console.print(
        Text(f"budget of a trial: epsilon {budget['epsilon']:g}, delta {budget['delta']:g}, {budget['adjacency']}")
    )
    members = f" ({OF_MEMBERS})" if report["search"].get("family") else ""
    before = " with the earlier ones" if any(each["counted"] for each in report.get("earlier", ())) else ""
    console.print(Text(f"epsilon of the whole search{before}, at most: {listed}{members}"))
    bad = sum(not trial["ok"] for trial in report["trials"])
    if report["ok"]:
        console.print(Text(f"All {len(rows)} runs hold their budget.", style="green"))
    else:
        what = f"{bad} of {len(rows)} runs do not hold" if bad else "The search as a whole does not hold"
        console.print(Text(f"{what} what was promised.", style="red"))


def print_comparison(found: Mapping[str, Any], console: Console | None = None) -> None:
    """What ``raydp compare`` found: a row a search, then the differences, then what is not comparable."""
    console = console or Console()
    rows = [
        (
            item["name"],
            item["method"] or "-",
            "-" if item["budget"] is None else f"{item['budget']['epsilon']:g}",
            "-" if item["mean"] is None else _spread(item["mean"], item["std"]),
            item["metric"],
            item["best"] or "-",
            f"{item['complete']}/{item['trials']}",
            upward(item["epsilon_search"]["upper"], 5),
            f"{item['hours']:.2f}",
        )
        for item in found["searches"]
    ]
    columns = ("search", "method", "ε trial", "best", "of", "trial", "complete", "ε search", "hours")
    console.print(_table(columns, rows))
    for item in found["differences"]:
        interval = "" if item["low"] is None else f", 95 % interval {item['low']:+.3g} to {item['high']:+.3g}"
        if item["paired"]:
            how = f"paired by seed: {', '.join(f'{value:+.3g}' for value in item['values'])}"
        else:
            how = "not paired"
        winner = item[item["better"]] if item["better"] != "unclear" else None
        says = f"{winner} is better" if winner else "no clear difference"
        budgets = "" if item["same_budget"] else " (budgets differ)"
        difference = f"{item['first']} − {item['second']}: {item['mean']:+.4g} {item['metric']}{interval}; {how}."
        console.print(Text(f"{difference} {says}{budgets}."), soft_wrap=True)
        for note in item["notes"]:
            console.print(Text(f"  note: {note}", style="yellow"), soft_wrap=True)
    for item in found["not_comparable"]:
        reasons = "; ".join(item["reasons"])
        console.print(
            Text(f"{item['first']} and {item['second']} are not comparable: {reasons}", style="yellow"), soft_wrap=True
        )


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """What ``raydp doctor`` found: a line each, with what to do under it."""
    console = console or Console()
    styles = {"ok": "green", "warn": "yellow", "fail": "red"}
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        line = Text(f"{finding.status:<5}", style=styles[finding.status])
        line.append(f"{finding.name:<{width}}  {finding.found}", style="default")
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':<5}{'':<{width}}  → {finding.advice}"), soft_wrap=True)
    bad = [finding.name for finding in findings if finding.status == "fail"]
    console.print(Text(f"Not ready: {', '.join(bad)}." if bad else "Ready."))


def _spread(mean: float, std: float | None) -> str:
    return f"{mean:.4g}" if std is None else f"{mean:.4g} ± {std:.2g}"


def _upper(intervals: Mapping[str, Mapping[str, Any]], name: str) -> str:
    return upward(intervals[name]["upper"], 6) if name in intervals else "-"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        last = index == len(columns) - 1
        table.add_column(Text(column), overflow="fold", ratio=1 if last else None, no_wrap=index == 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _type_name(annotation: Any) -> str:
    """``float``, or ``float | none`` for an optional one."""
    options = get_args(annotation) or (annotation,)
    return " | ".join("none" if option is type(None) else option.__name__ for option in options)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    return str(value)
