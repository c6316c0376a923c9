"""The audit of the training path: below the claim for the code as it is, above it for code with too little noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydp import data, models
from raydp.data import canaries
from raydp.errors import InvalidValue
from raydp.privacy.budget import Budget
from raydp.privacy.noise import NoiseKey
from raydp.training.audit import AuditReport, AuditSpec, audit
from raydp.training.gradients import PerExampleGradients


def audited(directory: Path, method: str = "dp_sgd", *, runs: int = 10, **given: Any) -> AuditReport:
    values = {"config": {}, "budget": Budget(epsilon=1.0, delta=1e-5), "canaries": 600, **given}
    return audit(AuditSpec(method=method, runs=runs, **values), directory)


def test_canaries_have_weights_of_their_own_and_a_dark_image_has_no_gradient(tmp_path: Path) -> None:
    included = np.array([True, False, True, True, False])
    loaded = data.load(canaries.write(tmp_path / "canaries", included))
    examples = loaded.private.non_private("canaries are public")
    inputs = loaded.normalization.apply(examples.inputs)
    model = models.build_model("bright_map", input_shape=examples.input_shape, outputs=2, seed=0)
    (gradients,) = PerExampleGradients(model)(inputs, examples.targets)
    products = gradients.flatten(1) @ gradients.flatten(1).T
    assert torch.equal(products.diagonal() > 1, torch.from_numpy(included))
    assert torch.equal(products - products.diagonal().diag(), torch.zeros(5, 5))


@pytest.mark.parametrize("method", ["dp_sgd", "tp_topk"])
def test_the_bound_is_below_the_claim_and_sees_the_canaries(tmp_path: Path, method: str) -> None:
    report = audited(tmp_path, method)
    assert report.passed and 0 < report.one_run.epsilon_lower < report.one_run_claim <= 1.0
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["one_run"]["canaries"] == 600


@pytest.mark.slow
def test_a_tenth_of_the_noise_is_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = NoiseKey.use_rounded_normals
    monkeypatch.setattr(
        NoiseKey, "use_rounded_normals", lambda self, n, scale, use, *a: honest(self, n, scale / 10, use, *a)
    )
    report = audited(tmp_path, runs=100)
    assert not report.passed
    assert report.one_run.epsilon_lower > 1.5 * report.one_run_claim
    assert report.repeated.epsilon_lower > report.repeated_claim


@pytest.mark.parametrize("method", ["gep", "dp_ngd", "dp_deepsets"])
def test_a_method_that_canaries_cannot_audit_is_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(InvalidValue, match="public"):
        audited(tmp_path, method)


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("dp_sgd_pt", {"pretrain_epochs": 1}),
        ("dp_ngd", {"curvature_interval": 8}),
        ("ada_dps", {}),
        ("gep", {"subspace": 5}),
    ],
)
def test_a_method_with_public_images_is_audited_on_them(tmp_path: Path, method: str, config: dict[str, Any]) -> None:
    report = audited(tmp_path, method, config=config, public="digits28", public_limit=100, canaries=200)
    assert report.passed and np.isfinite(report.one_run_scores).all()
    assert not np.array_equal(report.with_canary, report.without_canary)
    assert np.ptp(report.one_run_scores) > 0


@pytest.mark.slow
def test_a_tenth_of_the_noise_is_refuted_with_public_images_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = NoiseKey.use_rounded_normals
    monkeypatch.setattr(
        NoiseKey, "use_rounded_normals", lambda self, n, scale, use, *a: honest(self, n, scale / 10, use, *a)
    )
    report = audited(tmp_path, "dp_sgd_pt", config={"pretrain_epochs": 1}, public="digits28", public_limit=100, runs=50)
    assert report.one_run.epsilon_lower > report.one_run_claim


def test_public_images_take_the_shape_of_the_canaries(tmp_path: Path) -> None:
    public = data.load_public("digits28", limit=20)
    written = data.load_public(canaries.write_public(tmp_path / "public.parquet", public, 50))
    assert written.input_shape == (1, canaries.side(50), canaries.side(50)) and written.num_classes == 2
    assert len(written) == 20 and int(written.inputs.max()) > 100
    dark = data.PublicData(
        name="dark",
        inputs=torch.zeros(3, 1, 4, 4, dtype=torch.uint8),
        targets=torch.zeros(3, dtype=torch.int64),
        num_classes=1,
    )
    with pytest.raises(InvalidValue, match="not dark"):
        canaries.write_public(tmp_path / "dark.parquet", dark, 50)
