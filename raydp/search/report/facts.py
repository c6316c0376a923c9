"""What figures and tables of a report say, as plain values: varying hyperparameters, scales, reported steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from raydp.search.records import TrialRecord, finite
from raydp.search.report.charts import NotShown
from raydp.search.results import Result
from raydp.search.run_directory import RunDirectory, read_json_lines
from raydp.tasks import TASKS

_MODES = {name: mode for task in TASKS.values() for name, mode in task.metrics.items()}
LOGARITHMIC = 8.0  # candidates that span this factor are drawn on a logarithmic scale


def objective(result: Result, metric: str | None = None) -> tuple[str, str]:
    """(metric, mode): the first objective, or the named metric with its mode as an objective or as tasks define it."""
    if metric is None:
        return result.objectives[0]
    return metric, {**_MODES, **dict(result.objectives)}.get(metric, "max")


def scored(result: Result, metric: str | None = None) -> list[TrialRecord]:
    """Complete trials that have the metric for every seed, in the order of their numbers.

    Raises:
        NotShown: there is none.
    """
    name, _ = objective(result, metric)
    found = [trial for trial in result.trials if trial.state == "complete" and trial.mean(name) is not None]
    if not found:
        raise NotShown(f"no trial is complete with a finite {name}")
    return found


def score(trial: TrialRecord, metric: str) -> float:
    """The mean over the seeds of a metric that the trial has."""
    mean = trial.mean(metric)
    assert mean is not None
    return mean


def varying(result: Result) -> list[str]:
    """Hyperparameters of which the trials have several values (or that some lack): method first, then by name."""
    names = sorted({name for trial in result.trials for name in trial.config})
    found = [name for name in names if len({repr(trial.config.get(name)) for trial in result.trials}) > 1]
    return sorted(found, key=lambda name: name != "method")


def is_number(value: object) -> bool:
    """Whether a hyperparameter's value has a place on a scale (bools have not)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and finite(value) is not None


def numeric(trials: Sequence[TrialRecord], names: Sequence[str]) -> list[str]:
    """The names that are numbers in every one of these trials that has them, and vary among them."""
    found = []
    for name in names:
        values = [trial.config[name] for trial in trials if name in trial.config]
        if len(set(values)) > 1 and all(map(is_number, values)):
            found.append(name)
    return found


def is_logarithmic(result: Result, name: str, values: Sequence[float]) -> bool:
    """Whether the hyperparameter's scale is logarithmic: as the space says, or by the spread of its candidates."""
    distributions = (result.search.get("space") or {}).get("distributions") or {}
    attributes: Mapping[str, Any] = (distributions.get(name) or {}).get("attributes") or {}
    if "log" in attributes:
        return bool(attributes["log"]) and min(values) > 0
    return min(values) > 0 and max(values) / min(values) >= LOGARITHMIC


def steps(result: Result, key: str) -> dict[int, list[dict[str, Any]]]:
    """Seed -> what the run reported: ``step`` and ``metrics``, in the order of the steps.

    Raises:
        CorruptFile: a metrics.jsonl is damaged.
    """
    found = {}
    for seed, path in RunDirectory.open(result.directory).runs(key):
        lines = [line for line in read_json_lines(path / "metrics.jsonl") if "metrics" in line and "step" in line]
        if lines:
            found[seed] = sorted(lines, key=lambda line: int(line["step"]))
    return found


def series(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of one name, finite values only."""
    pairs = [(int(line["step"]), finite(line["metrics"].get(name))) for line in lines]
    return [(step, value) for step, value in pairs if value is not None]


def last(result: Result, key: str, names: Sequence[str]) -> dict[str, tuple[float, float | None]]:
    """Name -> (mean, std) over the seeds of the last value that each run reported."""
    runs = steps(result, key)
    found: dict[str, tuple[float, float | None]] = {}
    for name in names:
        values = [points[-1][1] for lines in runs.values() if (points := series(lines, name))]
        if values:
            found[name] = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
    return found
