"""Statements fit their schema, say what is not covered, and their numbers can be computed again from them alone."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raydp import cli
from raydp.errors import CorruptFile
from raydp.privacy.budget import Budget
from raydp.privacy.calibration import calibrate
from raydp.privacy.plan import Plan
from raydp.search import statement
from raydp.search.run_directory import RunDirectory
from raydp.search.verify import verify
from tests.chains import forge_journal
from tests.search.test_verify import BUDGET, DEFINITION, PHASES, add, finish, good_plan

VALIDATOR = jsonschema.Draft202012Validator(statement.schema())


def checked(directory: RunDirectory) -> dict[str, Any]:
    """The statement, after it was held against its schema, as a reader of the file gets it."""
    found = json.loads(json.dumps(statement.build(directory), allow_nan=False))
    VALIDATOR.validate(found)
    assert statement.text(found).endswith("\n")
    return found


def recomputed(mechanisms: list[dict[str, Any]], found: dict[str, Any]) -> float:
    """Epsilon by dp-accounting from what stands in the statement, without raydp."""
    relation = {
        "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
        "replace_one": NeighboringRelation.REPLACE_ONE,
    }[found["adjacency"]["name"]]
    accountant = PLDAccountant(relation, value_discretization_interval=1e-3)
    for m in mechanisms:
        step: dp_event.DpEvent = dp_event.GaussianDpEvent(m["noise_multiplier"])
        if m["sample_rate"] < 1:
            step = dp_event.PoissonSampledDpEvent(m["sample_rate"], step)
        accountant.compose(dp_event.SelfComposedDpEvent(step, m["steps"]))
    return float(accountant.get_epsilon(found["budget"]["delta"]))


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(statement.schema())
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate({"statement": 1})


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_epsilon_follows_from_the_statement_alone(tmp_path: Any, adjacency: Any) -> None:
    budget = Budget(epsilon=1.0, delta=1e-5, adjacency=adjacency)
    plan = calibrate(budget=budget, phases=PHASES)
    directory = RunDirectory.create(tmp_path / "run", {**DEFINITION, "budget": budget.to_json()})
    add(directory, 0, plan)
    add(directory, 1, plan, state="failed", seeds=1, steps=8)
    found = checked(directory)
    runs = [run for trial in found["trials"] for run in trial["runs"]]
    assert len(runs) == found["everything"]["runs"] == 3
    for part in (*runs, found["everything"]):
        again = recomputed(part["mechanisms"], found)
        bounds = part["epsilon"]["pld"]
        assert bounds["lower"] * (1 - 1e-3) <= again <= bounds["upper"] * (1 + 1e-2)
        assert part["epsilon"]["rdp"]["upper"] >= bounds["lower"] and part["epsilon"]["prv"]["upper"] >= bounds["lower"]
    assert runs[0]["epsilon"]["pld"]["upper"] <= found["budget"]["epsilon"]
    executed = [m for run in runs for m in run["mechanisms"]]
    assert recomputed(executed, found) == pytest.approx(recomputed(found["everything"]["mechanisms"], found), rel=1e-3)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [good_plan(), good_plan(split="naive")]


trials = st.tuples(st.integers(0, 1), st.sampled_from(["complete", "failed", "running", "diverged"]), st.integers(1, 2))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(trials, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "insecure_seed": st.integers(0, 3),
            "paired": st.booleans(),
            "public": st.sampled_from(["digits28", None]),
            "sampler": st.sampled_from(["tpe", "random"]),
            "data": st.just("digits"),
            "metric": st.sampled_from(["accuracy", ["accuracy", "loss"]]),
        },
    ),
    st.sampled_from(["digits (public benchmark, 9 examples)", "mine (private hold-out, 9 examples)", None]),
    st.booleans(),
)
def test_whatever_ran_the_statement_fits_its_schema(
    tmp_path_factory: Any, plans: Any, found: Any, fields: Any, measured_on: Any, damaged: bool
) -> None:
    directory = RunDirectory.create(tmp_path_factory.mktemp("s") / "run", {**DEFINITION, **fields})
    for number, (which, state, seeds) in enumerate(found):
        plan = plans[which]
        key = add(directory, number, plan, state="running", seeds=seeds, steps=None if state == "complete" else 8)
        if damaged and number == 0:
            (directory.run_path(key, 0) / "ledger.jsonl").write_bytes(b"{}\n")
        if state != "running":
            finish(directory, key, state, measured_on=measured_on)
    infeasible = {"event": "infeasible", "key": "t0003", "number": 3, "config": {}, "reason": "no room"}
    directory.append(infeasible)
    stated = checked(directory)
    whats = {item["what"] for item in stated["not_covered"]}
    text = statement.text(stated)
    assert stated["private"] == ("insecure_seed" not in fields) == ("INSECURE" not in text)
    assert ("paired noise" in whats) == bool(fields.get("paired"))
    assert ("public data" in whats) == (fields.get("public") is not None)
    assert stated["search"]["finished"] == all(state != "running" for _, state, _ in found)
    told = measured_on is not None and any(state != "running" for _, state, _ in found)
    covered = told and "public benchmark" in str(measured_on)
    assert stated["metrics"]["covered"] == covered == ("metrics on a private hold-out" not in whats)
    assert stated["everything"]["runs"] == sum(seeds for *_, seeds in found)
    if found and damaged:
        run = stated["trials"][0]["runs"][0]
        assert run["damaged"] and [m["steps"] for m in run["mechanisms"]] == [5, 20] and "is damaged" in text


def test_it_is_written_read_by_the_command_line_and_held_against_the_journal(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory.create(tmp_path / "run", DEFINITION)
    add(directory, 0, good_plan())
    add(directory, 1, good_plan(), state="failed", seeds=1, steps=8)
    as_json, as_text = statement.write(directory)
    for arguments, expected in ((["--json"], as_json.read_text()), ([], as_text.read_text())):
        with pytest.raises(SystemExit) as ended:
            cli.main(["statement", str(directory.path), *arguments])
        assert not ended.value.code
        out = capsys.readouterr().out
        assert (json.loads(out) == json.loads(expected)) if arguments else (out == expected)
    assert verify(directory.path)["ok"]
    directory.append({"event": "driver"})  # a resumed search goes on from there
    assert verify(directory.path)["ok"]
    # Whoever cuts the end of the journal off, and deletes what ran, has to find the statement and its copies as well.
    lines = (directory.path / "journal.jsonl").read_bytes().splitlines(keepends=True)
    forge_journal(directory, lines[:3])
    assert "the end was cut off" in verify(directory.path)["problems"][0]
    as_json.write_text("{")
    assert "statement.json is damaged" in verify(directory.path)["problems"][0]


def test_an_edited_journal_has_no_statement(tmp_path: Any) -> None:
    directory = RunDirectory.create(tmp_path / "run", DEFINITION)
    add(directory, 0, good_plan())
    journal = directory.path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"lr": 0.1', b'"lr": 0.2'))
    with pytest.raises(CorruptFile, match="not the one that was written"):
        statement.build(directory)


def test_a_large_delta_is_named(tmp_path: Any) -> None:
    budget = Budget(epsilon=1.0, delta=1e-2)
    directory = RunDirectory.create(tmp_path / "run", {**DEFINITION, "budget": budget.to_json()})
    add(directory, 0, calibrate(budget=budget, phases=PHASES), seeds=1)
    (why,) = [item["why"] for item in checked(directory)["not_covered"] if item["what"] == "delta"]
    assert "not below 1/N = 0.001" in why
    assert BUDGET.delta < 1e-3
