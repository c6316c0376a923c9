"""Methods refuse what they do not know, and know nothing of the data."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from raydp.errors import InvalidValue, UnknownName
from raydp.methods import METHODS, GradientHyperparameters, method
from raydp.methods.online import OnlinePolicy
from tests.training.helpers import setting

PACKAGE = Path(__file__).parents[2] / "raydp"


@pytest.mark.parametrize(
    "name", [name for name, chosen in METHODS.items() if issubclass(chosen.hyperparameters, GradientHyperparameters)]
)
def test_defaults_make_phases_for_any_population(name: str) -> None:
    chosen = method(name)
    for population in (256, 1437, 60_000):
        specs = chosen.phases(chosen.parse({}), population=population)
        assert sum(spec.steps for spec in specs) == 10 * (population // 256)
        assert all(spec.sample_rate == 256 / population for spec in specs)
        assert [spec.share is None for spec in specs] == [False] * (len(specs) - 1) + [True]


@pytest.mark.parametrize("name", METHODS)
def test_every_hyperparameter_has_help(name: str) -> None:
    import dataclasses

    assert all(item.metadata["help"] for item in dataclasses.fields(method(name).hyperparameters))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"learning_rte": 0.1}, "learning_rate"),
        ({"active_ratio": 0.1}, "does not exist"),
    ],
)
def test_unknown_hyperparameters_are_refused_with_near_names(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        method("dp_sgd").parse(config)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"learning_rate": True}, "learning_rate"),
        ({"epochs": 2.0}, "epochs"),
        ({"epochs": 0}, "epochs"),
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": 0.5, "optimizer": "adam"}, "momentum"),
        ({"augmentation_multiplicity": 4}, "augmentation_multiplicity"),
        ({"clip_norm": float("inf")}, "clip_norm"),
    ],
)
def test_bad_hyperparameters_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        method("dp_sgd").parse(config)


def test_an_unknown_method_gets_a_near_name() -> None:
    with pytest.raises(UnknownName, match="tp_topk"):
        method("tp_top")


def online(name: str, config: dict[str, Any], sizes: tuple[int, ...]) -> OnlinePolicy:
    chosen = method(name)
    found = chosen.policy(chosen.parse(config), setting(name, config, sizes))
    assert isinstance(found, OnlinePolicy)
    return found


def test_on_rand_draws_a_fresh_support_of_the_same_size_each_epoch() -> None:
    found = online("on_rand", {"epochs": 4, "batch_size": 128}, (60, 40))
    per_epoch = 1437 // 128
    supports = [found.geometry("train", epoch * per_epoch).support for epoch in range(3)]
    assert all(support is not None and sum(map(len, support)) == 40 for support in supports)
    assert supports[0] is not None and supports[1] is not None
    assert not torch.equal(torch.cat(supports[0]), torch.cat(supports[1]))


def test_on_topk_starts_dense_keeps_its_best_and_explores() -> None:
    found = online("on_topk", {"epochs": 4, "batch_size": 128, "explore": 0.25}, (60, 40))
    assert found.geometry("train", 0).support is None
    signal = torch.zeros(100)
    signal[:30] = 1.0
    found.observe("train", 0, list(signal.split([60, 40])))
    support = found.geometry("train", 1437 // 128).support
    assert support is not None and sum(map(len, support)) == 40
    assert set(range(30)) <= set(support[0].tolist())  # the 30 best of 40 - 10 explored


def test_scores_of_frozen_coordinates_are_means_over_active_steps() -> None:
    found = online("on_topk", {"epochs": 4, "batch_size": 128, "explore": 0.0, "active_ratio": 0.5}, (2, 2))
    found.observe("train", 0, [torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0])])
    support = found.geometry("train", 1437 // 128).support
    assert support is not None and [index.tolist() for index in support] == [[0], [0]]
    found.observe("train", 11, [torch.tensor([0.0]), torch.tensor([0.0])])
    # Means: 9/2, 1, 4/2, 0 (less the noise floor): coordinate 2 was not seen to fall below coordinate 1.
    again = found.geometry("train", 2 * (1437 // 128)).support
    assert again is not None and [index.tolist() for index in again] == [[0], [0]]


@pytest.mark.parametrize("room", ["methods", "geometry"])
def test_methods_and_geometries_cannot_reach_data_or_the_oracle(room: str) -> None:
    for path in (PACKAGE / room).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                forbidden = ("raydp.data", "raydp.analysis", "raydp.search", "ray", "mlflow", "optuna")
                assert str(name) not in forbidden, (path, name)
                assert not str(name).startswith(tuple(f"{root}." for root in forbidden)), (path, name)
