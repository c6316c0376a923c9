"""Trials of two workers whose workers, machines, drivers and disks are lost. The machines are Ray nodes on this one.

Only processes that a test started itself are ended, by their ids.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from raydp.privacy.ledger import Ledger
from raydp.search import runner
from raydp.search.definition import Resources, Search
from raydp.search.run_directory import RunDirectory
from tests.search.driving import doing, driver, events, everything_ran_once, reports
from tests.search.helpers import drive, session_in, small_search

_WORKER = "ray::RayTrainWorker"
_PATIENCE = 200.0  # several processes start for an attempt, and each imports torch


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray lets its workers wait for everything else
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "30")  # a machine that is gone is waited for so long
    monkeypatch.setattr("tests.search.driving.PATIENCE", _PATIENCE)


@pytest.fixture
def machines(patient: None) -> Iterator[Cluster]:
    """A head without cores, and two machines of one core."""
    cluster = Cluster()
    cluster.add_node(num_cpus=0, include_dashboard=False)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def _wait(condition: Callable[[], Any], what: str, *, alive: Callable[[], bool] = lambda: True) -> Any:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and alive():
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {what}")


def _workers() -> list[psutil.Process]:
    return doing(_WORKER, psutil.Process().children(recursive=True))


def _at_work(path: Path, *, attempt: int, more_than: int = 0) -> Callable[[], bool]:
    """Whether a trial's attempt has reported more than so often in all."""

    def found() -> bool:
        begun = [event for event in events(path, "started") if event["attempt"] == attempt]
        return bool(begun) and max(reports(path).values(), default=0) > more_than

    return found


def _search(**changes: Any) -> Search:
    resources = Resources(**{"num_workers": 2, **changes.pop("resources", {})})
    return small_search(fixed={"epochs": 40, "batch_size": 32}, trials=1, reports=20, resources=resources, **changes)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_is_killed_and_a_machine_is_lost(machines: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "run"
    search = _search(resources={"num_workers": (1, 2)})
    failures: list[BaseException] = []

    def break_things() -> None:
        try:
            _wait(_at_work(path, attempt=1), "first report", alive=main.is_alive)
            assert len(_workers()) == 2
            _workers()[0].kill()
            had = max(reports(path).values())
            _wait(_at_work(path, attempt=2, more_than=had), "report of the second attempt", alive=main.is_alive)
            machines.remove_node(machines.list_all_nodes()[-1], allow_graceful=False)
            had = max(reports(path).values())
            _wait(_at_work(path, attempt=3, more_than=had), "report of the third attempt", alive=main.is_alive)
        except BaseException as error:
            failures.append(error)
            raise

    main = threading.current_thread()
    thread = threading.Thread(target=break_things)
    thread.start()
    try:
        result = runner.run(search, storage=path, quiet=True)
    finally:
        thread.join()
    assert not failures, failures
    everything_ran_once(path, trials=1)
    assert result.trials[0].attempts == 3
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"] == 1.0  # so it ended with one worker

    # What one worker that nothing happened to would have run and spent.
    alone = tmp_path / "alone"
    drive(session_in(alone, search))
    (undisturbed,) = RunDirectory.open(alone).records().values()
    assert result.trials[0].epsilon == undisturbed.epsilon
    ledgers = [Ledger.read(place / "trials/t0000/seed-0/ledger.jsonl") for place in (path, alone)]
    assert ledgers[0].mechanisms == ledgers[1].mechanisms


SEARCH_FILE = """
import raydp
from ray import tune

search = raydp.Search(
    name="faults", method="tp_topk", data="digits", model="mlp", budget=raydp.Budget(epsilon=3.0, delta=1e-5),
    space={"learning_rate": tune.loguniform(0.1, 4.0)}, fixed={"epochs": 40, "batch_size": 32},
    trials=1, sampler="random", reports=20,
    resources=raydp.Resources(total_cpus=2, num_workers=2, time_limit=15.0),
)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_hangs_the_driver_is_killed_and_the_disk_is_full(patient: None, tmp_path: Path) -> None:
    file, path = tmp_path / "faults.py", tmp_path / "run"
    file.write_text(SEARCH_FILE)
    with driver(tmp_path / "first.log", "run", str(file), "--storage", str(path)) as first:
        first.wait_until(_at_work(path, attempt=1), "first report")
        # One worker stands still. The other waits for it, for the time limit at most.
        os.kill(doing(_WORKER, first.children())[0].pid, signal.SIGSTOP)
        first.wait_until(lambda: [e for e in events(path, "started") if e["attempt"] == 2], "second attempt")
        (said,) = [text for file in path.glob("trials/t0000/hang-*.txt") if (text := file.read_text())]
        assert said.startswith("Timeout (0:00:15)!")
        had = max(reports(path).values())
        first.wait_until(_at_work(path, attempt=2, more_than=had), "report of the second attempt")
        first.children()
        os.kill(first.process.pid, signal.SIGKILL)

    with driver(tmp_path / "second.log", "resume", str(path)) as second:
        had = max(reports(path).values())
        second.wait_until(_at_work(path, attempt=3, more_than=had), "report of the third attempt")
        for process in doing(_WORKER, second.children()):
            process.rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))  # no checkpoint is as small
        assert second.process.wait(_PATIENCE) == 2
        assert "Free some space" in second.log.read_text()
        assert f"raydp resume {path}" in second.log.read_text()
    assert [record.state for record in RunDirectory.open(path).records().values()] == ["running"]
    kept = sorted(path.glob("trials/t0000/seed-0/checkpoint-*.pt"))
    assert len(kept) == 2
    kept[-1].write_bytes(kept[-1].read_bytes()[:-100])  # torn, so that the one before it is taken

    runner.resume(path, quiet=True)
    everything_ran_once(path, trials=1)
    assert not list(path.glob("trials/t0000/workers-*"))
