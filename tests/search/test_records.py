import math

import pytest

from raydp.errors import CorruptFile, InvalidValue, UnknownName
from raydp.privacy.plan import Interval
from raydp.search.records import TrialRecord, fold, key_of

PROPOSED = {"event": "proposed", "key": "t0000", "number": 0, "config": {"lr": 0.5}, "plan": None}


def no_plan(key, digest):
    raise AssertionError(f"no plan was proposed for {key}")


def folded(*events):
    return fold(events, no_plan)


def test_a_notebook_shows_a_trial_in_one_line():
    record = TrialRecord(
        key="t0000", number=0, state="complete", config={"lr": 0.123456, "n": 3}, metrics={"accuracy": (0.5, 0.7)}
    )
    assert repr(record) == "<Trial t0000 complete | accuracy=0.6 | lr=0.1235 n=3>"


def test_life_of_a_trial():
    started = {"event": "started", "key": "t0000", "attempt": 1}
    interval = Interval(lower=0.9, estimate=0.95, upper=1.0, accountant="pld")
    finished = {
        "event": "finished",
        "key": "t0000",
        "state": "complete",
        "reason": None,
        "metrics": {"accuracy": [0.5, 0.7]},
        "seconds": 3.0,
        "epsilon": {"pld": interval.to_json()},
        "measured_on": "hold-out",
    }
    assert folded(PROPOSED)["t0000"].state == "proposed"
    assert folded(PROPOSED, started)["t0000"].state == "running"
    record = folded(PROPOSED, started, finished)["t0000"]
    assert record.finished and record.state == "complete" and record.attempts == 1 and record.seconds == 3.0
    assert record.config == {"lr": 0.5} and record.epsilon == {"pld": interval} and record.measured_on == "hold-out"
    assert record.mean("accuracy") == pytest.approx(0.6)
    assert record.std("accuracy") == pytest.approx(math.sqrt(0.02))


def test_a_second_start_is_a_second_attempt_even_if_the_event_does_not_count():
    started = {"event": "started", "key": "t0000"}
    assert folded(PROPOSED, started, started)["t0000"].attempts == 2
    assert folded(PROPOSED, {**started, "attempt": 1}, {**started, "attempt": 1})["t0000"].attempts == 2


def test_infeasible_needs_no_proposal_and_keeps_its_reason():
    event = {"event": "infeasible", "key": "t0001", "number": 1, "config": {"lr": 1}, "reason": "no budget left"}
    record = folded(PROPOSED, event)["t0001"]
    assert (record.state, record.reason, record.plan, record.attempts) == ("infeasible", "no budget left", None, 0)


def test_order_is_by_number_beyond_four_digits():
    numbers = [10000, 3, 9999]
    records = folded(*({**PROPOSED, "key": key_of(n), "number": n} for n in numbers))
    assert list(records) == ["t0003", "t9999", "t10000"]


def test_events_of_others_are_skipped():
    assert list(folded({"event": "resumed"}, PROPOSED)) == ["t0000"]


@pytest.mark.parametrize(
    ("event", "word"),
    [
        ({"event": "started", "key": "t0009"}, "t0009"),
        ({"event": "proposed", "key": "t0001"}, "number|config"),
        ({"event": "finished", "key": "t0000", "state": "done"}, "state"),
        ({"event": "finished", "key": "t0000", "state": "running"}, "state"),
        ({"event": "proposed", "key": "a/b", "number": 1, "config": {}}, "a/b"),
        ({"no": "event"}, "event"),
        ({"event": "finished", "key": "t0000", "state": "failed", "heads": [""]}, "cannot be understood"),
    ],
)
def test_events_that_make_no_sense_are_named_with_their_position(event, word):
    with pytest.raises(CorruptFile, match=f"(?s)event 2.*({word})"):
        folded(PROPOSED, event)


def test_mean_and_std_do_not_flatter():
    record = TrialRecord(
        key="t0000", number=0, state="failed", metrics={"a": (0.5, None), "b": (0.5,), "c": (0.5, math.nan), "d": ()}
    )
    assert record.mean("a") is None and record.std("a") is None  # one seed is missing
    assert record.mean("b") == 0.5 and record.std("b") is None  # one seed has no spread
    assert record.metrics["c"] == (0.5, None) and record.mean("c") is None
    assert record.mean("d") is None and record.mean("unknown") is None


def test_records_are_validated():
    with pytest.raises(UnknownName, match="complete"):
        TrialRecord(key="t0000", number=0, state="completed")
    with pytest.raises(InvalidValue):
        TrialRecord(key="t0000", number=-1, state="complete")
