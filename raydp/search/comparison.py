"""Comparing what methods and searches found: differences by seed, and what must not be compared.

A difference is stated with the values that it comes from and a 95 % interval of Student's t, which for two or three
seeds is wide, as it should be. The winners of searches were chosen on the hold-out set that measures them, which
flatters each of them, the more the more trials it was chosen from; the interval does not cover that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scipy import stats

from raydp.errors import InvalidValue
from raydp.search.records import TrialRecord
from raydp.search.results import Result


@dataclass(frozen=True, kw_only=True)
class Difference:
    """first − second in one metric.

    Attributes:
        first, second: what was compared.
        metric: in whose units everything is.
        paired: whether ``values`` are differences of runs with equal initial weights. Otherwise there are none.
        values: one difference a seed.
        mean: of the difference.
        low, high: 95 % interval of the mean (paired t, or Welch's for unpaired runs); None with fewer than two seeds.
        better: ``first``, ``second``, or ``unclear`` where the interval holds 0 or there is none.
    """

    first: str
    second: str
    metric: str
    paired: bool
    values: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None
    better: str

    def to_json(self) -> dict[str, Any]:
        """Every field."""
        return {**asdict(self), "values": list(self.values)}


def difference(
    first: tuple[str, TrialRecord], second: tuple[str, TrialRecord], metric: str, *, mode: str = "max", paired: bool
) -> Difference:
    """The difference of two complete trials.

    Args:
        first, second: (what to call it, trial).
        metric: that every seed of both has.
        mode: whether ``max`` or ``min`` is better.
        paired: whether seed i of both began with the same weights; the seeds that both have are then compared.

    Raises:
        InvalidValue: a trial lacks the metric in one of its seeds.
    """
    ours, theirs = (_complete(trial, metric) for _, trial in (first, second))
    low = high = None
    values: tuple[float, ...] = ()
    if paired:
        values = tuple(a - b for a, b in zip(ours, theirs, strict=False))
        mean = statistics.fmean(values)
        if len(values) > 1:
            half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
            low, high = mean - half, mean + half
    else:
        mean = statistics.fmean(ours) - statistics.fmean(theirs)
        half_width = _welch(ours, theirs)
        if half_width is not None:
            low, high = mean - half_width, mean + half_width
    return Difference(
        first=first[0],
        second=second[0],
        metric=metric,
        paired=paired,
        values=values,
        mean=mean,
        low=low,
        high=high,
        better=_better(low, high, mode),
    )


def _complete(trial: TrialRecord, metric: str) -> list[float]:
    values = [value for value in trial.metrics.get(metric, ()) if value is not None]
    if not values or len(values) < len(trial.metrics[metric]):
        raise InvalidValue(
            metric, trial.metrics.get(metric), f"must be finite for every seed of {trial.key}", "Compare other trials."
        )
    return values


def _welch(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Half the width of Welch's 95 % interval; None if one side has a single value."""
    if min(len(ours), len(theirs)) < 2:
        return None
    a, b = (statistics.variance(values) / len(values) for values in (ours, theirs))
    if a + b == 0:
        return 0.0
    freedom = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(theirs) - 1))
    return float(stats.t.ppf(0.975, freedom)) * math.sqrt(a + b)


def _better(low: float | None, high: float | None, mode: str) -> str:
    if low is None or high is None or low <= 0 <= high:
        return "unclear"
    return "first" if (low > 0) == (mode == "max") else "second"


def method_of(result: Result, trial: TrialRecord) -> str:
    """The method of a trial: proposed by the space, or that of the search."""
    return str(trial.config.get("method", result.search.get("method", "")))


def best_by_method(result: Result) -> dict[str, TrialRecord]:
    """Method -> its best complete trial by the first objective, the best method first."""
    found: dict[str, TrialRecord] = {}
    for trial in result.ranked:
        found.setdefault(method_of(result, trial), trial)
    return found


def method_differences(result: Result) -> list[Difference]:
    """The best method − each other one, each at its best trial, by seed.

    >>> from raydp.search.comparison import method_differences
    >>> (found,) = method_differences(result)  # of the example of Result
    >>> found.first, found.second, round(found.mean, 3), found.better
    ('tp_topk', 'dp_sgd', 0.02, 'first')
    """
    metric, mode = result.objectives[0]
    found = list(best_by_method(result).items())
    return [difference(found[0], other, metric, mode=mode, paired=True) for other in found[1:]]


def compare(results: Sequence[Result]) -> dict[str, Any]:
    """What the first search found against each other one.

    Returns:
        The JSON of ``raydp compare``: ``searches`` (a summary each), ``differences`` (each a :class:`Difference` with
        ``same_budget`` and ``notes``) and ``not_comparable`` (``first``, ``second``, ``reasons``).

    Raises:
        InvalidValue: fewer than two searches, or one of them twice.
    """
    if len(results) < 2:
        raise InvalidValue("DIR", [str(r.directory) for r in results], "must be two or more", "Name another search.")
    refuse_twins(results)
    names = labels(results)
    differences, refused = [], []
    for index in range(1, len(results)):
        pair = (names[0], results[0]), (names[index], results[index])
        reasons = incomparable(results[0], results[index])
        if reasons:
            refused.append({"first": names[0], "second": names[index], "reasons": reasons})
            continue
        found, notes = search_difference(*pair)
        record = {"same_budget": same_budget(results[0], results[index]), "notes": notes}
        differences.append({**found.to_json(), **record})
    summaries = [summary(name, result) for name, result in zip(names, results, strict=True)]
    return {"searches": summaries, "differences": differences, "not_comparable": refused}


def refuse_twins(results: Sequence[Result]) -> None:
    """Raises InvalidValue if a run directory is given twice."""
    seen = set()
    for result in results:
        if result.directory in seen:
            raise InvalidValue("DIR", str(result.directory), "is given twice", "Give each run directory once.")
        seen.add(result.directory)


def labels(results: Sequence[Result]) -> list[str]:
    """A name for each search: its own, with the directory's where two are called the same."""
    names = [str(result.search.get("name")) for result in results]
    unique = [
        name if names.count(name) == 1 else f"{name} ({result.directory.parent.name}/{result.directory.name})"
        for name, result in zip(names, results, strict=True)
    ]
    return [
        label if unique.count(label) == 1 else str(result.directory)
        for label, result in zip(unique, results, strict=True)
    ]


def incomparable(first: Result, second: Result) -> list[str]:
    """Why the metrics of two searches mean different things; empty if they mean the same."""
    reasons = []
    for field, word in (("data", "data"), ("data_limit", "number of private examples")):
        if first.search.get(field) != second.search.get(field):
            reasons.append(f"other {word}: {first.search.get(field)} and {second.search.get(field)}")
    if first.objectives[0] != second.objectives[0]:
        reasons.append(f"other objective: {' '.join(first.objectives[0])} and {' '.join(second.objectives[0])}")
    for name, result in (("first", first), ("second", second)):
        if not result.ranked:
            reasons.append(f"the {name} has no complete trial")
    measured = {result.ranked[0].measured_on for result in (first, second) if result.ranked}
    if len(measured) > 1:
        reasons.append(f"measured on other examples: {' and '.join(sorted(measured))}")
    return reasons


def same_budget(first: Result, second: Result) -> bool:
    """Whether each trial of both spends the same epsilon at the same delta for the same adjacency."""
    return first.search.get("budget") == second.search.get("budget")


def search_difference(first: tuple[str, Result], second: tuple[str, Result]) -> tuple[Difference, list[str]]:
    """(the difference of the best trials of two comparable searches, what a reader must know about it)."""
    (metric, mode), (_, ours), (_, theirs) = first[1].objectives[0], first, second
    notes = []
    if not same_budget(ours, theirs):
        notes.append(f"other budgets: {_budget(ours)} and {_budget(theirs)}")
    if ours.search.get("model") != theirs.search.get("model"):
        notes.append(f"other models: {ours.search.get('model')} and {theirs.search.get('model')}")
    paired = ours.search.get("seed") == theirs.search.get("seed")
    if not paired:
        notes.append("other seeds, so the runs are not paired")
    elif ours.search.get("seeds") != theirs.search.get("seeds"):
        notes.append(
            f"{ours.search.get('seeds')} and {theirs.search.get('seeds')} seeds a trial; the common ones count"
        )
    counts = [len(result.ranked) for result in (ours, theirs)]
    if counts[0] != counts[1]:
        notes.append(f"chosen from {counts[0]} and {counts[1]} complete trials, which favours the larger number")
    for name, result in (first, second):
        if result.insecure:
            notes.append(f"{name} had insecure noise: nothing in it is private")
    pair = (first[0], ours.ranked[0]), (second[0], theirs.ranked[0])
    return difference(*pair, metric, mode=mode, paired=paired), notes


def summary(name: str, result: Result) -> dict[str, Any]:
    """One search in numbers."""
    metric, mode = result.objectives[0]
    best = next(iter(result.ranked), None)
    trial = result.epsilon_trial
    return {
        "name": name,
        "directory": str(result.directory),
        "data": result.search.get("data"),
        "measured_on": best.measured_on if best else None,
        "budget": result.search.get("budget"),
        "metric": metric,
        "mode": mode,
        "trials": len(result.trials),
        "complete": sum(record.state == "complete" for record in result.trials),
        "seeds": result.search.get("seeds"),
        "best": best.key if best else None,
        "method": method_of(result, best) if best else None,
        "config": dict(best.config) if best else None,
        "mean": best.mean(metric) if best else None,
        "std": best.std(metric) if best else None,
        "values": list(best.metrics[metric]) if best else [],
        "epsilon_trial": trial.to_json() if trial else None,
        "epsilon_search": result.epsilon_search.to_json(),
        "hours": hours(result.trials),
        "insecure": result.insecure,
    }


def hours(trials: Sequence[TrialRecord]) -> float:
    """Wall-clock hours of all trials together; trials at once count each."""
    return sum(trial.seconds or 0.0 for trial in trials) / 3600


def _budget(result: Result) -> str:
    budget: Mapping[str, Any] = result.search.get("budget") or {}
    return f"epsilon {budget.get('epsilon')}, delta {budget.get('delta')}, {budget.get('adjacency')}"
