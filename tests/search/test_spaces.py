"""Spaces: Tune's domains and define-by-run functions become one thing, or are refused with a remedy."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from ray import tune

from raydp.errors import CorruptFile, InvalidValue, UnknownName
from raydp.search.dimensions import contains
from raydp.search.spaces import Space, canonical, quiet, scratch_study

DICTIONARY = {
    "learning_rate": tune.loguniform(1e-2, 10.0),
    "fraction": tune.uniform(0.1, 0.9),
    "step": tune.quniform(0.0, 0.5, 0.1),
    "epochs": tune.randint(2, 11),
    "batch": tune.qrandint(64, 256, 64),
    "width": tune.lograndint(1, 65),
    "schedule": tune.choice(["constant", "cosine"]),
    "momentum": 0.9,
    "nesterov": False,
}


def _ask(space: Space, seed: int, count: int = 1) -> list[dict]:
    study = scratch_study(optuna.samplers.RandomSampler(seed=seed))
    with quiet():
        return [space.suggest(study.ask()) for _ in range(count)]


def dependent(trial: optuna.Trial) -> dict:
    epochs = trial.suggest_int("epochs", 2, 20)
    trial.suggest_int("warmup", 1, epochs - 1)
    if trial.suggest_categorical("schedule", ["constant", "cosine"]) == "cosine":
        trial.suggest_float("floor", 0.0, 0.1)
    return {"twice": 2 * epochs, "momentum": 0.9}


def test_tune_domains_become_the_distributions_that_tune_means():
    found = Space.from_definition(DICTIONARY).distributions
    assert found == {
        "learning_rate": FloatDistribution(1e-2, 10.0, log=True),
        "fraction": FloatDistribution(0.1, 0.9),
        "step": FloatDistribution(0.0, 0.5, step=0.1),
        "epochs": IntDistribution(2, 10),  # randint's upper bound is exclusive …
        "batch": IntDistribution(64, 256, step=64),  # … and qrandint's is not: Tune rounds up to it
        "width": IntDistribution(1, 64, log=True),
        "schedule": CategoricalDistribution(["constant", "cosine"]),
    }


def test_configs_hold_every_name_with_its_own_type():
    space = Space.from_definition(DICTIONARY)
    for config in _ask(space, seed=0, count=20):
        assert tuple(config) == space.names == tuple(sorted(DICTIONARY))
        assert config["momentum"] == 0.9 and config["nesterov"] is False
        types = {name: type(value) for name, value in config.items()}
        assert types["epochs"] is types["batch"] is types["width"] is int
        assert types["learning_rate"] is types["step"] is float
        assert all(contains(space.distributions[name], config[name]) for name in space.distributions)


def test_the_written_order_does_not_change_the_proposals():
    backwards = dict(reversed(DICTIONARY.items()))
    assert _ask(Space.from_definition(DICTIONARY), 3, 5) == _ask(Space.from_definition(backwards), 3, 5)


@pytest.mark.parametrize("name", ["sched/decay", "LearningRate", "learning rate", "", "lr-1", 3])
def test_ray_11947_names_with_slashes_or_capitals_are_refused(name):
    with pytest.raises(InvalidValue, match="a-z"):
        Space.from_definition({name: tune.uniform(0, 1)})


@pytest.mark.parametrize(
    "domain",
    [
        tune.randn(0, 1),
        tune.qrandn(0, 1, 0.1),
        tune.sample_from(lambda spec: 1),
        tune.qloguniform(1e-2, 1, 1e-2),
        tune.qlograndint(2, 64, 2),
        tune.choice([(1, 2), (3, 4)]),
        tune.choice([None, 1]),
        tune.choice([1, True]),
        tune.choice([0.1, math.nan]),
        tune.choice([]),
        tune.uniform(2, 1),
        tune.randint(3, 3),
        {"inner": tune.uniform(0, 1)},
        tune.grid_search([{"a": 1}]),
        [1, 2],
        None,
        math.inf,
    ],
    ids=str,
)
def test_what_cannot_be_sampled_is_refused_by_name(domain):
    with pytest.raises(InvalidValue, match=r"learning\.rate"):
        Space.from_definition({"learning.rate": domain})


def test_other_definitions_are_refused():
    with pytest.raises(InvalidValue, match="space"):
        Space.from_definition(["learning_rate"])


def test_numpy_scalars_in_choices_become_plain_numbers():
    space = Space.from_definition({"rho": tune.choice(list(np.linspace(0, 1, 3))), "k": tune.choice([np.int64(3)])})
    config = _ask(space, seed=0)[0]
    assert type(config["rho"]) is float and type(config["k"]) is int


def test_function_names_are_found_and_dependent_bounds_kept():
    space = Space.from_definition(dependent)
    assert space.names == ("epochs", "floor", "momentum", "schedule", "twice", "warmup")
    assert space.dynamic == {"floor", "warmup"} and space.computed == {"twice", "momentum"}
    for config in [*_ask(space, seed=1, count=30), *space.corners(), space.centre()]:
        assert 1 <= config["warmup"] < config["epochs"] and config["twice"] == 2 * config["epochs"]
        assert ("floor" in config) == (config["schedule"] == "cosine")


def test_function_that_contradicts_itself_is_refused():
    with pytest.raises(InvalidValue, match="contradicts"):
        Space.from_definition(lambda trial: {"lr": 2 * trial.suggest_float("lr", 0.1, 1)})
    same = Space.from_definition(lambda trial: {"lr": trial.suggest_float("lr", 0.1, 1)})
    assert same.names == ("lr",) and not same.computed


@pytest.mark.parametrize(
    "function",
    [
        lambda trial: trial.suggest_float("a/b", 0, 1) and None,
        lambda trial: trial.suggest_categorical("a", [None, 1]) and None,
        lambda trial: {"a": [1]},
        lambda trial: 3,
        lambda trial: {"A": 1},
        lambda trial: trial.suggest_categorical("a", list(range(trial.suggest_int("n", 1, 9)))) and None,
    ],
    ids=["slash", "none", "list", "number", "capital", "changing choices"],
)
def test_functions_with_bad_names_or_values_are_refused(function):
    with pytest.raises(InvalidValue):
        Space.from_definition(function)


def test_pruning_inside_a_space_is_refused():
    def space(trial):
        raise optuna.TrialPruned

    with pytest.raises(InvalidValue, match="TrialPruned"):
        Space.from_definition(space)


def test_centre_is_the_middle_of_each_scale():
    centre = Space.from_definition(DICTIONARY).centre()
    assert centre["learning_rate"] == pytest.approx(math.sqrt(1e-2 * 10))
    assert centre["fraction"] == pytest.approx(0.5)
    assert centre["epochs"] == 6 and centre["width"] == 8 and centre["batch"] == 128
    assert centre["momentum"] == 0.9


def test_all_corners_of_up_to_four_dimensions():
    space = Space.from_definition({name: tune.uniform(0.0, 1.0) for name in "abcd"})
    corners = {tuple(config.values()) for config in space.corners()}
    assert corners == {tuple(map(float, f"{i:04b}")) for i in range(16)}
    assert len(Space.from_definition({"a": tune.loguniform(1e-3, 1)}).corners()) == 2
    assert Space.from_definition({"a": 3}).corners() == [{"a": 3}]


def test_corners_of_many_dimensions_are_bounded_and_cover_every_pair_of_ends():
    names = [f"x{i:02d}" for i in range(15)]
    corners = Space.from_definition({name: tune.uniform(0.0, 1.0) for name in names}).corners()
    assert len(corners) == 16
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            assert {(corner[first], corner[second]) for corner in corners} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_corners_show_every_choice():
    corners = Space.from_definition({"method": tune.choice(list("abcde")), "x": tune.uniform(0.0, 1.0)}).corners()
    assert {corner["method"] for corner in corners} == set("abcde")
    assert {corner["x"] for corner in corners} == {0.0, 1.0}


def test_grid_lists_every_candidate_and_refuses_the_continuous():
    space = Space.from_definition(
        {
            "rho": tune.grid_search([0.1, 0.2]),
            "epochs": tune.randint(1, 4),
            "share": tune.quniform(0.1, 0.4, 0.1),
            "schedule": tune.choice(["a", "b"]),
            "momentum": 0.9,
        }
    )
    assert space.is_grid
    assert space.grid() == {
        "epochs": [1, 2, 3],
        "rho": [0.1, 0.2],
        "schedule": ["a", "b"],
        "share": [0.1, 0.2, 0.3, 0.4],
    }
    assert space.grid_size() == 48
    with pytest.raises(InvalidValue, match="lr"):
        Space.from_definition({"lr": tune.loguniform(1e-2, 1)}).grid()
    with pytest.raises(InvalidValue, match="function"):
        Space.from_definition(dependent).grid()
    with pytest.raises(InvalidValue, match="grid points"):
        Space.from_definition({name: tune.randint(0, 1000) for name in "ab"}).grid()


def test_json_round_trip_proposes_the_same_points():
    space = Space.from_definition({**DICTIONARY, "rho": tune.grid_search([0.1, 0.2])})
    again = Space.from_json(json.loads(json.dumps(space.to_json(), sort_keys=True)))
    assert again == space and again.digest() == space.digest()
    assert _ask(again, 5, 4) == _ask(space, 5, 4)
    with pytest.raises(InvalidValue, match="define-by-run"):
        Space.from_json(Space.from_definition(dependent).to_json())


def test_digest_is_equal_in_another_process_and_tells_spaces_apart():
    script = (
        "from ray import tune\nfrom raydp.search.spaces import Space\n"
        "def f(trial):\n    n = trial.suggest_int('n', 2, 9)\n"
        "    trial.suggest_float('x', 0, n)\n    return {'two': 2}\n"
        "print(Space.from_definition(f).digest())\n"
        "print(Space.from_definition({'b': tune.uniform(0, 1), 'a': tune.choice(['x', 'y']), 'c': 1}).digest())\n"
    )
    ran = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert ran[0] == ran[1] and len(set(ran[0].split())) == 2
    digests = {
        Space.from_definition(definition).digest()
        for definition in (
            {"a": tune.uniform(0, 1)},
            {"a": tune.uniform(0, 2)},
            {"a": tune.loguniform(0.5, 1)},
            {"a": tune.choice([0, 1])},
            {"a": tune.choice([1, 0])},
            {"a": tune.uniform(0, 1), "b": 1},
        )
    }
    assert len(digests) == 6


def test_ray_35319_warm_starts_that_would_be_ignored_are_refused():
    space = Space.from_definition(DICTIONARY)
    space.check_config({"learning_rate": 1, "schedule": "cosine", "momentum": 0.9})
    with pytest.raises(UnknownName, match="learning_rate"):
        space.check_config({"learning_rat": 1.0})
    with pytest.raises(InvalidValue, match="numbers in"):
        space.check_config({"learning_rate": 11.0})
    with pytest.raises(InvalidValue, match="one of"):
        space.check_config({"schedule": "linear"})
    with pytest.raises(InvalidValue, match="ignored"):
        space.check_config({"momentum": 0.8})
    function = Space.from_definition(dependent)
    function.check_config({"epochs": 4, "twice": 8})
    with pytest.raises(InvalidValue, match="ignored"):
        function.check_config({"epochs": 4, "twice": 7})
    with pytest.raises(InvalidValue, match="integers in"):
        function.check_config({"epochs": 4, "warmup": 4})
    with pytest.raises(InvalidValue, match="ignored"):
        function.check_config({"schedule": "constant", "floor": 0.05})


def test_a_name_can_be_taken_out_of_a_dictionary_but_not_of_a_function():
    space = Space.from_definition({**DICTIONARY, "rho": tune.grid_search([0.1, 0.2])})
    smaller = space.without("rho").without("momentum").without("not_there")
    assert set(smaller.names) == set(DICTIONARY) - {"momentum"} and not smaller.is_grid
    with pytest.raises(InvalidValue, match="space's function"):
        Space.from_definition(dependent).without("epochs")


def test_replay_gives_back_the_suggested_part_and_notices_a_changed_space():
    space = Space.from_definition(dependent)
    config = _ask(space, seed=4)[0]
    params, distributions = space.replay({**config, "held_fixed": 1})
    assert params.keys() == distributions.keys() == config.keys() - {"twice", "momentum"}
    assert distributions["warmup"] == IntDistribution(1, config["epochs"] - 1)
    narrower = Space.from_definition({"epochs": tune.randint(100, 200)})
    for other in (config, {"other": 1}):
        with pytest.raises(InvalidValue, match="any more"):
            narrower.replay(other)


def test_canonical_tells_numbers_from_their_likes():
    assert canonical({"b": 1, "a": 2.0}) == canonical({"a": 2.0, "b": 1})
    assert len({canonical({"a": value}) for value in (1, 1.0, True, "1")}) == 4


@given(
    low=st.floats(1e-6, 1e3), ratio=st.floats(1.0, 1e6), log=st.booleans(), whole=st.booleans(), seed=st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_centre_corners_and_suggestions_lie_inside(low, ratio, log, whole, seed):
    domain = tune.loguniform if log else tune.uniform
    definition = {"x": domain(low, low * ratio)}
    if whole:
        lower = math.ceil(low)
        definition["x"] = (tune.lograndint if log else tune.randint)(lower, math.ceil(lower * ratio) + 1)
    space = Space.from_definition(definition)
    for config in [space.centre(), *space.corners(), *_ask(space, seed)]:
        assert contains(space.distributions["x"], config["x"])


@pytest.mark.parametrize("record", [None, {}, [], {"function": None}, {"function": None, "distributions": {"a": 3}}])
def test_a_stored_space_that_is_none(record):
    with pytest.raises(CorruptFile, match="damaged"):
        Space.from_json(record)
