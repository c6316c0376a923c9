"""The command line: parses, calls, prints; what raydp refuses is one message and exit status 2."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import raydp.search
from raydp import cli
from raydp.errors import InvalidValue, LedgerRefusal
from raydp.methods import METHODS

FILE = """
from ray import tune
from raydp.privacy.budget import Budget
from raydp.search.definition import Search

def make(name):
    return Search(name=name, method="dp_sgd", data="digits", budget=Budget(epsilon=3.0, delta=1e-5), trials=4,
                  space={"learning_rate": tune.loguniform(0.1, 10.0)}, fixed={"epochs": 2}, small={"trials": 2})

"""
ONE, TWO = FILE + "search = make('one')\n", FILE + "searches = [make('first'), make('second')]\n"


@dataclass
class FakeResult:
    directory: Path
    states: tuple[str, ...] = ("complete",)

    @property
    def trials(self):
        return [types.SimpleNamespace(state=state, reason=f"{state} because") for state in self.states]

    def to_json(self):
        return {"directory": str(self.directory), "best": "t0000"}


@dataclass
class FakeRunner:
    """Stands for raydp.search.runner: remembers what it was asked for."""

    states: tuple[str, ...] = ("complete",)
    error: BaseException | None = None
    calls: list = field(default_factory=list)

    def run(self, search, *, storage, tracking_uri, address, quiet, file):
        self.calls.append((search, storage, tracking_uri, address, quiet, file))
        if self.error:
            raise self.error
        storage.mkdir(parents=True)
        return FakeResult(storage, self.states)

    def resume(self, directory, *, extra_trials, tracking_uri, address, quiet):
        self.calls.append((directory, extra_trials, tracking_uri, address, quiet))
        if self.error:
            raise self.error
        return FakeResult(directory, self.states)


def replace_module(monkeypatch, name: str, fake: object) -> None:
    monkeypatch.setitem(sys.modules, f"raydp.search.{name}", fake)
    monkeypatch.setattr(raydp.search, name, fake, raising=False)


@pytest.fixture
def runner(monkeypatch, tmp_path):
    fake = FakeRunner()
    replace_module(monkeypatch, "runner", fake)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.py").write_text(ONE)
    (tmp_path / "two.py").write_text(TWO)
    return fake


@pytest.fixture
def call(capsys):
    def invoke(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return invoke


def test_run_hands_over_the_search_with_its_overrides(call, runner):
    code, out, _ = call(
        "run", "one.py", "--set", "momentum=0.5", "--set", "seeds=2", "--trials", "7", "--epsilon", "1.5", "--quiet",
        "--tracking-uri", "http://tracker", "--address", "ray://head",
    )  # fmt: skip
    assert (code, out) == (0, "")
    search, storage, tracking_uri, address, quiet, file = runner.calls[0]
    assert search.fixed == {"epochs": 2, "momentum": 0.5} and search.seeds == 2
    assert search.trials == 7 and search.budget.epsilon == 1.5
    assert (storage, tracking_uri, address, quiet) == (Path("runs/one-1"), "http://tracker", "ray://head", True)
    assert file == Path("one.py")


def test_run_takes_the_first_free_directory_and_says_what_to_do_next(call, runner):
    call("run", "one.py")
    code, out, _ = call("run", "one.py", "--scale", "small")
    assert code == 0 and "raydp ui runs/one-2" in out and "raydp verify runs/one-2" in out
    assert [storage.name for _, storage, *_ in runner.calls] == ["one-1", "one-2"]
    assert [search.trials for search, *_ in runner.calls] == [4, 2]


def test_overrides_win_over_the_scale(call, runner):
    call("run", "one.py", "--scale", "small", "--trials", "9")
    assert runner.calls[0][0].trials == 9


def test_several_searches_run_one_after_the_other(call, runner):
    code, out, _ = call("run", "two.py", "--storage", "here", "--json")
    assert code == 0
    assert json.loads(out)["searches"]["second"] == {"directory": "here/second", "best": "t0000"}
    code, out, _ = call("run", "two.py", "--storage", "there", "--only", "second", "--json")
    assert json.loads(out) == {"directory": "there", "best": "t0000"}
    assert [search.name for search, *_ in runner.calls] == ["first", "second", "second"]
    assert all(quiet for *_, quiet, _ in runner.calls)


def test_run_without_a_complete_trial_exits_1(call, runner):
    runner.states = ("failed", "infeasible", "failed")
    code, _, err = call("run", "one.py")
    assert code == 1 and "completed (2 of 3: failed because); `raydp resume` can add trials" in err


def test_ctrl_c_says_how_to_go_on(call, runner):
    runner.error = KeyboardInterrupt()
    code, _, err = call("run", "one.py")
    assert code == 130 and "raydp resume runs/one-1" in err
    code, _, err = call("resume", "runs/one-1")
    assert code == 130 and "raydp resume runs/one-1" in err


def test_what_raydp_refuses_is_one_message_and_no_traceback(call, runner):
    runner.error = LedgerRefusal("the plan has no room")
    for arguments in (["run", "one.py"], ["resume", "x"]):
        code, out, err = call(*arguments)
        assert (code, out, err) == (2, "", "error: the plan has no room\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "absent.py"], "no such file"),
        (["run", "one.py", "--set", "momentum"], "FIELD=VALUE"),
        (["run", "one.py", "--set", "=3"], "FIELD=VALUE"),
        (["run", "one.py", "--trials", "3", "--set", "trials=4"], "second time"),
        (["run", "one.py", "--set", "momentumm=0.5"], "momentum"),
        (["run", "one.py", "--set", "trials=many"], "trials"),
        (["run", "one.py", "--epsilon", "-1"], "epsilon"),
        (["run", "one.py", "--scale", "paper"], "scale"),
        (["run", "one.py", "--scale", "large"], "small"),
        (["run", "two.py", "--only", "secnd"], "second"),
        (["resume", "x", "--trials", "-1"], "negative"),
        (["methods", "dp_sgdd"], "dp_sgd"),
        (["ui", "nowhere"], "mlflow.db"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(call, runner, arguments, expected):
    code, out, err = call(*arguments)
    assert code == 2 and out == "" and expected in err and "Traceback" not in err
    assert runner.calls == []


def test_unknown_options_and_no_command(call):
    assert call("run", "x.py", "--no-such-option")[0] == 2
    assert "Commands" in call("--help")[1]


def test_resume_reads_plus_n(call, runner, tmp_path):
    code, out, _ = call("resume", "runs/a", "--trials", "+5", "--json")
    assert code == 0 and json.loads(out)["best"] == "t0000"
    assert runner.calls == [(Path("runs/a"), 5, None, None, True)]
    assert "raydp verify runs/a" in call("resume", "runs/a")[1]
    assert call("resume", "runs/a", "--quiet")[1] == ""


INTERVALS = {name: {"lower": 2.99, "estimate": 2.995, "upper": 2.99991} for name in ("pld", "prv")}


def test_plan_prints_phases_and_certificates(call, runner, monkeypatch):
    def preview(search, proposals):
        phase = {"name": "train", "noise_multiplier": 1.25, "sample_rate": 0.1, "steps": 40, "clip_norm": 1.0}
        feasible = {"point": "centre", "config": {"learning_rate": 0.5}, "phases": [phase], "certificate": INTERVALS}
        refused = {"point": "corner", "config": {}, "phases": [], "certificate": {}, "reason": "nothing left"}
        return {
            "budget": search.budget.to_json(),
            "plans": [feasible, refused][: proposals + 1],
            "resources": {"max_concurrent": 2},
            "cost": {"seconds": 61.5},
        }

    replace_module(monkeypatch, "preview", types.SimpleNamespace(preview=preview))
    code, out, _ = call("plan", "one.py", "--epsilon", "2")
    assert code == 0 and runner.calls == []
    for expected in ("epsilon 2", "train", "1.2500", "40", "2.99991", "nothing left", "max concurrent: 2", "61.5"):
        assert expected in out
    code, out, _ = call("plan", "one.py", "--json", "--proposals", "0")
    record = json.loads(out)
    assert record["budget"]["epsilon"] == 3.0 and len(record["plans"]) == 1
    assert set(json.loads(call("plan", "two.py", "--json")[1])["searches"]) == {"first", "second"}


@pytest.mark.parametrize("ok", [True, False])
def test_verify_exits_1_when_a_run_is_over(call, monkeypatch, ok):
    trial = {
        "key": "t0000", "seed": 0, "state": "complete", "epsilon": INTERVALS, "ok": ok,
        "problem": None if ok else "over [its] budget",
    }  # fmt: skip
    report = {
        "ok": ok,
        "budget": {"epsilon": 3.0, "delta": 1e-5, "adjacency": "add_remove"},
        "trials": [trial],
        "search": {"epsilon": INTERVALS},
        "problems": [] if ok else ["the journal is [damaged]"],
    }
    replace_module(monkeypatch, "verify", types.SimpleNamespace(verify=lambda directory: report))
    code, out, _ = call("verify", "runs/a", "--json")
    assert code == (0 if ok else 1) and json.loads(out) == report
    code, out, _ = call("verify", "runs/a")
    assert code == (0 if ok else 1)
    assert "2.99991" in out and "whole search" in out
    assert ("All 1 runs hold their budget" in out) == ok and ("t0000 seed 0: over [its] budget" in out) != ok
    assert ("search: the journal is [damaged]" in out) != ok


def test_methods_lists_types_defaults_and_help(call):
    listed = json.loads(call("methods", "--json")[1])["methods"]
    assert [record["name"] for record in listed] == list(METHODS)
    one = json.loads(call("methods", "tp_topk", "--json")[1])
    found = {item["name"]: item for item in one["hyperparameters"]}
    assert found["learning_rate"]["type"] == "float" and found["learning_rate"]["help"]
    assert found["sparse_clip_norm"] | {"help": ""} == {
        "name": "sparse_clip_norm", "type": "float | none", "default": None, "help": "",
    }  # fmt: skip
    text = call("methods", "tp_topk")[1]
    assert all(name in text for name in found)
    assert all(name in call("methods")[1] for name in METHODS)


def test_datasets(call):
    found = json.loads(call("datasets", "--json")[1])["datasets"]
    assert {"mnist5k", "digits"} <= set(found)
    assert all(name in call("datasets")[1] for name in found)


def test_ui_serves_the_run_directory_until_ctrl_c_and_refuses_a_taken_port(call, monkeypatch, tmp_path):
    (tmp_path / "mlflow.db").touch()
    started, killed = [], []

    class Server:
        pid = 4242

        def __init__(self, command, start_new_session):
            assert start_new_session
            started.append(command)

        def wait(self):
            if not killed:
                raise KeyboardInterrupt
            return -signal.SIGTERM

    monkeypatch.setattr(subprocess, "Popen", Server)
    monkeypatch.setattr(os, "killpg", lambda *arguments: killed.append(arguments))
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, out, _ = call("ui", str(tmp_path), "--port", str(port))
    assert code == 0 and f"http://127.0.0.1:{port}" in out
    assert started[0][:4] == [sys.executable, "-m", "mlflow", "server"]
    assert f"sqlite:///{tmp_path / 'mlflow.db'}" in started[0]
    assert killed == [(4242, signal.SIGTERM)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = call("ui", str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert code == 2 and "another --port" in err and len(started) == 1


def test_parse_overrides_keeps_texts_whole():
    assert cli.parse_overrides(["a= x=y ", "b=1"], epsilon=0.1) == {"a": "x=y", "b": "1", "budget.epsilon": "0.1"}
    assert cli.parse_overrides(None) == {}
    with pytest.raises(InvalidValue, match="second time"):
        cli.parse_overrides(["a=1", "a=2"])


def test_help_is_instant_and_imports_nothing_heavy():
    script = (
        "import sys\nfrom raydp.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'ray', 'mlflow', 'optuna', 'pandas', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "resume" in done.stdout
    assert time.monotonic() - begun < 5  # 0.3 s on an idle core; the imports above are what would make it slow


def test_the_version(call):
    import raydp

    assert call("--version") == (0, f"raydp {raydp.__version__}\n", "")


AUDITED = """
from ray import tune
from raydp.privacy.budget import Budget
from raydp.search.definition import Search

search = Search(name="tiny", method="METHOD", data="digits", budget=Budget(epsilon=1.0, delta=1e-5), trials=1,
                PUBLIC space={"learning_rate": tune.loguniform(0.1, 10.0)}, fixed={"epochs": 2})
"""
FEW = ("--canaries", "200", "--runs", "10", "--json")


def search_file(path: Path, method: str, public: str = "") -> str:
    path.write_text(AUDITED.replace("METHOD", method).replace("PUBLIC", public))
    return str(path)


def test_audit_of_a_file_leaves_a_report_and_a_figure(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = call("audit", search_file(tmp_path / "tiny.py", "dp_sgd"), *FEW)
    report = json.loads(out)
    assert code == 0 and report["passed"] and report["method"] == "dp_sgd"
    assert report["one_run"]["epsilon_lower"] <= report["one_run"]["claim"] <= 1.0
    assert report["config"]["epochs"] == 2 and report["ran_with"]["epochs"] == 4
    assert report["ran_with"]["batch_size"] == 100
    directory = tmp_path / "runs" / "tiny-audit-1"
    assert json.loads((directory / "audit.json").read_text()) == report
    assert (directory / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_audit_of_a_run_directory_takes_its_first_trial_and_exits_1_if_the_noise_is_too_small(
    call, tmp_path, monkeypatch
):
    from raydp.privacy.noise import NoiseKey
    from raydp.search.files import load_searches
    from raydp.search.run_directory import RunDirectory

    monkeypatch.chdir(tmp_path)
    search = load_searches(Path(search_file(tmp_path / "tiny.py", "dp_sgd")))["tiny"]
    directory = RunDirectory.create(tmp_path / "run", search.to_json())
    code, _, err = call("audit", "run", *FEW)
    assert code == 2 and "no trial with a plan" in err
    config = {"learning_rate": 0.7}
    plan = search.plan_for(config)
    directory.write_json("trials/t0000/plan.json", plan.to_json())
    directory.append({"event": "proposed", "key": "t0000", "number": 0, "config": config, "plan": plan.digest})
    honest = NoiseKey.use_rounded_normals
    monkeypatch.setattr(
        NoiseKey, "use_rounded_normals", lambda self, n, scale, use, *a: honest(self, n, scale / 20, use, *a)
    )
    code, out, _ = call("audit", "run", *FEW)
    report = json.loads(out)
    assert code == 1 and not report["passed"] and report["config"]["learning_rate"] == 0.7
    assert report["one_run"]["epsilon_lower"] > report["one_run"]["claim"]
    assert json.loads((directory.path / "audit" / "audit.json").read_text()) == report
    assert (directory.path / "audit" / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_audit_refuses_a_method_that_lacks_its_public_data_and_leaves_nothing(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = search_file(tmp_path / "tiny.py", "dp_ngd")
    code, out, err = call("audit", file, "--canaries", "10", "--runs", "10", "--json")
    assert (code, out) == (2, "") and "uses public examples" in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists()
