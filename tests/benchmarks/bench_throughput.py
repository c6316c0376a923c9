"""Trials per second with two at once over one at a time, each of one worker with one thread. Prints JSON.

    python -m tests.benchmarks.bench_throughput

Each round runs the same search both ways, one after the other, so that other work on the machine falls on both. The
clock of a search runs from the start of its first trial to the end of its last: Ray's start is left out, the start of
the processes that train is not. Requirement: a median ratio of at least 1.7 on two idle cores; the load beside the
search is printed, for on a busy machine the ratio says how busy it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

SEARCH = """
import raydp
from ray import tune

search = raydp.Search(
    name="throughput", method="dp_sgd", data="digits", model="mlp", budget=raydp.Budget(epsilon=3.0, delta=1e-5),
    space={{"learning_rate": tune.loguniform(0.1, 4.0)}}, fixed={{"epochs": {epochs}, "batch_size": 64}},
    trials={trials}, sampler="random", reports=2,
    resources=raydp.Resources(total_cpus=2, max_concurrent={concurrent}),
)
"""
REQUIRED = 1.7


def seconds(root: Path, *, concurrent: int, trials: int, epochs: int) -> float:
    """Wall-clock seconds of a search's trials, in a process of its own."""
    file, path = root / f"at_once_{concurrent}.py", root / f"run-{concurrent}"
    file.write_text(SEARCH.format(concurrent=concurrent, trials=trials, epochs=epochs))
    command = [sys.executable, "-c", "from raydp.cli import main; main()", "run", str(file), "--storage", str(path)]
    environment = {**os.environ, "RAYDP_CACHE": str(root / "plans")}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    events = [json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines()]
    begun = min(_time(event) for event in events if event["event"] == "started")
    ends = [_time(event) for event in events if event["event"] == "finished"]
    if len(ends) != trials:
        raise RuntimeError(f"{len(ends)} of {trials} trials finished")
    return max(ends) - begun


def _time(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rounds = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as name:
            load = os.getloadavg()[0]
            one, two = (
                seconds(Path(name), concurrent=concurrent, trials=arguments.trials, epochs=arguments.epochs)
                for concurrent in (1, 2)
            )
        ratio = round(one / two, 3)
        rounds.append({"one_s": round(one, 2), "two_s": round(two, 2), "ratio": ratio, "load_before": load})
    median = statistics.median(found["ratio"] for found in rounds)
    record = {
        "cpus": os.cpu_count(),
        "trials": arguments.trials,
        "epochs": arguments.epochs,
        "rounds": rounds,
        "median_ratio": median,
        "required": REQUIRED,
        "ok": median >= REQUIRED,
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
