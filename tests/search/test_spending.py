"""What a search has spent: everything added up, or in a family of other people the largest of the members."""

import pytest

from raydp import data
from raydp.privacy import accountants
from raydp.privacy.accountants.rdp import RunningRdp
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.plan import Interval
from raydp.search import statement
from raydp.search.results import Result
from raydp.search.run_directory import RunDirectory
from raydp.search.spending import OF_MEMBERS, compositions, largest, merged
from raydp.search.verify import verify
from tests.search.helpers import drive, session_in, small_search
from tests.search.test_statement import checked
from tests.search.test_verify import DEFINITION, add, good_plan

STRONG = Mechanism(noise_multiplier=2.0, sample_rate=0.1, steps=10)
WEAK = Mechanism(noise_multiplier=1.0, sample_rate=0.1, steps=10)


def times(mechanism: Mechanism, count: int) -> Mechanism:
    return Mechanism(
        noise_multiplier=mechanism.noise_multiplier,
        sample_rate=mechanism.sample_rate,
        steps=count * mechanism.steps,
    )


def test_many_equal_runs_cost_no_more_than_one():
    assert merged([STRONG, WEAK] * 50) == (times(STRONG, 50), times(WEAK, 50))
    assert merged([]) == ()


def test_one_private_set_adds_up_all_runs_and_a_family_those_of_each_member():
    runs = [(0, (STRONG,)), (1, (STRONG,)), (2, (WEAK,)), (0, (STRONG,)), (1, (STRONG,))]
    assert compositions(runs, family=False) == ((times(STRONG, 4), WEAK),)
    assert compositions(runs, family=True) == ((times(STRONG, 2),), (WEAK,))  # members 0 and 1 went through the same
    assert compositions([], family=True) == compositions([], family=False) == ((),)


def test_the_largest_of_intervals_has_the_largest_of_each_bound():
    narrow = Interval(lower=0.9, estimate=0.95, upper=1.0, accountant="pld")
    wide = Interval(lower=0.1, estimate=0.5, upper=2.0, accountant="pld")
    assert largest([narrow, wide]) == Interval(lower=0.9, estimate=0.95, upper=2.0, accountant="pld")
    assert largest([narrow]) == narrow


def family_run(path, **fields):
    """Two trials of three members; a third, which failed, came to member 1 only, and a few steps far."""
    directory = RunDirectory.create(path, {**DEFINITION, "seeds": 3, "data": "regression", **fields})
    plan = good_plan()
    add(directory, 0, plan, seeds=3)
    add(directory, 1, plan, seeds=3)
    add(directory, 2, plan, seeds=2, state="failed", steps=9)
    return directory, plan


def test_a_search_over_a_family_costs_what_its_costliest_member_did(tmp_path):
    directory, plan = family_run(tmp_path / "family", family=True)
    short = [times(m, 1) for m in plan.mechanisms[:1]]
    last = plan.mechanisms[1]
    short.append(Mechanism(noise_multiplier=last.noise_multiplier, sample_rate=last.sample_rate, steps=4))
    expected = accountants.epsilon([*plan.mechanisms * 2, *short], delta=1e-5)
    result = Result.load(directory)
    assert result.runs == 8 and len(result.compositions) == 2  # member 2 was spared the third trial
    assert result.epsilon_search.upper == pytest.approx(expected.upper, rel=1e-4)
    assert result.epsilon_released == result.epsilon_search
    assert OF_MEMBERS in result.summary() and result.to_json()["family"] is True

    report = verify(directory.path)
    assert report["ok"] and report["search"]["family"] is True and report["search"]["runs"] == 8
    assert report["search"]["epsilon"]["pld"]["upper"] == result.epsilon_search.upper

    found = checked(directory)
    assert found["everything"]["runs"] == 8
    assert found["everything"]["epsilon"]["pld"]["upper"] == result.epsilon_search.upper
    assert found["selection"]["released"]["epsilon"] == result.epsilon_search.upper
    steps = sum(mechanism["steps"] for mechanism in found["everything"]["mechanisms"])
    assert steps == 2 * plan.steps + 9  # of the costliest member
    assert "people in several members" in {item["what"] for item in found["not_covered"]}
    assert OF_MEMBERS in " ".join(statement.text(found).split())


def test_without_the_word_of_the_definition_members_count_as_the_same_people(tmp_path):
    """So do the run directories of versions that did not record it."""
    (apart, _), (together, _) = (family_run(tmp_path / "a", family=True), family_run(tmp_path / "b"))
    one, all_of_them = Result.load(apart), Result.load(together)
    assert all_of_them.epsilon_search.lower > one.epsilon_search.upper
    assert OF_MEMBERS not in all_of_them.summary() and OF_MEMBERS not in statement.text(checked(together))
    assert verify(together.path)["search"]["family"] is False


def test_a_claim_that_one_private_set_is_a_family_is_found(tmp_path):
    directory, _ = family_run(tmp_path / "run", family=True, data="digits")
    report = verify(directory.path)
    assert not report["ok"] and "it is not a family" in " ".join(report["problems"])


def test_a_real_search_records_its_family_and_trains_each_seed_on_another_member(tmp_path, monkeypatch):
    seen = []
    honest = data.load
    monkeypatch.setattr(data, "load", lambda *a, **k: seen.append(k.get("member", 0)) or honest(*a, **k))
    search = small_search(
        data="regression",
        data_limit=64,
        seeds=2,
        trials=2,
        metric="parameter_error",
        fixed={"epochs": 1, "batch_size": 32},
    )
    session = session_in(tmp_path / "run", search)
    drive(session)
    assert {0, 1} <= set(seen)
    result = Result.load(tmp_path / "run")
    plans = [m for record in result.trials for m in record.plan.mechanisms]
    assert result.family and result.runs == 4
    expected = accountants.epsilon(plans, delta=search.budget.delta, adjacency=search.budget.adjacency)
    assert result.epsilon_search.upper == pytest.approx(expected.upper, rel=1e-4)
    assert verify(tmp_path / "run")["ok"]
    total = RunningRdp()
    total.add(plans)
    shown = session._total()
    assert shown.upper == pytest.approx(
        total.epsilon(delta=search.budget.delta, adjacency=search.budget.adjacency).upper, rel=1e-9
    )
    assert not Result.load(RunDirectory.create(tmp_path / "plain", small_search().to_json())).family
