"""A search on a real cluster: submitted twice, stopped, resubmitted, its driver killed, resubmitted, fetched."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import tune

import raydp
from raydp import cluster
from raydp.cli import main
from raydp.errors import InvalidValue
from raydp.privacy.ledger import Ledger
from raydp.search.copies import fetch
from raydp.search.run_directory import COPY, RunDirectory
from raydp.search.verify import verify
from tests.cluster.heads import Head, ray_head

SEARCH_FILE = """
import raydp
from ray import tune

search = raydp.Search(
    name="jobs", method="dp_sgd", data="mnist5k", data_limit=1500, model="mlp",
    budget=raydp.Budget(epsilon=3.0, delta=1e-5),
    space={"learning_rate": tune.loguniform(0.1, 4.0)}, fixed={"epochs": 60, "batch_size": 150},
    trials=2, sampler="random", reports=30, resources=raydp.Resources(max_concurrent=1),
)
"""
_PATIENCE = 180.0


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as started:
        yield started


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError(f"no {what}")


def reports(path: Path) -> int:
    """Lines that the running trial has reported so far."""
    return sum(file.read_bytes().count(b"\n") for file in path.glob("trials/*/seed-0/metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_lost_or_spent_twice_by_a_stop_and_by_the_death_of_the_driver(head: Head, tmp_path: Path) -> None:
    work, path = tmp_path / "work", tmp_path / "shared" / "run"
    work.mkdir()
    file = work / "jobs.py"
    file.write_text(SEARCH_FILE)
    said: list[str] = []

    def submit() -> cluster.Submission:
        return cluster.submit(file, name="jobs", address=head.address, storage=str(path), notify=said.append)

    first = submit()
    job = first.job.id
    assert (first.outcome, first.job.attempt) == ("started", 1)
    assert any("left out" in line and "MiB" in line for line in said)
    assert any("exec /" in line and " -m raydp run jobs.py" in line for line in said)  # no bare "python"
    wait_until(lambda: reports(path) >= 2, "report of the first attempt")
    again = submit()
    assert (again.outcome, again.job.id, again.job.attempt) == ("attached", job, 1)
    assert len(cluster.jobs(head.address)) == 1

    # A stop is one Ctrl-C: the driver says how to go on and leaves no trial behind.
    stopped = cluster.stop(job, head.address, timeout=_PATIENCE)
    assert stopped.status == "STOPPED"
    assert cluster.stop(job, head.address).status == "STOPPED"  # once more does nothing
    assert "Interrupted. Go on with" in cluster.logs(job, head.address)
    at_the_stop = reports(path)
    assert at_the_stop < 60

    second = submit()
    assert (second.outcome, second.job.id, second.job.attempt) == ("resumed", job, 2)
    wait_until(lambda: reports(path) > at_the_stop + 1, "report of the second attempt")
    driver = wait_until(lambda: head.driver_of(path), "driver")
    os.kill(driver.pid, signal.SIGKILL)
    wait_until(lambda: cluster.find(job, head.address).ended, "end of the killed driver's job")
    assert cluster.find(job, head.address).status == "FAILED"

    third = submit()
    assert (third.outcome, third.job.attempt) == ("resumed", 3)
    wait_until(lambda: cluster.find(job, head.address).ended, "end of the search")
    assert cluster.find(job, head.address).status == "SUCCEEDED", cluster.logs(job, head.address)
    assert submit().outcome == "complete"

    # Every trial ran once: its ledger is its plan, each report was made once, no key is left.
    directory = RunDirectory.open(path)
    records = directory.records()
    assert [record.state for record in records.values()] == ["complete", "complete"]
    for key, record in records.items():
        assert record.plan is not None
        ledger = Ledger.read(directory.run_path(key, 0) / "ledger.jsonl")
        ledger.check(record.plan)
        assert [ledger.steps(phase.name) for phase in record.plan.phases] == [p.steps for p in record.plan.phases]
        lines = (directory.run_path(key, 0) / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == sorted(set(steps)) and steps[-1] == record.plan.steps
    assert max(record.attempts for record in records.values()) >= 2
    assert not list(directory.secrets.iterdir())
    assert verify(path)["ok"]

    # Another file, or other options, for the same run directory is refused.
    file.write_text(SEARCH_FILE.replace("trials=2", "trials=3"))
    with pytest.raises(InvalidValue, match=r"--storage.*another file"):
        submit()

    # What comes back is what was released.
    result = fetch(job, address=head.address, target=tmp_path / "here")
    assert (result.directory / COPY).exists()
    assert not (result.directory / "secrets").exists() and not list(result.directory.rglob("checkpoint-*"))
    assert [trial.metrics for trial in result.trials] == [record.metrics for record in records.values()]
    assert (result.directory / "mlflow.db").exists()  # a tracker of its own
    assert verify(result.directory)["ok"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_python_and_the_command_line(
    head: Head, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = raydp.Search(
        name="quick",
        method="dp_sgd",
        data="mnist5k",
        data_limit=1000,
        model="mlp",
        budget=raydp.Budget(epsilon=3.0, delta=1e-5),
        space={"learning_rate": tune.loguniform(0.1, 4.0)},
        fixed={"epochs": 1, "batch_size": 250},
        trials=1,
        sampler="random",
        reports=1,
    )
    path = tmp_path / "run"
    job = search.submit(address=head.address, storage=str(path)).job
    monkeypatch.setenv("RAYDP_ADDRESS", head.address)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["logs", "-f", job.id])
    assert ended.value.code == 0
    output = capsys.readouterr()
    assert "epsilon of the whole search" in output.out and "SUCCEEDED" in output.err
    for arguments in (["jobs", "--json"], ["fetch", job.id, "--json"], ["stop", job.id, "--json"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert json.loads(capsys.readouterr().out)
    assert RunDirectory.open(tmp_path / "runs" / "run").records().keys() == {"t0000"}
    with pytest.raises(SystemExit) as ended:
        main(["fetch", job.id + "x"])
    assert ended.value.code == 2
    assert "Did you mean" in capsys.readouterr().err

    def space(trial: Any) -> None:
        trial.suggest_float("learning_rate", 0.1, 1.0)

    with pytest.raises(InvalidValue, match="is a Python function"):
        raydp.Search(name="function", data="mnist5k", budget=raydp.Budget(epsilon=3.0, delta=1e-5), space=space).submit(
            address=head.address
        )
