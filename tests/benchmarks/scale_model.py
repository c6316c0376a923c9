"""What a search of 10,000 trials needs: constants measured here or read of a simulation; the rest is arithmetic.

python -m tests.benchmarks.simulate_search --storage DIR              # 10,000 trials; less than an hour
python -m tests.benchmarks.simulate_search --storage DIR --ratio 5
python -m tests.benchmarks.scale_model --storage DIR                  # writes the table of cluster/SCALE.md
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from raydp.privacy.budget import Budget
from raydp.privacy.calibration import calibrate
from raydp.privacy.mechanism import PhaseSpec
from raydp.search.trainable import Assignment
from tests.benchmarks.simulate_search import Simulation, pretend, report

PAGE = Path(__file__).parents[2] / "cluster" / "SCALE.md"
BEGIN, END = "<!-- scale: begin -->", "<!-- scale: end -->"
TRIALS, GPUS = 10_000, 8
HOURS, AT_ONCE = 2.0, 100  # of a trial; trials at once: 800 GPUs, 8 days
_CALLS = ("create_run", "get_run", "log_batch", "log_artifact", "update_run", "set_terminated", "get_metric_history")


def seconds_of_a_plan() -> float:
    """Of a plan that was never solved: WRN-16-4's on CIFAR-10 (N = 50,000, B = 4,096, 2,500 steps), cross-checked."""
    spec = PhaseSpec(name="train", steps=2500, batch_size=4096, population=50_000, clip_norm=1.0)
    begun = time.process_time()
    calibrate(budget=Budget(epsilon=8.0, delta=1e-5), phases=[spec])
    return time.process_time() - begun


def calls_of_a_trial(reports: int = 5) -> dict[str, int]:
    """Calls of the tracking server for one trial each of whose events is written by itself, the most there can be."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(MlflowClient, name)

        def call(self: MlflowClient, *arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(self, *arguments, **options)

        return call

    originals = {name: getattr(MlflowClient, name) for name in _CALLS}
    with tempfile.TemporaryDirectory() as directory, Simulation(Path(directory), sampler="random", trials=2) as search:
        search.advance(1)
        for name in _CALLS:
            setattr(MlflowClient, name, counted(name))
        try:
            _slowly(search, reports)
        finally:
            for name, original in originals.items():
                setattr(MlflowClient, name, original)
    return dict(counts)


def _slowly(search: Simulation, reports: int) -> None:
    session = search.session
    task: Assignment | None = session.next_task()
    assert task is not None
    search.tracker.flush(60)
    session.started(task.key)
    search.tracker.flush(60)
    for step in range(1, reports + 1):
        session.progressed(task.key, {"seed": 0, "step": step, "fraction": 0.5, "metrics": {"accuracy": 0.5}})
        search.tracker.flush(60)
    score = pretend(session, task)
    item = {"state": "complete", "reason": None, "metrics": {"accuracy": [score]}, "seconds": 0.0}
    session.finished(task.key, item)
    search.tracker.flush(60)


def size_of_a_trial(storage: Path) -> float:
    """Bytes of a trial's own files: config, plan, ledger and metrics; not weights and checkpoints."""
    sizes = [
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in sorted((storage / "run" / "trials").iterdir())[:200]
    ]
    return sum(sizes) / len(sizes)


def table(storage: Path) -> list[str]:
    found = report(storage)
    ratios = json.loads((storage / "ratio.json").read_text(encoding="utf-8"))
    plan, calls = seconds_of_a_plan(), calls_of_a_trial()
    total, each = sum(calls.values()), found["memory_bytes_a_trial"]
    base = found["memory_bytes"] - each * found["trials"]
    rate = AT_ONCE / (HOURS * 3600)
    files = size_of_a_trial(storage)
    listed = ", ".join(f"{count} {name}" for name, count in sorted(calls.items(), key=lambda call: -call[1]))
    old, young = ratios["cpu_seconds_old"], ratios["cpu_seconds_young"]
    wall, ratio = ratios["ratio_seconds"], ratios["ratio_cpu_seconds"]
    journal, database = found["journal_bytes_a_trial"], found["tracker_bytes_a_trial"]
    days = TRIALS * HOURS / AT_ONCE / 24
    return [
        f"Simulated: {found['trials']} trials in {found['hours']:.2f} h on two shared cores. Modelled: {TRIALS:,} "
        f"trials of {GPUS} GPUs and {HOURS:g} h, {AT_ONCE} at once ({AT_ONCE * GPUS} GPUs, {days:.1f} days).",
        "",
        "| what | measured constant | modelled search |",
        "|---|---|---|",
        f"| driver's processor | {old * 1e3:.0f} ms a trial after {ratios['trials']:,}, {young * 1e3:.0f} ms after 100"
        f"; median ratio of neighbouring blocks {ratio:.2f} (wall clock {wall:.2f}) "
        f"| {TRIALS * old / 60:.0f} min in all |",
        f"| driver's memory | {base / 1e6:.0f} MB and {each / 1e3:.1f} kB a trial "
        f"| {(base + TRIALS * each) / 1e9:.2f} GB |",
        f"| journal | {journal / 1e3:.2f} kB a trial | {TRIALS * journal / 1e6:.0f} MB |",
        f"| a trial's files, without weights | {files / 1e3:.1f} kB | {TRIALS * files / 1e6:.0f} MB |",
        f"| calibration | {plan:.1f} s a plan that was never solved (2,500 steps, three accountants); none for another "
        f"clip norm or learning rate | {TRIALS * plan / 3600:.1f} h of one core if every plan differs |",
        f"| MLflow | at most {total} calls a trial with 5 reports ({listed}) | {rate * total:.2f} a second |",
        f"| MLflow's database | {database / 1e3:.1f} kB a trial | {TRIALS * database / 1e6:.0f} MB |",
        "| object store | nothing: a process is told its trial in a config of about a kilobyte, and reads its data by "
        "path | 0 |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--storage", type=Path, required=True, metavar="DIR")
    lines = table(parser.parse_args().storage)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
