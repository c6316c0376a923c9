"""DP-NGD in a run: what it refuses, when it looks at the curvature, and that a crash changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from raydp import data
from raydp.errors import Diverged, InvalidValue
from raydp.geometry import PostConditioning, PreConditioning, Whitening
from raydp.methods import PublicExamples, Setting, dp_ngd, method
from raydp.methods.dp_ngd import DpNgdHyperparameters, DpNgdPolicy
from raydp.models import build_model
from raydp.privacy.ledger import Ledger
from raydp.training import run
from raydp.training.run import RunSpec, execute
from tests.training.helpers import digits_spec, hand_made_plan

FAST = {"epochs": 2, "batch_size": 128, "learning_rate": 0.5, "clip_norm": 3.0, "kappa": 0.1}


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digits' hold-out images as a public set: 360 images of 8×8, none of them private."""
    path = tmp_path_factory.mktemp("public") / "digits.parquet"
    holdout = data.load("digits").holdout
    images = [image.tolist() for image in holdout.inputs.numpy()]
    pq.write_table(pa.table({"image": images, "label": holdout.targets.numpy()}), path)
    return str(path)


def ngd_spec(directory: Path, public: str | None, config: dict[str, Any], **changes: Any) -> RunSpec:
    return digits_spec(directory, "dp_ngd", config, **{"public": public, "public_limit": 100, **changes})


def parse(config: dict[str, Any]) -> DpNgdHyperparameters:
    found = method("dp_ngd").parse(config)
    assert isinstance(found, DpNgdHyperparameters)
    return found


def public_examples(n: int = 40, *, classes: int = 10) -> PublicExamples:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(n, 1, 8, 8, generator=generator)
    return PublicExamples(inputs=images, targets=torch.arange(n) % classes, num_classes=classes)


def policy(
    config: dict[str, Any], *, examples: PublicExamples | None, input_shape: tuple[int, int, int] | None = (1, 8, 8)
) -> DpNgdPolicy:
    chosen = method("dp_ngd")
    model = build_model("mlp", input_shape=(1, 8, 8), outputs=10, seed=0)
    setting = Setting(
        plan=hand_made_plan("dp_ngd", config), model=model, seed=0, public=examples, input_shape=input_shape
    )
    found = chosen.policy(chosen.parse(config), setting)
    assert isinstance(found, DpNgdPolicy)
    return found


def weights(spec: RunSpec) -> dict[str, Tensor]:
    return torch.load(spec.directory / "weights.pt", weights_only=True)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"lambda_base": 0.0}, "lambda_base"),
        ({"lambda_base": -1.0}, "lambda_base"),
        ({"lambda_base": 3.0, "lambda_safe": 2.0}, "lambda_base"),
        ({"lambda_base": 1.0, "clamping": "fixed"}, "lambda_base"),
        ({"lambda_safe": 0.0}, "lambda_safe"),
        ({"lambda_safe": 1.0, "clamping": "none"}, "lambda_safe"),
        ({"kappa": 0.0}, "kappa"),
        ({"kappa": 1.5}, "kappa"),
        ({"exponent": 0.9}, "exponent"),
        ({"decay_fraction": 1.1}, "decay_fraction"),
        ({"curvature_interval": 0}, "curvature_interval"),
        ({"noise_examples": 0}, "noise_examples"),
        ({"reference_learning_rate": 0.0}, "reference_learning_rate"),
        ({"reference_clip_norm": -1.0}, "reference_clip_norm"),
        ({"curvature_source": "noise", "fisher_labels": "given"}, "fisher_labels"),
    ],
)
def test_bad_hyperparameters_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        parse(config)
    assert refused.value.field == field


@pytest.mark.parametrize("examples", [None, public_examples(0)])
def test_a_missing_or_empty_public_set_is_refused_before_training(examples: PublicExamples | None) -> None:
    with pytest.raises(InvalidValue, match="curvature_source = 'noise'") as refused:
        policy({}, examples=examples)
    assert refused.value.field == "public"


def test_a_run_without_a_public_set_spends_nothing(tmp_path: Path) -> None:
    spec = ngd_spec(tmp_path, None, FAST, public_limit=None)
    with pytest.raises(InvalidValue, match="public"):
        next(execute(spec))
    assert not Ledger.read(spec.ledger_file).entries


def test_given_labels_need_a_common_label_set() -> None:
    with pytest.raises(InvalidValue, match=r"\[0, 10\)"):
        policy({"fisher_labels": "given"}, examples=public_examples(classes=12))
    policy({"fisher_labels": "given"}, examples=public_examples(classes=10)).geometry("train", 0)


def test_the_safe_floor_follows_from_the_dp_sgd_it_is_matched_with() -> None:
    matched = {"learning_rate": 0.2, "clip_norm": 10.0, "reference_learning_rate": 4.0, "reference_clip_norm": 0.5}
    assert parse(matched).safe_floor == pytest.approx(1.0)
    assert parse({"learning_rate": 0.2}).safe_floor == pytest.approx(4.0)  # by default a DP-SGD of rate 1 and C = 1
    own = {"learning_rate": 0.2, "reference_learning_rate": None}
    assert parse(own).safe_floor == pytest.approx(100.0)  # the same rate, C = 10 against 1
    assert parse({**matched, "reference_learning_rate": 1.0}).safe_floor == pytest.approx(16.0)
    assert parse({**matched, "reference_learning_rate": 1.0, "arm": "pre"}).safe_floor == pytest.approx(4.0)
    assert parse({**matched, "lambda_safe": 0.3}).clamping_schedule(100).lambda_base == pytest.approx(0.09)
    assert parse({**matched, "lambda_base": 0.5}).clamping_schedule(100).lambda_base == 0.5
    assert parse({**matched, "decay_fraction": 0.25}).clamping_schedule(100).decay_steps == 25


def test_the_curvature_is_refreshed_every_interval_and_the_floor_moves_every_step() -> None:
    found = policy({"curvature_interval": 3, "batch_size": 128}, examples=public_examples())
    geometries = [found.geometry("train", step) for step in range(7)]
    curvatures = [geometry.curvature for geometry in geometries]
    assert [a is b for a, b in pairwise(curvatures)] == [True, True, False, True, True, False]
    assert all(a.floor != b.floor for a, b in pairwise(geometries))
    assert found.geometry("train", 6) is geometries[6]


def test_a_fixed_floor_keeps_one_geometry_between_refreshes() -> None:
    found = policy({"curvature_interval": 4, "clamping": "fixed"}, examples=public_examples())
    geometries = [found.geometry("train", step) for step in range(5)]
    assert all(geometry is geometries[0] for geometry in geometries[:4]) and geometries[4] is not geometries[0]


@pytest.mark.parametrize(
    ("arm", "kind"), [("whitened", Whitening), ("pre", PreConditioning), ("post", PostConditioning)]
)
def test_arms_differ_in_the_geometry_alone(arm: str, kind: type) -> None:
    found = policy({"arm": arm}, examples=public_examples()).geometry("train", 0)
    assert type(found) is kind and found.support is None


def test_diagnostics_are_the_numbers_of_the_paper() -> None:
    config = {"clamping": "fixed", "learning_rate": 0.5, "clip_norm": 10.0, "lambda_safe": 0.02}
    found = policy(config, examples=public_examples())
    assert found.diagnostics() == {}
    geometry = found.geometry("train", 0)
    assert isinstance(geometry, Whitening)
    values = geometry.curvature.eigenvalues.double()
    clamped = values.clamp(min=0.02)
    numbers = found.diagnostics()
    assert numbers["lambda_t"] == 0.02
    assert numbers["clamped_fraction"] == pytest.approx(float((values < 0.02).double().mean()))
    assert numbers["d_eff"] == pytest.approx(float((values / clamped).sum()))
    assert numbers["step_ratio"] == pytest.approx((0.5 * 10.0) ** 2 * float((1 / clamped).mean()))
    assert 0.0 <= numbers["public_clip_fraction"] <= 1.0
    assert numbers == found.diagnostics()


def test_at_the_safe_floor_no_step_is_longer_than_dp_sgds() -> None:
    found = policy({"clamping": "fixed", "clip_norm": 3.0}, examples=public_examples())
    found.geometry("train", 0)
    assert found.diagnostics()["step_ratio"] <= 1.0 + 1e-12
    tight = policy({"clamping": "fixed", "lambda_safe": 1e-6, "clip_norm": 0.01}, examples=public_examples())
    tight.geometry("train", 0)
    assert tight.diagnostics()["public_clip_fraction"] == 1.0


def test_curvature_is_a_function_of_weights_public_examples_and_the_seed() -> None:
    found = [policy({}, examples=public_examples()).geometry("train", 0).curvature.eigenvalues for _ in range(2)]
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"curvature_form": "reduce", "fisher_labels": "given"},
        {"fisher_labels": "random", "clamping": "fixed"},
        {"arm": "post", "clip_norm": 1.0},
        {"arm": "pre", "clip_norm": 1.0},
        {"momentum": 0.5, "ema_decay": 0.9, "schedule": "cosine"},
    ],
)
def test_a_run_spends_its_plan_exactly_and_learns(tmp_path: Path, public: str, config: dict[str, Any]) -> None:
    spec = ngd_spec(tmp_path, public, {**FAST, "epochs": 6, **config}, sigma=0.7)
    reports = list(execute(spec))
    ledger = Ledger.read(spec.ledger_file)
    ledger.check(spec.plan)
    assert ledger.steps("train") == spec.plan.steps
    assert reports[-1].done and reports[-1].metrics["accuracy"] > 0.5
    assert reports[-1].diagnostics.keys() == {
        "lambda_t",
        "clamped_fraction",
        "d_eff",
        "step_ratio",
        "public_clip_fraction",
    }


def test_noise_images_stand_in_for_public_ones(tmp_path: Path) -> None:
    config = {**FAST, "epochs": 6, "curvature_source": "noise", "noise_examples": 50, "fisher_labels": "random"}
    reports = list(execute(ngd_spec(tmp_path, None, config, public_limit=None, sigma=0.7)))
    assert reports[-1].metrics["accuracy"] > 0.5
    with pytest.raises(InvalidValue, match="input_shape"):
        policy({"curvature_source": "noise"}, examples=None, input_shape=None)


@pytest.mark.parametrize("model", ["mlp", "tanh_cnn_small"])
@pytest.mark.parametrize("arm", ["whitened", "pre"])
def test_no_floor_is_a_diverged_run_with_its_steps_in_the_ledger(
    tmp_path: Path, public: str, model: str, arm: str
) -> None:
    config = {**FAST, "clamping": "none", "arm": arm}
    # Fewer public examples than inputs: the curvature has null directions, and nothing clamps them.
    spec = ngd_spec(tmp_path, public, config, model=model, public_limit=10)
    with pytest.raises(Diverged, match=r"not finite"):
        list(execute(spec))
    assert 1 <= Ledger.read(spec.ledger_file).steps("train") < spec.plan.steps


def test_no_floor_after_conditioning_is_a_random_walk_and_no_crash(tmp_path: Path, public: str) -> None:
    """Infinitely long examples are dropped and the noise is isotropic: all stays finite, and nothing is learnt."""
    config = {**FAST, "clamping": "none", "arm": "post", "clip_norm": 1.0}
    assert list(execute(ngd_spec(tmp_path, public, config, public_limit=10)))[-1].metrics["accuracy"] < 0.5


def test_weights_that_explode_end_as_divergence_at_the_next_refresh() -> None:
    found = policy({"curvature_interval": 1}, examples=public_examples())
    found.geometry("train", 0)
    with torch.no_grad():
        for parameter in found._model.parameters():
            parameter.fill_(3e38)
    with pytest.raises(Diverged, match="not finite"):
        found.geometry("train", 1)


@pytest.mark.parametrize("die_at", [3, 8, 9, 13])
def test_a_crash_at_any_place_of_an_interval_changes_nothing(
    tmp_path: Path, public: str, monkeypatch: pytest.MonkeyPatch, die_at: int
) -> None:
    """The curvature of the last refresh is in the checkpoint: replayed steps are whitened by the same matrix."""
    config = {**FAST, "momentum": 0.9, "curvature_interval": 5}
    whole = ngd_spec(tmp_path / "whole", public, config, reports=7)
    list(execute(whole))
    killed = ngd_spec(tmp_path / "killed", public, config, reports=7)
    original, calls = run.private_gradient, 0

    def dying(*arguments: Any, **keywords: Any) -> list[Tensor]:
        nonlocal calls
        calls += 1
        released = original(*arguments, **keywords)
        if calls == die_at:
            raise KeyboardInterrupt  # after the query, in the middle of the step
        return released

    monkeypatch.setattr(run, "private_gradient", dying)
    with pytest.raises(KeyboardInterrupt):
        list(execute(killed))
    list(execute(killed))
    found, wanted = weights(killed), weights(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert Ledger.read(killed.ledger_file).mechanisms == Ledger.read(whole.ledger_file).mechanisms


def test_a_resume_does_not_estimate_the_curvature_of_other_weights(
    tmp_path: Path, public: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report after step 6, whose geometry is that of step 5, a refresh: weights have moved since."""
    config = {**FAST, "curvature_interval": 5}
    spec = ngd_spec(tmp_path, public, config, reports=11)
    assert spec.plan.steps == 22
    reports = execute(spec)
    while next(reports).step < 6:
        pass
    reports.close()
    estimated: list[int] = []
    original = DpNgdPolicy._estimate

    def counting(self: DpNgdPolicy, step: int) -> Any:
        estimated.append(step)
        return original(self, step)

    monkeypatch.setattr(DpNgdPolicy, "_estimate", counting)
    list(execute(spec))
    assert estimated == [10, 15, 20]


@pytest.mark.parametrize(
    ("name", "config", "count"),
    [("dp_ngd", {}, 1), ("dp_sgd", {}, 1), ("tp_topk", {}, 2), ("on_rand", {"active_ratio": 0.5}, 2)],
)
def test_the_optimiser_starts_anew_exactly_when_the_support_changes(
    tmp_path: Path, public: str, monkeypatch: pytest.MonkeyPatch, name: str, config: dict[str, Any], count: int
) -> None:
    """A floor that moves at every step must not reset momentum at every step."""
    supports: list[Sequence[Tensor] | None] = []
    original = run.CoordinateOptimizer

    def spy(parameters: Any, support: Any, **keywords: Any) -> Any:
        supports.append(support)
        return original(parameters, support, **keywords)

    monkeypatch.setattr(run, "CoordinateOptimizer", spy)
    shared = {"epochs": 2, "batch_size": 128, "momentum": 0.9, **config}
    spec = digits_spec(tmp_path, name, shared, public=public if name == "dp_ngd" else None)
    list(execute(spec))
    assert len(supports) == count


def test_hyperparameters_of_the_curvature_have_the_published_defaults() -> None:
    found = parse({})
    assert (found.clip_norm, found.curvature_interval, found.exponent, found.decay_fraction) == (10.0, 8, 10.0, 0.1)
    assert (found.arm, found.clamping, found.curvature_form, found.labels_kind) == (
        "whitened",
        "dynamic",
        "expand",
        "model",
    )
    assert dp_ngd.SOURCES == ("public", "noise", "private")
