"""A search of many trials that train nothing, through everything else that a driver does. Says what a trial costs.

    python -m tests.benchmarks.simulate_search --trials 10000 --storage DIR    # goes on where it was interrupted
    python -m tests.benchmarks.simulate_search --storage DIR --report          # the table of what ran, as JSON

Each trial is proposed by the real sampler, planned through the calibration's cache, written to the journal, and shown
by the real tracker (SQLite, artifacts on disk). In place of training, its ledger records the plan's steps and one value
is reported. Ray is left out: a cluster's share of the cost has benchmarks of its own (bench_overhead).

DIR gets the run directory and ``cost.jsonl``, one line a block of a hundred trials: seconds by the wall clock and of
the processor (of all threads), parts of the wall-clock seconds, memory, and sizes of the files. The tracker works in a
thread of its own; each block waits until it has written everything, so its work is in the block that caused it.

Requirement: a block around trial 10,000 costs at most 1.1 times one around trial 100, in processor seconds, which other
programs on the machine change least.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
from ray import tune

from raydp.privacy.budget import Budget
from raydp.privacy.ledger import LedgerWriter
from raydp.search.definition import Search
from raydp.search.display import Display
from raydp.search.run_directory import JOURNAL, RunDirectory
from raydp.search.session import Session
from raydp.search.tracking import Tracker
from raydp.search.trainable import Assignment

BLOCK = 100  # trials a line of cost.jsonl
_Answer = TypeVar("_Answer")


def search_of(sampler: str, trials: int) -> Search:
    """Three hyperparameters, one of which decides the plan: its four values are calibrated once each."""
    return Search(
        name="simulated",
        method="dp_sgd",
        data="digits",
        model="mlp",
        budget=Budget(epsilon=3.0, delta=1e-5),
        space={
            "learning_rate": tune.loguniform(0.1, 4.0),
            "clip_norm": tune.loguniform(0.1, 10.0),
            "epochs": tune.choice([1, 2, 3, 4]),
        },
        fixed={"batch_size": 256},
        trials=trials,
        sampler=sampler,
        reports=1,
    )


class Clock:
    """Wall-clock seconds by part, since the last :meth:`take`."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}

    def time(self, part: str, action: Callable[[], _Answer]) -> _Answer:
        begun = time.perf_counter()
        answer = action()
        self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - begun
        return answer

    def take(self) -> dict[str, float]:
        parts, self._parts = self._parts, {}
        return {name: round(seconds, 4) for name, seconds in parts.items()}


def pretend(session: Session, task: Assignment) -> float:
    """What a trial leaves behind, without training: a ledger of the plan's steps and one reported value."""
    path = session.directory.run_path(task.key, 0)
    path.mkdir(parents=True, exist_ok=True)
    plan = session.directory.plan(task.key)
    assert plan is not None
    with LedgerWriter(path / "ledger.jsonl", plan) as ledger:
        for phase in plan.phases:
            for step in range(phase.steps):
                ledger.record(phase.name, step)
    rate, clip = float(task.config["learning_rate"]), float(task.config["clip_norm"])
    score = 0.9 - 0.05 * abs(math.log(rate)) - 0.02 * abs(math.log(clip)) + 0.01 * float(task.config["epochs"])
    line = {"step": plan.steps, "metrics": {"accuracy": score}}
    (path / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    return score


def run(storage: Path, *, sampler: str, trials: int) -> None:
    """Run what is left of the search, a line of cost.jsonl a block."""
    search, path = search_of(sampler, trials), storage / "run"
    directory = RunDirectory.open(path) if path.exists() else RunDirectory.create(path, search.to_json())
    if directory.definition["sampler"] != sampler:
        raise SystemExit(f"{path} is a simulation of the sampler {directory.definition['sampler']}; choose another.")
    display = Display(trials=trials, metric=search.metrics, quiet=True)
    clock, process = Clock(), psutil.Process()
    with directory.lock():
        tracker = Tracker(uri=None, directory=directory, experiment=search.name)
        begun = time.perf_counter()
        session = Session(search, directory, tracker=tracker, display=display)
        print(f"opened in {time.perf_counter() - begun:.2f} s", flush=True)
        tracker.start_search(directory.definition, search.point_space.varying)
        session.extend(max(0, trials - session.target))
        done = len(directory.records())
        clock.time("tracker", lambda: tracker.flush(600))
        clock.take()
        wall, cpu = time.perf_counter(), time.process_time()
        while (task := clock.time("propose and plan", session.next_task)) is not None:
            clock.time("journal the start", lambda task=task: session.started(task.key))  # type: ignore[misc]
            score = clock.time("ledger", lambda task=task: pretend(session, task))  # type: ignore[misc]
            step = {"seed": 0, "step": 1, "fraction": 1.0, "metrics": {"accuracy": score}}
            session.progressed(task.key, step)
            item = {"state": "complete", "reason": None, "metrics": {"accuracy": [score]}, "seconds": 0.0}
            clock.time(
                "journal the end",
                lambda task=task, item=item: session.finished(task.key, item),  # type: ignore[misc]
            )
            done += 1
            if done % BLOCK == 0:
                if not clock.time("tracker", lambda: tracker.flush(600)):
                    raise SystemExit(f"the tracker is behind: {tracker.degraded}")
                now, used = time.perf_counter(), time.process_time()
                line = {
                    "trials": done,
                    "seconds": round(now - wall, 4),
                    "cpu_seconds": round(used - cpu, 4),
                    "parts": clock.take(),
                    "memory": process.memory_info().rss,
                    "journal": os.path.getsize(path / JOURNAL),
                    "tracking_state": os.path.getsize(path / "tracking.json"),
                    "tracker": os.path.getsize(path / "mlflow.db"),
                }
                with (storage / "cost.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
                wall, cpu = time.perf_counter(), time.process_time()
        session.close()
        tracker.finish_search({"trials": done}, "complete")
        tracker.close()


def report(storage: Path) -> dict[str, Any]:
    """What cost.jsonl adds up to: cost a trial early and late, their ratio, and what grows with the trials."""
    lines = [json.loads(line) for line in (storage / "cost.jsonl").read_text(encoding="utf-8").splitlines()]
    found: dict[str, Any] = {"trials": lines[-1]["trials"], "hours": sum(line["seconds"] for line in lines) / 3600}
    # The first block has imports and calibrations in it, and fewer trials than the sampler's model needs.
    early, late = lines[1:4], lines[-3:]
    for name in ("seconds", "cpu_seconds"):
        first, last = (statistics.median(line[name] / BLOCK for line in part) for part in (early, late))
        found[name] = {"early": first, "late": last, "ratio": last / first}
    parts = {name: statistics.median(line["parts"][name] / BLOCK for line in late) for name in late[0]["parts"]}
    found["parts_late"] = parts
    span = lines[-1]["trials"] - lines[1]["trials"]
    for name in ("memory", "journal", "tracking_state", "tracker"):
        found[f"{name}_bytes_a_trial"] = (lines[-1][name] - lines[1][name]) / span
        found[f"{name}_bytes"] = lines[-1][name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--storage", type=Path, required=True, metavar="DIR")
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--sampler", default="tpe", choices=("tpe", "random"))
    parser.add_argument("--report", action="store_true", help="only print what the simulation in DIR has cost so far")
    arguments = parser.parse_args()
    if not arguments.report:
        arguments.storage.mkdir(parents=True, exist_ok=True)
        run(arguments.storage, sampler=arguments.sampler, trials=arguments.trials)
    print(json.dumps(report(arguments.storage), indent=2))


if __name__ == "__main__":
    main()
