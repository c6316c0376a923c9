"""Ctrl-C: once stops gracefully and says how to go on, twice stops now; nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydp.search import runner
from raydp.search.interrupts import Interrupts
from tests.search.driving import PATIENCE, driver, everything_ran_once, reports
from tests.search.test_faults import SEARCH_FILE


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_is_passed_on_and_said_and_the_second_stops_now() -> None:
    passed, said = [], []

    def tune(number: int, frame: object) -> None:
        passed.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as Tune does

    signal.signal(signal.SIGINT, tune)
    interrupts = Interrupts(said.append, "raydp resume runs/mine")
    interrupts.stand_between()
    interrupts.stand_between()  # before every step
    signal.raise_signal(signal.SIGINT)
    assert passed == [signal.SIGINT] and interrupts.count == 1
    assert interrupts.spoken is not None
    interrupts.spoken.join()
    (text,) = said
    assert "Ctrl-C again stops now" in text and text.endswith("raydp resume runs/mine")
    interrupts.stand_between()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert passed == [signal.SIGINT] and len(said) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_interrupts_of_a_real_search_lose_nothing(tmp_path: Path) -> None:
    """Whether the second comes while the first is still at work is not for the test to know: nothing depends on it."""
    file, path = tmp_path / "faults.py", tmp_path / "run"
    file.write_text(SEARCH_FILE.replace("trials=4", "trials=2"))
    with driver(tmp_path / "first.log", "run", str(file), "--storage", str(path)) as first:
        first.wait_until(lambda: max(reports(path).values(), default=0) >= 1, "trial at work")
        os.killpg(first.process.pid, signal.SIGINT)
        first.wait_until(lambda: "Ctrl-C again stops now" in " ".join(first.log.read_text().split()), "word about it")
        first.children()
        if first.process.poll() is None:
            os.killpg(first.process.pid, signal.SIGINT)
        assert first.process.wait(PATIENCE) != 0
    assert f"raydp resume {path}" in first.log.read_text().replace("\n", "")
    runner.resume(path, quiet=True)
    everything_ran_once(path, trials=2)
