"""A search of trials that do next to nothing, against bare Ray Tune with Optuna's sampler, in one run.

    python -m tests.benchmarks.bench_tune [--trials 200] [--write]

raydp's trials train an mlp on the 8x8 digits for one step and write plan, ledger, metrics and MLflow runs. Bare Tune's
report one number: by a function, for which it starts a process each, and by a class whose processes it reuses, as
raydp does. Each search has two cores and is a process of its own. A trial's time is the whole search's, from the first
proposal to the last result, over the trials; the start of Ray is in none. ``--write`` puts the table into the README
beside this file.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from raydp.search.run_directory import RunDirectory

README = Path(__file__).with_name("README.md")
_BEGIN, _END = "<!-- bench_tune: begin -->", "<!-- bench_tune: end -->"

SEARCH = """
import raydp
from ray import tune

search = raydp.Search(
    name="empty", method="dp_sgd", data="digits", model="mlp", budget=raydp.Budget(epsilon=3.0, delta=1e-5),
    space={{"learning_rate": tune.loguniform(0.1, 4.0), "momentum": tune.uniform(0.0, 0.9)}},
    fixed={{"epochs": 1, "batch_size": 1437}}, trials={trials}, reports=1, sampler="tpe",
    resources=raydp.Resources(total_cpus=2),
)
"""


def raydp_seconds(trials: int, directory: Path) -> float:
    """From the first proposal to the last result, by the journal's clock."""
    file = directory / "empty.py"
    file.write_text(SEARCH.format(trials=trials))
    run = directory / "run"
    command = [sys.executable, "-c", "from raydp.cli import main; main()", "run", str(file), "--storage", str(run)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    events = list(RunDirectory.open(run).events())
    first = next(event["time"] for event in events if event["event"] == "proposed")
    last = [event["time"] for event in events if event["event"] == "finished"]
    assert len(last) == trials
    return (datetime.fromisoformat(last[-1]) - datetime.fromisoformat(first)).total_seconds()


def bare(kind: str, trials: int) -> None:
    """In this process: bare Tune; prints seconds."""
    import ray
    from ray import tune
    from ray.tune.search.optuna import OptunaSearch

    class Empty(tune.Trainable):
        def setup(self, config: dict[str, float]) -> None:
            self.value = config["learning_rate"]

        def step(self) -> dict[str, float | bool]:
            return {"accuracy": -self.value, "done": True}

        def reset_config(self, new_config: dict[str, float]) -> bool:
            self.setup(new_config)
            return True

    def empty(config: dict[str, float]) -> None:
        tune.report({"accuracy": -config["learning_rate"]})

    logging.disable(logging.WARNING)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tuner = tune.Tuner(
        Empty if kind == "class" else empty,
        param_space={"learning_rate": tune.loguniform(0.1, 4.0), "momentum": tune.uniform(0.0, 0.9)},
        tune_config=tune.TuneConfig(
            metric="accuracy", mode="max", num_samples=trials, search_alg=OptunaSearch(), reuse_actors=kind == "class"
        ),
        run_config=tune.RunConfig(storage_path=tempfile.mkdtemp(), verbose=0),
    )
    begun = time.perf_counter()
    found = tuner.fit()
    seconds = time.perf_counter() - begun
    ray.shutdown()
    assert len(found) == trials
    print(json.dumps(seconds))


def bare_seconds(kind: str, trials: int) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_tune", "--bare", kind, "--trials", str(trials)],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--bare", choices=("function", "class"), help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="into the README beside this file")
    arguments = parser.parse_args()
    if arguments.bare:
        bare(arguments.bare, arguments.trials)
        return
    with tempfile.TemporaryDirectory() as scratch:
        found = {
            "bare Tune, class trainable, processes reused": bare_seconds("class", arguments.trials),
            "raydp": raydp_seconds(arguments.trials, Path(scratch)),
            "bare Tune, function trainable": bare_seconds("function", arguments.trials),
        }
    lines = [
        f"`python -m tests.benchmarks.bench_tune --trials {arguments.trials}`",
        "",
        "| search | s a trial |",
        "|---|---|",
    ]
    lines += [f"| {name} | {seconds / arguments.trials:.3f} |" for name, seconds in found.items()]
    print("\n".join(lines))
    if arguments.write:
        text = README.read_text(encoding="utf-8")
        before, rest = text.split(_BEGIN)
        written = "\n".join(lines)
        README.write_text(f"{before}{_BEGIN}\n{written}\n{rest[rest.index(_END) :]}", encoding="utf-8")


if __name__ == "__main__":
    main()
