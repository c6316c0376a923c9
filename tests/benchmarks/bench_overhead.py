"""What a search costs beside training: the start, and each trial after the first. Prints JSON.

    python tests/benchmarks/bench_overhead.py            # overhead of a trial, one and two at once
    python tests/benchmarks/bench_overhead.py FILE.py    # also the time line of the search in FILE

The trials of the overhead train for five steps (some milliseconds), so the time from one trial's end to the next one's
is the overhead, and a little more. Requirement: a median of at most 1 s on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

TINY = """
import raydp
from ray import tune

search = raydp.Search(
    name="tiny", method="tp_topk", data="digits", model="mlp", budget=raydp.Budget(epsilon=3.0, delta=1e-5),
    space={{"learning_rate": tune.loguniform(0.1, 4.0), "warmup_share": tune.uniform(0.2, 0.5)}},
    fixed={{"epochs": 1, "batch_size": 256}}, trials={trials}, reports=1,
    resources=raydp.Resources(total_cpus=2, max_concurrent={concurrent}),
)
"""


def child(file: Path, directory: Path) -> None:
    """Run the search of a file in this process, and print when each stage of its start was done."""
    stages = {"process": time.time()}
    import raydp  # noqa: F401
    from raydp.search import runner
    from raydp.search.files import load_searches

    stages["runner imported"] = time.time()
    search = next(iter(load_searches(file).values()))
    stages["search defined"] = time.time()
    runner.check(search)
    stages["checked"] = time.time()
    import ray

    init = ray.init

    def timed(*arguments: Any, **options: Any) -> Any:
        stages["tracker ready"] = time.time()
        try:
            return init(*arguments, **options)
        finally:
            stages["Ray ready"] = time.time()

    ray.init = timed
    runner.run(search, storage=directory, quiet=True, file=file)
    stages["end"] = time.time()
    print(json.dumps(stages))


def measure(file: Path, directory: Path) -> dict[str, Any]:
    """The time line of a search in a fresh process, with the plan cache of a fresh machine."""
    begun = time.time()
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(file), str(directory)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAYDP_CACHE": str(directory.parent / f"{directory.name}-plans")},
    )
    stages: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    events = [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()]
    finished = [event for event in events if event["event"] == "finished"]
    for kind, name in (("proposed", "first proposal"), ("started", "first trial started")):
        stages[name] = _seconds(next(event for event in events if event["event"] == kind))
    stages["first trial finished"], stages["last trial finished"] = _seconds(finished[0]), _seconds(finished[-1])
    timeline = {name: round(at - begun, 2) for name, at in sorted(stages.items(), key=lambda item: item[1])}
    ends = [_seconds(event) for event in finished]
    return {"timeline_s": timeline, "total_s": round(stages["end"] - begun, 2), "ends": ends, "finished": finished}


def overhead(trials: int, concurrent: int, root: Path) -> dict[str, Any]:
    """Seconds from the end of a trial to the end of the next one in the same process, without the first."""
    file = root / f"tiny_{concurrent}.py"
    file.write_text(TINY.format(trials=trials, concurrent=concurrent))
    found = measure(file, root / f"run-{concurrent}")
    # With c at once, the trial that ends as number k + c took the place of the one that ended as number k.
    periods = [later - earlier for earlier, later in zip(found["ends"], found["ends"][concurrent:], strict=False)]
    inside = [event["seconds"] for event in found["finished"]][concurrent:]
    return {
        "trials": trials,
        "at_once": concurrent,
        "period_median_s": round(statistics.median(periods), 3),
        "period_max_s": round(max(periods), 3),
        "inside_the_trial_median_s": round(statistics.median(inside), 3),
        "timeline_s": found["timeline_s"],
    }


def _seconds(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="a search whose time line is measured as well")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        record: dict[str, Any] = {
            "cpus": os.cpu_count(),
            "load_before": os.getloadavg()[0],
            "overhead": [overhead(arguments.trials, concurrent, root) for concurrent in (1, 2)],
        }
        record["ok"] = all(found["period_median_s"] <= 1.0 for found in record["overhead"])
        if arguments.file:
            found = measure(arguments.file, root / "search")
            record["search"] = {"total_s": found["total_s"], "timeline_s": found["timeline_s"]}
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
