"""Processes that die, drivers that are killed or interrupted, trackers that are down, disks that are full.

Only processes that a test started itself are ended, by their ids.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from raydp.errors import CorruptFile, RaydpError
from raydp.privacy.ledger import Ledger
from raydp.search import runner
from raydp.search.definition import Resources
from raydp.search.results import Result
from raydp.search.run_directory import DEFINITION, JOURNAL, RunDirectory
from raydp.search.session import Session
from raydp.search.verify import verify
from tests.search.helpers import small_search

SEARCH_FILE = """
import raydp
from ray import tune

search = raydp.Search(
    name="faults", method="tp_topk", data="digits", model="mlp", budget=raydp.Budget(epsilon=3.0, delta=1e-5),
    space={"learning_rate": tune.loguniform(0.1, 4.0)}, fixed={"epochs": 60, "batch_size": 32},
    trials=4, sampler="random", reports=10, resources=raydp.Resources(total_cpus=2),
)
"""
_PATIENCE = 90.0  # seconds that anything may take on a busy machine


class Driver:
    """`raydp …` in a session of its own, with everything that it starts."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from raydp.cli import main; main()", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started: dict[int, psutil.Process] = {}

    def children(self) -> list[psutil.Process]:
        """All processes below the driver; they are remembered, for they outlive it."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._started.update({child.pid: child for child in found})
        return found

    def trial_processes(self) -> list[psutil.Process]:
        """Those that train; Ray names a process after what it does, with Tune's wrapper for the trainable."""
        found = []
        for child in self.children():
            try:
                if any(part == "ray::ResourceTrainable.train" for part in child.cmdline()):
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found

    def wait_until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if found := condition():
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"no {what} (driver: {self.process.poll()})\n{self.log.read_text()[-3000:]}")

    def end(self) -> None:
        """Make sure that nothing of it is left."""
        self.children()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_PATIENCE)
        _, alive = psutil.wait_procs(list(self._started.values()), timeout=20)
        for process in alive:
            process.kill()  # psutil refuses if the id belongs to another process by now


@contextmanager
def driver(log: Path, *arguments: str) -> Iterator[Driver]:
    started = Driver(log, *arguments)
    try:
        yield started
    finally:
        started.end()


def _events(path: Path, kind: str) -> list[dict[str, Any]]:
    if not (path / DEFINITION).exists():
        return []
    return [event for event in RunDirectory.open(path).events() if event["event"] == kind]


def _reports(path: Path) -> dict[str, int]:
    """Reports of each unfinished trial."""
    finished = {event["key"] for event in _events(path, "finished")}
    return {
        file.parent.parent.name: file.read_bytes().count(b"\n")
        for file in path.glob("trials/*/seed-0/metrics.jsonl")
        if file.parent.parent.name not in finished
    }


def _statuses(uri: str) -> dict[str, str]:
    """Trial key -> status of its only run."""
    client = MlflowClient(uri)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    keys = [run.data.tags["raydp.trial_key"] for run in runs]
    assert len(keys) == len(set(keys)), f"duplicates: {sorted(keys)}"
    return {run.data.tags["raydp.trial_key"]: run.info.status for run in runs}


def _everything_ran_once(path: Path, trials: int) -> None:
    directory = RunDirectory.open(path)
    records = directory.records()
    assert [(r.number, r.state) for r in records.values()] == [(i, "complete") for i in range(trials)]
    for key, record in records.items():
        ledger = Ledger.read(directory.run_path(key, 0) / "ledger.jsonl")
        assert record.plan is not None
        ledger.check(record.plan)
        assert [ledger.steps(p.name) for p in record.plan.phases] == [p.steps for p in record.plan.phases]
        steps = [json.loads(line)["step"] for line in (directory.run_path(key, 0) / "metrics.jsonl").open()]
        assert steps == sorted(set(steps)) and steps[-1] == record.plan.steps
    assert Result.load(path).runs == trials
    assert not list(directory.secrets.iterdir())
    assert verify(path)["ok"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_survives_the_death_of_a_trial_of_its_driver_and_an_interrupt(tmp_path: Path) -> None:
    file, path = tmp_path / "faults.py", tmp_path / "run"
    file.write_text(SEARCH_FILE)

    with driver(tmp_path / "first.log", "run", str(file), "--storage", str(path)) as first:
        # A trial's process is killed: the trial goes on from its checkpoint, as attempt 2.
        # All are in their middles, so that whichever process it is, it is at work.
        first.wait_until(lambda: (n := list(_reports(path).values())) and all(1 <= x <= 5 for x in n), "trials at work")
        first.wait_until(first.trial_processes, "process of a trial")[0].kill()
        again = first.wait_until(lambda: [e for e in _events(path, "started") if e["attempt"] == 2], "second attempt")
        # A second driver is refused, and says who holds the directory.
        with pytest.raises(RaydpError, match=f"is being driven by another process .pid {first.process.pid}"):
            runner.resume(path, quiet=True)
        # The driver is killed in the middle of a trial.
        first.wait_until(
            lambda: _events(path, "finished") and max(_reports(path).values(), default=0) >= 3, "trial in the middle"
        )
        first.children()
        os.kill(first.process.pid, signal.SIGKILL)
    finished_then = {event["key"] for event in _events(path, "finished")}
    started_then = [event["key"] for event in _events(path, "started")]
    assert len(finished_then) < 4

    with driver(tmp_path / "second.log", "resume", str(path)) as second:
        # Ctrl-C reaches every process of the terminal's foreground group.
        first_new = second.wait_until(lambda: _events(path, "started")[len(started_then) :], "trial that goes on")
        assert first_new[0]["attempt"] >= 2  # the unfinished ones come first
        second.wait_until(lambda: _reports(path), "trial at work")
        second.children()
        os.killpg(second.process.pid, signal.SIGINT)
        assert second.process.wait(_PATIENCE) == 130, second.log.read_text()[-3000:]
        output = second.log.read_text()
        assert f"raydp resume {path}" in output
        assert "Traceback" not in output
    assert "RUNNING" not in _statuses(f"sqlite:///{path / 'mlflow.db'}").values()

    result = runner.resume(path, quiet=True)
    _everything_ran_once(path, trials=4)
    attempts = {record.key: record.attempts for record in result.trials}
    assert attempts[again[0]["key"]] >= 2
    for key in attempts:
        assert attempts[key] == [e["key"] for e in _events(path, "started")].count(key)
        assert key not in finished_then or attempts[key] == started_then.count(key)
    statuses = _statuses(f"sqlite:///{path / 'mlflow.db'}")
    assert statuses == dict.fromkeys(("search", "t0000", "t0001", "t0002", "t0003"), "FINISHED")


@pytest.mark.slow
def test_a_tracker_that_is_down_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = small_search(trials=2, resources=Resources(total_cpus=2, max_concurrent=1))
    path = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    finished = Session.finished

    def on_a_full_disk(self: Session, key: str, item: Any) -> None:
        if key == "t0001":
            resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path / JOURNAL) + 10, hard))
        finished(self, key, item)

    monkeypatch.setattr(Session, "finished", on_a_full_disk)
    try:
        with pytest.raises(RaydpError, match=str(path)) as caught:
            search.run(storage=path, tracking_uri="http://127.0.0.1:9", quiet=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "resume" in str(caught.value)
    monkeypatch.undo()
    assert [r.state for r in RunDirectory.open(path).records().values()] == ["complete", "running"]

    result = runner.resume(path, quiet=True)  # the tracker is still down
    _everything_ran_once(path, trials=2)
    assert (path / "trials.parquet").exists()
    assert not (path / "mlflow.db").exists()

    uri = f"sqlite:///{tmp_path / 'later.db'}"
    again = runner.resume(path, tracking_uri=uri, quiet=True)  # nothing is left to train, so no Ray starts
    assert [r.metrics for r in again.trials] == [r.metrics for r in result.trials]
    assert _statuses(uri) == {"search": "FINISHED", "t0000": "FINISHED", "t0001": "FINISHED"}


def test_another_layout_is_refused(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", small_search().to_json())
    header = json.loads((directory.path / DEFINITION).read_text())
    (directory.path / DEFINITION).write_text(json.dumps({**header, "layout": 99}))
    with pytest.raises(CorruptFile, match="has layout version 99, this raydp reads version 2"):
        runner.resume(directory.path, quiet=True)
