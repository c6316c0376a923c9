"""The audit of the training path: below the claim for the code as it is, above it for code with too little noise."""

from __future__ import annotations

import json
from pathlib import Path

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


def audited(directory: Path, method: str = "dp_sgd", *, runs: int = 10) -> AuditReport:
    spec = AuditSpec(method=method, config={}, budget=Budget(epsilon=1.0, delta=1e-5), canaries=600, runs=runs)
    return audit(spec, directory)


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
    honest = NoiseKey.rounded_normals
    monkeypatch.setattr(NoiseKey, "rounded_normals", lambda self, n, scale, *a: honest(self, n, scale / 10, *a))
    report = audited(tmp_path, runs=100)
    assert not report.passed
    assert report.one_run.epsilon_lower > 1.5 * report.one_run_claim
    assert report.repeated.epsilon_lower > report.repeated_claim


@pytest.mark.parametrize("method", ["gep", "dp_ngd", "dp_deepsets"])
def test_a_method_that_canaries_cannot_audit_is_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(InvalidValue, match="public examples"):
        audited(tmp_path, method)
