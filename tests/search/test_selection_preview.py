"""What a selection costs, said before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from raydp.privacy import gaussian
from raydp.privacy.budget import Budget
from raydp.privacy.selection import Subsample
from raydp.privacy.selection_bounds import profile_bound
from raydp.privacy.stopping import NegativeBinomial
from raydp.search.definition import Search
from raydp.search.selection_preview import alternatives, describe
from tests.search.helpers import small_search


def test_same_budget_under_other_rules() -> None:
    found = alternatives(Budget(epsilon=3.0, delta=1e-5), 10)
    names = list(found)
    assert found[names[0]] == 3.0
    assert found["composition of 10 runs"] == pytest.approx(0.834989, abs=1e-5)
    for name, eta in (("logarithmic", 0.0), ("geometric", 1.0)):
        mu = gaussian.mu(found[f"random stopping, {name}, 10 runs expected"], 1e-5)
        back = profile_bound(
            lambda at, mu=mu: gaussian.delta(at, mu), NegativeBinomial.with_mean(eta=eta, mean=10), 1e-5
        )
        assert back.epsilon == pytest.approx(3.0, abs=1e-4)
    order = sorted(found, key=lambda name: found[name])
    assert order[0] == "composition of 10 runs" and order[-1] == names[0]
    assert "subsample" in names[-1] and found["composition of 10 runs"] < found[names[-1]] < 3.0


def test_random_stopping_is_described_before_it_runs() -> None:
    search = small_search(selection="geometric:10", method="dp_sgd", space={"learning_rate": _rate()})
    record = described(search)
    assert record["quantiles_of_runs"] == {"50%": 7, "90%": 22, "95%": 29, "99%": 44}
    assert record["expected_runs"] == pytest.approx(10)
    assert record["epsilon_of_the_released_result"] == pytest.approx(3.0, rel=1e-9)
    assert record["delta_of_a_trial"] == pytest.approx(1e-6)
    assert 2.0 < record["epsilon_of_a_trial"] < 3.0
    assert "Koskela" in record["bound"]


def test_a_public_search_costs_nothing() -> None:
    search = small_search(selection="public:digits", method="dp_sgd", space={"learning_rate": _rate()})
    record = described(search)
    assert record["epsilon_of_the_released_result"] == 0.0


def test_tuning_on_a_subsample_is_described_before_it_runs() -> None:
    search = small_search(
        selection="subsample:0.25:all",
        method="dp_sgd",
        fixed={"epochs": 2, "batch_size": 64},
        space={"learning_rate": _rate()},
    )
    record = described(search)
    inside, whole = record["expected_examples_of_a_trial"], record["expected_examples_of_the_final_run"]
    assert inside == round(whole / 4)
    rate = search.point_space.centre()["learning_rate"]
    assert record["final_run_changes"] == {
        "batch_size": round(64 * whole / inside),
        "learning_rate": pytest.approx(rate * whole / inside),
    }
    assert record["epsilon_of_a_trial"] < record["epsilon_of_the_released_result"] < 4 * 3.0
    assert record["runs_on_the_subsample"] == 3
    kept = described(search.with_overrides({"selection": Subsample(fraction=0.25, final="all", scaling="none")}))
    assert kept["final_run_changes"] == {}


def described(search: Search) -> dict[str, Any]:
    """What is said of the search, by the plan at the centre of its space."""
    centre = search.point_space.centre()
    return describe(search, search.plan_for(centre, cross_check=()), centre)


def _rate() -> object:
    from ray import tune

    return tune.loguniform(0.1, 4.0)
