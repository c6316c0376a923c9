"""Public pre-training: it learns, swaps heads, happens once, and is part of what pairs runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raydp.errors import Diverged, InvalidValue
from raydp.methods import PublicExamples, Setting, method
from raydp.methods.pretraining import Pretraining
from raydp.privacy.noise import NoiseKey
from raydp.training import run
from raydp.training.run import execute
from tests.methods.helpers import public_examples, setting_of
from tests.training.helpers import digits_spec, hand_made_plan

CONFIG: dict[str, Any] = {"epochs": 2, "batch_size": 128, "pretrain_epochs": 4}


def pretrained(config: dict[str, Any], public: PublicExamples, *, seed: int = 0) -> tuple[list[Tensor], Setting]:
    """The weights before, and the setting after."""
    setting = setting_of("dp_sgd_pt", config, public=public, seed=seed)
    before = [parameter.detach().clone() for parameter in setting.model.parameters()]
    parsed: Any = method("dp_sgd_pt").parse(config)
    Pretraining(parsed, setting).run()
    return before, setting


def unchanged(before: list[Tensor], setting: Setting) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(before, setting.model.parameters(), strict=True)]


def accuracy(model: nn.Module, public: PublicExamples) -> float:
    with torch.no_grad():
        return float((model(public.inputs).argmax(dim=1) == public.targets).double().mean())


@pytest.mark.parametrize(("optimizer", "rate"), [("adam", 1e-2), ("sgd", 0.05)])
def test_common_classes_train_the_whole_model(optimizer: str, rate: float) -> None:
    public = public_examples()
    config = {**CONFIG, "pretrain_epochs": 30, "pretrain_optimizer": optimizer, "pretrain_learning_rate": rate}
    before, setting = pretrained(config, public)
    assert unchanged(before, setting) == [False] * 4
    assert accuracy(setting.model, public) > 0.9
    assert all(parameter.grad is None for parameter in setting.model.parameters())


@pytest.mark.parametrize(("classes", "head"), [(26, "auto"), (7, "auto"), (10, "swap"), (26, "swap")])
def test_a_swapped_head_comes_back_as_it_was_on_a_trained_body(classes: int, head: str) -> None:
    before, setting = pretrained({**CONFIG, "pretrain_head": head}, public_examples(classes=classes))
    assert unchanged(before, setting) == [False, False, True, True]
    last = setting.model[3]
    assert isinstance(last, nn.Linear) and last.out_features == 10
    assert list(setting.model.parameters())[2] is last.weight  # the very parameter that the run will train


def test_a_smaller_public_label_set_may_keep_the_head_a_larger_one_may_not() -> None:
    before, setting = pretrained({**CONFIG, "pretrain_head": "keep"}, public_examples(classes=7))
    assert unchanged(before, setting) == [False] * 4
    with pytest.raises(InvalidValue, match="26 for 10 outputs") as refused:
        pretrained({**CONFIG, "pretrain_head": "keep"}, public_examples(classes=26))
    assert refused.value.field == "pretrain_head"


def test_it_is_a_function_of_the_public_examples_and_the_seed() -> None:
    state = torch.get_rng_state()
    found = [pretrained(CONFIG, public_examples(classes=26), seed=seed)[1] for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other = ([p.detach() for p in setting.model.parameters()] for setting in found)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_a_model_without_a_linear_head_is_refused_before_training() -> None:
    model = nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten())
    config = {**CONFIG}
    parsed: Any = method("dp_sgd_pt").parse(config)
    setting = Setting(plan=hand_made_plan("dp_sgd_pt", config), model=model, seed=0, public=public_examples(classes=26))
    with pytest.raises(InvalidValue, match="temporary head"):
        Pretraining(parsed, setting)
    fitting = Setting(plan=setting.plan, model=model, seed=0, public=public_examples(classes=10))
    Pretraining(parsed, fitting).run()


def test_a_rate_that_is_too_large_is_divergence() -> None:
    with pytest.raises(Diverged, match="pre-training"):
        pretrained({**CONFIG, "pretrain_optimizer": "sgd", "pretrain_learning_rate": 1e38}, public_examples())


def test_no_epochs_are_no_training_and_no_public_data() -> None:
    ngd: Any = method("dp_ngd").parse({"curvature_source": "noise"})
    assert not method("dp_ngd").uses_public(ngd)
    more: Any = method("dp_ngd").parse({"curvature_source": "noise", "pretrain_epochs": 3})
    assert method("dp_ngd").uses_public(more)
    setting = setting_of("dp_ngd", {"curvature_source": "noise"}, public=None)
    before = [parameter.detach().clone() for parameter in setting.model.parameters()]
    Pretraining(ngd, setting).run()
    assert all(unchanged(before, setting))


def test_a_resume_does_not_pre_train_again(tmp_path: Path, public_digits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = digits_spec(tmp_path, "dp_sgd_pt", CONFIG, public=public_digits, public_limit=60)
    reports = execute(spec)
    next(reports)
    reports.close()

    def refuse(self: Pretraining) -> None:
        raise AssertionError("trained twice")

    monkeypatch.setattr(Pretraining, "run", refuse)
    assert list(execute(spec))[-1].done


def test_the_average_of_weights_starts_from_the_pre_trained_ones(tmp_path: Path, public_digits: str) -> None:
    config = {**CONFIG, "ema_decay": 0.9}
    spec = digits_spec(tmp_path, "dp_sgd_pt", config, public=public_digits, public_limit=60)
    spec.directory.mkdir(parents=True)
    with run.LedgerWriter(spec.ledger_file, spec.plan) as ledger:
        found = run._Run(spec, ledger)
        assert found.average is not None
        for value, parameter in zip(found.average.values, found.parameters, strict=True):
            assert torch.equal(value, parameter)


def test_pairing_needs_the_same_pre_training_on_the_same_examples(tmp_path: Path, public_digits: str) -> None:
    """Other weights at the start are another computation, so its noise is not shared."""
    pairing = tmp_path / "pairing.key"
    NoiseKey.generate().save(pairing)
    keys = []
    for index, (epochs, limit) in enumerate(((4, 60), (4, 60), (5, 60), (4, 61))):
        spec = digits_spec(
            tmp_path / str(index),
            "dp_sgd_pt",
            {**CONFIG, "pretrain_epochs": epochs},
            public=public_digits,
            public_limit=limit,
            insecure_seed=None,
            pairing_file=pairing,
        )
        spec.directory.mkdir(parents=True)
        with run.LedgerWriter(spec.ledger_file, spec.plan) as ledger:
            keys.append(tuple(run._Run(spec, ledger).keys["train"].rounded_normals(8, 1e6, "noise").tolist()))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
