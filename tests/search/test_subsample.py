"""Tuning on a secret subsample: who is seen by whom, the final run, its stated cost, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from ray import tune

from raydp import data
from raydp.errors import InvalidValue, RaydpError
from raydp.privacy.budget import Budget
from raydp.privacy.noise import NoiseKey
from raydp.privacy.selection import Subsample
from raydp.privacy.selection_subsample import AMPLIFIED, BY_PARTS
from raydp.search import runner, statement, subsample
from raydp.search.definition import Search
from raydp.search.results import Result
from raydp.search.run_directory import RunDirectory
from raydp.search.verify import verify
from tests.search.helpers import contents, drive, session_in, small_search

FRACTION = 0.25


def tuned_search(**changes: Any) -> Search:
    values: dict[str, Any] = {
        "method": "dp_sgd",
        "selection": f"subsample:{FRACTION}",
        "space": {"learning_rate": tune.loguniform(0.1, 1.0)},
        "fixed": {"epochs": 2, "batch_size": 64},
        "trials": 3,
    }
    return small_search(**{**values, **changes})


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished search."""
    path = tmp_path_factory.mktemp("tuned") / "run"
    session = session_in(path, tuned_search())
    assert session.left == 4
    assert drive(session) == ["t0000", "t0001", "t0002", "t0003"]
    assert session.left == 0
    return RunDirectory.open(path)


def test_trials_see_the_subsample_and_the_final_run_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across all runs, no example is in both; together they are a good part of all."""
    seen: dict[str, set[int]] = {}
    sample = data.PrivateData.sample

    def watched(self: Any, **given: Any) -> Any:
        batch = sample(self, **given)
        seen.setdefault(self.name, set()).update(batch.indices.tolist())
        return batch

    monkeypatch.setattr(data.PrivateData, "sample", watched)
    drive(session_in(tmp_path / "run", tuned_search()))
    tuning, final = seen["digits (a secret subsample)"], seen["digits (the rest)"]
    whole = len(data.load("digits").private)
    assert set(seen) == {"digits (a secret subsample)", "digits (the rest)"}
    assert not tuning & final
    assert len(tuning) > 0.7 * FRACTION * whole and len(final) > 0.7 * (1 - FRACTION) * whole
    assert len(tuning | final) < whole or len(tuning) + len(final) == whole


def test_plans_are_of_expected_sizes_and_the_config_is_carried_over(done: RunDirectory) -> None:
    records = done.records()
    final = subsample.final_of(records)
    assert final is not None and [record.final for record in records.values()] == [False, False, False, True]
    whole = len(data.load("digits").private)
    inside = round(FRACTION * whole)
    sizes = {record.final: record.plan.phases[0].spec.population for record in records.values() if record.plan}
    assert sizes == {False: inside, True: whole - inside}
    trials = [record for record in records.values() if not record.final]
    best = max(trials, key=lambda record: record.mean("accuracy") or 0.0)
    ratio = (whole - inside) / inside
    assert final.config == {
        "learning_rate": pytest.approx(best.config["learning_rate"] * ratio),
        "batch_size": round(64 * ratio),
    }
    assert final.plan is not None and best.plan is not None
    (mine,), (theirs,) = final.plan.phases, best.plan.phases
    assert mine.steps == theirs.steps
    assert mine.sample_rate == pytest.approx(theirs.sample_rate, rel=0.02)
    assert mine.noise_multiplier == pytest.approx(theirs.noise_multiplier, rel=0.02)
    for record in records.values():
        assert record.plan is not None and 3.0 * (1 - 1e-4) <= record.plan.epsilon.upper <= 3.0


def test_the_final_run_is_the_result_whatever_it_scored(done: RunDirectory) -> None:
    result = Result.load(done)
    assert result.best is not None and result.best.final and result.ranked[0] is result.best
    assert result.epsilon_trial is not None
    assert result.epsilon_trial.upper < result.epsilon_released.upper <= result.epsilon_search.upper
    last = result.summary().splitlines()[-1]
    assert "selection subsample, tuned on a fraction of 0.25, final run on the rest" in last
    assert "do not know who is in the subsample" in last


def test_the_json_of_the_statement_alone_reproduces_the_cost(done: RunDirectory) -> None:
    found = json.loads(json.dumps(statement.build(done)))
    jsonschema.Draft202012Validator(statement.schema()).validate(found)
    stated = found["selection"]["released"]
    assert stated["bound"] == BY_PARTS
    check_cost(found)
    assert found["data"]["population"] == len(data.load("digits").private)
    assert found["everything"]["epsilon"]["pld"]["upper"] > stated["epsilon"]
    text = " ".join(statement.text(found).split())
    assert "Budget of each trial and of the final run" in text and "t0003 (the final run)" in text
    assert {"who is in the subsample", "the config of the final run"} <= {item["what"] for item in found["not_covered"]}


def test_an_amplified_cost_is_reproduced_as_well(tmp_path: Path) -> None:
    search = tuned_search(selection="subsample:0.1:all", budget=Budget(epsilon=0.5, delta=1e-5), trials=4)
    session = session_in(tmp_path / "run", search)
    drive(session)
    found = json.loads(json.dumps(statement.build(session.directory)))
    assert found["selection"]["released"]["bound"] == AMPLIFIED
    check_cost(found)


def check_cost(found: dict[str, Any]) -> None:
    """Compute what a statement says that the released result costs, by dp-accounting, without raydp."""
    stated, where = found["selection"]["released"], found["selection"]["parameters"]
    q, parts = where["fraction"], stated["parts"]

    def delta(parts_of: set[bool], epsilon: float) -> float:
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        for trial in found["trials"]:
            for m in (m for run in trial["runs"] for m in run["mechanisms"] if trial["final"] in parts_of):
                step = dp_event.PoissonSampledDpEvent(m["sample_rate"], dp_event.GaussianDpEvent(m["noise_multiplier"]))
                accountant.compose(dp_event.SelfComposedDpEvent(step, m["steps"]))
        return float(accountant.get_delta(epsilon))

    if stated["bound"] == AMPLIFIED:
        total = q * delta({False}, parts["e_tuning"]) + delta({True}, parts["e_final"])
        amplified = math.log(1 + q * (math.exp(parts["e_tuning"]) - 1))
        assert stated["epsilon"] == pytest.approx(amplified + parts["e_final"], rel=1e-12)
    else:
        inside = delta({False} if where["final"] == "rest" else {False, True}, stated["epsilon"])
        total = q * inside + (1 - q) * delta({True}, stated["epsilon"])
    assert total == pytest.approx(found["budget"]["delta"], rel=0.05)


def test_verify_agrees_and_sees_what_was_changed(done: RunDirectory, tmp_path: Path) -> None:
    statement.write(done)
    report = verify(done.path)
    assert report["ok"], report
    assert report["released"]["epsilon"] == pytest.approx(Result.load(done).epsilon_released.upper, rel=1e-9)
    path = done.path / statement.JSON_FILE
    told = path.read_text()
    flattered = json.loads(told)
    flattered["selection"]["released"]["epsilon"] /= 2
    path.write_text(json.dumps(flattered))
    try:
        assert any("released result costs" in problem for problem in verify(done.path)["problems"])
    finally:
        path.write_text(told)


def test_trials_that_claim_another_part_are_found(tmp_path: Path) -> None:
    """Plans for a fraction that is not the one in the definition: their sample rates would be those of more people."""
    search = tuned_search(selection=f"subsample:{FRACTION}:all", trials=1)
    drive(session_in(tmp_path / "run", search))
    good = verify(tmp_path / "run")
    assert good["ok"], good
    records = RunDirectory.open(tmp_path / "run").records()
    from raydp.search.verify import _parts

    plans = {key: record.plan for key, record in records.items() if record.plan}
    other = search.with_overrides({"selection": Subsample(fraction=0.5, final="all")}).to_json()
    assert "no 0.5 of" in _parts(other, records, plans)[0]
    assert "tunes on no subsample" in _parts(small_search().to_json(), records, plans)[0]


def test_the_secret_is_one_for_all_and_is_gone_in_the_end(done: RunDirectory, tmp_path: Path) -> None:
    session = session_in(tmp_path / "run", tuned_search())
    key = tmp_path / "run" / "secrets" / subsample.KEY
    assert session.directory.secrets == key.parent and key.stat().st_mode & 0o777 == 0o600
    assert not (done.secrets / subsample.KEY).exists()
    assert list(done.secrets.iterdir()) == []


def test_nothing_tells_who_is_in_the_subsample_or_how_many(tmp_path: Path) -> None:
    """The realised size stands nowhere, nor does the key."""
    session = session_in(tmp_path / "run", tuned_search(trials=1))
    key = NoiseKey.load(tmp_path / "run" / "secrets" / subsample.KEY)
    secret = (tmp_path / "run" / "secrets" / subsample.KEY).read_text().splitlines()[1]
    members = data.load("digits").private
    from raydp.privacy import poisson_members

    inside = int(poisson_members(key, FRACTION, len(members)).sum())
    drive(session)
    statement.write(session.directory)
    whole = len(members)
    public = {round(FRACTION * whole), whole - round(FRACTION * whole), whole}
    for name, text in contents(tmp_path / "run"):
        assert secret not in text, name
        for size in {inside, whole - inside} - public:
            assert f": {size}," not in text and f" {size} examples" not in text, name


def test_a_search_goes_on_with_its_subsample_after_a_crash(tmp_path: Path) -> None:
    search = tuned_search()
    first = session_in(tmp_path / "run", search)
    task = first.next_task()
    assert task is not None
    key = (tmp_path / "run" / "secrets" / subsample.KEY).read_bytes()
    again = session_in(tmp_path / "run", search)
    assert (tmp_path / "run" / "secrets" / subsample.KEY).read_bytes() == key
    assert drive(again) == ["t0000", "t0001", "t0002", "t0003"]
    assert session_in(tmp_path / "run", search).left == 0


def test_a_lost_secret_ends_the_search(tmp_path: Path) -> None:
    session = session_in(tmp_path / "run", tuned_search())
    assert session.next_task() is not None
    (tmp_path / "run" / "secrets" / subsample.KEY).unlink()
    with pytest.raises(RaydpError, match="who is in the subsample"):
        session_in(tmp_path / "run", tuned_search())


def test_a_final_run_that_diverges_is_charged_and_not_repeated(tmp_path: Path) -> None:
    def diverge(key: str, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "metrics": {"accuracy": [float("nan")]}} if key == "t0003" else item

    session = session_in(tmp_path / "run", tuned_search())
    assert drive(session, change=diverge)[-1] == "t0003"
    assert session.left == 0 and session_in(tmp_path / "run", tuned_search()).next_task() is None
    result = Result.load(tmp_path / "run")
    assert result.trials[-1].state == "diverged" and result.best is not None and not result.best.final
    assert verify(tmp_path / "run")["ok"]


def test_without_a_complete_trial_there_is_no_final_run(tmp_path: Path) -> None:
    def fail(key: str, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "state": "failed", "reason": "on purpose", "metrics": {}}

    session = session_in(tmp_path / "run", tuned_search(trials=2))
    assert drive(session, change=fail) == ["t0000", "t0001"]
    assert session.left == 0


def test_further_trials_come_too_late(done: RunDirectory) -> None:
    with pytest.raises(InvalidValue, match="too late"):
        runner.resume(done.path, extra_trials=2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"paired": True}, "paired"),
        ({"metric": ("accuracy", "loss"), "mode": ("max", "min")}, "metric"),
        ({"accountant": "rdp"}, "accountant"),
        ({"data": "families", "selection": "subsample:0.5"}, "selection"),
    ],
)
def test_settings_that_void_the_bound_are_refused(
    changes: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "data" in changes:
        monkeypatch.setattr(data, "is_family", lambda name: True)
        changes = {name: value for name, value in changes.items() if name != "data"}
    with pytest.raises(InvalidValue, match=field):
        tuned_search(**changes)


def test_a_fraction_that_leaves_nobody_is_refused_before_anything_is_spent() -> None:
    with pytest.raises(InvalidValue, match="fraction"):
        runner.check(tuned_search(selection="subsample:0.00001"))


def test_a_config_that_cannot_be_carried_over_is_infeasible(tmp_path: Path) -> None:
    """A batch that the subsample holds, and the final run does not: with scaling none and less data in the rest."""
    search = tuned_search(selection=Subsample(fraction=0.9, scaling="none"), fixed={"epochs": 1, "batch_size": 500})
    session = session_in(tmp_path / "run", search)
    assert session.next_task() is None
    assert session.failure is not None and "500" in session.failure


@pytest.mark.parametrize(("rest", "rate"), [(False, 0.3), (True, 0.7)])
def test_a_part_is_sampled_at_the_rate_of_its_expected_size(rest: bool, rate: float) -> None:
    private = data.load("digits").private
    sizes = [
        len(private.part(key=NoiseKey.generate(), fraction=0.3, rest=rest).non_private("a test").targets)
        for _ in range(200)
    ]
    assert len(private.part(key=NoiseKey.generate(), fraction=0.3, rest=rest)) == round(rate * len(private))
    spread = math.sqrt(len(private) * 0.3 * 0.7)
    assert np.mean(sizes) == pytest.approx(rate * len(private), abs=5 * spread / math.sqrt(200))
    assert np.std(sizes) == pytest.approx(spread, rel=0.3)


def test_the_two_parts_of_one_key_are_complements_and_have_marks_of_their_own() -> None:
    private, key = data.load("digits").private, NoiseKey.generate()
    parts = [private.part(key=key, fraction=0.3, rest=rest) for rest in (False, True)]
    taken = [set(map(bytes, part.non_private("a test").inputs.numpy())) for part in parts]
    assert len(taken[0]) + len(taken[1]) == len(set(map(bytes, private.non_private("a test").inputs.numpy())))
    assert len({private.fingerprint, *(part.fingerprint for part in parts)}) == 3
    assert private.part(key=key, fraction=0.3, rest=False).fingerprint == parts[0].fingerprint
    with pytest.raises(InvalidValue, match="part already"):
        parts[0].part(key=key, fraction=0.5, rest=False)


@pytest.mark.slow
def test_a_subsample_on_ray(tmp_path: Path) -> None:
    result = tuned_search(trials=2, selection=f"subsample:{FRACTION}:all").run(storage=tmp_path / "run", quiet=True)
    assert result.best is not None and result.best.final and result.best.key == "t0002"
    assert verify(tmp_path / "run")["ok"]
    assert (tmp_path / "run" / "statement.json").exists() and list((tmp_path / "run" / "secrets").iterdir()) == []
