import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from raydp.errors import InvalidValue, RaydpError
from raydp.privacy.plan import Interval
from raydp.search.records import TrialRecord
from raydp.search.run_directory import RunDirectory
from raydp.search.tracking import SEARCH, Tracker, _first_axes

DEFINITION = {
    "name": "mine",
    "method": "dp_sgd",
    "data": "digits",
    "budget": {"epsilon": 1.0, "delta": 1e-5, "adjacency": "add_remove"},
    "fixed": {"batch_size": 64},
}
INTERVAL = Interval(lower=0.98, estimate=0.99, upper=1.0, accountant="pld")


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """A migrated database to copy: making one takes two seconds. One test makes its own."""
    directory = RunDirectory.create(tmp_path_factory.mktemp("template") / "run", DEFINITION)
    Tracker(uri=None, directory=directory, experiment="template").close()
    return directory.path / "mlflow.db"


@pytest.fixture
def directory(tmp_path, empty_database):
    directory = RunDirectory.create(tmp_path / "run", DEFINITION)
    shutil.copyfile(empty_database, directory.path / "mlflow.db")
    return directory


def client_of(directory):
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{directory.path / 'mlflow.db'}")


def runs_of(client, experiment="mine"):
    """key -> runs of that key, the search itself under SEARCH."""
    found = {}
    experiment_id = client.get_experiment_by_name(experiment).experiment_id
    for run in client.search_runs([experiment_id]):
        found.setdefault(run.data.tags["raydp.trial_key"], []).append(run)
    return found


def write_steps(directory, key, seed, steps):
    run = directory.run_path(key, seed)
    run.mkdir(parents=True, exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "metrics": {"loss": 1 / (1 + step)}}) + "\n")


def propose(directory, number, **config):
    key = f"t{number:04d}"
    directory.append({"event": "proposed", "key": key, "number": number, "config": config, "plan": None})
    directory.write_json(f"trials/{key}/config.json", config)
    return key


def start(directory, key):
    directory.append({"event": "started", "key": key, "attempt": 1})


def finish(directory, key, state="complete", reason=None, accuracy=(0.5, 0.75)):
    directory.append(
        {
            "event": "finished",
            "key": key,
            "state": state,
            "reason": reason,
            "metrics": {"accuracy": list(accuracy)},
            "seconds": 2.5,
            "epsilon": {"pld": INTERVAL.to_json()},
        }
    )


def history(client, run, name):
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


def a_small_search(directory):
    """One trial complete, one diverged, one infeasible, one that runs and one that waits."""
    for number in range(2):
        key = propose(directory, number, lr=0.1 * (number + 1), batch_size=64)
        start(directory, key)
        for seed in range(2):
            write_steps(directory, key, seed, range(0, 50, 10))
            (directory.run_path(key, seed) / "ledger.jsonl").write_text('{"a": "ledger"}\n')
    finish(directory, "t0000")
    finish(directory, "t0001", state="diverged", reason="loss is nan at step 41", accuracy=[float("nan"), None])
    event = {"event": "infeasible", "key": "t0002", "number": 2, "config": {"lr": 9.0}, "reason": "nothing is left"}
    directory.append(event)
    start(directory, propose(directory, 3, lr=0.4, batch_size=64))
    propose(directory, 4, lr=0.5, batch_size=64)


def test_a_search_as_the_driver_tells_it(directory, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)  # left by another tool: must not capture anything
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "77")
    tracker = Tracker(uri=None, directory=directory, experiment="mine")
    tracker.start_search(DEFINITION, ["lr"])
    key = propose(directory, 0, lr=0.25, flag=True, batch_size=64)
    tracker.trial_proposed(directory.records()[key])
    assert tracker.flush()
    client = client_of(directory)
    assert runs_of(client)[key][0].info.status == "SCHEDULED"
    start(directory, key)
    tracker.trial_started(directory.records()[key])
    for step in (10, 20):
        write_steps(directory, key, 0, [step])
        tracker.log_metrics(key, step, {"loss": 1 / (1 + step)})
        assert tracker.flush()
    tracker.log_metrics(key, 10, {"loss": 9.0, "other": float("inf")})  # a replay, and what is no number
    tracker.log_metrics(key, 10, {"loss": 0.5}, seed=1)  # a run whose files the driver does not see
    assert tracker.flush()
    assert runs_of(client)[key][0].info.status == "RUNNING"
    finish(directory, key)
    tracker.trial_finished(directory.records()[key])
    tracker.finish_search({"epsilon_search": 3.5, "best": key, "skipped": None}, "complete")
    tracker.close()

    runs = runs_of(client)
    assert set(runs) == {SEARCH, key} and all(len(found) == 1 for found in runs.values())
    parent, child = runs[SEARCH][0], runs[key][0]
    assert parent.info.run_name == "mine" and parent.info.status == "FINISHED"
    assert parent.data.metrics == {"epsilon_search": 3.5} and parent.data.tags["raydp.best"] == key
    assert parent.data.params["epsilon"] == "1.0" and "raydp verify" in parent.data.tags["mlflow.note.content"]
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert child.info.run_name == "t0000 lr=0.25" and child.info.status == "FINISHED"
    assert child.data.params == {"lr": "0.25", "method": "dp_sgd"}
    assert history(client, child, "seed-0/loss") == [(10, 1 / 11), (20, 1 / 21)]
    assert history(client, child, "seed-1/loss") == [(10, 0.5)]
    assert child.data.metrics["accuracy"] == 0.625 and child.data.metrics["epsilon.pld"] == 1.0
    assert "seed-0/other" not in child.data.metrics
    assert [artifact.path for artifact in client.list_artifacts(child.info.run_id)] == ["config.json"]


def test_synchronise_twice_gives_no_duplicates_and_leaves_nothing_running(directory):
    a_small_search(directory)
    client = client_of(directory)
    for lost_state in (False, False, True):
        if lost_state:
            (directory.path / "tracking.json").unlink()
        tracker = Tracker(uri=None, directory=directory, experiment="mine")
        assert tracker.synchronise()
        tracker.close()
        runs = runs_of(client)
        assert {key: len(found) for key, found in runs.items()} == dict.fromkeys(
            [SEARCH, "t0000", "t0001", "t0002", "t0003", "t0004"], 1
        )
        statuses = {key: found[0].info.status for key, found in runs.items()}
        assert statuses == {
            SEARCH: "KILLED",
            "t0000": "FINISHED",
            "t0001": "FAILED",
            "t0002": "FAILED",
            "t0003": "KILLED",
            "t0004": "KILLED",
        }
        for key in ("t0000", "t0001"):
            for seed in range(2):
                expected = [(step, 1 / (1 + step)) for step in range(0, 50, 10)]
                assert history(client, runs[key][0], f"seed-{seed}/loss") == expected
        assert history(client, runs["t0000"][0], "accuracy") == [(0, 0.625)]
        assert runs["t0001"][0].data.metrics["diverged"] == 1 and "accuracy" not in runs["t0001"][0].data.metrics
        assert runs["t0002"][0].data.tags["raydp.reason"] == "nothing is left"


def test_acknowledgements_that_never_arrived_give_no_duplicates(directory):
    """The driver dies between the server's write and its own note of it: tracking.json is older than the server."""
    a_small_search(directory)
    tracker = Tracker(uri=None, directory=directory, experiment="mine")
    assert tracker.synchronise()
    tracker.close()
    path = directory.path / "tracking.json"
    state = json.loads(path.read_text())
    for tracked in state["trackers"].values():
        for entry in tracked["runs"].values():
            entry["steps"] = {name: 20 for name in entry["steps"]}
            entry["content"] = None
    path.write_text(json.dumps(state))
    write_steps(directory, "t0000", 0, [50])
    tracker = Tracker(uri=None, directory=directory, experiment="mine")
    assert tracker.synchronise()
    tracker.close()
    client = client_of(directory)
    run = runs_of(client)["t0000"][0]
    assert [step for step, _ in history(client, run, "seed-0/loss")] == [0, 10, 20, 30, 40, 50]
    assert [step for step, _ in history(client, run, "seed-1/loss")] == [0, 10, 20, 30, 40]
    assert len(history(client, run, "seconds")) == 1


def test_resume_continues_the_same_runs(directory):
    a_small_search(directory)
    first = Tracker(uri=None, directory=directory, experiment="mine")
    first.start_search(DEFINITION, ["lr"])
    assert first.synchronise()
    client = client_of(directory)
    assert {runs_of(client)[key][0].info.status for key in (SEARCH, "t0003")} == {"RUNNING"}
    # No close(): this driver is killed here. The next one takes over, and is interrupted by an exception.
    second = Tracker(uri=None, directory=directory, experiment="mine")
    second.start_search(DEFINITION, ["lr"])
    assert second.synchronise()
    assert runs_of(client)["t0003"][0].info.status == "RUNNING"
    finish(directory, "t0003")
    second.trial_finished(directory.records()["t0003"])
    second.close()
    runs = runs_of(client)
    assert all(len(found) == 1 for found in runs.values())
    assert runs["t0003"][0].info.status == "FINISHED"
    assert runs["t0004"][0].info.status == "KILLED" and runs[SEARCH][0].info.status == "KILLED"


def test_a_server_that_is_down_costs_no_time_and_is_caught_up_with(directory, caplog):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    a_small_search(directory)
    tracker = Tracker(uri=f"http://user:password@127.0.0.1:{port}", directory=directory, experiment="mine")
    begin = time.monotonic()
    tracker.start_search(DEFINITION, ["lr"])
    for record in directory.records().values():
        tracker.trial_proposed(record)
        tracker.log_metrics(record.key, 1, {"loss": 1.0})
    assert time.monotonic() - begin < 0.5
    assert tracker.flush(20) is False and tracker.degraded
    assert tracker.flush(20) is False
    tracker.finish_search({"epsilon_search": 2.0}, "complete")
    tracker.close(20)
    warnings = [entry for entry in caplog.records if entry.name == "raydp.search.tracking"]
    assert len(warnings) == 1 and "search goes on" in warnings[0].message
    for text in (caplog.text, (directory.path / "tracking.json").read_text()):
        assert "password" not in text

    # The next process uses the default tracker, and finds everything in the run directory.
    tracker = Tracker(uri=None, directory=directory, experiment="mine")
    assert tracker.synchronise()
    tracker.close()
    client = client_of(directory)
    runs = runs_of(client)
    assert len(runs) == 6 and runs[SEARCH][0].info.status == "FINISHED"
    assert runs[SEARCH][0].data.metrics == {"epsilon_search": 2.0}
    assert len(history(client, runs["t0000"][0], "seed-1/loss")) == 5


@contextlib.contextmanager
def serving(directory, tmp_path, port):
    """A real server of the directory's database for the length of the block."""
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--backend-store-uri", f"sqlite:///{directory.path / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(tmp_path / "served")]
    with (tmp_path / "server.log").open("a") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def flush_at_last(tracker, tmp_path):
    deadline = time.monotonic() + 180
    while not tracker.flush(20):
        assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()
        time.sleep(1)


@pytest.mark.slow
def test_a_real_server_that_comes_up_late(directory, tmp_path):
    """The search begins before the server; what it missed arrives by itself."""
    port = free_port()
    a_small_search(directory)
    tracker = Tracker(uri=f"http://127.0.0.1:{port}", directory=directory, experiment="mine")
    tracker.start_search(DEFINITION, ["lr"])
    assert not tracker.synchronise(20)
    with serving(directory, tmp_path, port):
        flush_at_last(tracker, tmp_path)
        tracker.finish_search({"epsilon_search": 2.0}, "complete")
        tracker.close()
    client = client_of(directory)
    runs = runs_of(client)
    assert {key: len(found) for key, found in runs.items()} == dict.fromkeys(runs, 1) and len(runs) == 6
    assert runs[SEARCH][0].info.status == "FINISHED" and runs["t0003"][0].info.status == "KILLED"
    assert len(history(client, runs["t0000"][0], "seed-1/loss")) == 5
    assert len(list((tmp_path / "served").rglob("ledger.jsonl"))) == 4


@pytest.mark.slow
def test_a_real_server_that_is_stopped_for_a_while(directory, tmp_path):
    """What happens meanwhile costs the search no time, and arrives once when the server is back."""
    port = free_port()
    a_small_search(directory)
    tracker = Tracker(uri=f"http://127.0.0.1:{port}", directory=directory, experiment="mine")
    with serving(directory, tmp_path, port):
        tracker.start_search(DEFINITION, ["lr"])
        tracker.synchronise()
        flush_at_last(tracker, tmp_path)
        tracker.log_metrics("t0003", 10, {"loss": 1.0}, seed=0)
        flush_at_last(tracker, tmp_path)
    begun = time.monotonic()
    for step in (20, 30, 40):
        tracker.log_metrics("t0003", step, {"loss": 1.0 / step}, seed=0)
    assert time.monotonic() - begun < 1.0
    assert not tracker.flush(5)
    with serving(directory, tmp_path, port):
        flush_at_last(tracker, tmp_path)
        tracker.finish_search({"epsilon_search": 2.0}, "complete")
        tracker.close()
    client = client_of(directory)
    runs = runs_of(client)
    assert {key: len(found) for key, found in runs.items()} == dict.fromkeys(runs, 1) and len(runs) == 6
    steps = [step for step, _ in history(client, runs["t0003"][0], "seed-0/loss")]
    assert steps == sorted(set(steps)) and {10, 20, 30, 40} <= set(steps)
    assert runs[SEARCH][0].info.status == "FINISHED"


def test_an_outage_in_the_middle(directory, monkeypatch, caplog):
    """Every third request fails after it was carried out: the worst kind, for a repeat would write it twice."""
    from mlflow import MlflowClient

    calls = {"count": 0}

    def flaky(method):
        def call(self, *args, **kwargs):
            result = method(self, *args, **kwargs)
            calls["count"] += 1
            if calls["count"] % 3 == 0 and calls["count"] < 40:
                raise ConnectionError("the answer was lost")
            return result

        return call

    for name in ("create_run", "log_batch", "set_terminated", "create_experiment", "log_artifact"):
        monkeypatch.setattr(MlflowClient, name, flaky(getattr(MlflowClient, name)))
    a_small_search(directory)
    tracker = Tracker(uri=None, directory=directory, experiment="mine")
    tracker.start_search(DEFINITION, ["lr"])
    for _ in range(40):
        if tracker.synchronise():
            break
    tracker.finish_search({}, "complete")
    tracker.close()
    assert calls["count"] >= 20
    client = client_of(directory)
    runs = runs_of(client)
    assert {key: len(found) for key, found in runs.items()} == dict.fromkeys(runs, 1) and len(runs) == 6
    for key in ("t0000", "t0001"):
        for seed in range(2):
            assert [step for step, _ in history(client, runs[key][0], f"seed-{seed}/loss")] == [0, 10, 20, 30, 40]
    assert not [key for key, found in runs.items() if found[0].info.status in ("RUNNING", "SCHEDULED")]


def test_a_run_that_was_deleted_by_hand_does_not_stop_the_others(directory, caplog):
    a_small_search(directory)
    tracker = Tracker(uri=None, directory=directory, experiment="mine")
    tracker.start_search(DEFINITION, ["lr"])
    assert tracker.synchronise()
    client = client_of(directory)
    client.delete_run(runs_of(client)["t0003"][0].info.run_id)
    finish(directory, "t0003")
    finish(directory, "t0004")
    for key in ("t0003", "t0004"):
        tracker.trial_finished(directory.records()[key])
    assert tracker.flush()
    tracker.close()
    assert runs_of(client)["t0004"][0].info.status == "FINISHED" and "t0003" in caplog.text


def test_secrets_and_checkpoints_stay_here(directory):
    a_small_search(directory)
    secret = "f00dfeed" * 8
    (directory.secrets / "t0000").write_text(secret)
    (directory.run_path("t0000", 0) / "key").write_text(secret)
    (directory.run_path("t0000", 0) / "checkpoint.pt").write_text(secret)
    tracker = Tracker(uri=None, directory=directory, experiment="mine")
    assert tracker.synchronise()
    tracker.close()
    uploaded = [path for path in (directory.path / "mlartifacts").rglob("*") if path.is_file()]
    assert {path.name for path in uploaded} == {"config.json", "ledger.jsonl"} and len(uploaded) == 8
    for path in [*uploaded, directory.path / "mlflow.db", directory.path / "tracking.json"]:
        assert secret.encode() not in path.read_bytes()


def test_long_and_odd_values(directory):
    key = propose(directory, 0, lr=0.1, text="x" * 300, flag=False, count=7, **{"a.b": 7.0})
    tracker = Tracker(uri=None, directory=directory, experiment="mine")
    tracker.start_search({**DEFINITION, "insecure_seed": 0}, ["lr", "text", "flag", "count", "a.b"])
    finished = TrialRecord(
        key=key,
        number=0,
        state="failed",
        reason="y" * 9000,
        config=directory.records()[key].config,
        metrics={"top-5 (%)": (0.5,)},
    )
    tracker.trial_finished(finished)
    assert tracker.flush()
    tracker.close()
    run = runs_of(client_of(directory))[key][0]
    assert "nothing is private" in run.data.tags["raydp.insecure"]
    assert run.data.params.pop("text").startswith("sha256:")
    assert run.data.params == {"lr": "0.1", "flag": "false", "count": "7", "a.b": "7.0", "method": "dp_sgd"}
    assert all(len(value) <= 250 for value in run.data.params.values()) and len(run.info.run_name) <= 120
    assert run.data.tags["raydp.reason"].startswith("yyy") and run.data.metrics["top-5 ___"] == 0.5


def test_a_fresh_database_is_made_quietly(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", DEFINITION)
    script = """
import sys
from raydp.search.run_directory import RunDirectory
from raydp.search.tracking import Tracker
tracker = Tracker(uri=None, directory=RunDirectory.open(sys.argv[1]), experiment="mine")
tracker.start_search({}, [])
tracker.finish_search({}, "complete")
tracker.close()
"""
    environment = {**os.environ, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}  # the argument counts, not this
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory.path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert runs_of(client_of(directory))[SEARCH][0].info.status == "FINISHED"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no ./mlruns, no ./mlflow.db


def test_refused_addresses(directory, tmp_path):
    for uri in ("file:///tmp/mlruns", "mlruns", str(tmp_path)):
        with pytest.raises(InvalidValue, match="migrate-filestore"):
            Tracker(uri=uri, directory=directory, experiment="mine")
    with pytest.raises(InvalidValue, match="begin with one of"):
        Tracker(uri="ftp://x", directory=directory, experiment="mine")
    (tmp_path / "text.db").write_text("no database, but long enough to be read as one" * 100)
    with pytest.raises(RaydpError, match=r"text\.db cannot be opened"):
        Tracker(uri=f"sqlite:///{tmp_path / 'text.db'}", directory=directory, experiment="mine")


def test_importing_the_module_does_not_import_mlflow():
    script = "import sys, raydp.search.tracking; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_objective_is_the_first_metric_of_a_run_and_nothing_of_it_is_written_twice(directory):
    """MLflow's comparison opens on the first metric; a run's own order in SQLite is that of the first values."""
    key = propose(directory, 0)
    tracker = Tracker(uri=None, directory=directory, experiment="mine")
    tracker.start_search({**DEFINITION, "metric": ["accuracy"]}, ["lr"])
    tracker.trial_proposed(directory.records()[key])
    start(directory, key)
    tracker.trial_started(directory.records()[key])
    write_steps(directory, key, 0, [10])
    tracker.log_metrics(key, 10, {"loss": 1 / 11})
    assert tracker.flush()
    client = client_of(directory)
    assert math.isnan(runs_of(client)[key][0].data.metrics["accuracy"])
    finish(directory, key)
    tracker.trial_finished(directory.records()[key])
    tracker.close()
    run = runs_of(client)[key][0]
    assert next(iter(run.data.metrics)) == "accuracy" and run.data.metrics["accuracy"] == 0.625
    values = [value for _, value in history(client, run, "accuracy")]
    assert len(values) == 2 and math.isnan(values[0]) and values[1] == 0.625


def test_splits_come_first_among_more_axes_than_are_drawn():
    few = {"learning_rate": 1.0, "warmup_fraction": 0.3, "warmup_share": 0.2}
    assert _first_axes(few) == {}
    many = {**few, "batch_size": 64, "epochs": 2}
    found = _first_axes(many)
    assert found == {"Split/warmup_fraction": 0.3, "Split/warmup_share": 0.2}
    assert set(found) < set(sorted({**many, **found})[:3])
    assert _first_axes({name: 1 for name in "abcd"}) == {}
