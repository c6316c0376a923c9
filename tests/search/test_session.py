"""A session: what it proposes, what it makes of what comes back, and how it goes on from any point of its journal."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from raydp.errors import RaydpError
from raydp.privacy import accountants, noise
from raydp.privacy.accountants.rdp import RunningRdp
from raydp.privacy.ledger import Ledger
from raydp.privacy.noise import NoiseKey
from raydp.search.display import Display
from raydp.search.results import Result
from raydp.search.run_directory import JOURNAL, RunDirectory
from raydp.search.session import Session
from raydp.search.tracking import Tracker
from raydp.search.trainable import outcomes
from raydp.search.verify import verify
from tests.search.helpers import drive, session_in, small_search


def _ledgers_fit_their_plans(path: Path, seeds: int = 1) -> None:
    """Every run of every trained trial executed its plan once: no step less, none twice."""
    directory = RunDirectory.open(path)
    for key, record in directory.records().items():
        if record.state != "infeasible":
            runs = directory.runs(key)
            assert len(runs) == seeds
            for _, run in runs:
                ledger = Ledger.read(run / "ledger.jsonl")
                assert record.plan is not None
                ledger.check(record.plan)
                assert [ledger.steps(p.name) for p in record.plan.phases] == [p.steps for p in record.plan.phases]
    assert not list(directory.secrets.iterdir())


def test_it_trains_as_many_trials_as_the_search_wants(tmp_path: Path) -> None:
    session = session_in(tmp_path / "run", small_search())
    assert session.left == 3
    assert drive(session) == ["t0000", "t0001", "t0002"]
    assert session.left == 0
    assert session.next_task() is None
    assert session.failure is None
    records = RunDirectory.open(tmp_path / "run").records()
    assert {record.state for record in records.values()} == {"complete"}
    for record in records.values():
        assert record.attempts == 1
        assert record.measured_on == "digits (public benchmark, 360 examples)"
        assert record.mean("accuracy") is not None
        assert record.plan is not None
        assert record.epsilon == dict(record.plan.certificate)
        assert 3 * (1 - 1e-4) <= record.epsilon["pld"].upper <= 3
        assert record.epsilon["prv"].lower <= record.epsilon["pld"].upper
    _ledgers_fit_their_plans(tmp_path / "run")
    assert verify(tmp_path / "run")["ok"]


def test_points_without_a_plan_are_passed_over_and_cost_nothing(tmp_path: Path) -> None:
    # Two of three proposals ask for batches larger than the data.
    search = small_search(
        space={"batch_size": tune.grid_search([128, 4000, 256, 5000, 512, 6000])}, fixed={"epochs": 2}, sampler="grid"
    )
    session = session_in(tmp_path / "run", search)
    keys = drive(session)
    assert session.left == 0
    directory = RunDirectory.open(tmp_path / "run")
    records = directory.records()
    infeasible = [record for record in records.values() if record.state == "infeasible"]
    assert len(keys) == 3
    assert infeasible
    for record in infeasible:
        assert "must not exceed the number of private examples N = 1437" in (record.reason or "")
        assert not directory.trial_directory(record.key).exists()
    assert Result.load(tmp_path / "run").runs == 3


def test_a_grid_with_fewer_points_than_trials_ends(tmp_path: Path) -> None:
    search = small_search(space={"batch_size": tune.grid_search([256, 512])}, fixed={"epochs": 1}, sampler="grid")
    session = session_in(tmp_path / "run", search)
    assert session.left == 2
    assert len(drive(session)) == 2
    assert (session.left, session.failure) == (0, None)


def test_a_space_without_any_plan_stops_with_the_reason(tmp_path: Path) -> None:
    session = session_in(tmp_path / "run", small_search(fixed={"epochs": 2, "batch_size": 5000}))
    assert session.next_task() is None
    assert "100 proposals in a row have no plan" in (session.failure or "")
    assert "N = 1437" in (session.failure or "")
    assert {r.state for r in RunDirectory.open(tmp_path / "run").records().values()} == {"infeasible"}


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_metric_that_is_no_number_fails_its_trial_only(tmp_path: Path, value: float | None) -> None:
    def spoil(key: str, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "metrics": {**item["metrics"], "accuracy": [value]}} if key == "t0001" else item

    session = session_in(tmp_path / "run", small_search())
    assert len(drive(session, change=spoil)) == 3
    records = RunDirectory.open(tmp_path / "run").records()
    assert [record.state for record in records.values()] == ["complete", "diverged", "complete"]
    assert records["t0001"].reason == "a metric is missing or not finite"
    assert Result.load(tmp_path / "run").runs == 3  # it is charged all the same


def test_a_trial_that_diverges_or_raises_is_recorded_and_the_search_goes_on(tmp_path: Path) -> None:
    search = small_search(
        space={"learning_rate": tune.choice([1e30])},
        fixed={"epochs": 1, "batch_size": 256, "weight_decay": 1.0},
        trials=1,
    )
    session = session_in(tmp_path / "diverged", search)
    drive(session)
    record = RunDirectory.open(tmp_path / "diverged").records()["t0000"]
    assert record.state == "diverged"
    assert "the weights are not finite after step" in (record.reason or "")
    assert 0 < record.epsilon["pld"].upper <= 3

    session = session_in(tmp_path / "failed", small_search(trials=2))
    task = session.next_task()
    assert task is not None
    run = tmp_path / "failed" / "trials" / task.key / "seed-0"
    run.mkdir()
    (run / "ledger.jsonl").write_text("not a ledger\n")
    session.started(task.key)
    for item in outcomes(task):
        session.finished(task.key, item) if item["done"] else session.progressed(task.key, item)
    drive(session_in(tmp_path / "failed", small_search(trials=2)))
    records = RunDirectory.open(tmp_path / "failed").records()
    assert [record.state for record in records.values()] == ["failed", "complete"]
    assert records["t0000"].epsilon["pld"].upper <= 3  # unknown, and at most the whole plan
    assert "CorruptFile" in (records["t0000"].reason or "")
    assert "Traceback" in (run / "error.txt").read_text()
    assert (run / "error.txt").stat().st_mode & 0o777 == 0o600


def test_a_process_that_dies_too_often_fails_its_trial_and_takes_the_key_along(tmp_path: Path) -> None:
    session = session_in(tmp_path / "run", small_search(trials=1))
    task = session.next_task()
    assert task is not None
    session.started(task.key)
    items = outcomes(task)
    session.progressed(task.key, next(items))  # half of the steps ran
    items.close()
    assert list(session.directory.secrets.iterdir())
    for _ in range(session.search.resources.retries):
        session.died(task.key)  # also before it was told of its trial
        assert session.waiting
        assert session.directory.records()[task.key].state == "running"
        again = session.next_task()
        assert again is not None
        assert again.key == task.key
    session.died(task.key)
    record = session.directory.records()[task.key]
    assert (record.state, record.reason) == ("failed", "its process died 3 times")
    assert 0 < record.epsilon["pld"].upper < 3
    assert not list(session.directory.secrets.iterdir())


def test_a_plan_that_was_exchanged_after_the_proposal_does_not_train(tmp_path: Path) -> None:
    session = session_in(tmp_path / "run", small_search(trials=1))
    task = session.next_task()
    assert task is not None
    file = session.directory.trial_directory(task.key) / "plan.json"
    record = json.loads(file.read_text())
    record["phases"][-1]["noise_multiplier"] /= 100  # the certificate still claims what it did
    file.write_text(json.dumps(record))
    with pytest.raises(RaydpError, match="it was exchanged"):
        next(outcomes(task))
    assert not session.directory.runs(task.key)


def test_extending_a_finished_search(tmp_path: Path) -> None:
    drive(session_in(tmp_path / "run", small_search(trials=1)))
    session = session_in(tmp_path / "run", small_search(trials=1))
    assert session.left == 0
    session.extend(2)
    assert session.left == 2
    assert drive(session) == ["t0001", "t0002"]
    assert session_in(tmp_path / "run", small_search(trials=1)).left == 0


def test_every_seed_is_charged(tmp_path: Path) -> None:
    drive(session_in(tmp_path / "run", small_search(trials=2, seeds=2)))
    _ledgers_fit_their_plans(tmp_path / "run", seeds=2)
    result = Result.load(tmp_path / "run")
    assert result.runs == 4
    for record in result.trials:
        assert len(record.metrics["accuracy"]) == 2
        assert record.std("accuracy") is not None
    everything = [m for record in result.trials if record.plan for m in record.plan.mechanisms * 2]
    composed = accountants.epsilon(everything, delta=1e-5)
    assert result.epsilon_search.upper == pytest.approx(composed.upper, rel=1e-3)
    assert result.epsilon_search.upper > 3
    spending = RunningRdp()
    spending.add(everything)
    assert spending.epsilon(delta=1e-5, adjacency="add_remove").upper >= result.epsilon_search.lower


def test_paired_trials_share_the_warm_up_and_no_secret_survives(tmp_path: Path) -> None:
    search = small_search(
        space={"method": tune.grid_search(["tp_topk", "tp_rand"])},
        fixed={"epochs": 1, "batch_size": 256, "learning_rate": 1.0},
        sampler="grid",
        trials=2,
        paired=True,
        reports=5,  # one a step: the first falls into the warm-up
    )
    session = session_in(tmp_path / "run", search)
    assert (tmp_path / "run" / "secrets" / "pairing.key").exists()
    drive(session)
    directory = RunDirectory.open(tmp_path / "run")
    first, second = (
        [json.loads(line)["metrics"]["loss"] for line in (directory.run_path(key, 0) / "metrics.jsonl").open()]
        for key in ("t0000", "t0001")
    )
    assert first[0] == second[0]
    assert first[-1] != second[-1]
    assert not list(directory.secrets.iterdir())
    assert Result.load(tmp_path / "run").runs == 2  # both are charged in full


def test_insecure_noise_is_repeatable_and_said(tmp_path: Path) -> None:
    search = small_search(trials=1, insecure_seed=5)
    drive(session_in(tmp_path / "one", search))
    drive(session_in(tmp_path / "two", search))
    one, two = (Result.load(tmp_path / name) for name in ("one", "two"))
    assert one.trials[0].metrics == two.trials[0].metrics
    assert "INSECURE" in one.summary()


def test_it_goes_on_from_every_point_of_its_journal(tmp_path: Path) -> None:
    """Each prefix of events, with the files that lay on the disk then, is finished without loss or a second charge."""
    search = small_search(trials=2, seeds=2)
    session = session_in(tmp_path / "run", search)
    stages: list[Path] = []
    append = session.directory.append

    def keep(event: Any) -> None:
        append(event)
        stages.append(tmp_path / f"stage-{len(stages)}-{event['event']}")
        shutil.copytree(tmp_path / "run", stages[-1])

    session.directory.append = keep  # type: ignore[method-assign]
    drive(session)
    assert [stage.name.split("-")[2] for stage in stages] == ["proposed", "started", "finished"] * 2
    uninterrupted = RunDirectory.open(tmp_path / "run").records()
    for stage in stages:
        done_before = {key for key, r in RunDirectory.open(stage).records().items() if r.finished}
        again = session_in(stage, search)
        ran = drive(again)
        assert not done_before & set(ran)
        records = RunDirectory.open(stage).records()
        assert [(r.key, r.number, r.state) for r in records.values()] == [
            ("t0000", 0, "complete"),
            ("t0001", 1, "complete"),
        ]
        assert [r.config for r in records.values()] == [r.config for r in uninterrupted.values()]
        _ledgers_fit_their_plans(stage, seeds=2)
        assert Result.load(stage).runs == 4


def test_it_goes_on_in_the_middle_of_a_trial(tmp_path: Path) -> None:
    search = small_search(trials=1, seeds=2, reports=3)
    for stop_after in range(1, 6):
        path = tmp_path / f"after-{stop_after}"
        session = session_in(path, search)
        task = session.next_task()
        assert task is not None
        session.started(task.key)
        items = outcomes(task)
        for _ in range(stop_after):
            next(items)
        items.close()
        assert drive(session_in(path, search)) == ["t0000"]
        record = RunDirectory.open(path).records()["t0000"]
        assert (record.state, record.attempts, len(record.metrics["accuracy"])) == ("complete", 2, 2)
        _ledgers_fit_their_plans(path, seeds=2)
        steps = [json.loads(line)["step"] for line in (path / "trials/t0000/seed-0/metrics.jsonl").open()]
        assert steps == sorted(set(steps))


def test_a_torn_journal_line_is_as_if_it_was_never_written(tmp_path: Path) -> None:
    drive(session_in(tmp_path / "run", small_search(trials=1)))
    journal = tmp_path / "run" / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-20])  # the end of "finished"
    assert drive(session_in(tmp_path / "run", small_search(trials=1))) == ["t0000"]
    _ledgers_fit_their_plans(tmp_path / "run")


@contextmanager
def _file_size_limit(size: int) -> Iterator[None]:
    """Writes beyond ``size`` bytes of a file fail, as on a full disk, for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_in_a_trial_stops_the_search_with_a_clear_error_and_it_goes_on_later(tmp_path: Path) -> None:
    search = small_search(trials=2, reports=3)
    session = session_in(tmp_path / "run", search)
    task = session.next_task()
    assert task is not None
    session.started(task.key)
    items = outcomes(task)
    session.progressed(task.key, next(items))
    with _file_size_limit(2000):  # a checkpoint is larger
        last = next(items)
    assert (last["done"], last["state"]) == (True, "interrupted")
    session.finished(task.key, last)
    assert session.next_task() is None
    assert "checkpoint" in (session.failure or "")
    assert f"raydp resume {tmp_path / 'run'}" in (session.failure or "")
    assert not session.directory.records()[task.key].finished
    assert drive(session_in(tmp_path / "run", search)) == ["t0000", "t0001"]
    assert {r.state for r in RunDirectory.open(tmp_path / "run").records().values()} == {"complete"}
    _ledgers_fit_their_plans(tmp_path / "run")


def test_a_full_disk_under_the_journal_names_the_directory_and_loses_nothing(tmp_path: Path) -> None:
    search = small_search(trials=2)
    session = session_in(tmp_path / "run", search)
    journal = tmp_path / "run" / JOURNAL
    task = session.next_task()
    assert task is not None
    session.started(task.key)
    size = os.path.getsize(journal)
    last = list(outcomes(task))[-1]
    with _file_size_limit(size + 10), pytest.raises(RaydpError, match=str(tmp_path / "run")):
        session.finished(task.key, last)
    assert os.path.getsize(journal) == size
    assert drive(session_in(tmp_path / "run", search)) == ["t0000", "t0001"]
    _ledgers_fit_their_plans(tmp_path / "run")


def test_no_byte_of_a_key_is_in_any_file_that_a_search_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key that is generated is caught at its source, and looked for in every file, raw and as text."""
    secrets: list[bytes] = []
    token_bytes = noise.secrets.token_bytes

    def spy(count: int | None = None) -> bytes:
        secrets.append(token_bytes(count))
        return secrets[-1]

    monkeypatch.setattr(noise.secrets, "token_bytes", spy)
    for name, changes in {"single": {}, "paired": {"paired": True}}.items():
        search = small_search(trials=1, seeds=2, **changes)
        directory = RunDirectory.create(tmp_path / name, search.to_json())
        tracker = Tracker(uri=None, directory=directory, experiment="keys")
        tracker.start_search(directory.definition, search.point_space.varying)
        display = Display(trials=1, metric=search.metrics, quiet=True)
        drive(Session(search, directory, tracker=tracker, display=display))
        tracker.finish_search({"epsilon_search": Result.load(tmp_path / name).epsilon_search.upper}, "complete")
        assert tracker.synchronise()
        tracker.close()
        assert not list(directory.secrets.iterdir())
    assert len(secrets) == 3  # one a run, one for the pair
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "mlflow.db" for path in files)
    assert any(path.name == "ledger.jsonl" for path in files)
    for path in files:
        content = path.read_bytes()
        for secret in secrets:
            for form in (secret, secret[:16], secret[16:], secret.hex().encode(), secret.hex().upper().encode()):
                assert form not in content, path


def test_a_key_that_outlived_the_crash_after_the_last_report_is_destroyed(tmp_path: Path) -> None:
    session = session_in(tmp_path / "run", small_search(trials=1))
    task = session.next_task()
    assert task is not None
    session.started(task.key)
    list(outcomes(task))
    NoiseKey.generate().save(session.directory.secrets / "t0000-0.key")  # as if destroying it was cut short
    drive(session_in(tmp_path / "run", small_search(trials=1)))
    assert not list(session.directory.secrets.iterdir())
