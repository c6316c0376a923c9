"""A search of many trials that train nothing, through everything else that a driver does. Says what a trial costs.

    python -m tests.benchmarks.simulate_search --trials 10000 --storage DIR    # goes on where it was interrupted
    python -m tests.benchmarks.simulate_search --storage DIR --report          # the table of what ran, as JSON

Each trial is proposed by the real sampler, planned through the calibration's cache, written to the journal, and shown
by the real tracker (SQLite, artifacts on disk). In place of training, its ledger records the plan's steps and one value
is reported. Ray is left out: a cluster's share of the cost has benchmarks of its own (bench_overhead).

DIR gets the run directory and ``cost.jsonl``, one line a block of a hundred trials: seconds by the wall clock and of
the processor (of all threads), parts of the wall-clock seconds, memory, and sizes of the files. The tracker works in a
thread of its own; each block waits until it has written everything, so its work is in the block that caused it.

    python -m tests.benchmarks.simulate_search --storage DIR --ratio 5         # a trial after DIR's over one after 100

Requirement: a trial after the ten-thousandth costs at most 1.1 times one after the hundredth. The two are measured in
turn, for what a trial costs doubles while the machine has other work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

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


class Simulation:
    """A driver of one simulated search, which goes on where an earlier one ended. A context manager."""

    def __init__(self, storage: Path, *, sampler: str, trials: int) -> None:
        search, path = search_of(sampler, trials), storage / "run"
        storage.mkdir(parents=True, exist_ok=True)
        self.storage = storage
        self.directory = RunDirectory.open(path) if path.exists() else RunDirectory.create(path, search.to_json())
        if self.directory.definition["sampler"] != sampler:
            raise SystemExit(f"{path} simulates the sampler {self.directory.definition['sampler']}; choose another.")
        self._stack = ExitStack()
        self._stack.enter_context(self.directory.lock())
        self.tracker = Tracker(uri=None, directory=self.directory, experiment=search.name)
        self._stack.callback(self.tracker.close)
        display = Display(trials=trials, metric=search.metrics, quiet=True)
        begun = time.perf_counter()
        self.session = Session(search, self.directory, tracker=self.tracker, display=display)
        self.seconds_to_open = time.perf_counter() - begun
        self.tracker.start_search(self.directory.definition, search.point_space.varying)
        self.session.extend(max(0, trials - self.session.target))
        self.done = len(self.directory.records())
        self.clock = Clock()
        self.tracker.flush(600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.session.close()
        self._stack.close()

    def advance(self, trials: int) -> dict[str, Any]:
        """Run so many trials, or what is left, and wait for the tracker: seconds, processor seconds and parts."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(trials):
            task = self.clock.time("propose and plan", self.session.next_task)
            if task is None:
                break
            self._trial(task)
        if not self.clock.time("tracker", lambda: self.tracker.flush(600)):
            raise SystemExit(f"the tracker is behind: {self.tracker.degraded}")
        seconds, used = time.perf_counter() - wall, time.process_time() - cpu
        return {
            "trials": self.done,
            "seconds": round(seconds, 4),
            "cpu_seconds": round(used, 4),
            "parts": self.clock.take(),
        }

    def _trial(self, task: Assignment) -> None:
        self.clock.time("journal the start", lambda: self.session.started(task.key))
        score = self.clock.time("ledger", lambda: pretend(self.session, task))
        step = {"seed": 0, "step": 1, "fraction": 1.0, "metrics": {"accuracy": score}}
        self.session.progressed(task.key, step)
        item = {"state": "complete", "reason": None, "metrics": {"accuracy": [score]}, "seconds": 0.0}
        self.clock.time("journal the end", lambda: self.session.finished(task.key, item))
        self.done += 1


def run(storage: Path, *, sampler: str, trials: int) -> None:
    """Run what is left of the search, a line of cost.jsonl a block."""
    process = psutil.Process()
    with Simulation(storage, sampler=sampler, trials=trials) as simulation:
        print(f"opened in {simulation.seconds_to_open:.2f} s", flush=True)
        while simulation.done < trials:
            line = simulation.advance(min(BLOCK - simulation.done % BLOCK, trials - simulation.done))
            path = simulation.directory.path
            line["memory"] = process.memory_info().rss
            for name, file in (("journal", JOURNAL), ("tracking_state", "tracking.json"), ("tracker", "mlflow.db")):
                line[name] = os.path.getsize(path / file)
            with (storage / "cost.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def ratio(storage: Path, *, sampler: str, blocks: int) -> dict[str, Any]:
    """What a trial after those in ``storage`` costs over one after the hundredth of a new search, block by block.

    Blocks of young and old trials alternate, so that other work on the machine falls on both; the ratio is the median
    of those of neighbours.
    """
    size = BLOCK // 2
    ratios: dict[str, list[float]] = {"seconds": [], "cpu_seconds": []}
    seconds: dict[str, list[float]] = {"young": [], "old": []}
    done = len(RunDirectory.open(storage / "run").records())
    with Simulation(storage, sampler=sampler, trials=done + (blocks + 1) * size) as old:
        old.advance(size)  # warm
        for _ in range(blocks):
            with (
                tempfile.TemporaryDirectory(dir=storage) as directory,
                Simulation(Path(directory), sampler=sampler, trials=BLOCK + size) as young,
            ):
                young.advance(BLOCK)
                costs = {"young": young.advance(size), "old": old.advance(size)}
            for name in ratios:
                ratios[name].append(costs["old"][name] / costs["young"][name])
            for name, cost in costs.items():
                seconds[name].append(cost["cpu_seconds"] / size)
            print(json.dumps(costs), flush=True)
        trials = old.done
    return {
        "trials": trials,
        "blocks": blocks,
        **{f"ratio_{name}": statistics.median(values) for name, values in ratios.items()},
        **{f"cpu_seconds_{name}": statistics.median(values) for name, values in seconds.items()},
    }


def report(storage: Path) -> dict[str, Any]:
    """What cost.jsonl adds up to: cost a trial early and late, their ratio, and what grows with the trials."""
    lines = [json.loads(line) for line in (storage / "cost.jsonl").read_text(encoding="utf-8").splitlines()]
    found: dict[str, Any] = {"trials": lines[-1]["trials"], "hours": sum(line["seconds"] for line in lines) / 3600}
    # The first block has imports and calibrations in it, and fewer trials than the sampler's model needs.
    early, late = lines[1:4], lines[-3:]
    for name in ("seconds", "cpu_seconds"):
        found[name] = {
            when: statistics.median(line[name] / BLOCK for line in part)
            for when, part in (("early", early), ("late", late))
        }
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
    parser.add_argument("--ratio", type=int, default=0, metavar="BLOCKS", help="compare with a young search, in turn")
    arguments = parser.parse_args()
    found: dict[str, Any]
    if arguments.ratio:
        found = ratio(arguments.storage, sampler=arguments.sampler, blocks=arguments.ratio)
        (arguments.storage / "ratio.json").write_text(json.dumps(found), encoding="utf-8")
    else:
        if not arguments.report:
            run(arguments.storage, sampler=arguments.sampler, trials=arguments.trials)
        found = report(arguments.storage)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
