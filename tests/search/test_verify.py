import dataclasses
import functools
import json
import shutil

import pytest

from raydp.errors import InvalidValue
from raydp.privacy.budget import Budget
from raydp.privacy.calibration import calibrate
from raydp.privacy.ledger import Ledger, LedgerWriter
from raydp.privacy.mechanism import Phase, PhaseSpec
from raydp.privacy.plan import Interval, Plan
from raydp.search.run_directory import RunDirectory
from raydp.search.verify import verify
from tests.chains import forge_journal, forge_ledger

BUDGET = Budget(epsilon=1.0, delta=1e-5)
DEFINITION = {"name": "mine", "budget": BUDGET.to_json(), "accountant": "pld", "seeds": 2}
PHASES = (
    PhaseSpec(name="warmup", steps=5, batch_size=50, population=1000, clip_norm=1.0, share=0.5),
    PhaseSpec(name="sparse", steps=20, batch_size=50, population=1000, clip_norm=0.5),
)


@functools.cache
def good_plan(epsilon=1.0, split="composed"):
    return calibrate(budget=Budget(epsilon=epsilon, delta=1e-5), phases=PHASES, split=split)


def forged_plan(budget=BUDGET, factor=0.5):
    """A plan whose noise is too small and whose certificate says that it is not."""
    phases = [Phase(spec=phase.spec, noise_multiplier=phase.noise_multiplier * factor) for phase in good_plan().phases]
    return Plan(
        budget=budget,
        phases=tuple(phases),
        certificate={"pld": Interval(lower=0.9999, estimate=0.99995, upper=1.0, accountant="pld")},
    )


def add(directory, number, plan, *, state="complete", seeds=2, steps=None, journal=True, config=None, score=0.5):
    key = f"t{number:04d}"
    directory.write_json(f"trials/{key}/plan.json", plan.to_json())
    if journal:
        event = {
            "event": "proposed",
            "key": key,
            "number": number,
            "config": config or {"lr": 0.1},
            "plan": plan.digest,
        }
        directory.append(event)
        directory.append({"event": "started", "key": key, "attempt": 1})
    for seed in range(seeds):
        directory.run_path(key, seed).mkdir(parents=True)
        left = plan.steps if steps is None else steps
        with LedgerWriter(directory.run_path(key, seed) / "ledger.jsonl", plan) as ledger:
            for phase in plan.phases:
                for step in range(min(left, phase.steps)):
                    ledger.record(phase.name, step)
                    ledger.commit()
                left -= min(left, phase.steps)
    if journal and state != "running":
        finish(directory, key, state, metrics={"accuracy": [score] * seeds})
    return key


def finish(directory, key, state="complete", **fields):
    heads = directory.heads(key)
    directory.append({"event": "finished", "key": key, "state": state, "metrics": {}, "heads": heads, **fields})


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run", DEFINITION)


def problems(directory, **kwargs):
    """(key, seed) -> problem, of a verification that must fail."""
    report = verify(directory.path, **kwargs)
    assert not report["ok"]
    return {(entry["key"], entry["seed"]): entry["problem"] for entry in report["trials"] if not entry["ok"]}


def test_a_good_search(directory):
    plan = good_plan()
    add(directory, 0, plan)
    add(directory, 1, plan, state="failed", seeds=1, steps=8)
    add(directory, 2, plan, state="running", seeds=1, steps=3)
    directory.append({"event": "infeasible", "key": "t0003", "number": 3, "config": {"lr": 9.0}, "reason": "no room"})
    before = sorted(directory.path.rglob("*"))
    report = verify(directory.path)
    assert sorted(directory.path.rglob("*")) == before
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["ok"] and report["budget"] == BUDGET.to_json() and report["problems"] == []
    assert [(entry["key"], entry["seed"], entry["state"]) for entry in report["trials"]] == [
        ("t0000", 0, "complete"),
        ("t0000", 1, "complete"),
        ("t0001", 0, "failed"),
        ("t0002", 0, "running"),
        ("t0003", None, "infeasible"),
    ]
    complete, _, failed, running, infeasible = report["trials"]
    assert 1 - 1e-4 <= complete["epsilon"]["pld"]["upper"] <= 1
    assert complete["epsilon"]["pld"]["upper"] == pytest.approx(plan.epsilon.upper, rel=1e-4)
    assert complete["epsilon"]["prv"]["lower"] <= 1 and set(complete["epsilon"]) == {"pld", "prv", "rdp"}
    assert running["epsilon"]["pld"]["upper"] < failed["epsilon"]["pld"]["upper"] < 1
    assert infeasible["epsilon"] == {} and infeasible["executed"] == []
    assert [(phase["name"], phase["steps"]) for phase in failed["executed"]] == [("warmup", 5), ("sparse", 3)]
    assert report["plans"][0]["certificate"] == plan.to_json()["certificate"]
    assert report["plans"][0]["phases"][1]["noise_multiplier"] == plan.phases[1].noise_multiplier
    assert report["plans"][0]["config"] == {"lr": 0.1}
    assert report["search"]["runs"] == 4 and report["search"]["epsilon"]["pld"]["upper"] > 1.2


@pytest.mark.slow
def test_the_same_answer_from_several_processes(directory):
    for number, steps in enumerate((3, 8, 12, None)):
        add(directory, number, good_plan(), state="complete" if steps is None else "failed", steps=steps)
    assert verify(directory.path, processes=2) == verify(directory.path)


def test_a_forged_certificate_is_seen_through(directory):
    add(directory, 0, good_plan())
    add(directory, 1, forged_plan())
    found = problems(directory)
    assert set(found) == {("t0001", 0), ("t0001", 1)} and "overspent" in found["t0001", 0]


def test_overspending_is_seen_in_unfinished_runs_as_well(directory):
    add(directory, 0, forged_plan(factor=0.3), state="running", steps=20)
    assert "overspent" in problems(directory)["t0000", 0]


def test_a_plan_of_another_budget(directory):
    add(directory, 0, good_plan(epsilon=2.0))
    assert "the plan is of budget" in problems(directory)["t0000", 0]


def test_a_plan_that_was_exchanged_or_lost(directory):
    add(directory, 0, good_plan())
    add(directory, 1, good_plan())
    directory.write_json("trials/t0000/plan.json", good_plan(epsilon=0.5).to_json())
    (directory.trial_directory("t0001") / "plan.json").unlink()
    found = problems(directory)
    assert "the journal says" in found["t0000", 0] and "ledger is of plan" in found["t0000", 0]
    assert "no plan.json" in found["t0001", 1]
    (directory.trial_directory("t0001") / "plan.json").write_text("{}")
    assert "damaged" in problems(directory)["t0001", 1]


def test_a_ledger_that_is_not_what_the_plan_allows(directory):
    add(directory, 0, good_plan())
    path = directory.run_path("t0000", 1) / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["noise_multiplier"] *= 2  # the harmless direction: still not what was certified
    lines = [json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    found = problems(directory)
    assert set(found) == {("t0000", 1)} and "was edited, or a line was lost" in found["t0000", 1]
    forge_ledger(path, lines)
    found = problems(directory)
    assert set(found) == {("t0000", 1)} and "not what was certified" in found["t0000", 1]
    path.write_text("garbage\n")
    report = verify(directory.path)
    assert (
        "ledger" in report["trials"][1]["problem"] and not report["trials"][1]["ok"] and report["search"]["runs"] == 2
    )  # the lost one counts as its whole plan


def test_complete_runs_must_have_run(directory):
    add(directory, 0, good_plan(), steps=24)
    add(directory, 1, good_plan(), seeds=1)
    found = problems(directory)
    assert "19 of the 20 steps of phase 'sparse'" in found["t0000", 0]
    assert set(found) == {("t0000", 0), ("t0000", 1), ("t0001", 1)} and "no ledger" in found["t0001", 1]


def test_a_trial_whose_directory_was_deleted(directory):
    add(directory, 0, good_plan())
    for number, state in ((1, "failed"), (2, "running")):
        add(directory, number, good_plan(), state=state, seeds=1, steps=8)
        shutil.rmtree(directory.trial_directory(f"t{number:04d}"))
    found = problems(directory)
    assert set(found) == {("t0001", 0), ("t0002", None)}
    assert "this run has no ledger" in found.pop(("t0001", 0))
    assert all("the journal says that there was one" in problem for problem in found.values())


def test_a_failed_trial_whose_ledger_lost_a_line_or_all(directory):
    key = add(directory, 0, good_plan(), state="running", seeds=1, steps=8)
    path = directory.run_path(key, 0) / "ledger.jsonl"
    epsilon = {"pld": Ledger.read(path).epsilon("pld").to_json()}
    finish(directory, key, "failed", epsilon=epsilon)
    assert verify(directory.path)["ok"]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    found = problems(directory)[key, 0]
    assert "the journal says that a run spent" in found and "not the one with which the trial ended" in found
    path.unlink()
    assert "the ledgers say 0" in problems(directory)[key, 0]


def test_a_run_that_reported_more_than_its_ledger_holds(directory):
    key = add(directory, 0, good_plan(), state="running", seeds=1, steps=8)
    reports = directory.run_path(key, 0) / "metrics.jsonl"
    reports.write_text('{"step": 4, "metrics": {}}\n{"step": 8, "metrics": {}}\n')
    assert verify(directory.path)["ok"]
    reports.write_text('{"step": 9, "metrics": {}}\n')
    assert problems(directory)[key, 0] == "it reported step 9, and its ledger holds 8 steps"
    reports.write_text('{"step": "9"}\n')
    assert "cannot be read" in problems(directory)[key, 0]


def test_a_seed_that_ran_before_another_must_have_a_ledger(directory):
    key = add(directory, 0, good_plan(), state="failed", steps=8)
    (directory.run_path(key, 0) / "ledger.jsonl").unlink()
    assert "the runs of the seeds [0] come before" in problems(directory)[key, 1]


def test_a_trial_that_was_cut_out_of_the_journal(directory):
    for number in range(3):
        add(directory, number, good_plan())
    journal = directory.path / "journal.jsonl"
    kept = [line for line in journal.read_bytes().splitlines(keepends=True) if b"t0001" not in line]
    journal.write_bytes(b"".join(kept))
    shutil.rmtree(directory.trial_directory("t0001"))
    assert "line 4 is not the one that was written" in verify(directory.path)["problems"][0]
    forge_journal(directory, kept)
    assert verify(directory.path)["problems"] == ["the journal lacks the trials of number 1, and has later ones"]


def test_a_definition_that_was_edited(directory):
    add(directory, 0, good_plan())
    header = {**directory.header, "definition": {**DEFINITION, "budget": {**BUDGET.to_json(), "epsilon": 5.0}}}
    directory.write_json("raydp.json", header)
    assert "line 1 is not the one that was written (raydp.json" in verify(directory.path)["problems"][0]


def test_a_config_that_was_exchanged(directory):
    key = add(directory, 0, good_plan())
    directory.write_json(f"trials/{key}/config.json", {"lr": 0.1})
    assert verify(directory.path)["ok"]
    directory.write_json(f"trials/{key}/config.json", {"lr": 0.2})
    assert "was exchanged" in problems(directory)[key, 0]
    (directory.trial_directory(key) / "config.json").write_text("[")
    assert "config.json cannot be read" in problems(directory)[key, 0]


def test_a_ledger_that_goes_on_or_is_written_anew_after_the_trial_ended(directory):
    key = add(directory, 0, good_plan(), state="failed", seeds=1, steps=8)
    path = directory.run_path(key, 0) / "ledger.jsonl"
    before = path.read_bytes()
    with LedgerWriter(path, good_plan()) as ledger:
        ledger.record("sparse", 3)
    assert "not the one with which the trial ended" in problems(directory)[key, 0]
    path.write_bytes(before)
    assert verify(directory.path)["ok"]
    header, first, *_ = before.splitlines()
    forge_ledger(path, [header, first.replace(b'"steps": 1', b'"steps": 5')])
    assert "not the one with which the trial ended" in problems(directory)[key, 0]


def test_a_ledger_that_was_readable_only_later(directory):
    key = add(directory, 0, good_plan(), state="running", seeds=1, steps=8)
    path = directory.run_path(key, 0) / "ledger.jsonl"
    before = path.read_bytes()
    path.write_bytes(b"garbage\n")
    finish(directory, key, "failed")
    assert "is not JSON" in problems(directory)[key, 0]
    path.write_bytes(before)
    assert "does not know a readable ledger" in problems(directory)[key, 0]


def test_a_certificate_that_claims_less_than_was_spent(directory):
    plan = good_plan()
    claim = Interval(lower=0.1, estimate=0.2, upper=0.3, accountant="pld")
    add(directory, 0, dataclasses.replace(plan, certificate={**plan.certificate, "pld": claim}))
    assert "certificate claims epsilon <= 0.3" in problems(directory)["t0000", 0]


def test_a_naive_split_may_leave_some_of_the_budget(directory):
    add(directory, 0, good_plan(split="naive"))
    report = verify(directory.path)
    assert report["ok"] and report["trials"][0]["epsilon"]["pld"]["upper"] < 0.99


def test_runs_that_the_journal_does_not_know(directory):
    add(directory, 0, good_plan(), journal=False)
    assert "does not know" in problems(directory)["t0000", 0]
    event = {"event": "infeasible", "key": "t0000", "number": 0, "config": {}, "reason": "no room"}
    directory.append(event)
    assert "infeasible" in problems(directory)["t0000", 0]


def test_a_damaged_journal_does_not_stop_the_check(directory):
    add(directory, 0, good_plan())
    add(directory, 1, forged_plan())
    journal = directory.path / "journal.jsonl"
    journal.write_bytes(b"garbage\n" + journal.read_bytes())
    report = verify(directory.path)
    assert "line 1" in report["problems"][0]
    assert [entry["ok"] for entry in report["trials"]] == [True, True, False, False]


def test_an_empty_search_and_no_search(directory, tmp_path):
    report = verify(directory.path)
    assert report["ok"] and report["trials"] == [] and report["search"]["epsilon"]["pld"]["upper"] == 0
    with pytest.raises(InvalidValue):
        verify(tmp_path)


def test_insecure_noise_never_verifies(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {**DEFINITION, "insecure_seed": 0})
    add(directory, 0, good_plan())
    report = verify(directory.path)
    assert not report["ok"] and "known seed" in report["problems"][0] and all(entry["ok"] for entry in report["trials"])
