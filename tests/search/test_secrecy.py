"""Random stopping from the definition to the released trial: what is refused, what is hidden, what is stated."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from raydp.errors import CorruptFile, InvalidValue
from raydp.privacy import gaussian
from raydp.privacy.accountants.profiles import profile
from raydp.privacy.budget import Budget
from raydp.privacy.ledger import Ledger
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.selection import RandomStopping, parse
from raydp.privacy.selection_budget import released
from raydp.search import runner, statement
from raydp.search.definition import Search
from raydp.search.display import Display
from raydp.search.preview import preview
from raydp.search.results import Result
from raydp.search.run_directory import RunDirectory, trial_budget
from raydp.search.secrecy import SilentTracker, Terms, is_released, open_store, release
from raydp.search.session import Session
from raydp.search.verify import verify
from raydp.search.verify_holdout import _of_a_trial
from tests.chains import forge_journal
from tests.search.helpers import drive, small_search
from tests.search.private_data import write_private

TARGET = Budget(epsilon=8.0, delta=1e-5)


def secret_search(**changes: Any) -> Search:
    return small_search(
        **{"method": "dp_sgd", "space": {"learning_rate": _rate()}, "selection": "geometric:3", "budget": TARGET}
        | changes
    )


def _rate() -> Any:
    from ray import tune

    return tune.loguniform(0.1, 4.0)


def session_of(search: Search, home: RunDirectory) -> tuple[RunDirectory, Terms, Session]:
    store, terms = open_store(search, home)
    display = Display(trials=1, metric=search.metrics, quiet=True)
    return store, terms, Session(search, store, tracker=SilentTracker(), display=display, terms=terms)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A search that ran to its end and kept its losers, so that tests can look at them."""
    rule = parse("geometric:3")
    assert isinstance(rule, RandomStopping)
    search = secret_search(selection=RandomStopping(runs=rule.runs, keep_losers=True))
    directory = RunDirectory.create(tmp_path_factory.mktemp("secret") / "run", search.to_json())
    store, terms, session = session_of(search, directory)
    assert session.left == terms.runs >= 1
    drive(session)
    assert session.left == 0 and not is_released(directory)
    release(search, store, directory)
    return directory


def test_the_best_of_the_store_is_released_and_nothing_else(home: RunDirectory) -> None:
    store = RunDirectory.open(home.path / "private")
    scores = {key: record.mean("accuracy") for key, record in store.records().items()}
    (only,) = Result.load(home).trials
    assert only.key == "t0000" and only.number == 0 and only.seconds is None and only.attempts == 1
    assert only.mean("accuracy") == max(score for score in scores.values() if score is not None)
    files = {str(path.relative_to(home.path)) for path in home.path.rglob("*") if path.is_file()}
    public = {name for name in files if not name.startswith("private/")}
    assert public == {
        "raydp.json",
        "journal.jsonl",
        "trials/t0000/config.json",
        "trials/t0000/plan.json",
        *(f"trials/t0000/seed-0/{name}" for name in ("ledger.jsonl", "metrics.jsonl", "weights.pt")),
    }


def test_the_store_is_for_its_owner_alone(home: RunDirectory) -> None:
    assert stat.S_IMODE((home.path / "private").stat().st_mode) == 0o700


def test_no_public_time_is_earlier_than_the_release(home: RunDirectory) -> None:
    created = json.loads((home.path / "raydp.json").read_text())["created"]
    last = RunDirectory.open(home.path / "private").events()[-1]["time"]
    assert created >= last
    assert all(event["time"] >= last for event in home.events())


def test_the_statement_alone_reproduces_the_cost(home: RunDirectory) -> None:
    """Definition, trial budget and the released ledger: no store, no journal of losers."""
    result = Result.load(home)
    rule = result.selection
    assert isinstance(rule, RandomStopping)
    trial = trial_budget(home)
    assert trial is not None
    bound = released(rule, trial)
    assert TARGET.epsilon * (1 - 1e-9) <= bound.epsilon <= TARGET.epsilon
    assert bound.parts["delta"] <= TARGET.delta
    assert result.epsilon_released.upper == bound.epsilon
    spent = Ledger.read(home.path / "trials/t0000/seed-0/ledger.jsonl").epsilon("pld")
    assert trial.epsilon * (1 - 5e-3) <= spent.upper <= trial.epsilon  # here every plan has the reference's curve
    lines = result.summary().splitlines()[-2:]
    assert lines[0].startswith("epsilon of the trial:") and lines[1].startswith("epsilon of the released result: 8 ")
    assert "random_stopping" in lines[1] and "Koskela" in lines[1]
    assert verify(home.path)["ok"]


def test_the_json_of_the_statement_alone_reproduces_the_cost(home: RunDirectory) -> None:
    """What a stranger computes who has statement.json and a library of accountants, and trusts no epsilon in it."""
    record = json.loads(json.dumps(statement.build(home)))
    jsonschema.validate(record, statement.schema())
    runs = record["selection"]["parameters"]["runs"]
    (trial,) = record["trials"]
    (run,) = trial["runs"]
    mechanisms = [
        Mechanism(noise_multiplier=m["noise_multiplier"], sample_rate=m["sample_rate"], steps=m["steps"])
        for m in run["mechanisms"]
    ]
    points = record["selection"]["released"]["trial_budget"]
    ((hat, delta_hat),) = points["further"]
    delta_of = profile(mechanisms, adjacency="add_remove", epsilon=points["epsilon"], delta=points["delta"])
    assert delta_of(points["epsilon"]) <= points["delta"] and delta_of(hat) <= delta_hat
    assert delta_hat <= math.expm1(hat) * runs["gamma"] / (1 - runs["gamma"])
    assert runs["mean"] * points["delta"] <= record["budget"]["delta"]
    cost = points["epsilon"] + (runs["eta"] + 1) * hat
    assert cost == pytest.approx(record["selection"]["released"]["epsilon"], rel=1e-12)
    assert record["budget"]["epsilon"] * (1 - 1e-9) <= cost <= record["budget"]["epsilon"]
    assert "Released result: epsilon = 8 at delta = 1e-05" in statement.text(record).replace("\n", " ")


def test_verify_finds_a_run_that_exceeds_the_second_point(home: RunDirectory, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(home.path, copy, ignore=shutil.ignore_patterns("private"))
    opened = RunDirectory.open(copy)
    events = opened.events()
    for event in events:
        if event["event"] == "selection":
            event["trial_budget"]["further"][0][1] /= 2
    forge_journal(opened, [json.dumps(event).encode() for event in events])
    report = verify(copy)
    assert not report["ok"]
    assert any("at epsilon" in (entry["problem"] or "") for entry in report["trials"])


def test_the_number_of_trials_and_the_proposals_survive_a_crash(tmp_path: Path) -> None:
    search = secret_search()
    directory = RunDirectory.create(tmp_path / "run", search.to_json())
    _, first, session = session_of(search, directory)
    task = session.next_task()
    assert task is not None
    _, second, _ = session_of(search, directory)
    assert (first.runs, first.sampler_seed, first.budget) == (second.runs, second.sampler_seed, second.budget)


def test_two_searches_draw_their_own_numbers_and_proposals(tmp_path: Path) -> None:
    search = secret_search(selection="geometric:1000", budget=Budget(epsilon=8.0, delta=1e-4))
    terms = []
    for name in ("one", "two"):
        directory = RunDirectory.create(tmp_path / name, search.to_json())
        terms.append(open_store(search, directory)[1])
    assert terms[0].sampler_seed != terms[1].sampler_seed and terms[0].runs != terms[1].runs


def test_a_lost_key_ends_the_search(tmp_path: Path) -> None:
    search = secret_search()
    directory = RunDirectory.create(tmp_path / "run", search.to_json())
    store, _ = open_store(search, directory)
    assert store.events()[0]["event"] == "selection" and not directory.events()
    (store.secrets / "selection.key").unlink()
    with pytest.raises(CorruptFile, match="number of trials"):
        open_store(search, directory)


def test_a_failed_trial_keeps_its_place_and_nothing_is_released_when_all_fail(tmp_path: Path) -> None:
    search = secret_search(insecure_seed=1)
    directory = RunDirectory.create(tmp_path / "run", search.to_json())
    store, terms, session = session_of(search, directory)
    started = []
    while (task := session.next_task()) is not None:
        started.append(task.key)
        session.started(task.key)
        session.finished(task.key, {"state": "diverged", "reason": "no", "metrics": {}, "seconds": 1.0})
    assert len(started) == terms.runs
    release(search, store, directory)
    assert is_released(directory) and not directory.records() and not store.path.exists()
    assert "none" in Result.load(directory).summary()


def test_a_release_that_a_crash_cut_short_is_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = secret_search(insecure_seed=1)
    directory = RunDirectory.create(tmp_path / "run", search.to_json())
    store, _, session = session_of(search, directory)
    drive(session)
    append = RunDirectory.append

    def crash(self: RunDirectory, event: Any) -> None:
        if event["event"] == "finished":
            raise KeyboardInterrupt
        append(self, event)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunDirectory, "append", crash)
        release(search, store, directory)
    release(search, store, directory)
    assert [event["event"] for event in directory.events()] == [
        "selection",
        "proposed",
        "started",
        "finished",
        "released",
    ]
    assert not store.path.exists()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampler": "tpe"}, "sampler"),
        ({"warm_start": [{"learning_rate": 1.0}]}, "warm_start"),
        ({"seeds": 2}, "seeds"),
        ({"paired": True}, "paired"),
        ({"metric": ("accuracy", "loss"), "mode": ("max", "min")}, "metric"),
        ({"accountant": "rdp"}, "accountant"),
    ],
)
def test_settings_that_void_the_theorem_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        secret_search(**changes)


def test_further_trials_are_refused(home: RunDirectory) -> None:
    with pytest.raises(InvalidValue, match="void"):
        runner.resume(home.path, extra_trials=3)


@pytest.mark.parametrize("rule", ["composition", "public:digits", "logarithmic:5", "poisson:4", "subsample:0.2:all"])
def test_a_search_keeps_its_selection_in_json_and_takes_one_from_text(rule: str) -> None:
    search = small_search().with_overrides({"selection": rule})
    assert search.rule == parse(rule)
    assert Search.from_json(json.loads(json.dumps(search.to_json()))).rule == search.rule
    old = {name: value for name, value in search.to_json().items() if name != "selection"}
    assert Search.from_json(old).rule == parse("composition")


def test_a_private_hold_out_chooses_through_noise_and_pays_for_the_released_result(tmp_path: Path) -> None:
    """Its people have a budget of their own, from which a trial's is solved by the same theorem."""
    data = write_private(tmp_path / "mine")
    with pytest.raises(InvalidValue, match="unaccounted query"):
        runner.check(secret_search(data=data))
    total = Budget(epsilon=2.0, delta=1e-4)
    search = secret_search(data=data, holdout_budget=total)
    runner.check(search)
    home = RunDirectory.create(tmp_path / "run", search.to_json())
    store, terms, session = session_of(search, home)
    assert terms.holdout_budget is not None and terms.holdout_budget.epsilon < total.epsilon
    drive(session)
    records = store.records()
    plans = [store.plan(key, "holdout-plan.json") for key in records]
    assert plans and all(plan is not None and plan.budget == terms.holdout_budget for plan in plans)
    release(search, store, home)
    report = verify(home.path)
    assert report["ok"], report
    statement.write(home)
    found = json.loads((home.path / statement.JSON_FILE).read_text())
    jsonschema.Draft202012Validator(statement.schema()).validate(found)
    held, runs = found["holdout"], found["selection"]["parameters"]["runs"]
    (mechanism,) = held["mechanisms"]
    mu = math.sqrt(mechanism["steps"]) / mechanism["noise_multiplier"]
    # What the released result costs someone of the hold-out, from the statement alone: the two points of a trial.
    first = held["released"]["trial_budget"]
    ((hat, allowed),) = first["further"]
    assert gaussian.delta(first["epsilon"], mu) <= first["delta"] * (1 + 1e-9)
    assert gaussian.delta(hat, mu) <= allowed * (1 + 1e-9)
    assert allowed <= math.expm1(hat) * runs["gamma"] / (1 - runs["gamma"])
    cost = first["epsilon"] + (runs["eta"] + 1) * hat
    assert held["released"]["epsilon"] == pytest.approx(cost) == pytest.approx(total.epsilon, rel=1e-6)
    assert runs["mean"] * first["delta"] == pytest.approx(total.delta, rel=1e-6)
    result = Result.load(home)
    assert result.epsilon_holdout is not None and result.epsilon_holdout.upper == pytest.approx(total.epsilon, rel=1e-6)
    assert "of the released result, by random stopping" in result.summary()
    assert found["metrics"]["covered"] and not any("hold-out examples" in item["why"] for item in found["not_covered"])
    assert _of_a_trial(home, total) == (terms.holdout_budget, [])
    assert "adds up to epsilon" in _of_a_trial(home, Budget(epsilon=1.9, delta=1e-4))[1][0]
    assert "adds up to epsilon" in _of_a_trial(home, Budget(epsilon=2.0, delta=9e-5))[1][0]
    planned = preview(search, proposals=0)["holdout"]
    assert planned["epsilon_of_the_released_result"] == pytest.approx(total.epsilon, rel=1e-6)


@pytest.mark.slow
def test_random_stopping_on_ray_shows_and_keeps_nothing_but_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command that people run to the tracker: one trial, whatever ran; its statement reproduces the cost."""
    from mlflow import MlflowClient

    search = small_search(selection="geometric:2", budget=Budget(epsilon=8.0, delta=1e-5), trials=1)
    result = runner.run(search, storage=tmp_path / "run")
    printed = capsys.readouterr().out
    assert "secret" in printed and "t0001" not in printed and "released result: 8 at most" in printed
    assert [trial.key for trial in result.trials] == ["t0000"]
    assert not (tmp_path / "run" / "private").exists()
    assert verify(tmp_path / "run")["ok"]
    client = MlflowClient(f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    (experiment,) = [found for found in client.search_experiments() if found.name == "small"]
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 2  # the search and the released trial
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert parent.data.metrics["epsilon_released"] == pytest.approx(8.0, rel=1e-9)
    again = runner.resume(tmp_path / "run", quiet=True)  # released is released
    assert [trial.key for trial in again.trials] == ["t0000"]
