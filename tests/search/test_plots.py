"""Figures show what the run directory holds, and refuse what it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raydp.errors import InvalidValue, UnknownName
from raydp.search.records import TrialRecord
from raydp.search.report.charts import NotShown
from raydp.search.results import Result
from raydp.search.run_directory import RunDirectory

DEFINITION = {"name": "splits", "metric": ["accuracy"], "mode": ["max"]}


def result(tmp_path: Path) -> Result:
    directory = RunDirectory.create(tmp_path / "run", DEFINITION)
    trials = tuple(
        TrialRecord(
            key=f"t000{number}",
            number=number,
            state="complete",
            config={"warmup_fraction": 0.2 + number / 10, "warmup_share": 0.5 - number / 10, "method": "tp_topk"},
            metrics={"accuracy": (0.8 + number / 100,)},
        )
        for number in range(3)
    )
    path = directory.run_path("t0001", 0)
    path.mkdir(parents=True)
    lines = [{"step": step, "metrics": {"accuracy": step / 10, "lambda_t": 1 / step}} for step in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Result(directory=directory.path, search=DEFINITION, trials=trials)


def test_splits_show_every_complete_trial_and_ring_the_best(tmp_path: Path) -> None:
    figure = result(tmp_path).plot_splits()
    points, ring = figure.axes[0].collections[:2]
    assert len(points.get_offsets()) == 3
    assert ring.get_offsets().tolist() == [[pytest.approx(0.4), pytest.approx(0.3)]]
    figure.savefig(tmp_path / "splits.png")


def test_steps_show_what_was_reported(tmp_path: Path) -> None:
    figure = result(tmp_path).plot_steps("t0001")
    assert [axes.get_ylabel() for axes in figure.axes] == ["accuracy", "lambda_t"]
    assert figure.axes[1].lines[0].get_ydata().tolist() == [1, 1 / 2, 1 / 3]


def test_what_is_not_there_is_refused_with_near_names(tmp_path: Path) -> None:
    found = result(tmp_path)
    with pytest.raises(UnknownName, match="warmup_share"):
        found.plot_splits(y="warmup_shre")
    with pytest.raises(NotShown, match="method is not a number"):
        found.plot_splits(x="method")
    with pytest.raises(NotShown, match="no trial is complete with a finite loss"):
        found.plot_splits(metric="loss")
    with pytest.raises(UnknownName, match="t0001"):
        found.plot_steps("t1001")
    with pytest.raises(UnknownName, match="lambda_t"):
        found.plot_steps("t0001", ["lambda"])
    with pytest.raises(InvalidValue, match="reported nothing"):
        found.plot_steps("t0002")
