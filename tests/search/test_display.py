"""The display: live in a terminal, plain lines of at most 80 columns elsewhere, silent when quiet."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from raydp.privacy.plan import Interval
from raydp.search.display import Display, upward
from raydp.search.records import TrialRecord


@pytest.fixture(autouse=True)
def no_service(monkeypatch):
    monkeypatch.delenv("CI", raising=False)


EPSILON = Interval(lower=2.99, estimate=2.995, upper=2.9999, accountant="pld")


def record(number: int, state: str, **fields) -> TrialRecord:
    config = {
        "learning_rate": 0.123456789,
        "warmup_share": 0.3,
        "method": "tp_topk",
        "batch_size": 512,
        "momentum": 0.9,
    }
    return TrialRecord(key=f"t{number:04d}", number=number, state=state, config=config, **fields)


def complete(number: int, *values: float) -> TrialRecord:
    return record(number, "complete", metrics={"accuracy": values}, epsilon={"pld": EPSILON}, seconds=65.0)


def make(terminal: bool, **options) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=terminal, force_jupyter=False, _environ={"TERM": "xterm"})
    return Display(trials=12, metric="accuracy", console=console, **options), out


def play(display: Display) -> None:
    with display:
        display.proposed(record(0, "proposed"))
        display.started("t0000")
        display.progress("t0000", 0.5, 0.71)
        display.infeasible(record(1, "infeasible", reason="phase 'sparse': [0.1] leaves nothing. " * 5))
        best = complete(0, 0.91, 0.93)
        display.finished(best)
        display.finished(record(2, "diverged", reason="loss is NaN\nat step 7"))
        display.total(done=1, failed=1, infeasible=1, best=best, epsilon_search=EPSILON, eta=3700)
        display.note("the tracking server does not answer")
        display.finish("best trial t0000\nepsilon of the trial: 3\nepsilon of the search: 5")


def test_plain_lines_fit_in_80_columns_and_say_everything():
    display, out = make(terminal=False)
    assert not display.is_live
    play(display)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = out.getvalue()
    for expected in (
        "t0000 proposed",
        "learning_rate=0.1235",
        "t0001 infeasible phase 'sparse': [0.1] leaves nothing.",
        "accuracy 0.92 ± 0.014  ε 3  1 min 05 s",
        "t0002 diverged   loss is NaN at step 7",
        "1 of 12 done, 1 failed, 1 infeasible | best 0.92 ± 0.014 (t0000) | ε search ≤ 3",
        "tracking server does not answer",
    ):
        assert expected in text
    assert lines[-3:] == ["best trial t0000", "epsilon of the trial: 3", "epsilon of the search: 5"]
    assert "\x1b" not in text


def test_plain_progress_is_paced_by_quarters_and_time():
    now = [0.0]
    display, out = make(terminal=False, clock=lambda: now[0])
    display.started("t0000")
    for step in range(1, 101):
        now[0] += 1.0
        display.progress("t0000", step / 100, 0.5)
    assert [line.split()[1] for line in out.getvalue().splitlines()[1:]] == ["25%", "50%", "75%"]
    display.started("t0001")
    for step in range(1, 101):
        now[0] += 0.01
        display.progress("t0001", step / 100)
    assert out.getvalue().count("t0001") == 1


def test_upper_bounds_are_rounded_up():
    assert [upward(value) for value in (2.99991, 2.9999, 3.0, 3.00001, 12345.0, 0.0)] == [
        "3",
        "3",
        "3",
        "3.001",
        "12350",
        "0",
    ]
    assert upward(2.99991, 6) == "2.99991"


def test_quiet_prints_nothing():
    for terminal in (False, True):
        display, out = make(terminal=terminal, quiet=True)
        play(display)
        assert out.getvalue() == ""


def test_live_table_fits_80_columns_and_marks_the_best():
    display, out = make(terminal=True)
    assert display.is_live
    play(display)
    assert out.getvalue().endswith("epsilon of the search: 5\n")
    drawn = Console(file=io.StringIO(), width=80, record=True, force_jupyter=False)
    drawn.print(display.render())
    lines = drawn.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "t0000*" in text and "0.92 ± 0.014" in text and "t0002" in text and "2/12 trials" in text


def test_live_table_is_bounded_and_keeps_the_best_and_the_running():
    display, _ = make(terminal=True)
    best = complete(0, 0.99)
    display.finished(best)
    for number in range(1, 50):
        display.finished(complete(number, 0.5))
    display.proposed(record(3, "proposed"))
    display.started("t0003")
    display.progress("t0003", 0.25, 0.4)
    display.total(done=50, failed=0, infeasible=0, best=best)
    drawn = Console(file=io.StringIO(), width=80, record=True, force_jupyter=False)
    drawn.print(display.render())
    text = drawn.export_text()
    assert "t0000*" in text and "t0003" in text and "t0049" in text and "25% accuracy 0.4" in text
    assert len(text.splitlines()) <= 14


def test_jupyter_and_dumb_terminals_have_no_table_that_moves_the_cursor():
    for options in ({"force_jupyter": True}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}):
        console = Console(file=io.StringIO(), width=80, **options)
        assert not Display(trials=1, metric=("accuracy", "loss"), console=console).is_live


def test_everything_that_one_watches_for_is_seen_at_80_columns():
    """Also the time that is left, and the reasons, in a search of many trials with long names."""
    display, out = make(terminal=True)
    display.finished(
        record(11, "failed", reason="its process died 3 times, having worked 600 s without a report. " * 4)
    )
    display.infeasible(record(12, "infeasible", reason="phase 'sparse': [0.1] leaves nothing. " * 5))
    display.started("t0013")
    display.progress("t0013", 0.5, 0.712345)
    best = complete(0, 0.91234, 0.93456)
    display.total(done=1234, failed=17, infeasible=250, best=best, epsilon_search=EPSILON, eta=73000)
    drawn = Console(file=io.StringIO(), width=80, record=True, force_jupyter=False)
    drawn.print(display.render())
    text = drawn.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for expected in (
        "1234 of 12 done, 17 failed, 250 infeasible",
        "best 0.9234 ± 0.016 (t0000)",
        "ε search ≤ 3",
        "20 h 16 min left",
        "best t0000: batch_size=512 learning_rate=0.1235",
        "t0012 infeasible: phase 'sparse': [0.1] leaves nothing.",
        "its process died",
        " 50% accuracy 0.7123",
    ):
        assert expected in text
    assert display.is_live and out.getvalue() == ""

    plain, out = make(terminal=False)
    plain.total(done=1234, failed=17, infeasible=250, best=best, epsilon_search=EPSILON, eta=73000)
    assert max(map(len, out.getvalue().splitlines())) <= 80 and "20 h 16 min left" in out.getvalue()


def test_a_terminal_without_colours_gets_none():
    out = io.StringIO()
    environment = {"TERM": "xterm", "NO_COLOR": "1"}
    console = Console(file=out, width=80, force_terminal=True, force_jupyter=False, _environ=environment)
    display = Display(trials=12, metric="accuracy", console=console)
    play(display)
    assert "t0000*" in out.getvalue()
    assert not re.search(r"\x1b\[(?:\d+;)*[34][0-7]m", out.getvalue())  # no foreground or background


def test_ci_gets_a_line_for_each_trial_that_ended_and_seldom_where_the_search_stands(monkeypatch):
    monkeypatch.setenv("CI", "true")
    now = [0.0]
    display, out = make(terminal=True, clock=lambda: now[0])  # CI services claim to be terminals, for the colours
    assert not display.is_live
    with display:
        for number in range(12):
            display.proposed(record(number, "proposed"))
            display.started(f"t{number:04d}")
            now[0] += 20
            display.progress(f"t{number:04d}", 0.5, 0.4)
            display.finished(complete(number, 0.5))
            display.total(done=number + 1, failed=0, infeasible=0, best=complete(0, 0.5), eta=60)
        display.finish("the end")
    lines = out.getvalue().splitlines()
    assert sum(" complete " in line for line in lines) == 12
    assert not any("proposed" in line or "started" in line or "50%" in line for line in lines)
    assert [line.split(" of ")[0] for line in lines if " done" in line] == ["1", "4", "7", "10", "12"]
    assert lines[-1] == "the end"


def test_a_notebook_gets_one_output_that_is_written_anew(monkeypatch):
    shown, updates = [], []

    class Handle:
        def update(self, content):
            updates.append(content.data)

    ipython = pytest.importorskip("IPython.display")
    monkeypatch.setattr(ipython, "display", lambda content, display_id: shown.append(content.data) or Handle())
    now, out = [0.0], io.StringIO()
    console = Console(file=out, width=115, force_jupyter=True)
    display = Display(trials=50, metric="accuracy", console=console, clock=lambda: now[0])
    with display:
        for number in range(50):
            now[0] += 0.1
            display.proposed(record(number, "proposed"))
            display.started(f"t{number:04d}")
            display.progress(f"t{number:04d}", 0.5, 0.4)
            display.finished(complete(number, 0.5))
            display.total(done=number + 1, failed=0, infeasible=0, best=complete(0, 0.5))
    assert len(shown) == 1 and 5 <= len(updates) <= 11  # five seconds
    assert "50 of 50 done" in updates[-1] and updates[-1].startswith("<pre")
    assert out.getvalue() == ""  # and no line beside it


def test_many_threads_may_update_one_display():
    display, out = make(terminal=False)

    def work(first: int) -> None:
        for number in range(first, first + 40):
            display.proposed(record(number, "proposed"))
            display.started(f"t{number:04d}")
            display.progress(f"t{number:04d}", 0.5)
            display.render()
            display.finished(complete(number, 0.5))

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 * 40 * 3
    assert all(line.startswith("t0") for line in lines)
