from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydp import data
from raydp.data import PublicData
from raydp.errors import InvalidValue, UnknownName
from raydp.methods import PublicExamples, Setting, method
from raydp.methods import hypernetwork_training as training
from raydp.methods.dp_deepsets import DeepSetsPolicy
from raydp.models import build_model
from raydp.privacy import Budget, calibrate, gaussian
from raydp.privacy.ledger import Ledger
from raydp.tasks import task
from raydp.training import run
from raydp.training.run import RunSpec, execute

N = 64
SMALL = {"embedding": 8, "encoder_width": 32, "decoder": "mlp", "decoder_depth": 1, "decoder_hidden": 32, "epochs": 3}
ORACLE = {"encoder": "oracle", "decoder": "pad", "embedding": 4, "clip_norm": 4.0}
REPLACE = Budget(epsilon=4.0, delta=1e-5, adjacency="replace_one")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYDP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hypernetworks"


def plan_of(config: dict[str, Any], *, n: int = N, budget: Budget = REPLACE):
    chosen = method("dp_deepsets")
    return calibrate(budget=budget, phases=chosen.phases(chosen.parse(config), population=n), cross_check=())


def spec_of(directory: Path, config: dict[str, Any], **changes: Any) -> RunSpec:
    directory.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "directory": directory / "run",
        "key_file": directory / "secret.key",
        "method": "dp_deepsets",
        "config": config,
        "plan": plan_of(config),
        "data": "regression:dimension=16",
        "data_limit": N,
        "public": "regression:dimension=16",
        "public_limit": 40,
        "model": "linear_map",
        "seed": 0,
    }
    return RunSpec(**{**values, **changes})


def setting_of(config: dict[str, Any], *, sets: int = N, d: int = 16) -> Setting:
    public = data.load_public(f"regression:dimension={d}", limit=20, set_size=sets)
    return Setting(
        plan=plan_of(config),
        model=build_model("linear_map", input_shape=(16,), outputs=1, seed=0),
        seed=0,
        public=PublicExamples(inputs=public.inputs, targets=public.targets, sets=public.sets),
        input_shape=(16,),
        task=task("regression"),
    )


def policy_of(config: dict[str, Any], **changes: Any) -> DeepSetsPolicy:
    chosen = method("dp_deepsets")
    return chosen.policy(chosen.parse(config), setting_of(config, **changes))


def test_a_run_from_public_sets_to_a_released_model(tmp_path):
    spec = spec_of(tmp_path, SMALL)
    (report,) = execute(spec)
    assert report.done and report.metrics.keys() == {"mse", "parameter_error"}
    ledger = Ledger.read(spec.ledger_file)
    assert ledger.steps("embed") == 1
    interval = ledger.epsilon("pld")
    assert interval.lower <= 4.0 and interval.upper == pytest.approx(4.0, rel=1e-9)
    assert not spec.key_file.exists()
    assert set(torch.load(spec.directory / "weights.pt", weights_only=True)) == {"1.weight"}
    assert report.diagnostics["public_validation_loss"] > 0
    assert report.diagnostics["embedding_noise_std"] == pytest.approx(2 / gaussian.mu(4, 1e-5) / N, rel=1e-6)


def test_training_on_public_sets_helps(tmp_path):
    losses = []
    for epochs in (1, 40):
        config = {**SMALL, "epochs": epochs, "clip_norm": 2.0}
        *_, report = execute(spec_of(tmp_path / str(epochs), config, public_limit=200))
        losses.append(report.diagnostics["public_validation_loss"])
    assert losses[1] < 0.95 * losses[0]


def test_the_explicit_network_estimates_the_first_weights(tmp_path):
    plan = plan_of(ORACLE, budget=Budget(epsilon=500.0, delta=1e-5, adjacency="replace_one"), n=2000)
    spec = spec_of(tmp_path, ORACLE, data_limit=2000, plan=plan, public=None, public_limit=None)
    (report,) = execute(spec)
    truth = data.load(spec.data, limit=2000).holdout.truth
    assert report.metrics["parameter_error"] < float(truth.square().sum()) / 2
    weights = torch.load(spec.directory / "weights.pt", weights_only=True)["1.weight"].flatten()
    assert not weights[4:].any() and float((weights[:4] - truth[:4]).norm()) < 0.4


def test_the_noise_of_a_release_has_the_planned_covariance(tmp_path):
    """Replayed with many keys: the released average minus the clean one is N(0, s² I)."""
    specs = [
        spec_of(tmp_path / str(seed), ORACLE, insecure_seed=seed, public=None, public_limit=None) for seed in range(400)
    ]
    found = torch.stack([released(spec) for spec in specs]).double()
    examples = data.load(specs[0].data, limit=N).private.non_private("a test of synthetic data")
    vectors = examples.targets[:, None] * examples.inputs[:, :4]
    clean = (vectors * (4.0 / vectors.norm(dim=1, keepdim=True).clamp(min=4.0))).mean(dim=0)
    scaled = (found - clean) / (specs[0].plan.phases[0].noise_std / N)
    assert float(scaled.mean(dim=0).norm()) < 4 * 2 / math.sqrt(len(specs))
    assert float((scaled.T @ scaled / len(specs) - torch.eye(4)).abs().max()) < 5 * math.sqrt(2 / len(specs))


def released(spec: RunSpec) -> torch.Tensor:
    """What the only step of a run released."""
    seen: list[torch.Tensor] = []
    original = DeepSetsPolicy.observe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSetsPolicy, "observe", lambda *args: (seen.append(args[3][0]), original(*args))[1])
        list(execute(spec))
    return seen[0]


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_either_adjacency_has_its_own_noise_on_the_sum(adjacency):
    plan = plan_of(SMALL, budget=dataclasses.replace(REPLACE, adjacency=adjacency))
    sensitivity = 2 if adjacency == "replace_one" else 1
    assert plan.phases[0].noise_std == pytest.approx(sensitivity / gaussian.mu(4, 1e-5), rel=1e-9)


def test_the_hypernetwork_is_the_same_before_and_after_a_release(tmp_path):
    policies: list[DeepSetsPolicy] = []
    before: list[dict[str, torch.Tensor]] = []
    original = DeepSetsPolicy.engine

    def engine(self: DeepSetsPolicy, phase: str) -> Any:
        policies.append(self)
        before.append({name: value.clone() for name, value in self._hypernetwork.state_dict().items()})
        return original(self, phase)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSetsPolicy, "engine", engine)
        list(execute(spec_of(tmp_path, SMALL)))
    after = policies[-1]._hypernetwork.state_dict()
    assert before[0] and all(torch.equal(value, after[name]) for name, value in before[0].items())
    assert all(
        parameter.grad is None or not parameter.grad.isnan().any()
        for parameter in policies[-1]._hypernetwork.parameters()
    )


def test_runs_of_several_members_train_it_once(tmp_path, own_cache, monkeypatch):
    calls: list[int] = []
    original = training.train
    monkeypatch.setattr("raydp.methods.dp_deepsets.train", lambda *a, **k: (calls.append(1), original(*a, **k)))
    ends = [list(execute(spec_of(tmp_path / str(i), SMALL, member=i, seed=i)))[-1] for i in range(3)]
    assert len(calls) == 1 and len(list(own_cache.glob("*.pt"))) == 1
    assert len({end.metrics["parameter_error"] for end in ends}) == 3
    assert len({end.diagnostics["public_validation_loss"] for end in ends}) == 1
    (file,) = own_cache.glob("*.pt")
    file.write_bytes(file.read_bytes()[:-7])  # a damaged file is a miss
    list(execute(spec_of(tmp_path / "again", SMALL)))
    list(execute(spec_of(tmp_path / "other", {**SMALL, "clip_norm": 2.0}, plan=plan_of({**SMALL, "clip_norm": 2.0}))))
    assert len(calls) == 3


def test_a_crash_between_checkpoint_and_report_releases_the_same(tmp_path, monkeypatch):
    whole = spec_of(tmp_path / "whole", SMALL, insecure_seed=3)
    (wanted,) = execute(whole)
    broken = spec_of(tmp_path / "broken", SMALL, insecure_seed=3)
    original = run._append_durably
    monkeypatch.setattr(run, "_append_durably", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(execute(broken))
    monkeypatch.setattr(run, "_append_durably", original)
    (found,) = execute(broken)
    assert found.metrics == wanted.metrics and found.diagnostics == wanted.diagnostics
    assert Ledger.read(broken.ledger_file).mechanisms == Ledger.read(whole.ledger_file).mechanisms


class TestPublicTraining:
    def test_losses_of_many_sets_at_once_are_those_of_one_after_the_other(self):
        model = build_model("mlp", input_shape=(5,), outputs=1, seed=0)
        losses = training.SetLosses(model, task("regression"), ("1.weight", "3.bias"))
        generator = torch.Generator().manual_seed(0)
        generated = {
            "1.weight": torch.randn(3, 64, 5, generator=generator),
            "3.bias": torch.randn(3, 1, generator=generator),
        }
        x, y = torch.randn(3, 7, 5, generator=generator), torch.randn(3, 7, generator=generator)
        found = losses(generated, x, y)
        for index in range(3):
            with torch.no_grad():
                for name, value in generated.items():
                    dict(model.named_parameters())[name].copy_(value[index])
                wanted = (model(x[index]).flatten() - y[index]).square().mean()
            assert float(found[index]) == pytest.approx(float(wanted), rel=1e-5)

    def test_it_repeats_itself_to_the_last_bit(self):
        states = []
        for _ in range(2):
            policy = policy_of(SMALL)
            policy.prepare()
            states.append(policy.state_dict()["hypernetwork"])
            (training.HypernetworkCache().directory / f"{policy._digest()}.pt").unlink()
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


class TestBadInput:
    def test_sets_of_another_size(self):
        with pytest.raises(InvalidValue, match="must hold as many examples as the private set") as caught:
            policy_of(SMALL, sets=32)
        needed = 2 / gaussian.mu(4, 1e-5)
        assert f"{needed / N:.6g}" in str(caught.value) and f"{needed / 32:.6g}" in str(caught.value)

    def test_fewer_than_two_examples(self):
        with pytest.raises(InvalidValue, match="private examples"):
            plan_of(SMALL, n=1)

    def test_parameters_that_do_not_exist(self):
        with pytest.raises(UnknownName, match=r"1\.weight"):
            policy_of({**SMALL, "generates": "1.weigt"})

    def test_public_examples_that_are_no_sets(self):
        chosen = method("dp_deepsets")
        setting = setting_of(SMALL)
        assert setting.public is not None
        lone = dataclasses.replace(setting.public, sets=None)
        with pytest.raises(InvalidValue, match="must be data sets"):
            chosen.policy(chosen.parse(SMALL), dataclasses.replace(setting, public=lone))

    def test_features_that_are_not_finite(self):
        with pytest.raises(InvalidValue, match="features"):
            training.PublicSets(
                features=torch.tensor([[math.nan]]),
                inputs=torch.zeros(1, 1),
                targets=torch.zeros(1),
                sets=torch.zeros(1, 2).long(),
            )

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"encoder": "oracle", "decoder": "pad", "epochs": 3}, "learn nothing"),
            ({"decoder": "mlp", "decoder_heads": 2}, "decoder_heads"),
            ({"encoder": "linear", "encoder_width": 3}, "encoder_width"),
            ({"calibration": "classic"}, "calibration"),
        ],
    )
    def test_settings_without_effect_or_meaning(self, config, message):
        with pytest.raises((InvalidValue, UnknownName), match=message):
            method("dp_deepsets").parse(config)

    def test_the_oracle_is_for_regression(self):
        setting = dataclasses.replace(setting_of(ORACLE), task=task("classification"), num_classes=3)
        with pytest.raises(InvalidValue, match="linear regression"):
            method("dp_deepsets").policy(method("dp_deepsets").parse(ORACLE), setting)


def test_the_papers_formula_under_spends_and_says_so(tmp_path):
    config = {**ORACLE, "calibration": "paper"}
    plan = plan_of(config)
    assert plan.epsilon.upper == pytest.approx(3.51, abs=0.01)
    spec = spec_of(tmp_path, config, plan=plan, public=None, public_limit=None)
    list(execute(spec))
    assert Ledger.read(spec.ledger_file).epsilon("pld").upper == pytest.approx(3.51, abs=0.01)


def test_classes_of_an_image_set(tmp_path, monkeypatch):
    """A linear classifier of digits, generated from 64 of them by what 12 public sets taught."""
    pool = data.load("digits").holdout
    generator = np.random.default_rng(0)
    rows = [generator.permutation(len(pool))[:N] for _ in range(12)]
    public = PublicData(
        name="sets of digits",
        inputs=torch.cat([pool.inputs[row] for row in rows]),
        targets=torch.cat([pool.targets[row] for row in rows]),
        num_classes=10,
        sets=np.arange(12 * N).reshape(12, N),
    )
    monkeypatch.setattr(run.data, "load_public", lambda *a, **k: public)
    config = {**SMALL, "generates": "1.weight,1.bias", "epochs": 30, "clip_norm": 5.0, "learning_rate": 3e-3}
    plan = plan_of(config, budget=Budget(epsilon=50.0, delta=1e-5))
    spec = spec_of(tmp_path, config, plan=plan, data="digits", data_limit=N, public="sets", model="linear")
    *_, report = execute(spec)
    assert report.metrics["accuracy"] > 0.3
