"""PDA-DPMD: the mixture of private and public gradients, in classification and in denoising."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from raydp.errors import InvalidValue
from raydp.methods import method
from raydp.privacy.ledger import Ledger
from raydp.training.run import execute
from tests.methods.helpers import assert_resumes, policy_of, public_examples, setting_of, weights
from tests.training.helpers import digits_spec

CONFIG: dict[str, Any] = {"epochs": 2, "batch_size": 128, "learning_rate": 0.5}


def test_the_direction_is_the_mixture_at_the_present_weights() -> None:
    public = public_examples(40)
    setting = setting_of("pda_dpmd", CONFIG, public=public)
    config = {**CONFIG, "alpha": 0.3, "public_batch_size": 4000}
    policy = method("pda_dpmd").policy(method("pda_dpmd").parse(config), setting)
    released = [torch.ones(size) for size in setting.sizes]
    found = policy.direction("train", 3, released)
    loss = F.cross_entropy(setting.model(public.inputs), public.targets)
    whole = torch.autograd.grad(loss, list(setting.model.parameters()))
    for direction, gradient in zip(found, whole, strict=True):
        # The public batch is large: its gradient is close to that of all public examples.
        torch.testing.assert_close(direction, 0.3 + 0.7 * gradient.flatten(), rtol=0, atol=0.02)
    again = policy.direction("train", 3, released)
    assert all(torch.equal(left, right) for left, right in zip(found, again, strict=True))  # a replay sees the same
    other = policy.direction("train", 4, released)
    assert not torch.equal(found[0], other[0])  # a fresh batch each step


def test_alpha_one_is_dp_sgd(tmp_path: Path, public_digits: str) -> None:
    plain = digits_spec(tmp_path / "plain", "dp_sgd", CONFIG)
    mixed = digits_spec(tmp_path / "mixed", "pda_dpmd", {**CONFIG, "alpha": 1.0}, public=public_digits)
    list(execute(plain)), list(execute(mixed))
    assert all(torch.equal(value, weights(mixed)[name]) for name, value in weights(plain).items())


def test_the_weight_falls_with_the_cosine() -> None:
    chosen: Any = method("pda_dpmd").parse({"alpha": 0.8, "alpha_schedule": "cosine"})
    found = [chosen.private_weight(step, 100) for step in (0, 50, 100)]
    assert found == pytest.approx([0.8, 0.8 * 2**-0.5, 0.0])


def test_a_run_spends_its_plan_exactly_and_learns(tmp_path: Path, public_digits: str) -> None:
    spec = digits_spec(tmp_path, "pda_dpmd", {**CONFIG, "epochs": 6}, public=public_digits)
    reports = list(execute(spec))
    Ledger.read(spec.ledger_file).check(spec.plan)
    assert reports[-1].metrics["accuracy"] > 0.7


def test_a_crash_at_any_place_changes_nothing(tmp_path: Path, public_digits: str) -> None:
    config = {**CONFIG, "alpha_schedule": "cosine", "momentum": 0.5, "learning_rate": 0.1}
    assert_resumes(tmp_path, "pda_dpmd", config, reports=7, public=public_digits)


@pytest.mark.parametrize(
    ("config", "field"),
    [({"alpha": 1.5}, "alpha"), ({"public_batch_size": 0}, "public_batch_size"), ({"steps": 0}, "steps")],
)
def test_bad_hyperparameters_are_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        method("pda_dpmd").parse(config)
    assert refused.value.field == field


def test_public_examples_must_be_there_and_of_the_models_classes() -> None:
    for public in (None, public_examples(classes=12)):
        with pytest.raises(InvalidValue) as refused:
            policy_of("pda_dpmd", CONFIG, public=public)
        assert refused.value.field == "public"


def test_steps_replace_epochs() -> None:
    chosen: Any = method("dp_sgd")
    by_steps = chosen.parse({"steps": 17, "batch_size": 32})
    assert chosen.phases(by_steps, population=128)[0].steps == 17
    assert by_steps.total_epochs(128) == 5
    with pytest.raises(InvalidValue, match="no effect with steps"):
        chosen.parse({"steps": 17, "epochs": 3})
