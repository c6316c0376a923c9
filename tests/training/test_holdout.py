"""A hold-out behind its ledger: recorded before it is read, clipped, noised by a key of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raydp import tasks
from raydp.errors import InvalidValue, LedgerRefusal, RaydpError
from raydp.privacy.budget import Budget
from raydp.privacy.calibration import calibrate
from raydp.privacy.ledger import Ledger, LedgerWriter
from raydp.privacy.noise import NoiseKey
from raydp.tasks import Classification, HeldOut
from raydp.training.holdout import HoldoutQuery, phase_of
from tests.training.helpers import digits_spec

TASK = Classification()
N = 40


def examples(right: int) -> HeldOut:
    """Of N examples the identity predicts the class of so many."""
    targets = torch.zeros(N, dtype=torch.int64)
    inputs = torch.tensor([[1.0, 0.0]] * right + [[0.0, 1.0]] * (N - right))
    return HeldOut(inputs=inputs, targets=targets, normalize=lambda x: x, num_classes=2)


class Itself(nn.Linear):
    """Its outputs are its inputs."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        with torch.no_grad():
            self.weight.copy_(torch.eye(2))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[LedgerWriter]:
    phase = phase_of(TASK, "accuracy", reports=2, population=N)
    plan = calibrate(budget=Budget(epsilon=20.0, delta=1e-3), phases=[phase], cross_check=())
    with LedgerWriter(tmp_path / "holdout-ledger.jsonl", plan) as writer:
        yield writer


def query(ledger: LedgerWriter, right: int, seed: int = 1, **changes: Any) -> HoldoutQuery:
    given = {"task": TASK, "metric": "accuracy", "examples": examples(right), "key": NoiseKey.insecure(seed)}
    return HoldoutQuery(ledger, **{**given, **changes})


def test_a_report_is_the_share_and_one_draw_of_the_noise(ledger: LedgerWriter) -> None:
    """The draws are known here, so they can be taken off again: what is left is the number of right examples."""
    phase = ledger.plan.phase("holdout")
    for right in (10, 20, 25):
        for report in (0, 1):
            found = query(ledger, right).release(Itself(), report)["accuracy"]
            key = NoiseKey.insecure(1).derive("holdout")
            scale = phase.noise_std / phase.spacing
            (noise,) = key.rounded_normals(1, scale, "noise", "holdout", report, 0) * phase.spacing
            assert 0 < found < 1 and abs(noise) > 1e-3
            assert N * found - noise == pytest.approx(right, abs=1e-3)  # clipping rounds towards zero
    assert query(ledger, 20, seed=2).release(Itself(), 0) != query(ledger, 20, seed=3).release(Itself(), 0)
    assert query(ledger, 20, seed=2).release(Itself(), 0) == query(ledger, 20, seed=2).release(Itself(), 0)


def test_the_ledger_is_durable_before_an_example_is_read(ledger: LedgerWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        assert Ledger.read(ledger.path).steps("holdout") == 1
        raise ValueError("17 of 40 were right")

    monkeypatch.setattr(Classification, "contributions", fail)
    with pytest.raises(RaydpError, match="failed with ValueError") as caught:
        query(ledger, 20).release(Itself(), 0)
    assert "17" not in str(caught.value)
    with pytest.raises(LedgerRefusal, match="would overspend"):
        query(ledger, 20).release(Itself(), 2)
    assert Ledger.read(ledger.path).steps("holdout") == 1  # nothing was recorded of what was refused


def test_an_example_counts_at_most_its_bound_and_the_number_stays_in_its_range(
    ledger: LedgerWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.zeros(N)
    monkeypatch.setattr(Classification, "contributions", lambda *_: values)
    base = query(ledger, 0)._contributions(Itself())
    assert base.shape == (N, 1)
    values[:20] = 1.0
    usual = query(ledger, 0).release(Itself(), 0)["accuracy"]
    values[0] = 1e6  # whatever a task returns
    assert query(ledger, 0).release(Itself(), 0)["accuracy"] == pytest.approx(usual, abs=1e-6)
    values[0] = float("nan")
    assert query(ledger, 0).release(Itself(), 0)["accuracy"] == pytest.approx(usual - 1 / N, abs=1e-6)
    values[:] = 1e6
    values[1:] = 1.0
    high = {query(ledger, 0, seed=seed).release(Itself(), 0)["accuracy"] for seed in range(8)}
    assert max(high) == 1.0


def test_what_does_not_fit_the_plan_or_has_no_bound_is_refused(ledger: LedgerWriter, tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="must be the one of 'accuracy' on the 39 examples"):
        held = examples(20)
        fewer = HeldOut(inputs=held.inputs[1:], targets=held.targets[1:], normalize=held.normalize, num_classes=2)
        query(ledger, 20, examples=fewer)
    with pytest.raises(InvalidValue, match=r"no bound is known.*bounded: accuracy"):
        query(ledger, 20, metric="loss")
    for name, task in tasks.TASKS.items():
        assert set(task.bounds) <= set(task.metrics)
        assert bool(task.bounds) == (name in ("classification", "multilabel"))
        with pytest.raises(InvalidValue, match="has no bound"):
            task.contributions("loss", Itself(), examples(3))
    config = {"epochs": 1, "batch_size": 128, "learning_rate": 0.5}
    with pytest.raises(InvalidValue, match="would share the noise"):
        digits_spec(tmp_path, "dp_sgd", config, holdout_plan=ledger.plan, pairing_file=tmp_path / "pairing.key")


def test_accuracy_is_the_mean_of_what_the_examples_contribute() -> None:
    held = examples(13)
    found = TASK.contributions("accuracy", Itself(), held)
    assert found.tolist() == [1.0] * 13 + [0.0] * (N - 13)
    assert float(found.mean()) == pytest.approx(TASK.evaluate(Itself(), held)["accuracy"])
    broken = HeldOut(inputs=held.inputs.clone(), targets=held.targets, normalize=lambda x: x, num_classes=2)
    broken.inputs[0, 0] = float("inf")  # one that cannot be measured is not right, and changes no other
    assert TASK.contributions("accuracy", Itself(), broken).tolist() == [0.0] + [1.0] * 12 + [0.0] * (N - 13)
