"""Searches that run as drivers of their own, what one sees of them from outside, and how they should have ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from mlflow import MlflowClient

from raydp.privacy.ledger import Ledger
from raydp.search.results import Result
from raydp.search.run_directory import DEFINITION, RunDirectory
from raydp.search.verify import verify

PATIENCE = 180.0  # seconds that anything may take on a busy machine


def doing(what: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of the processes that do this; Ray names a process after what it does."""
    found = []
    for process in processes:
        try:
            if any(part.startswith(what) for part in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


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
                # Ray lets its workers wait for everything else on the machine.
                env={"RAY_worker_niceness": "0", **os.environ},
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
        """Those that train; Tune wraps the trainable."""
        return doing("ray::ResourceTrainable.train", self.children())

    def wait_until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE
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
        self.process.wait(PATIENCE)
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


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    if not (path / DEFINITION).exists():
        return []
    return [event for event in RunDirectory.open(path).events() if event["event"] == kind]


def reports(path: Path) -> dict[str, int]:
    """Reports of each unfinished trial."""
    finished = {event["key"] for event in events(path, "finished")}
    return {
        file.parent.parent.name: file.read_bytes().count(b"\n")
        for file in path.glob("trials/*/seed-0/metrics.jsonl")
        if file.parent.parent.name not in finished
    }


def statuses(uri: str) -> dict[str, str]:
    """Trial key -> status of its only run."""
    client = MlflowClient(uri)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    keys = [run.data.tags["raydp.trial_key"] for run in runs]
    assert len(keys) == len(set(keys)), f"duplicates: {sorted(keys)}"
    return {run.data.tags["raydp.trial_key"]: run.info.status for run in runs}


def everything_ran_once(path: Path, trials: int) -> None:
    directory = RunDirectory.open(path)
    records = directory.records()
    assert [(r.number, r.state) for r in records.values()] == [(i, "complete") for i in range(trials)]
    for key, record in records.items():
        ledger = Ledger.read(directory.run_path(key, 0) / "ledger.jsonl")
        assert record.plan is not None
        ledger.check(record.plan)
        assert [ledger.steps(p.name) for p in record.plan.phases] == [p.steps for p in record.plan.phases]
        # What is reported again, because its checkpoint was torn, is the same to the last digit.
        lines = dict.fromkeys((directory.run_path(key, 0) / "metrics.jsonl").read_text().splitlines())
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == sorted(set(steps)) and steps[-1] == record.plan.steps
    assert Result.load(path).runs == trials
    assert not list(directory.secrets.iterdir())
    assert verify(path)["ok"]
