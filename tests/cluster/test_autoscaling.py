"""A search on a cluster without a single CPU makes it grow, trains, and lets it shrink."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raydp.search.run_directory import RunDirectory
from raydp.search.verify import verify
from tests.cluster.autoscaling import autoscaling_head

SCRIPT = """
import json, sys, threading, time
import ray, raydp
from ray import tune

address, storage = sys.argv[1:]
ray.init(address=address, log_to_driver=False, logging_level="ERROR")

def workers():
    return sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())

seen, ended = [workers()], threading.Event()

def watch():
    while not ended.wait(0.5):
        seen.append(workers())

watcher = threading.Thread(target=watch)
watcher.start()
search = raydp.Search(
    name="grows", method="dp_sgd", data="mnist5k", data_limit=1000, model="mlp",
    budget=raydp.Budget(epsilon=3.0, delta=1e-5), space={"learning_rate": tune.loguniform(0.1, 4.0)},
    fixed={"epochs": 1, "batch_size": 250}, trials=2, sampler="random", reports=1,
    resources=raydp.Resources(max_concurrent=1),
)
search.run(storage=storage, quiet=True)
deadline = time.monotonic() + 90
while workers() and time.monotonic() < deadline:
    time.sleep(0.5)
ended.set()
watcher.join()
print(json.dumps({"before": seen[0], "most": max(seen), "after": workers()}))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_empty_cluster_grows_for_a_search_and_shrinks_afterwards(tmp_path: Path) -> None:
    with autoscaling_head({"CPU": 1}, most=2) as address:
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, address, str(tmp_path / "run")],
            capture_output=True,
            text=True,
            timeout=350,
            env=environment,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == '{"before": 0, "most": 1, "after": 0}'
    assert [record.state for record in RunDirectory.open(tmp_path / "run").records().values()] == ["complete"] * 2
    assert verify(tmp_path / "run")["ok"]
