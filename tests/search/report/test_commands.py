"""`raydp report`, `raydp compare` and `raydp new`, as one types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raydp import cli
from raydp.search.run_directory import RunDirectory
from raydp.search.tracking import Tracker, log_report
from tests.search.synthetic import methods_run


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def track(path: Path) -> None:
    """A tracker of the run directory's own, as a finished search leaves it."""
    opened = RunDirectory.open(path)
    tracker = Tracker(uri=None, directory=opened, experiment="made")
    try:
        tracker.start_search(opened.definition, ["learning_rate"])
        tracker.finish_search({}, "complete")
        assert tracker.synchronise()
    finally:
        tracker.close()


def test_report_writes_into_the_run_directory_and_its_tracker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = methods_run(tmp_path / "run")
    track(path)
    assert run("report", path) == 0
    assert str(path / "report.html") in capsys.readouterr().out
    (artifact,) = (path / "mlartifacts").rglob("report.html")
    assert artifact.read_bytes() == (path / "report.html").read_bytes()
    moved = path.rename(tmp_path / "moved")
    artifact_before = next((moved / "mlartifacts").rglob("report.html")).read_bytes()
    (moved / "report.html").write_text("newer")
    assert log_report(RunDirectory.open(moved)) is False  # its tracker still names the old place
    assert not path.exists() and next((moved / "mlartifacts").rglob("report.html")).read_bytes() == artifact_before


def test_a_tracker_shows_the_report_that_a_search_wrote(tmp_path: Path) -> None:
    path = methods_run(tmp_path / "run")
    (path / "report.html").write_text("<html></html>")
    track(path)
    assert len(list((path / "mlartifacts").rglob("report.html"))) == 1


def test_report_of_several_goes_where_one_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = methods_run(tmp_path / "a"), methods_run(tmp_path / "b")
    out = tmp_path / "all.html"
    assert run("report", *paths, "--out", out, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["page"] == str(out) and out.is_file() and len(record["figures"]) > 4
    assert not (paths[0] / "report.html").exists()


def test_wrong_directories_are_refused_with_what_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside = methods_run(tmp_path / "runs" / "one")
    assert run("report", tmp_path / "runs") == 2
    assert f"Write: {inside}" in capsys.readouterr().err.replace("\n", " ")
    assert run("report", tmp_path / "nowhere") == 2
    assert "must be a directory that raydp made" in capsys.readouterr().err
    assert run("report", inside, "--pair", "learning_rate") == 2
    assert "must be X,Y" in capsys.readouterr().err


def test_compare_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = {"epsilon": 1.0, "delta": 1e-5, "adjacency": "add_remove"}
    paths = methods_run(tmp_path / "a", name="first"), methods_run(tmp_path / "b", name="second", budget=budget)
    assert run("compare", *paths) == 0
    out = capsys.readouterr().out
    assert "first − second: +0 accuracy" in out and "budgets differ" in out and "paired by seed" in out
    assert run("compare", *paths, "--json") == 0
    assert json.loads(capsys.readouterr().out)["differences"][0]["same_budget"] is False
    assert run("compare", paths[0]) == 2
    assert "two or more" in capsys.readouterr().err


def test_new_writes_a_file_that_plan_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("new", "tp_topk") == 0
    assert "raydp run tp_topk_search.py" in capsys.readouterr().out
    assert run("plan", "tp_topk_search.py", "--proposals", 0, "--json") == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert any(len(plan["phases"]) == 2 for plan in plans)
    assert run("new", "tp_topk") == 2
    assert "exists already" in capsys.readouterr().err
