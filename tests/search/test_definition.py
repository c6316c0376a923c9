"""A search is validated when it is made, changed by overrides with checked types, and survives the run directory."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from ray import tune

from raydp.errors import Infeasible, InvalidValue, UnknownName
from raydp.search.definition import Resources, Search
from raydp.search.runner import check
from tests.search.helpers import small_search


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({"method": "tp_topq"}, "tp_topk"),
        ({"data": "digit"}, "digits"),
        ({"metric": "acuracy"}, "accuracy"),
        ({"fixed": {"epoch": 1}}, "epochs"),
        ({"space": {"learning_rates": tune.uniform(0, 1)}}, "learning_rate"),
        ({"sampler": "tpes"}, "tpe"),
        ({"accountant": "plt"}, "pld"),
        ({"split": "composd"}, "composed"),
        ({"mode": "mx"}, "max"),
        ({"model": "mpl"}, "mlp"),
    ],
)
def test_near_names_are_suggested(changes: dict[str, Any], near: str) -> None:
    with pytest.raises(UnknownName, match=f"Did you mean .*{near}"):
        check(small_search(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "a/b"}, "'/' is refused"),
        ({"budget": (3.0, 1e-5)}, "must be a raydp.Budget"),
        ({"resources": {"cpus_per_worker": 1}}, "must be a raydp.Resources"),
        ({"warm_start": {"learning_rate": 1.0}}, "must be a list of configs"),
        ({"space": {"learning/rate": tune.uniform(0, 1)}}, "'/' is refused"),
        ({"space": {"optimizer": tune.choice([None, "sgd"])}}, "must be a str, int, float or bool"),
        ({"space": {"learning_rate": tune.choice([[1, 2]])}}, "must be a str, int, float or bool"),
        ({"fixed": {"epochs": 1.5}}, "must be int"),
        ({"fixed": {"epochs": True}}, "must be int, not bool"),
        ({"fixed": {"momentum": float("nan")}}, "must be finite"),
        ({"fixed": {"learning_rate": 1.0}}, "is also proposed by the space"),
        ({"fixed": {"method": "dp_sgd"}}, "is a field of the Search"),
        ({"trials": 0}, "must be >= 1"),
        ({"seeds": 1.5}, "must be an integer"),
        ({"metric": ("accuracy", "loss"), "mode": "max"}, "one mode for each"),
        ({"paired": True, "insecure_seed": 1}, "has no meaning with insecure_seed"),
        ({"space": {"learning_rate": tune.grid_search([1.0])}}, "sampler='grid'"),
        ({"warm_start": ({"learning_rate": 9.0},)}, "Choose a value that the space can hold"),
    ],
)
def test_bad_fields_are_refused_when_the_search_is_made(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        small_search(**changes)


def test_a_space_cannot_name_what_the_method_lacks() -> None:
    with pytest.raises(UnknownName, match="hyperparameter of dp_sgd = 'warmup_share'"):
        small_search(method="dp_sgd")


def test_wrong_choices_and_values_of_the_space_are_refused_before_anything_is_spent() -> None:
    with pytest.raises(InvalidValue, match="epochs = 'many': must be int"):
        check(small_search(fixed={}, space={"epochs": tune.choice(["many"])}))
    with pytest.raises(UnknownName, match="optimizer"):
        check(small_search(space={"optimizer": tune.choice(["sgd", "adm"])}))
    with pytest.raises(InvalidValue, match="limit"):
        check(small_search(data_limit=10**6))


def test_a_rule_that_every_proposal_breaks_is_told_before_anything_is_spent() -> None:
    with pytest.raises(InvalidValue, match="must not exceed the number of private examples"):
        check(small_search(fixed={"batch_size": 100_000}))


def test_a_large_delta_warns_with_the_bound() -> None:
    with pytest.warns(UserWarning, match=r"1/N = 0\.000696 \(N = 1437\)"):
        check(small_search().with_overrides({"budget.delta": "0.01"}))


def test_overrides_reach_every_kind_of_field() -> None:
    changed = small_search().with_overrides(
        {
            "trials": "7",
            "seeds": 2,
            "paired": "true",
            "data_limit": "1000",
            "model": "none",
            "metric": "accuracy, loss",
            "mode": "max,min",
            "budget.epsilon": "8",
            "budget.adjacency": "replace_one",
            "resources.cpus_per_worker": "2",
            "resources.gpus_per_worker": "0",
            "resources.max_concurrent": "none",
            "learning_rate": "2",
            "fixed.epochs": "3",
        }
    )
    assert (changed.trials, changed.seeds, changed.paired, changed.data_limit, changed.model) == (
        7,
        2,
        True,
        1000,
        None,
    )
    assert (changed.metrics, changed.modes) == (("accuracy", "loss"), ("max", "min"))
    assert (changed.budget.epsilon, changed.budget.delta, changed.budget.adjacency) == (8.0, 1e-5, "replace_one")
    assert changed.resources == Resources(cpus_per_worker=2)
    assert changed.fixed == {"learning_rate": 2.0, "epochs": 3, "batch_size": 256}
    assert changed.point_space.names == ("warmup_share",)
    assert type(changed.fixed["learning_rate"]) is float


@pytest.mark.parametrize(
    ("overrides", "kind", "words"),
    [
        ({"trial": "3"}, UnknownName, "trials"),
        ({"budget.epsilom": "3"}, UnknownName, "epsilon"),
        ({"resources.cpu_per_worker": "3"}, UnknownName, "cpus_per_worker"),
        ({"learning_rat": "3"}, UnknownName, "learning_rate"),
        ({"trials": "many"}, InvalidValue, "must be int"),
        ({"trials": 2.5}, InvalidValue, "must be int"),
        ({"budget.epsilon": "-1"}, InvalidValue, "epsilon"),
        ({"budget.epsilon": "nan"}, InvalidValue, "finite"),
        ({"paired": "perhaps"}, InvalidValue, "must be true or false"),
        ({"fixed": "3"}, InvalidValue, "by its own name"),
        ({"epochs": "1.5"}, InvalidValue, "must be int"),
        ({"method": "dp_sgd"}, UnknownName, "warmup_share"),
    ],
)
def test_bad_overrides_are_refused(overrides: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        small_search().with_overrides(overrides)


def test_overrides_of_the_method_bring_its_hyperparameters() -> None:
    search = small_search(method="dp_sgd", space={"learning_rate": tune.loguniform(0.1, 4.0)})
    changed = search.with_overrides({"method": "on_topk", "explore": "0.2"})
    assert changed.method == "on_topk"
    assert changed.fixed["explore"] == 0.2


def test_scales_are_overrides_of_the_search() -> None:
    search = small_search(small={"trials": 2, "epochs": 3, "budget.epsilon": 1.0})
    assert (search.scaled("small").trials, search.scaled("small").fixed["epochs"]) == (2, 3)
    assert search.scaled("small").budget.epsilon == 1.0
    with pytest.raises(InvalidValue, match="is not defined by the search 'small'"):
        search.scaled("paper")
    with pytest.raises(UnknownName, match="Did you mean small"):
        search.scaled("smal")


def _round_trip(search: Search, space: Any = None) -> Search:
    return Search.from_json(json.loads(json.dumps(search.to_json())), space=space)


def test_a_search_survives_json() -> None:
    search = small_search(
        metric=("accuracy", "loss"),
        mode=("max", "min"),
        seeds=2,
        paired=True,
        resources=Resources(max_concurrent=1),
        warm_start=({"learning_rate": 0.5},),
    )
    again = _round_trip(search)
    assert again.to_json() == search.to_json()
    assert again.metrics == ("accuracy", "loss")
    assert again.plan_for({"learning_rate": 1.0, "warmup_share": 0.3}) == search.plan_for(
        {"learning_rate": 1.0, "warmup_share": 0.3}
    )
    assert _round_trip(small_search()).metric == "accuracy"


def test_a_function_space_survives_with_its_function_and_no_other() -> None:
    def space(trial: Any) -> dict[str, Any]:
        trial.suggest_float("learning_rate", 0.1, 4.0, log=True)
        return {"warmup_share": 0.3}

    def other(trial: Any) -> None:
        trial.suggest_float("learning_rate", 0.1, 8.0, log=True)

    search = small_search(space=space)
    assert _round_trip(search, space=space).to_json() == search.to_json()
    with pytest.raises(InvalidValue, match="is not the space that the search began with"):
        _round_trip(search, space=other)


def test_data_is_stored_by_name_or_by_absolute_path(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()  # a directory of this name is not the bundled data set
    assert small_search().to_json()["data"] == "digits"
    assert small_search(data="mine").to_json()["data"] == str(tmp_path / "mine")


def test_a_searched_method_gets_its_own_parameters_only() -> None:
    search = small_search(
        space={
            "method": tune.choice(["tp_topk", "tp_rand", "dp_sgd"]),
            "learning_rate": tune.loguniform(0.1, 4.0),
            "warmup_share": tune.uniform(0.2, 0.5),
        },
        fixed={"epochs": 1, "batch_size": 256, "active_ratio": 0.5},
    )
    config = {"learning_rate": 1.0, "warmup_share": 0.3}
    assert {m.name for m in search.methods} == {"tp_topk", "tp_rand", "dp_sgd"}
    _, dense, values = search.point({**config, "method": "dp_sgd"})
    assert values == {"epochs": 1, "batch_size": 256, "learning_rate": 1.0}
    assert not hasattr(dense, "warmup_share")
    _, sparse, values = search.point({**config, "method": "tp_rand"})
    assert (sparse.warmup_share, sparse.active_ratio, "method" in values) == (0.3, 0.5, False)
    assert [p.name for p in search.plan_for({**config, "method": "dp_sgd"}).phases] == ["train"]
    assert [p.name for p in search.plan_for({**config, "method": "tp_rand"}).phases] == ["warmup", "sparse"]
    with pytest.raises(UnknownName, match="'explore' does not exist"):
        small_search(space={"method": tune.choice(["tp_topk", "dp_sgd"])}, fixed={"explore": 0.1})


def test_points_without_a_plan_say_why() -> None:
    search = small_search(fixed={"epochs": 1})
    with pytest.raises(Infeasible, match=r"Nearest split that works: warmup = 0\.99"):
        search.plan_for({"learning_rate": 1.0, "warmup_share": 0.99995, "batch_size": 256})
    with pytest.raises(InvalidValue, match="must not exceed the number of private examples N = 1437"):
        search.plan_for({"batch_size": 5000, "epochs": 2, "warmup_share": 0.3})


def test_gpus_are_read_as_a_fraction_and_refused_for_paired_runs() -> None:
    for number, meant in (("2", 2), ("1,4", (1, 4)), ((1, 4), (1, 4)), (2, 2)):
        found = small_search().with_overrides({"resources.num_workers": number}).resources
        assert found == Resources(num_workers=meant)  # type: ignore[arg-type]
        assert Resources.from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found
    with pytest.raises(InvalidValue, match="must be int or low,high"):
        small_search().with_overrides({"resources.num_workers": "two"})
    search = small_search().with_overrides({"resources.gpus_per_worker": "0.5"})
    assert search.resources.gpus_per_worker == 0.5
    with pytest.raises(InvalidValue, match="same floats"):
        search.with_overrides({"paired": "true"})


def test_a_search_optimises_something():
    with pytest.raises(InvalidValue, match="at least one metric"):
        small_search(metric=(), mode=())


def test_an_override_beyond_all_floats_is_refused():
    with pytest.raises(InvalidValue, match="must be finite"):
        small_search().with_overrides({"budget.epsilon": 10**400})


def test_fixed_is_a_dictionary():
    with pytest.raises(InvalidValue, match="must be a dictionary"):
        small_search(fixed=None)


def test_a_search_shows_itself_in_a_notebook() -> None:
    text = small_search(fixed={"epochs": 1, "batch_size": 256, "schedule": "cosine"})._repr_html_()
    for expected in ("ε = 3, δ = 1e-05", "learning_rate: numbers in [0.1, 4] (log)", "schedule = cosine", "tp_topk"):
        assert expected in text
    assert "every trial spends" in text and "selection" not in text
    assert text.count("<td style") == text.count("<td") and "text-align:left" in text
    stopped = small_search(selection="geometric:4", sampler="random")._repr_html_()
    assert "the released result spends" in stopped and "random_stopping" in stopped and "mean 4, at random" in stopped
