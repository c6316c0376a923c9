"""DP-NGD with a private curvature: a phase of its own that spends its share, moves no weight, and survives a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raydp.errors import InvalidValue
from raydp.geometry.private_factors import FACTOR_CLIP_NORM, ClippedMoments, FactorEngine
from raydp.geometry.whitening import FlooredGeometry
from raydp.methods import method
from raydp.privacy.budget import Budget
from raydp.privacy.calibration import calibrate
from raydp.privacy.ledger import Ledger
from raydp.training import checkpoint, run
from raydp.training.run import execute
from tests.methods.helpers import assert_resumes, policy_of
from tests.training.helpers import DIGITS, digits_spec

CONFIG: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 128,
    "learning_rate": 0.3,
    "clip_norm": 3.0,
    "kappa": 1.0,
    "curvature_source": "private",
    "curvature_steps": 4,
}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"curvature_share": 0.0}, "curvature_share"),
        ({"curvature_share": 1.0}, "curvature_share"),
        ({"curvature_steps": 0}, "curvature_steps"),
        ({"curvature_batch_size": 0}, "curvature_batch_size"),
        ({"curvature_input_clip": 0.0}, "curvature_input_clip"),
        ({"curvature_output_clip": -1.0}, "curvature_output_clip"),
        ({"curvature_interval": 4}, "curvature_interval"),
        ({"noise_examples": 100}, "noise_examples"),
        ({"fisher_labels": "model"}, "fisher_labels"),
        ({"fisher_labels": "random"}, "fisher_labels"),
        ({"curvature_source": "public", "curvature_share": 0.5}, "curvature_share"),
        ({"curvature_source": "noise", "curvature_steps": 2}, "curvature_steps"),
        ({"curvature_source": "public", "curvature_batch_size": 64}, "curvature_batch_size"),
        ({"curvature_source": "public", "curvature_input_clip": 2.0}, "curvature_input_clip"),
        ({"curvature_source": "public", "curvature_output_clip": 2.0}, "curvature_output_clip"),
        ({"curvature_source": "public", "noise_exponent": 2.0}, "noise_exponent"),
    ],
)
def test_bad_hyperparameters_and_those_without_effect_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        method("dp_ngd").parse({"curvature_source": "private", **config})
    assert refused.value.field == field


def test_the_phases_are_the_curvature_with_its_share_and_the_training_with_the_rest() -> None:
    chosen = method("dp_ngd")
    parsed = chosen.parse({**CONFIG, "curvature_share": 0.5, "curvature_batch_size": 1000})
    curvature, train = chosen.phases(parsed, population=DIGITS)
    assert (curvature.name, curvature.steps, curvature.batch_size, curvature.share) == ("curvature", 4, 1000, 0.5)
    assert curvature.clip_norm == FACTOR_CLIP_NORM
    assert (train.name, train.steps, train.batch_size, train.share) == ("train", 22, 128, None)
    assert train.clip_norm == 3.0
    assert not chosen.uses_public(parsed)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_the_whole_trial_spends_its_budget_and_no_more(tmp_path: Path, share: float) -> None:
    """By the ledger of what ran, not by the plan."""
    chosen = method("dp_ngd")
    config = {**CONFIG, "curvature_share": share}
    budget = Budget(epsilon=3.0, delta=1e-5)
    plan = calibrate(budget=budget, phases=chosen.phases(chosen.parse(config), population=DIGITS), cross_check=())
    spec = digits_spec(tmp_path, "dp_ngd", config, plan=plan)
    list(execute(spec))
    ledger = Ledger.read(spec.ledger_file)
    ledger.check(plan)
    assert [ledger.steps(phase) for phase in ("curvature", "train")] == [4, 22]
    assert 3.0 * (1 - 1e-4) <= ledger.epsilon().upper <= 3.0


def test_the_curvature_phase_moves_no_weight_and_the_training_uses_what_it_released(tmp_path: Path) -> None:
    spec = digits_spec(tmp_path, "dp_ngd", {**CONFIG, "ema_decay": 0.9}, reports=26)
    reports = execute(spec)
    start = None
    for report in reports:
        state = checkpoint.load_latest(spec.directory)
        if report.step <= 4:
            assert state is not None and state["optimizer"] is None and state["policy"]["curvature"] is None
            assert len(state["policy"]["moments"]) == 4  # two layers, two moments each
            start = state["model"] if start is None else start
            assert all(torch.equal(state["model"][name], value) for name, value in start.items())
            assert all(torch.equal(a, b) for a, b in zip(state["average"], state["model"].values(), strict=True))
            assert "lambda_t" not in report.diagnostics
        elif not report.done:
            assert state is not None and state["optimizer"] is not None and not state["policy"]["moments"]
            assert state["policy"]["curvature"] is not None
            assert {"lambda_t", "d_eff", "step_ratio", "clamped_fraction"} == report.diagnostics.keys()
            assert any(not torch.equal(state["model"][name], value) for name, value in (start or {}).items())


def test_schedules_count_updates_and_not_the_curvature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    original = run.CoordinateOptimizer.step

    def spy(self: Any, update: Any, learning_rate: float) -> None:
        rates.append(learning_rate)
        original(self, update, learning_rate)

    monkeypatch.setattr(run.CoordinateOptimizer, "step", spy)
    list(execute(digits_spec(tmp_path, "dp_ngd", {**CONFIG, "schedule": "linear"})))
    assert rates == pytest.approx([0.3 * (1 - step / 22) for step in range(22)])


def test_a_private_curvature_learns_when_its_noise_is_small(tmp_path: Path) -> None:
    config = {**CONFIG, "epochs": 6, "curvature_batch_size": DIGITS, "curvature_steps": 1}
    reports = list(execute(digits_spec(tmp_path, "dp_ngd", config, sigma=0.3)))
    assert reports[-1].metrics["accuracy"] > 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.9},
        {"augmentation": "crop", "augmentation_multiplicity": 2, "curvature_form": "reduce", "ema_decay": 0.9},
    ],
)
def test_a_crash_in_either_phase_changes_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert_resumes(tmp_path, "dp_ngd", {**CONFIG, **changes}, reports=13)


def test_micro_batches_change_neither_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released: dict[int, list[torch.Tensor]] = {}
    original = run.private_gradient
    for size in (7, 1000):
        spec = digits_spec(tmp_path / str(size), "dp_ngd", CONFIG, micro_batch=size)
        seen: list[torch.Tensor] = released.setdefault(size, [])

        def spy(batches: Any, seen: list[torch.Tensor] = seen, **keywords: Any) -> list[torch.Tensor]:
            found = original(batches, **keywords)
            seen.append(torch.cat(found))
            return found

        monkeypatch.setattr(run, "private_gradient", spy)
        list(execute(spec))
    for step in range(4):
        torch.testing.assert_close(released[7][step], released[1000][step], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(released[7][4], released[1000][4], rtol=1e-3, atol=1e-4)


def test_only_the_curvature_phase_has_another_engine() -> None:
    found = policy_of("dp_ngd", CONFIG, public=None)
    assert isinstance(found.engine("curvature"), FactorEngine) and found.engine("train") is None
    assert not found.trains("curvature") and found.trains("train")
    geometry = found.geometry("curvature", 0)
    assert isinstance(geometry, ClippedMoments)
    for step in range(4):
        found.observe("curvature", step, [torch.full((size,), 0.1) for size in geometry.sizes])
    first = found.geometry("train", 0)
    assert isinstance(first, FlooredGeometry)
    later = found.geometry("train", 20)
    assert isinstance(later, FlooredGeometry) and later.curvature is first.curvature
