"""A private hold-out: measured through noise under a budget of its own, or labelled as not private."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from torch import Tensor

from raydp import tasks
from raydp.errors import InvalidValue
from raydp.privacy import gaussian
from raydp.privacy.budget import Budget
from raydp.privacy.ledger import Ledger
from raydp.search import report, statement
from raydp.search.definition import Search
from raydp.search.display import Display
from raydp.search.preview import preview
from raydp.search.results import Result, write_trials_parquet
from raydp.search.run_directory import RunDirectory
from raydp.search.runner import check
from raydp.search.session import Session
from raydp.search.tracking import Tracker
from raydp.search.verify import verify
from raydp.training import run
from raydp.training.holdout import HoldoutQuery
from tests.chains import forge_ledger
from tests.search.helpers import contents, drive, session_in, small_search
from tests.search.private_data import HOLDOUT_BUDGET, write_private


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_private(tmp_path_factory.mktemp("data") / "mine")


def noised(data: str, **changes: Any) -> Search:
    return small_search(**{"data": data, "holdout_budget": HOLDOUT_BUDGET, "trials": 2, **changes})


class Truth:
    """What was measured of the hold-out before any noise: how many were right, of how many."""

    def __init__(self) -> None:
        self.right: list[int] = []
        self.measure: Callable[..., Tensor] = tasks.Classification.contributions

    def __call__(self, *given: Any) -> Tensor:
        found = self.measure(tasks.task("classification"), *given)
        self.right.append(int(found.sum()))
        assert len(found) == 300 and set(found.tolist()) <= {0.0, 1.0}
        return found


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> Truth:
    found = Truth()
    monkeypatch.setattr(tasks.Classification, "contributions", lambda self, *given: found(*given))
    return found


def told(right: set[int], text: str) -> list[str]:
    """Which of the counts stand in the text, as words or as shares of 300 examples."""
    tokens = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.])", text))
    shares = {f"{float(token):.5f}" for token in tokens if "." in token and len(token) >= 6}
    return [str(count) for count in right if str(count) in tokens or f"{count / 300:.5f}" in shares]


def test_the_ledger_the_noise_and_epsilon_are_those_of_the_plan(tmp_path: Path, private: str, truth: Truth) -> None:
    search = noised(private, seeds=2)
    check(search)
    drive(session_in(tmp_path / "run", search))
    directory = RunDirectory.open(tmp_path / "run")
    sigmas = set()
    for key, record in directory.records().items():
        plan = directory.plan(key, "holdout-plan.json")
        assert plan is not None and record.holdout_plan == plan.digest and record.state == "complete"
        (phase,) = plan.phases
        assert (phase.name, phase.steps, phase.sample_rate, phase.clip_norm) == ("holdout", 2, 1.0, 1.0)
        assert phase.spec.population == 300
        # Two releases of sensitivity 1: the analytic Gaussian mechanism at mu = sqrt(2)/sigma.
        spent = gaussian.epsilon(1e-4, math.sqrt(2) / phase.noise_multiplier)
        assert 1 - 1e-4 <= spent <= 1 and plan.epsilon.upper == pytest.approx(spent, rel=1e-9)
        sigmas.add(phase.noise_multiplier)
        assert set(record.metrics) == {"accuracy"}  # nothing else was measured
        assert record.measured_on == "mine (private hold-out, through noise, 300 examples)"
        for _, path in directory.runs(key):
            ledger = Ledger.read(path / "holdout-ledger.jsonl")
            ledger.check(plan)
            assert ledger.steps("holdout") == 2
            assert ledger.epsilon("pld").upper == pytest.approx(spent, rel=1e-9)
            for line in map(json.loads, (path / "metrics.jsonl").read_text().splitlines()):
                assert 0 <= line["metrics"]["accuracy"] <= 1 and "loss" not in line["metrics"]
    assert len(truth.right) == 2 * 2 * 2  # trials, seeds, reports
    (sigma,) = sigmas
    result = Result.load(directory)
    assert result.epsilon_holdout is not None
    assert result.epsilon_holdout.upper == pytest.approx(gaussian.epsilon(1e-4, math.sqrt(8) / sigma), rel=1e-9)
    assert result.to_json()["epsilon_holdout"]["upper"] == result.epsilon_holdout.upper
    assert "epsilon of the hold-out: " in result.summary() and "through noise" in result.summary()
    assert result.summary().splitlines()[-1].startswith("epsilon of the whole search")
    found = verify(directory.path)
    assert found["ok"] and found["holdout"]["ok"] and len(found["holdout"]["runs"]) == 4
    assert found["holdout"]["epsilon"]["pld"]["upper"] == pytest.approx(result.epsilon_holdout.upper, rel=1e-9)
    # What is trained under its own budget is not charged for the hold-out.
    assert found["search"]["runs"] == 4 and found["trials"][0]["epsilon"]["pld"]["upper"] <= 3


def test_the_noise_has_the_stated_size(private: str, tmp_path: Path, truth: Truth, monkeypatch: Any) -> None:
    released: list[float] = []
    query = HoldoutQuery.release

    def note(self: HoldoutQuery, model: Any, report: int) -> dict[str, float]:
        found = query(self, model, report)
        released.append(found["accuracy"])
        return found

    monkeypatch.setattr(HoldoutQuery, "release", note)
    # Little enough noise that nothing is cut off at 0 or 1, and public noise, so that the test is the same each time.
    search = noised(private, reports=20, trials=1, insecure_seed=5, fixed={"epochs": 12, "batch_size": 100})
    drive(session_in(tmp_path / "run", search))
    plan = RunDirectory.open(tmp_path / "run").plan("t0000", "holdout-plan.json")
    assert plan is not None and len(released) == len(truth.right) == 20
    errors = [300 * value - right for value, right in zip(released, truth.right, strict=True) if 0 < value < 1]
    assert len(errors) > 10 and len({round(error, 3) for error in errors}) == len(errors)  # a draw for each report
    size = math.sqrt(sum(error**2 for error in errors) / len(errors)) / plan.phases[0].noise_std
    assert 0.6 < size < 1.4


def test_a_crash_before_the_report_replays_the_same_number_and_is_charged_once(
    tmp_path: Path, private: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, float]] = []
    query, append = HoldoutQuery.release, run._append_durably

    def note(self: HoldoutQuery, model: Any, report: int) -> dict[str, float]:
        found = query(self, model, report)
        seen.append((report, found["accuracy"]))
        return found

    def full(path: Path, line: str) -> None:
        if len(seen) == 1:
            raise OSError(28, "No space left on device")
        append(path, line)

    monkeypatch.setattr(HoldoutQuery, "release", note)
    monkeypatch.setattr(run, "_append_durably", full)
    search = noised(private, trials=1)
    session = session_in(tmp_path / "run", search)
    drive(session)
    assert session.failure is not None and len(seen) == 1
    path = RunDirectory.open(tmp_path / "run").run_path("t0000", 0)
    assert Ledger.read(path / "holdout-ledger.jsonl").steps("holdout") == 1 and not (path / "metrics.jsonl").exists()
    drive(session_in(tmp_path / "run", search))
    assert [report for report, _ in seen] == [0, 0, 1] and seen[0] == seen[1]
    assert Ledger.read(path / "holdout-ledger.jsonl").steps("holdout") == 2
    assert verify(tmp_path / "run")["ok"]


def test_a_hold_out_that_changed_is_not_measured_again_with_the_same_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_private(tmp_path / "mine")
    append = run._append_durably

    def full(path: Path, line: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "_append_durably", full)
    search = noised(data, trials=1)
    drive(session_in(tmp_path / "run", search))
    shutil.rmtree(data)
    write_private(tmp_path / "mine", shared=1)  # one of the hold-out is another one
    monkeypatch.setattr(run, "_append_durably", append)
    drive(session_in(tmp_path / "run", search))
    record = RunDirectory.open(tmp_path / "run").records()["t0000"]
    assert record.state == "failed" and "private data are not those" in str(record.reason)


def test_nothing_is_told_of_the_hold_out_but_what_was_noised(
    tmp_path: Path, private: str, truth: Truth, capfd: pytest.CaptureFixture[str]
) -> None:
    search = noised(private, insecure_seed=1)  # known noise, so that no run of this test finds a number by chance
    directory = RunDirectory.create(tmp_path / "run", search.to_json())
    tracker = Tracker(uri=None, directory=directory, experiment="holdout")
    tracker.start_search(directory.definition, search.point_space.varying)
    with Display(trials=2, metric=search.metrics, varying=search.point_space.varying, quiet=False) as display:
        drive(Session(search, directory, tracker=tracker, display=display))
    write_trials_parquet(directory.path)
    statement.write(directory)
    result = Result.load(directory.path)
    report.write([result], directory.path / report.REPORT, pictures=False)
    tracker.finish_search({"epsilon_search": result.epsilon_search.upper}, "complete")
    assert tracker.synchronise()
    tracker.close()
    texts = dict(contents(directory.path))
    assert {"journal.jsonl", "statement.txt", "trials.parquet", "mlflow.db: metrics", "report.html"} <= set(texts)
    assert "trials/t0000/seed-0/holdout-ledger.jsonl" in texts
    uploaded = {path.name for path in (directory.path / "mlartifacts").rglob("*")}
    assert {"holdout-plan.json", "holdout-ledger.jsonl"} <= uploaded
    out, err = capfd.readouterr()
    texts["terminal"] = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", " ", out + err)
    texts["said"] = "\n".join([result.summary(), str(result.to_json()), repr(result), result._repr_html_()])
    assert len(set(truth.right)) > 1
    for name, text in texts.items():
        if name not in ("report.html", "terminal"):  # pictures and positions are full of numbers
            assert told(set(truth.right), text) == [], name
        assert not re.search(r"auroc|balanced_accuracy", text), name
    for share in {f"{right / 300:.4g}" for right in truth.right}:
        assert share not in texts["report.html"] and share not in texts["terminal"]
    assert told({247}, '{"right": 247}') == ["247"] and told({150}, "0.500000") == ["150"]
    for name in ("statement.txt", "report.html", "said", "trials.parquet", "mlflow.db: tags"):
        assert "through noise" in re.sub(r"\s+", " ", texts[name]), name


def test_the_statement_holds_what_the_hold_out_cost(tmp_path: Path, private: str) -> None:
    drive(session_in(tmp_path / "run", noised(private)))
    stated = statement.build(tmp_path / "run")
    jsonschema.validate(stated, statement.schema())
    held = stated["holdout"]
    (mechanism,) = held["mechanisms"]
    assert (held["metric"], held["population"], len(held["runs"])) == ("accuracy", 300, 2)
    assert (mechanism["sample_rate"], mechanism["steps"]) == (1.0, 4)
    by_hand = gaussian.epsilon(held["budget"]["delta"], math.sqrt(4) / mechanism["noise_multiplier"])
    assert held["epsilon"]["pld"]["upper"] == pytest.approx(by_hand, rel=1e-9)
    assert stated["metrics"]["covered"]
    assert "metrics on a private hold-out" not in {item["what"] for item in stated["not_covered"]}
    assert "people in both parts" in {item["what"] for item in stated["not_covered"]}
    text = re.sub(r"\s+", " ", statement.text(stated))
    assert "They carry noise, and cost what follows." in text and "Budget of each run: epsilon = 1 at" in text
    # A run whose ledger is damaged counts as its whole plan.
    (tmp_path / "run/trials/t0001/seed-0/holdout-ledger.jsonl").write_bytes(b"{}\n")
    again = statement.build(tmp_path / "run")["holdout"]
    assert again["epsilon"] == held["epsilon"] and again["runs"][1]["damaged"]


def test_without_a_budget_every_place_says_that_the_metric_is_not_private(tmp_path: Path, private: str) -> None:
    search = small_search(data=private, trials=1)
    check(search)
    directory = RunDirectory.create(tmp_path / "run", search.to_json())
    tracker = Tracker(uri=None, directory=directory, experiment="plain")
    tracker.start_search(directory.definition, search.point_space.varying)
    drive(Session(search, directory, tracker=tracker, display=Display(trials=1, metric=("accuracy",), quiet=True)))
    write_trials_parquet(directory.path)
    statement.write(directory)
    result = Result.load(directory.path)
    report.write([result], directory.path / report.REPORT, pictures=False)
    tracker.close()
    texts = dict(contents(directory.path))
    label = "mine (private hold-out, without noise: NOT private, 300 examples)"
    for name in ("statement.txt", "report.html", "trials.parquet", "mlflow.db: tags", "journal.jsonl"):
        assert label in re.sub(r"\s+", " ", texts[name]), name
    assert label in result.summary() and label in result._repr_html_()
    assert "They are NOT private: no budget covers them." in re.sub(r"\s+", " ", texts["statement.txt"])
    assert result.epsilon_holdout is None and verify(directory.path)["holdout"] is None
    every = {"accuracy", "balanced_accuracy", "auroc", "kappa", "minority_recall", "loss"}
    assert set(result.trials[0].metrics) == every
    assert not list(directory.path.rglob("holdout*"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"metric": "loss"}, r"metric = 'loss'.*no bound is known.*bounded: accuracy"),
        ({"metric": ("accuracy", "loss")}, "must be one metric"),
        ({"paired": True}, "share noise between runs"),
        ({"selection": "public"}, "that nothing private is looked at"),
        ({"holdout_budget": Budget(epsilon=1.0, delta=1e-4, adjacency="replace_one")}, "one adjacency"),
        ({"holdout_budget": Budget(epsilon=1.0, delta=1e-4, further=((0.5, 1e-3),))}, "random stopping"),
        ({"holdout_budget": 1.0}, r"must be a raydp\.Budget"),
    ],
)
def test_what_a_budget_cannot_cover_is_refused_at_construction(private: str, changes: Any, expected: str) -> None:
    with pytest.raises(InvalidValue, match=expected):
        noised(private, **changes)


def test_data_whose_hold_out_it_does_not_fit_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"hold-out is no private one \(public benchmark\)"):
        check(noised("digits"))
    with pytest.raises(InvalidValue, match="holds examples that are trained on"):
        check(noised(write_private(tmp_path / "both", shared=2)))
    with pytest.raises(InvalidValue, match=r"no bound is known.*none of this task's metrics"):
        noised("sparse_regression", task="regression", metric="mse", mode="min", model=None)


def test_verify_sees_what_was_done_to_the_ledger_of_the_hold_out(tmp_path: Path, private: str) -> None:
    drive(session_in(tmp_path / "good", noised(private, trials=1)))
    assert verify(tmp_path / "good")["ok"]

    def problem(change: Callable[[Path], object]) -> str:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "good", copy)
        change(copy / "trials/t0000/seed-0/holdout-ledger.jsonl")
        found = verify(copy)
        assert not found["ok"] and not found["holdout"]["ok"]
        return str(found["holdout"]["runs"][0]["problem"])

    def cut(ledger: Path) -> None:
        ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))

    def forge(ledger: Path) -> None:
        lines = [{k: v for k, v in json.loads(line).items() if k != "chain"} for line in ledger.open()]
        forge_ledger(ledger, [json.dumps({**line, **_halved(line)}).encode() for line in lines])

    def _halved(line: dict[str, Any]) -> dict[str, float]:
        return {"noise_multiplier": line["noise_multiplier"] / 2} if "noise_multiplier" in line else {}

    assert "there is no holdout-ledger.jsonl" in problem(Path.unlink)
    assert "2 reports, and the ledger of the hold-out holds 1" in problem(cut)
    assert "what ran is not what was certified" in problem(forge) and "overspent" in problem(forge)
    assert "is not the one that was written" in problem(lambda p: p.write_text(p.read_text().replace("1.0", "0.5")))
    plan = "holdout-plan.json"
    assert "nothing allowed these releases" in problem(lambda p: (p.parents[1] / plan).unlink())
    stray = tmp_path / "stray"
    drive(session_in(stray, small_search(data=private, trials=1)))
    shutil.copy(tmp_path / "good/trials/t0000/seed-0/holdout-ledger.jsonl", stray / "trials/t0000/seed-0")
    assert "no budget for them" in verify(stray)["problems"][0]


def test_the_preview_and_the_stored_definition_know_of_it(private: str) -> None:
    search = noised(private, trials=3)
    found = preview(search, 0)["holdout"]
    assert (found["metric"], found["examples"], found["reports_a_run"], found["runs"]) == ("accuracy", 300, 2, 3)
    assert found["standard_deviation_of_accuracy"] == pytest.approx(found["sigma"] / 300)
    assert 1 - 1e-4 <= found["epsilon_of_a_run"] <= 1 < found["epsilon_of_the_search_if_all_runs_finish"]
    assert Search.from_json(json.loads(json.dumps(search.to_json()))).holdout_budget == HOLDOUT_BUDGET
    assert "holdout_budget" not in small_search().to_json()
    assert search.with_overrides({"holdout_budget.epsilon": "2"}).holdout_budget == Budget(epsilon=2.0, delta=1e-4)
