"""Every command and every piece of Python in README.md runs, in the order in which a reader meets them.

A command is a line of a block of commands, or a span of code in the text that begins as one. Most run as they stand, in
a directory that holds a copy of ``searches``; :data:`CASES` says what is changed where a command would take minutes or
names something that only the reader has. A command that is not listed here makes a test fail.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raydp
from raydp import cli, models
from raydp.search.results import Result

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(raydp|pip|python3?|pytest|cluster/local\.sh|RAYDP_\w+=\S+)\s\S")
#: Named in a sentence, without what it is about.
_HOW = re.compile(r"raydp (plan|verify|run( FILE)?|report|resume RUN_DIR|statement DIR|submit|logs -f ID)")


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a command of the README is run.

    Attributes:
        says: a part of what it prints.
        more: options that make it short.
        names: what only the reader has -> what stands for it here.
        trains: whether it starts processes that train; it then runs as a process of its own.
    """

    says: str = ""
    more: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    trains: bool = False


#: Commands that need a finished search, which the first of them makes.
CASES: Mapping[str, Case] = {
    "raydp run searches/quickstart.py": Case(
        more="--trials 2 --set epochs=1 --set resources.total_cpus=2",
        says="epsilon of the whole search",
        trains=True,
    ),
    "raydp run searches/quickstart.py --set trials=1 --set resources.num_workers=2": Case(
        more="--set epochs=1", says="epsilon of the whole search", trains=True
    ),
    "raydp report runs/quickstart-1": Case(says="report.html"),
    "raydp verify runs/quickstart-1": Case(says="hold their budget"),
    "raydp statement runs/quickstart-1": Case(says="epsilon"),
    "raydp compare runs/A runs/B": Case(
        names={"runs/A": "runs/quickstart-1", "runs/B": "runs/quickstart-2"}, says="accuracy"
    ),
    "raydp run searches/quickstart.py --after runs/quickstart-1": Case(
        # Its options are read by `plan`, which trains nothing; tests/search/test_earlier.py runs such searches.
        names={"run": "plan"},
        more="--proposals 0",
        says="already spent on these people",
    ),
    "raydp resume runs/quickstart-1 --trials +6": Case(
        names={"+6": "+1"}, says="epsilon of the whole search", trains=True
    ),
    "raydp statement DIR --json": Case(names={"DIR": "runs/quickstart-1"}, says='"epsilon'),
}
#: Commands that need none.
QUICK: Mapping[str, Case] = {
    "raydp plan searches/quickstart.py": Case(says="sparse"),
    "raydp plan searches/quickstart.py --set resources.num_workers=2": Case(says="num workers: 2"),
    "raydp audit searches/quickstart.py": Case(more="--canaries 100 --runs 10", says="no bound exceeds its claim"),
    "raydp new tp_topk": Case(says="raydp run tp_topk_search.py"),
    "raydp doctor": Case(more="--quick", says="Python"),  # what it starts: tests/search/test_doctor.py
    "raydp methods dp_ngd": Case(says="learning_rate"),
    "raydp datasets": Case(says="mnist5k"),
    "raydp describe visits.parquet --target readmitted > visits.toml": Case(says='[features."age"]'),
    "raydp --version": Case(says=raydp.__version__),
    "raydp run FILE --set batch_size=512 --set budget.epsilon=1 --set resources.cpus_per_worker=2 --scale small": Case(
        # `plan` reads the options as `run` does, and trains nothing.
        names={"run": "plan", "FILE": "searches/learning_rate.py"},
        more="--proposals 0",
        says="epsilon 1,",
    ),
}
SERVED = "raydp ui runs/quickstart-1"
_JOBS = "tests/cluster/test_jobs.py::"
_STOPPED = f"{_JOBS}test_nothing_is_lost_or_spent_twice_by_a_stop_and_by_the_death_of_the_driver"
_LINE = f"{_JOBS}test_from_python_and_the_command_line"
#: Commands that another test runs: it needs a cluster, a browser, or the measurements.
ELSEWHERE = {
    "cluster/local.sh start 3 1": (
        "tests/cluster/test_deployment.py::test_a_local_cluster_of_two_nodes_starts_with_a_token_and_stops"
    ),
    "raydp submit searches/quickstart.py --storage /shared/runs/quickstart -f": _STOPPED,
    "raydp submit searches/quickstart.py --storage /shared/runs/quickstart": _STOPPED,
    "raydp jobs": _LINE,
    "raydp logs -f ID": _LINE,
    "raydp stop ID": _LINE,
    "raydp fetch ID": _LINE,
    "RAYDP_SCREENSHOTS=DIR pytest tests/search/test_mlflow_ui.py": (
        "tests/search/test_mlflow_ui.py::test_selected_trials_are_compared_on_the_axes_of_the_split"
    ),
}
#: What .ci/run does with a clean clone, by reading the README's own test command.
INSTALLATION = {
    "python3 -m venv .venv",
    ". .venv/bin/activate",
    "pip install .",
    "pip install -e '.[test]'",
    "pip install '.[diffusion]'",  # part of .[test]
    "pytest",
}
MEASUREMENTS = {"python -m tests.benchmarks.bench_noise"}


def commands() -> list[str]:
    """Every command of the README, once each, in its order."""
    found: list[str] = []

    def take(line: str) -> None:
        for command in re.split(r"\s+&&\s+", re.split(r"\s+#", line)[0].strip()):
            if command and not command.startswith("#"):
                found.append(command)

    position = 0
    for block in _BLOCK.finditer(README):
        found += spans(README[position : block.start()])
        if block[1] in ("", "sh"):
            for line in block[2].replace("\\\n", " ").splitlines():
                take(line)
        position = block.end()
    found += spans(README[position:])
    return list(dict.fromkeys(found))


def spans(text: str) -> list[str]:
    """Spans of code that are commands to type, and not a command's name in a sentence."""
    written = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text))
    return [span for span in written if _COMMAND.match(span) and not _HOW.fullmatch(span)]


def python_blocks() -> list[str]:
    return [block[2] for block in _BLOCK.finditer(README) if block[1] == "python"]


def test_every_command_of_the_readme_has_a_test() -> None:
    tested = {*CASES, *QUICK, *ELSEWHERE, *INSTALLATION, *MEASUREMENTS, SERVED}
    assert set(commands()) == tested  # a new command needs a case, one that is gone needs none
    assert {block[1] for block in _BLOCK.finditer(README)} <= {"", "sh", "python"}  # other kinds would go unread


@pytest.mark.parametrize("command", ELSEWHERE)
def test_the_test_that_runs_a_command_exists(command: str) -> None:
    file, name = ELSEWHERE[command].split("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {name}\(", text, re.MULTILINE)
    verb = command.split()[1]  # raydp submit, local.sh start
    assert verb == "pytest" or verb in text


def test_installation_and_measurements_are_where_the_readme_says() -> None:
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "raydp-search[diffusion]" in project.split("\ntest = ")[1].splitlines()[0]
    for command in MEASUREMENTS:
        assert (ROOT / f"{command.split()[-1].replace('.', '/')}.py").is_file()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader's directory holds: the searches, and a table."""
    path = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "searches", path / "searches")
    pq.write_table(pa.table({"age": [30, 40], "readmitted": ["no", "yes"]}), path / "visits.parquet")
    return path


def arguments(command: str, case: Case) -> list[str]:
    """What follows ``raydp``."""
    words = [case.names.get(word, word) for word in shlex.split(command.split(" > ")[0])[1:]]
    return words + shlex.split(case.more)


def process(arguments: list[str], place: Path, **options: Any) -> subprocess.Popen[str]:
    environment = {"RAY_worker_niceness": "0", **os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "raydp", *arguments], cwd=place, env=environment, text=True, **options
    )


def run(command: str, case: Case, place: Path) -> str:
    """Run a command as a process of its own; what it printed."""
    started = process(arguments(command, case), place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = started.communicate(timeout=600)
    assert started.returncode == 0, output[-3000:]
    return output


def call(
    command: str,
    case: Case,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Run a command here, which saves the seconds of its imports; what it printed."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments(command, case))
    output, errors = capsys.readouterr()
    assert not ended.value.code, errors
    return output


@pytest.mark.parametrize("command", QUICK)
def test_a_command_that_trains_nothing_does_what_the_readme_says(
    command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert QUICK[command].says in call(command, QUICK[command], workplace, monkeypatch, capsys)


@pytest.fixture(scope="module")
def said(workplace: Path) -> dict[str, str]:
    """What the commands print that train, each after the other in one directory."""
    return {command: run(command, case, workplace) for command, case in CASES.items() if case.trains}


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_the_searches_of_the_readme_run(said: Mapping[str, str], workplace: Path) -> None:
    for command, output in said.items():
        assert CASES[command].says in output or "Read:    raydp report" in output, command
    first, second = (Result.load(workplace / "runs" / f"quickstart-{number}") for number in (1, 2))
    assert [trial.state for trial in first.trials] == ["complete"] * 3  # one of them by `resume`
    assert [trial.state for trial in second.trials] == ["complete"]
    assert second.search["resources"]["num_workers"] == 2


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("command", [command for command, case in CASES.items() if not case.trains])
def test_a_command_on_a_search_does_what_the_readme_says(
    command: str,
    said: Mapping[str, str],
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert CASES[command].says in call(command, CASES[command], workplace, monkeypatch, capsys)


@pytest.fixture
def served(said: Mapping[str, str], workplace: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = process(arguments(SERVED, Case(more=f"--port {port}")), workplace)
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        if server.poll() is None:
            server.kill()
        server.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_the_user_interface_of_the_readme_is_served_until_it_is_ended(
    served: tuple[str, subprocess.Popen[str]],
) -> None:
    url, server = served
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and server.poll() is None:
        try:
            assert urllib.request.urlopen(f"{url}/health", timeout=5).read() == b"OK"
            break
        except OSError:
            time.sleep(0.5)
    else:
        raise AssertionError("nothing answers")
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0


def test_the_python_of_the_readme_runs(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    search, net = python_blocks()
    monkeypatch.chdir(workplace)
    (workplace / "splits.py").write_text(search, encoding="utf-8")
    (workplace / "nets.py").write_text(net, encoding="utf-8")
    output = call("raydp plan splits.py --proposals 0", Case(), workplace, monkeypatch, capsys)
    assert "splits: epsilon 3" in output and "sparse" in output
    model = models.build_model("nets.py:make", input_shape=(5,), outputs=2, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 5 * 32 + 32 + 64 + 32 * 2 + 2
