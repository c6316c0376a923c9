"""Processes that die, drivers that are killed or interrupted, trackers that are down, disks that are full.

Only processes that a test started itself are ended, by their ids.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from raydp.errors import CorruptFile, RaydpError
from raydp.search import runner
from raydp.search.definition import Resources
from raydp.search.run_directory import DEFINITION, JOURNAL, RunDirectory
from raydp.search.session import Session
from tests.search.driving import PATIENCE, driver, events, everything_ran_once, reports, statuses
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_survives_the_death_of_a_trial_of_its_driver_and_an_interrupt(tmp_path: Path) -> None:
    file, path = tmp_path / "faults.py", tmp_path / "run"
    file.write_text(SEARCH_FILE)

    with driver(tmp_path / "first.log", "run", str(file), "--storage", str(path)) as first:
        # A trial's process is killed: the trial goes on from its checkpoint, as attempt 2.
        # All are in their middles, so that whichever process it is, it is at work.
        first.wait_until(lambda: (n := list(reports(path).values())) and all(1 <= x <= 5 for x in n), "trials at work")
        first.wait_until(first.trial_processes, "process of a trial")[0].kill()
        again = first.wait_until(lambda: [e for e in events(path, "started") if e["attempt"] == 2], "second attempt")
        # A second driver is refused, and says who holds the directory.
        with pytest.raises(RaydpError, match=f"is being driven by another process .pid {first.process.pid}"):
            runner.resume(path, quiet=True)
        # The driver is killed in the middle of a trial.
        first.wait_until(
            lambda: events(path, "finished") and max(reports(path).values(), default=0) >= 3, "trial in the middle"
        )
        first.children()
        os.kill(first.process.pid, signal.SIGKILL)
    finished_then = {event["key"] for event in events(path, "finished")}
    proposed_then = {event["key"] for event in events(path, "proposed")}
    started_then = [event["key"] for event in events(path, "started")]
    assert len(finished_then) < 4

    with driver(tmp_path / "second.log", "resume", str(path)) as second:
        # Ctrl-C reaches every process of the terminal's foreground group.
        first_new = second.wait_until(lambda: events(path, "started")[len(started_then) :], "trial that goes on")
        # The unfinished ones come first; one of them may have been handed out without ever having begun.
        assert first_new[0]["key"] in proposed_then - finished_then
        second.wait_until(lambda: reports(path), "trial at work")
        second.children()
        os.killpg(second.process.pid, signal.SIGINT)
        assert second.process.wait(PATIENCE) == 130, second.log.read_text()[-3000:]
        output = second.log.read_text()
        assert f"raydp resume {path}" in output
        assert "Traceback" not in output
    assert "RUNNING" not in statuses(f"sqlite:///{path / 'mlflow.db'}").values()

    result = runner.resume(path, quiet=True)
    everything_ran_once(path, trials=4)
    attempts = {record.key: record.attempts for record in result.trials}
    assert attempts[again[0]["key"]] >= 2
    for key in attempts:
        assert attempts[key] == [e["key"] for e in events(path, "started")].count(key)
        assert key not in finished_then or attempts[key] == started_then.count(key)
    found = statuses(f"sqlite:///{path / 'mlflow.db'}")
    assert found == dict.fromkeys(("search", "t0000", "t0001", "t0002", "t0003"), "FINISHED")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("server", ["raylet/raylet", "gcs/gcs_server"])
def test_a_cluster_that_dies_ends_the_search_which_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    file, path = tmp_path / "faults.py", tmp_path / "run"
    # So long that no trial ends by itself before the loss is noticed, which takes some twenty seconds.
    file.write_text(SEARCH_FILE.replace("trials=4", "trials=2").replace('"epochs": 60', '"epochs": 300'))
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "20")  # for a minute otherwise
    with driver(tmp_path / "first.log", "run", str(file), "--storage", str(path)) as first:
        first.wait_until(lambda: max(reports(path).values(), default=0) >= 2, "trial at work")
        (process,) = [c for c in first.children() if c.cmdline() and c.cmdline()[0].endswith(server)]
        process.kill()
        assert first.process.wait(PATIENCE) != 0
        output = first.log.read_text()
        assert "of the Ray cluster" in output or "The Ray cluster is gone" in output
        assert f"raydp resume {path}" in output.replace("\n", "")
    runner.resume(path, quiet=True)
    everything_ran_once(path, trials=2)


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
    everything_ran_once(path, trials=2)
    assert (path / "trials.parquet").exists()
    assert not (path / "mlflow.db").exists()

    uri = f"sqlite:///{tmp_path / 'later.db'}"
    again = runner.resume(path, tracking_uri=uri, quiet=True)  # nothing is left to train, so no Ray starts
    assert [r.metrics for r in again.trials] == [r.metrics for r in result.trials]
    assert statuses(uri) == {"search": "FINISHED", "t0000": "FINISHED", "t0001": "FINISHED"}


def test_another_layout_is_refused(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", small_search().to_json())
    header = json.loads((directory.path / DEFINITION).read_text())
    (directory.path / DEFINITION).write_text(json.dumps({**header, "layout": 99}))
    with pytest.raises(CorruptFile, match="has layout version 99, this raydp reads version 2"):
        runner.resume(directory.path, quiet=True)
