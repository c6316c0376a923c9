"""Differences by seed, with their intervals; what is not comparable is not compared."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from scipy import stats

from raydp.errors import InvalidValue
from raydp.privacy.budget import Budget
from raydp.search.comparison import best_by_method, compare, difference, method_differences
from raydp.search.records import TrialRecord
from raydp.search.results import Result
from tests.search.synthetic import Run, methods_run


def trial(*values: float | None) -> TrialRecord:
    return TrialRecord(key="t0000", number=0, state="complete", metrics={"accuracy": values})


def between(first: TrialRecord, second: TrialRecord, *, paired: bool = True, mode: str = "max"):
    return difference(("a", first), ("b", second), "accuracy", mode=mode, paired=paired)


def test_a_paired_difference_is_students_interval_of_the_differences() -> None:
    ours, theirs = (0.9, 0.8, 0.7), (0.8, 0.75, 0.6)
    found = between(trial(*ours), trial(*theirs))
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert found.values == pytest.approx((0.1, 0.05, 0.1))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.better == "first"
    assert between(trial(*ours), trial(*theirs), mode="min").better == "second"


def test_an_unpaired_difference_is_welchs_interval() -> None:
    ours, theirs = (0.9, 0.8, 0.7), (0.5, 0.9)
    found = between(trial(*ours), trial(*theirs), paired=False)
    expected = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.values == () and found.better == "unclear"


def test_a_single_seed_says_nothing_about_chance() -> None:
    for paired in (True, False):
        found = between(trial(0.9), trial(0.1), paired=paired)
        assert found.mean == pytest.approx(0.8)
        assert (found.low, found.high, found.better) == (None, None, "unclear")


def test_the_seeds_that_both_have_are_paired() -> None:
    assert len(between(trial(0.9, 0.8, 0.7), trial(0.8, 0.7)).values) == 2


def test_a_missing_value_is_refused() -> None:
    with pytest.raises(InvalidValue, match="finite for every seed"):
        between(trial(0.9, None), trial(0.8, 0.7))
    with pytest.raises(InvalidValue, match="finite for every seed"):
        between(trial(0.9, math.nan), trial(0.8, 0.7))


def test_methods_are_compared_at_their_best_trials(tmp_path: Path) -> None:
    result = Result.load(methods_run(tmp_path / "run"))
    assert {method: record.config["learning_rate"] for method, record in best_by_method(result).items()} == {
        "tp_topk": 1.0,
        "dp_sgd": 1.0,
    }
    (found,) = method_differences(result)
    assert (found.first, found.second, found.better) == ("tp_topk", "dp_sgd", "first")
    assert found.mean == pytest.approx(0.02)


def test_searches_are_compared_and_differences_of_budget_are_said(tmp_path: Path) -> None:
    first, second = methods_run(tmp_path / "a", name="a"), methods_run(tmp_path / "b", name="b")
    other = methods_run(tmp_path / "c", name="c", budget=Budget(epsilon=1.0, delta=1e-5).to_json())
    found = compare([Result.load(path) for path in (first, second, other)])
    json.dumps(found, allow_nan=False)
    assert [item["name"] for item in found["searches"]] == ["a", "b", "c"]
    same, differs = found["differences"]
    assert same["same_budget"] and same["paired"] and same["mean"] == 0 and same["notes"] == []
    assert not differs["same_budget"] and "epsilon 3.0" in differs["notes"][0] and "epsilon 1.0" in differs["notes"][0]
    assert found["not_comparable"] == []


def test_what_is_not_comparable_is_said_and_not_compared(tmp_path: Path) -> None:
    first = methods_run(tmp_path / "a", name="a")
    data = methods_run(tmp_path / "b", name="b", data="mnist5k")
    metric = Run(tmp_path / "c", name="c", metric=["loss"], mode=["min"])
    metric.trial({}, {"loss": [0.1]})
    elsewhere = Run(tmp_path / "d", name="d")
    elsewhere.trial({}, {"accuracy": [0.1]}, measured_on="a private hold-out")
    nothing = Run(tmp_path / "e", name="e")
    nothing.trial({}, state="failed", reason="x")
    paths = [first, data, metric.done(), elsewhere.done(), nothing.done()]
    found = compare([Result.load(path) for path in paths])
    assert found["differences"] == []
    reasons = {item["second"]: " ".join(item["reasons"]) for item in found["not_comparable"]}
    assert "other data: digits and mnist5k" in reasons["b"]
    assert "other objective: accuracy max and loss min" in reasons["c"]
    assert "measured on other examples" in reasons["d"]
    assert "no complete trial" in reasons["e"]


def test_runs_of_other_seeds_are_not_paired(tmp_path: Path) -> None:
    paths = methods_run(tmp_path / "a", name="a"), methods_run(tmp_path / "b", name="b", seed=100)
    (found,) = compare([Result.load(path) for path in paths])["differences"]
    assert not found["paired"] and "other seeds" in found["notes"][0] and found["values"] == []


def test_one_search_or_one_twice_is_refused(tmp_path: Path) -> None:
    result = Result.load(methods_run(tmp_path / "a"))
    with pytest.raises(InvalidValue, match="two or more"):
        compare([result])
    with pytest.raises(InvalidValue, match="given twice"):
        compare([result, result])
    same_name = Result.load(methods_run(tmp_path / "b" / "x"))
    assert len({item["name"] for item in compare([result, same_name])["searches"]}) == 2
