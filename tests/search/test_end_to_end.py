"""Whole searches on Ray Tune with MLflow on SQLite."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray
from mlflow import MlflowClient
from ray import tune

from raydp.errors import InvalidValue
from raydp.search import runner, statement
from raydp.search.definition import Resources, Search
from raydp.search.results import Result
from raydp.search.verify import verify
from tests.search.helpers import small_search

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray cluster for all searches here; they use what is connected."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def finished(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A search of four trials with two seeds."""
    path = tmp_path_factory.mktemp("search") / "run"
    return small_search(name="whole", trials=4, seeds=2, sampler="tpe").run(storage=path, quiet=True)


def test_every_trial_is_complete_and_spent_its_budget(finished: Result) -> None:
    assert [(r.key, r.number, r.state, r.attempts) for r in finished.trials] == [
        (f"t000{i}", i, "complete", 1) for i in range(4)
    ]
    assert finished.runs == 8
    for record in finished.trials:
        values = record.metrics["accuracy"]
        assert len(values) == 2
        assert record.mean("accuracy") == pytest.approx(statistics.fmean(v for v in values if v is not None))
        assert record.std("accuracy") is not None
        pld, prv = record.epsilon["pld"], record.epsilon["prv"]
        assert 3 * (1 - 1e-4) <= pld.upper <= 3
        assert prv.lower <= pld.upper and pld.lower <= prv.upper
        assert record.seconds is not None
    best = finished.best
    assert best is not None
    assert best.mean("accuracy") == max(r.mean("accuracy") or 0 for r in finished.trials)
    assert (best.mean("accuracy") or 0) > 0.5  # it learned something: chance is 0.1


def test_both_epsilons_are_said(finished: Result) -> None:
    trial, whole = finished.summary().splitlines()[-2:]
    assert trial.startswith("epsilon of the trial: 2.999") or trial.startswith("epsilon of the trial: 3 ")
    assert "target 3, delta 1e-05, add_remove" in trial
    assert whole.startswith("epsilon of the whole search: ")
    assert "all that ran: 8 runs" in whole
    assert finished.epsilon_search.upper > 3


def test_verification_agrees(finished: Result) -> None:
    report = verify(finished.directory)
    assert report["ok"], report
    assert len(report["trials"]) == 8
    assert report["search"]["runs"] == 8


def test_a_search_goes_on_from_another_one_and_carries_what_that_spent(finished: Result, tmp_path: Path) -> None:
    search = small_search(name="next", trials=1, sampler="tpe", after=str(finished.directory))
    found = search.run(storage=tmp_path / "next", quiet=True)
    assert found.runs == 1 and found.epsilon_carried == finished.epsilon_search
    assert found.epsilon_search.upper > finished.epsilon_search.upper
    report = verify(found.directory)
    assert report["ok"], report
    client = MlflowClient(f"sqlite:///{found.directory / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'next'")
    (parent,) = client.search_runs(
        [experiment.experiment_id], "tags.raydp.search_id != '' and attributes.run_name = 'next'"
    )
    assert parent.data.tags["raydp.after"].startswith("whole (")
    assert parent.data.metrics["epsilon_carried"] == pytest.approx(finished.epsilon_search.upper)
    text = (found.directory / "report.html").read_text(encoding="utf-8")
    assert "earlier searches: with whole" in text and "Earlier searches, whose results" in text
    again = search.run(storage=tmp_path / "next", quiet=True)  # the same search: nothing is taken over twice
    assert again.epsilon_search == found.epsilon_search


def test_the_table_of_trials(finished: Result) -> None:
    table = pq.read_table(finished.directory / "trials.parquet")
    assert table.num_rows == 4
    assert {
        "key",
        "state",
        "reason",
        "attempts",
        "seconds",
        "config.learning_rate",
        "config.warmup_share",
        "metric.accuracy.mean",
        "metric.accuracy.std",
        "metric.accuracy.values",
        "epsilon.pld.lower",
        "epsilon.pld.estimate",
        "epsilon.pld.upper",
        "epsilon.prv.upper",
        "epsilon.rdp.upper",
        "target_epsilon",
        "delta",
        "adjacency",
        "measured_on",
    } <= set(table.column_names)
    assert table.column("measured_on").to_pylist() == ["digits (public benchmark, 360 examples)"] * 4


def test_mlflow_shows_the_parent_and_its_trials(finished: Result) -> None:
    client = MlflowClient(f"sqlite:///{finished.directory / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("whole")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    by_key = {run.data.tags["raydp.trial_key"]: run for run in runs}
    assert set(by_key) == {"search", "t0000", "t0001", "t0002", "t0003"}
    assert len(runs) == 5
    assert {run.info.status for run in runs} == {"FINISHED"}
    parent = by_key.pop("search")
    assert parent.data.metrics["epsilon_search"] == pytest.approx(finished.epsilon_search.upper)
    for record in finished.trials:
        run = by_key[record.key]
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert set(run.data.params) == {"learning_rate", "warmup_share", "method"}
        assert float(run.data.params["learning_rate"]) == record.config["learning_rate"]
        assert run.data.metrics["accuracy"] == pytest.approx(record.mean("accuracy"))
        assert run.data.metrics["accuracy_std"] == pytest.approx(record.std("accuracy"))
        assert run.data.metrics["epsilon.pld"] == record.epsilon["pld"].upper
        history = client.get_metric_history(run.info.run_id, "seed-1/accuracy")
        assert [point.step for point in history] == [2, 5] or len(history) == 2
        artifacts = {item.path for item in client.list_artifacts(run.info.run_id)}
        assert artifacts == {"config.json", "plan.json", "seed-0", "seed-1"}
        assert [item.path for item in client.list_artifacts(run.info.run_id, "seed-0")] == ["seed-0/ledger.jsonl"]


def test_the_privacy_statement_is_written_and_uploaded(finished: Result) -> None:
    written = json.loads((finished.directory / "statement.json").read_text())
    assert written == statement.build(finished.directory)
    assert written["search"]["finished"] and written["everything"]["runs"] == 8
    assert written["everything"]["epsilon"]["pld"]["upper"] == finished.epsilon_search.upper
    client = MlflowClient(f"sqlite:///{finished.directory / 'mlflow.db'}")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    (parent,) = [run for run in runs if run.data.tags["raydp.trial_key"] == "search"]
    assert {item.path for item in client.list_artifacts(parent.info.run_id)} == {
        "statement.json",
        "statement.txt",
        "report.html",
    }


def test_nothing_secret_and_nothing_of_tunes_own_is_left(finished: Result) -> None:
    assert not list((finished.directory / "secrets").iterdir())
    assert not list(finished.directory.glob("trials/*/*/checkpoint-*"))
    assert not list(finished.directory.glob("ray/**/*.csv"))


def test_running_it_again_goes_on_and_another_search_is_refused(finished: Result) -> None:
    search = small_search(name="whole", trials=4, seeds=2, sampler="tpe")
    again = search.run(storage=finished.directory, quiet=True)
    assert [r.metrics for r in again.trials] == [r.metrics for r in finished.trials]
    with pytest.raises(InvalidValue, match="must not hold a search already"):
        small_search(name="whole", trials=5).run(storage=finished.directory, quiet=True)


def test_a_search_over_methods_with_paired_noise(tmp_path: Path) -> None:
    search = small_search(
        space={"method": tune.grid_search(["tp_topk", "tp_rand", "dp_sgd"])},
        fixed={"epochs": 1, "batch_size": 256, "learning_rate": 1.0, "active_ratio": 0.2},
        sampler="grid",
        trials=3,
        paired=True,
        reports=5,
    )
    result = search.run(storage=tmp_path / "run", quiet=True)
    assert [r.state for r in result.trials] == ["complete"] * 3
    series = {}
    for record in result.trials:
        lines = (result.directory / "trials" / record.key / "seed-0" / "metrics.jsonl").read_text().splitlines()
        series[record.config["method"]] = [json.loads(line)["metrics"]["accuracy"] for line in lines]
    assert series["tp_topk"][0] == series["tp_rand"][0]  # one warm-up step, the very same
    assert series["tp_topk"][1:] != series["tp_rand"][1:]
    assert not list((result.directory / "secrets").iterdir())
    assert verify(result.directory)["ok"]


def test_a_define_by_run_space_from_a_file_is_resumed_with_more_trials(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        """
import raydp

def space(trial):
    share = trial.suggest_float("warmup_share", 0.1, 0.5)
    if trial.suggest_categorical("optimizer", ["sgd", "adam"]) == "sgd":
        trial.suggest_float("momentum", 0.0, 0.9)
    return {"warmup_fraction": share}

search = raydp.Search(
    name="function", method="tp_topk", data="digits", model="mlp", budget=raydp.Budget(epsilon=3.0, delta=1e-5),
    space=space, fixed={"epochs": 1, "batch_size": 256}, trials=2, sampler="random", reports=1,
)
"""
    )
    from raydp.search.files import load_searches

    search = load_searches(file)["function"]
    result = runner.run(search, storage=tmp_path / "run", quiet=True, file=file)
    assert [r.state for r in result.trials] == ["complete"] * 2
    file.unlink()  # the run directory has its own copy
    result = runner.resume(tmp_path / "run", extra_trials=2, quiet=True)
    assert [(r.number, r.state, r.attempts) for r in result.trials] == [(i, "complete", 1) for i in range(4)]
    assert all(r.config["warmup_fraction"] == r.config["warmup_share"] for r in result.trials)
    assert all(("momentum" in r.config) == (r.config["optimizer"] == "sgd") for r in result.trials)


def test_several_objectives(tmp_path: Path) -> None:
    search = small_search(metric=("accuracy", "loss"), mode=("max", "min"), trials=3, reports=1)
    result = search.run(storage=tmp_path / "run", quiet=True)
    assert result.pareto
    with pytest.raises(InvalidValue, match=r"Use result\.pareto"):
        _ = result.best
    for chosen in result.pareto:
        for other in result.trials:
            better = (other.mean("accuracy") or 0) > (chosen.mean("accuracy") or 0)
            assert not (better and (other.mean("loss") or 0) < (chosen.mean("loss") or 0))
    assert "on the Pareto front" in result.summary()
    assert len(result.summary().splitlines()[-2:]) == 2


def test_a_trial_that_fits_no_node_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    search: Search = small_search(resources=Resources(cpus_per_worker=3))
    with pytest.raises(InvalidValue, match=r"3 CPU \+ 0 GPU a trial.*2 CPU \+ 0 GPU"):
        search.run(storage=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_trials_that_fail_leave_a_search_that_ends(tmp_path: Path) -> None:
    search = small_search(
        space={"learning_rate": tune.grid_search([0.5, 1e30])},
        fixed={"epochs": 1, "batch_size": 256, "weight_decay": 1.0},
        sampler="grid",
        trials=2,
    )
    result = search.run(storage=tmp_path / "run", quiet=True)
    states: dict[Any, str] = {r.config["learning_rate"]: r.state for r in result.trials}
    assert states == {0.5: "complete", 1e30: "diverged"}
    client = MlflowClient(f"sqlite:///{result.directory / 'mlflow.db'}")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert sorted(run.info.status for run in runs) == ["FAILED", "FINISHED", "FINISHED"]
    assert verify(result.directory)["ok"]
