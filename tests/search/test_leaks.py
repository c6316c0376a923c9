"""Nothing of a private batch reaches a file, the tracker, a log line or the terminal."""

from __future__ import annotations

import logging
import re
import stat
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raydp import cli
from raydp.errors import InvalidValue
from raydp.geometry.rank_one import dense
from raydp.search import statement
from raydp.search.display import Display
from raydp.search.results import Result, write_trials_parquet
from raydp.search.run_directory import RunDirectory
from raydp.search.session import Session
from raydp.search.tracking import Tracker
from raydp.search.trainable import outcomes
from raydp.search.verify import verify
from raydp.training import run
from tests.search.helpers import contents, drive, session_in, small_search


class Spy:
    """Sees what the private step sees: sizes of batches, norms of gradients, the share of those that are clipped."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()
        self.numbers: set[float] = set()
        self.query = run.private_gradient

    def __call__(self, batches: Iterable[Sequence[Tensor]], *, geometry: Any, phase: Any, **given: Any) -> Any:
        seen = [[dense(gradient) for gradient in part] for part in batches]
        given |= {"shapes": {}}  # they are all there now
        norms = torch.cat([self.norms(geometry.project(part)) for part in seen]) if seen else torch.zeros(0)
        self.sizes.add(len(norms))
        if len(norms):
            clipped = (norms > phase.clip_norm).double().mean()
            self.numbers |= {float(clipped), *(float(x) for x in (norms.max(), norms.min(), norms.mean(), norms[0]))}
        return self.query(seen, geometry=geometry, phase=phase, **given)

    @staticmethod
    def norms(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([part.flatten(1).double().norm(dim=1) for part in parts]).norm(dim=0)

    def found_in(self, text: str) -> list[str]:
        """Which of the numbers stand in the text: sizes as words of their own, others by six significant digits."""
        tokens = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.])", text))
        sizes = [f"a batch of {size}" for size in self.sizes if str(size) in tokens]
        told = {f"{float(token):.5e}" for token in tokens if len(token.replace(".", "").lstrip("0")) >= 6}
        return sizes + sorted(told & {f"{number:.5e}" for number in self.numbers if number not in (0, 1)})


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy()
    monkeypatch.setattr(run, "private_gradient", spy)
    return spy


@pytest.mark.slow
def test_no_number_of_a_private_batch_is_told(
    tmp_path: Path, spy: Spy, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    # From a known seed, so that no run of this test finds a number by chance.
    search = small_search(trials=2, seeds=2, insecure_seed=1)
    directory = RunDirectory.create(tmp_path / "run", search.to_json())
    tracker = Tracker(uri=None, directory=directory, experiment="leaks")
    tracker.start_search(directory.definition, search.point_space.varying)
    display = Display(trials=2, metric=search.metrics, varying=search.point_space.varying, quiet=False)
    with display, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        drive(Session(search, directory, tracker=tracker, display=display))
    write_trials_parquet(directory.path)
    statement.write(directory)
    result = Result.load(directory.path)
    tracker.finish_search({"epsilon_search": result.epsilon_search.upper}, "complete")
    assert tracker.synchronise()
    tracker.close()
    said = [result.summary(), str(result.to_json()), str(verify(directory.path)), repr(result), result._repr_html_()]
    out, err = capfd.readouterr()
    texts = dict(contents(directory.path))
    assert {"journal.jsonl", "statement.txt", "trials.parquet", "mlflow.db: metrics"} <= set(texts)
    texts |= {"said": "\n".join(said), "log": caplog.text, "warnings": str([w.message for w in warned])}
    # The terminal holds escape codes and cursor positions, so only words of digits count there.
    texts |= {"terminal": re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", " ", out + err)}
    assert len(spy.sizes) > 5 and len(spy.numbers) > 20
    population = 1437
    spy.sizes -= {population, 256, 360}  # planned sizes, which are public
    for name, text in texts.items():
        assert spy.found_in(text) == [], name


def test_the_spy_finds_what_it_looks_for() -> None:
    spy = Spy()
    spy.sizes, spy.numbers = {247}, {0.31415926, 27.182818}
    assert spy.found_in('{"batch": 247}') == ["a batch of 247"] and spy.found_in("0.247 a247 2471") == []
    assert spy.found_in("norm 27.18282") == ["2.71828e+01"] and spy.found_in("share=0.314159") == ["3.14159e-01"]


def test_no_message_of_a_failing_private_step_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever raises it: an exception of raydp's own may name the shape of a batch as well."""

    def fail(batches: Iterable[Any], **_: Any) -> None:
        size = sum(len(part[0]) for part in batches)
        warnings.warn(f"a batch of {size}", stacklevel=1)
        raise InvalidValue("images", f"shape ({size}, 1, 8, 8)", "must be square", "Resize them.")

    monkeypatch.setattr(run, "private_gradient", fail)
    session = session_in(tmp_path / "run", small_search(trials=1))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        drive(session)
    directory = RunDirectory.open(tmp_path / "run")
    record = directory.records()["t0000"]
    assert record.state == "failed" and "only the traceback has it" in str(record.reason)
    (error,) = directory.path.rglob("error.txt")
    assert "must be square" in error.read_text() and stat.S_IMODE(error.stat().st_mode) == 0o600
    for name, text in contents(directory.path):
        assert "must be square" not in text or name.endswith("error.txt"), name
    assert not [w for w in warned if "a batch of" in str(w.message)]


def test_secrets_and_checkpoints_are_the_owners_alone(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", small_search().to_json())
    assert stat.S_IMODE(directory.secrets.stat().st_mode) == 0o700
    session = session_in(tmp_path / "run", small_search(trials=1, paired=True))
    modes: dict[str, int] = {}

    task = session.next_task()
    assert task is not None
    session.started(task.key)
    items = outcomes(task)
    next(items)  # in the middle of the run
    for path in directory.path.rglob("*"):
        if path.suffix in (".pt", ".key"):
            modes[path.name] = stat.S_IMODE(path.stat().st_mode)
    items.close()  # type: ignore[attr-defined]
    assert len(modes) >= 2 and set(modes.values()) == {0o600}


def test_the_user_interface_and_ray_listen_to_this_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from raydp.search.connection import connected

    called: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **given: called.append(given))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with connected(small_search(), None, tracking_uri=None):
        pass
    assert called[0]["include_dashboard"] is False and "_node_ip_address" not in called[0]

    commands: list[list[str]] = []

    class Server:
        pid = 0

        def __init__(self, command: list[str], **_: Any) -> None:
            commands.append(command)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(cli.subprocess, "Popen", Server)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    (tmp_path / "mlflow.db").touch()
    with pytest.raises(SystemExit):
        cli.main(["ui", str(tmp_path), "--port", "5987"])
    assert commands[0][commands[0].index("--host") + 1] == "127.0.0.1"
