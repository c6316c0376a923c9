"""AdaDPS, GEP and DP-SGD-PT in runs: what they refuse, when they look at public data, that a crash changes nothing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from raydp.errors import Diverged, InvalidValue
from raydp.geometry import Diagonal, Subspace
from raydp.geometry.subspace import SUBSPACE_CLIP_NORM
from raydp.methods import Setting, method
from raydp.privacy.ledger import Ledger
from raydp.training.run import execute
from tests.methods.helpers import assert_resumes, policy_of, public_examples, setting_of, weights
from tests.training.helpers import digits_spec

SHARED = {"epochs": 2, "batch_size": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "ada_dps": {**SHARED, "learning_rate": 0.3, "refresh_interval": 5},
    "gep": {**SHARED, "learning_rate": 0.3, "refresh_interval": 5, "subspace": 30},
    "dp_sgd_pt": {**SHARED, "learning_rate": 0.5, "pretrain_epochs": 2},
}


@pytest.mark.parametrize(
    ("name", "config", "field"),
    [
        ("ada_dps", {"damping": 0.0}, "damping"),
        ("ada_dps", {"refresh_interval": 0}, "refresh_interval"),
        ("ada_dps", {"clip_norm": 0.0}, "clip_norm"),
        ("gep", {"clip_norm": 1.0}, "clip_norm"),
        ("gep", {"embedding_clip_norm": 0.0}, "embedding_clip_norm"),
        ("gep", {"residual_clip_norm": -1.0}, "residual_clip_norm"),
        ("gep", {"subspace": 0}, "subspace"),
        ("gep", {"power_iterations": 0}, "power_iterations"),
        ("gep", {"refresh_interval": 0}, "refresh_interval"),
        ("dp_sgd_pt", {"pretrain_epochs": 0}, "pretrain_epochs"),
        ("dp_sgd_pt", {"pretrain_learning_rate": 0.0}, "pretrain_learning_rate"),
        ("dp_sgd_pt", {"pretrain_batch_size": 0}, "pretrain_batch_size"),
        ("ada_dps", {"pretrain_learning_rate": 0.1}, "pretrain_learning_rate"),  # without pre-training: no effect
        ("gep", {"pretrain_head": "swap"}, "pretrain_head"),
        ("dp_ngd", {"pretrain_batch_size": 8}, "pretrain_batch_size"),
        ("dp_ngd", {"pretrain_optimizer": "sgd"}, "pretrain_optimizer"),
    ],
)
def test_bad_hyperparameters_and_those_without_effect_are_refused_by_name(
    name: str, config: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        method(name).parse(config)
    assert refused.value.field == field


@pytest.mark.parametrize("name", CONFIGS)
def test_public_examples_are_needed_before_anything_is_spent(tmp_path: Path, name: str) -> None:
    chosen = method(name)
    assert chosen.uses_public(chosen.parse(CONFIGS[name]))
    for examples in (None, public_examples(0)):
        with pytest.raises(InvalidValue) as refused:
            policy_of(name, CONFIGS[name], public=examples)
        assert refused.value.field == "public"
    spec = digits_spec(tmp_path, name, CONFIGS[name])
    with pytest.raises(InvalidValue, match="public"):
        next(execute(spec))
    assert not Ledger.read(spec.ledger_file).entries


@pytest.mark.parametrize("name", ["ada_dps", "gep"])
def test_given_labels_need_a_common_label_set(name: str) -> None:
    config = {**CONFIGS[name], "fisher_labels": "given"}
    with pytest.raises(InvalidValue, match=r"\[0, 10\)"):
        policy_of(name, config, public=public_examples(classes=12))
    policy_of(name, config, public=public_examples(classes=10)).geometry("train", 0)


def test_a_subspace_larger_than_the_gradients_is_refused_before_training() -> None:
    with pytest.raises(InvalidValue, match=r"\[4, "):
        policy_of("gep", {"subspace": 10_000}, public=public_examples())
    with pytest.raises(InvalidValue, match=r"\[4, "):
        policy_of("gep", {"subspace": 3}, public=public_examples())


@pytest.mark.parametrize(("name", "kind"), [("ada_dps", Diagonal), ("gep", Subspace)])
def test_the_geometry_is_refreshed_every_interval_at_the_weights_then(name: str, kind: type) -> None:
    config = {**CONFIGS[name], "refresh_interval": 3}
    setting = setting_of(name, config, public=public_examples())
    found = method(name).policy(method(name).parse(config), setting)
    geometries = [found.geometry("train", 0)]
    with torch.no_grad():
        for parameter in setting.model.parameters():
            parameter.mul_(1.5)
    geometries += [found.geometry("train", step) for step in range(1, 5)]
    assert [a is b for a, b in pairwise(geometries)] == [True, True, False, True]
    assert all(type(geometry) is kind and geometry.support is None for geometry in geometries)
    fresh = method(name).policy(method(name).parse(config), setting).geometry("train", 3)
    coordinates = [torch.ones(1, *parameter.shape) for parameter in setting.model.parameters()]
    for left, right in zip(geometries[3].project(coordinates), fresh.project(coordinates), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["ada_dps", "gep"])
def test_weights_that_explode_end_as_divergence_at_the_next_refresh(name: str) -> None:
    config = {**CONFIGS[name], "refresh_interval": 1}
    setting = setting_of(name, config, public=public_examples())
    found = method(name).policy(method(name).parse(config), setting)
    found.geometry("train", 0)
    with torch.no_grad():
        for parameter in setting.model.parameters():
            parameter.fill_(3e38)
    with pytest.raises(Diverged, match="not finite"):
        found.geometry("train", 1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ada_dps", {}),
        ("ada_dps", {"fisher_labels": "given", "momentum": 0.5, "learning_rate": 0.15}),
        ("ada_dps", {"pretrain_epochs": 5}),
        ("gep", {}),
        ("gep", {"fisher_labels": "random", "schedule": "cosine", "ema_decay": 0.9}),
        ("gep", {"pretrain_epochs": 5, "pretrain_optimizer": "sgd", "pretrain_learning_rate": 0.05}),
        ("dp_sgd_pt", {}),
        ("dp_sgd_pt", {"pretrain_head": "swap", "ema_decay": 0.9}),
    ],
)
def test_a_run_spends_its_plan_exactly_and_learns(
    tmp_path: Path, public_digits: str, name: str, changes: dict[str, Any]
) -> None:
    config = {**CONFIGS[name], "epochs": 6, **changes}
    spec = digits_spec(tmp_path, name, config, sigma=0.7, public=public_digits, public_limit=200)
    reports = list(execute(spec))
    ledger = Ledger.read(spec.ledger_file)
    ledger.check(spec.plan)
    assert ledger.steps("train") == spec.plan.steps
    assert reports[-1].done and reports[-1].metrics["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ada_dps", {"momentum": 0.9}),
        ("gep", {"optimizer": "adam", "learning_rate": 0.01}),
        ("dp_sgd_pt", {"ema_decay": 0.9}),
        ("gep", {"pretrain_epochs": 1}),
    ],
)
def test_a_crash_at_any_place_changes_nothing(
    tmp_path: Path, public_digits: str, name: str, changes: dict[str, Any]
) -> None:
    config = {**CONFIGS[name], **changes}
    assert_resumes(tmp_path, name, config, reports=7, public=public_digits, public_limit=60)


@pytest.mark.parametrize("name", CONFIGS)
def test_micro_batches_change_neither_the_ledger_nor_the_result(tmp_path: Path, public_digits: str, name: str) -> None:
    found = []
    for size in (16, 1000):
        spec = digits_spec(
            tmp_path / str(size), name, CONFIGS[name], micro_batch=size, public=public_digits, public_limit=60
        )
        list(execute(spec))
        found.append((weights(spec), Ledger.read(spec.ledger_file).mechanisms))
    assert found[0][1] == found[1][1]
    for key, value in found[0][0].items():
        torch.testing.assert_close(value, found[1][0][key], rtol=1e-2, atol=1e-3)


def test_geps_phase_has_the_clip_norm_of_its_two_parts() -> None:
    (phase,) = method("gep").phases(method("gep").parse({}), population=1000)
    assert phase.clip_norm == SUBSPACE_CLIP_NORM == pytest.approx(2**0.5)


def test_published_clip_norms_are_the_defaults() -> None:
    gep: Any = method("gep").parse({})
    assert method("ada_dps").parse({}).clip_norm == 2.0
    assert (gep.embedding_clip_norm, gep.residual_clip_norm) == (10.0, 2.0)


def test_the_model_of_a_setting_is_only_changed_by_preparation() -> None:
    for name, config in CONFIGS.items():
        setting: Setting = setting_of(name, config, public=public_examples())
        before = [parameter.detach().clone() for parameter in setting.model.parameters()]
        found = method(name).policy(method(name).parse(config), setting)
        found.geometry("train", 0)
        assert all(torch.equal(a, b) for a, b in zip(before, setting.model.parameters(), strict=True))
        found.prepare()
        same = [torch.equal(a, b) for a, b in zip(before, setting.model.parameters(), strict=True)]
        assert all(same) == (name != "dp_sgd_pt")
