"""A preview plans what the search would run, by the documented form, and trains nothing."""

from __future__ import annotations

import json

import pytest
from ray import tune
from rich.console import Console

from raydp.data import PrivateData
from raydp.privacy import Budget, gaussian
from raydp.search import tables
from raydp.search.definition import Resources
from raydp.search.preview import preview
from raydp.search.sampling import Sampling
from tests.search.helpers import small_search


def test_the_documented_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a preview must not read a private example")

    monkeypatch.setattr(PrivateData, "sample", refuse)
    search = small_search(trials=5, seeds=2, resources=Resources(total_cpus=4, cpus_per_worker=2))
    found = json.loads(json.dumps(preview(search, 2)))
    assert set(found) == {"budget", "plans", "resources", "cost", "selection", "holdout", "earlier"}
    assert found["budget"] == {"epsilon": 3.0, "delta": 1e-5, "adjacency": "add_remove"}
    assert [plan["point"] for plan in found["plans"]] == [
        "centre",
        *(f"corner {i}" for i in range(1, 5)),
        "proposal 1",
        "proposal 2",
    ]
    for plan in found["plans"]:
        assert [phase["name"] for phase in plan["phases"]] == ["warmup", "sparse"]
        for phase in plan["phases"]:
            assert {"noise_multiplier", "sample_rate", "steps", "clip_norm"} <= set(phase)
        assert 3 * (1 - 1e-4) <= plan["certificate"]["pld"]["upper"] <= 3
        assert {"lower", "estimate", "upper"} <= set(plan["certificate"]["prv"])
    assert found["resources"]["trials_at_once_on_this_machine"] == 2
    assert found["resources"]["arithmetic"] == (
        "nodes of 4 CPU + 0 GPU hold 2 workers of 2 CPU + 0 GPU; 2 // 1 a trial = 2 at once"
    )
    cost = found["cost"]
    assert cost["runs"] == 10
    assert cost["steps_a_run"] == 5
    assert cost["epsilon_of_the_search_if_all_runs_finish"] > 3
    assert cost["seconds_for_the_search"] >= 0
    assert cost["coordinates"] > 0
    assert cost["gradients"]["outer_products"] and cost["gradients"]["by"] == "formulas of the layers"


def test_trials_of_several_workers_and_what_does_not_fit_this_machine() -> None:
    resources = Resources(total_cpus=5, num_workers=2, max_concurrent=1)
    assert preview(small_search(resources=resources), 0)["resources"]["arithmetic"] == (
        "nodes of 5 CPU + 0 GPU hold 5 workers of 1 CPU + 0 GPU; 5 // 2 a trial = 2 at once, at most 1 wanted"
    )
    found = preview(small_search(resources=Resources(total_cpus=2, num_workers=64)), 0)
    assert found["resources"]["trials_at_once_on_this_machine"] == 0
    assert "64 workers of 1 CPU + 0 GPU a trial" in found["resources"]["arithmetic"]
    assert found["cost"]["runs"] == 3


def test_proposals_are_those_that_the_search_makes() -> None:
    search = small_search(sampler="tpe")
    found = [plan["config"] for plan in preview(search, 3)["plans"] if plan["point"].startswith("proposal")]
    sampling = Sampling(space=search.point_space, sampler="tpe", seed=search.seed, directions=search.modes)
    assert found == [proposal.config for proposal in (sampling.ask() for _ in range(3)) if proposal]


def test_points_without_a_plan_stand_with_their_reason() -> None:
    search = small_search(space={"batch_size": tune.choice([256, 4000])}, fixed={"epochs": 2})
    plans = preview(search, 0)["plans"]
    reasons = [plan["reason"] for plan in plans if "reason" in plan]
    assert reasons
    assert all("N = 1437" in reason for reason in reasons)
    assert all(plan["phases"] == [] and plan["certificate"] == {} for plan in plans if "reason" in plan)


def test_a_space_without_any_plan_has_no_cost() -> None:
    found = preview(small_search(space={"warmup_share": tune.uniform(0.99995, 0.99996)}, fixed={"epochs": 1}), 1)
    assert found["cost"] == {}
    assert all("reason" in plan for plan in found["plans"])


def test_thirty_proposals_spend_the_budget_exactly() -> None:
    """The certificate of every trial of a search lies in [epsilon (1 - 1e-4), epsilon]; PRV does not contradict it."""
    search = small_search(
        space={
            "warmup_share": tune.uniform(0.1, 0.9),
            "warmup_fraction": tune.uniform(0.1, 0.9),
            "batch_size": tune.choice([64, 700]),
        },
        fixed={"epochs": 4},
    )
    proposals = [plan for plan in preview(search, 30)["plans"] if plan["point"].startswith("proposal")]
    assert len(proposals) == 30
    for plan in proposals:
        pld, prv = plan["certificate"]["pld"], plan["certificate"]["prv"]
        assert 3 * (1 - 1e-4) <= pld["upper"] <= 3, plan["config"]
        assert prv["lower"] <= pld["upper"], plan["config"]
        assert pld["lower"] <= prv["upper"], plan["config"]
        assert all(phase["noise_multiplier"] > 0 for phase in plan["phases"])


def test_noise_on_all_data_is_shown_for_both_adjacencies() -> None:
    search = small_search(
        method="dp_deepsets",
        data="regression:dimension=8",
        data_limit=64,
        model=None,
        budget=Budget(epsilon=2.0, delta=1e-5, adjacency="replace_one"),
        space={"clip_norm": tune.loguniform(1.0, 4.0)},
        fixed={"encoder": "oracle", "decoder": "pad", "embedding": 2},
    )
    found = json.loads(json.dumps(preview(search, 1)))
    (phase,) = found["plans"][0]["phases"]
    assert (phase["name"], phase["sample_rate"], phase["steps"]) == ("embed", 1.0, 1)
    seen = found["plans"][0]["epsilon_by_adjacency"]
    assert seen["replace_one"] == pytest.approx(2, rel=1e-9)
    assert seen["add_remove"] == pytest.approx(gaussian.epsilon(1e-5, 1 / phase["noise_multiplier"]), rel=1e-9)
    console = Console(record=True, width=120)
    tables.print_preview("deepsets", found, console)
    text = console.export_text()
    assert f"the same noise spends epsilon = {seen['add_remove']:.6g} for add_remove, 2 for replace_one" in text
