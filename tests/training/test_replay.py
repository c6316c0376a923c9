"""Steps that were seen run again only as the same computation, and a failing step says nothing about private data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from raydp import data
from raydp.data import PrivateData
from raydp.errors import RaydpError
from raydp.privacy.ledger import Ledger
from raydp.privacy.noise import NoiseKey
from raydp.training import checkpoint, run
from raydp.training.run import RunSpec, execute
from tests.training.helpers import digits_spec

FAST = {"epochs": 2, "batch_size": 128}


def begun(tmp_path: Path, reports: int, **changes: Any) -> RunSpec:
    """A run that was interrupted after so many of six reports."""
    spec = digits_spec(tmp_path, "dp_sgd", FAST, **{"insecure_seed": None, "reports": 6, **changes})
    progress = execute(spec)
    for _ in range(reports):
        next(progress)
    progress.close()
    return spec


def tear_newest(spec: RunSpec) -> None:
    newest = sorted(spec.directory.glob("checkpoint-*.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[:-100])


def test_a_run_does_not_go_on_with_other_private_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One changed label: with the same noise, replayed steps would differ by that example's gradient alone."""
    spec = begun(tmp_path, 2)
    original = data.load

    def changed(name: str, *, limit: int | None = None, member: int = 0) -> data.Dataset:
        dataset = original(name, limit=limit)
        every = dataset.private.non_private("a test changes one label")
        labels = every.targets.clone()
        labels[0] = (labels[0] + 1) % every.num_classes
        private = PrivateData(name=name, inputs=every.inputs, targets=labels, num_classes=every.num_classes)
        return dataclasses.replace(dataset, private=private)

    steps = Ledger.read(spec.ledger_file).steps("train")
    with monkeypatch.context() as patch:
        patch.setattr(data, "load", changed)
        with pytest.raises(RaydpError, match="are not those with which the run"):
            next(execute(spec))
    assert Ledger.read(spec.ledger_file).steps("train") == steps
    assert list(execute(spec))[-1].done  # the data are back, so it goes on


def test_a_checkpoint_does_not_identify_the_data(tmp_path: Path) -> None:
    """Checkpoints of failed runs stay; a hash of the content in them would let anyone test guesses of it."""
    specs = [begun(tmp_path / name, 1) for name in "ab"]
    states = [checkpoint.load_latest(spec.directory) for spec in specs]
    assert states[0] is not None and states[1] is not None
    assert states[0]["data"] != states[1]["data"]
    assert data.load("digits").private.fingerprint not in repr([state["data"] for state in states if state])


def test_seen_steps_do_not_run_again_under_other_conditions(tmp_path: Path) -> None:
    spec = begun(tmp_path, 3)
    other = dataclasses.replace(spec, micro_batch=spec.micro_batch // 2)
    tear_newest(spec)
    with pytest.raises(RaydpError, match=r"reports go up to step \d+, and micro_batch changed"):
        next(execute(other))
    assert list(execute(spec))[-1].done


def test_steps_that_were_not_seen_may_run_under_other_conditions(tmp_path: Path) -> None:
    spec = begun(tmp_path, 3)
    other = dataclasses.replace(spec, micro_batch=spec.micro_batch // 2)
    assert list(execute(other))[-1].done


def test_seen_steps_do_not_run_again_without_any_checkpoint(tmp_path: Path) -> None:
    spec = begun(tmp_path, 2)
    checkpoint.remove(spec.directory)
    with pytest.raises(RaydpError, match="no usable checkpoint"):
        next(execute(spec))


def test_paired_runs_under_other_conditions_have_independent_noise(tmp_path: Path) -> None:
    pairing = tmp_path / "pairing.key"
    NoiseKey.generate().save(pairing)
    keys = []
    for index, micro_batch in enumerate((64, 64, 32)):
        spec = digits_spec(
            tmp_path / str(index),
            "tp_topk",
            FAST,
            insecure_seed=None,
            pairing_file=pairing,
            micro_batch=micro_batch,
        )
        spec.directory.mkdir(parents=True)
        with run.LedgerWriter(spec.ledger_file, spec.plan) as ledger:
            keys.append(run._Run(spec, ledger).keys["warmup"].rounded_normals(8, 1e6, "noise").tolist())
    assert keys[0] == keys[1] != keys[2]


def test_what_a_private_step_fails_of_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's messages hold shapes, and the size of a Poisson batch is private."""
    spec = digits_spec(tmp_path, "dp_sgd", FAST)
    sizes = []

    def failing(self: object, images: torch.Tensor, labels: torch.Tensor, **_: object) -> list[torch.Tensor]:
        sizes.append(len(images))
        raise RuntimeError(f"shape [{len(images)}, 64] is invalid")

    monkeypatch.setattr(run.PerExampleGradients, "compact", failing)
    with pytest.raises(RaydpError, match="failed with RuntimeError") as caught:
        list(execute(spec))
    assert str(sizes[0]) not in str(caught.value) and str(sizes[0]) in str(caught.value.__cause__)
    assert Ledger.read(spec.ledger_file).steps("train") == 1
