"""Where memory runs out, the same batch is summed up again in smaller pieces, under the same noise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raydp.errors import CorruptFile, RaydpError
from raydp.privacy.ledger import Ledger
from raydp.training import run
from raydp.training.memory import Batches, MicroBatch, is_out_of_memory
from raydp.training.run import RunSpec, execute
from tests.training.helpers import digits_spec

CONFIG = {"epochs": 1, "batch_size": 100, "learning_rate": 0.5}


def weights(spec: RunSpec) -> list[torch.Tensor]:
    list(execute(spec))
    return list(torch.load(spec.directory / "weights.pt", weights_only=True).values())


def test_a_run_whose_memory_runs_out_ends_as_one_with_smaller_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = weights(digits_spec(tmp_path / "whole", "dp_sgd", CONFIG))
    small = weights(digits_spec(tmp_path / "small", "dp_sgd", CONFIG, micro_batch=16))
    compact, calls, sizes = run.PerExampleGradients.compact, 0, []

    def greedy(self: run.PerExampleGradients, inputs: torch.Tensor, *rest: object, **others: object) -> object:
        """Memory suffices for 16, and runs out after something of the batch was summed up already."""
        nonlocal calls
        calls += 1
        if len(inputs) > 16 and calls > 1:
            raise torch.OutOfMemoryError("no room")
        sizes.append(len(inputs))
        return compact(self, inputs, *rest, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(run.PerExampleGradients, "compact", greedy)
    spec = digits_spec(tmp_path / "greedy", "dp_sgd", CONFIG, micro_batch=64)
    found = weights(spec)
    assert sizes[0] > 16 and max(sizes[1:]) <= 16
    assert MicroBatch(64, spec.directory / "micro-batch-0").size == 16
    ledger = Ledger.read(spec.ledger_file)
    assert ledger.steps("train") == spec.plan.steps  # no step counts twice
    for left, right, other in zip(found, small, whole, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(left, other, rtol=1e-4, atol=1e-6)


def test_a_run_that_goes_on_begins_with_the_size_that_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = digits_spec(tmp_path, "dp_sgd", CONFIG)
    reports = execute(spec)
    next(reports)
    reports.close()  # type: ignore[attr-defined]
    (spec.directory / "micro-batch-0").write_text("8\n")
    compact, sizes = run.PerExampleGradients.compact, []

    def seen(self: run.PerExampleGradients, inputs: torch.Tensor, *rest: object, **others: object) -> object:
        sizes.append(len(inputs))
        return compact(self, inputs, *rest, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(run.PerExampleGradients, "compact", seen)
    list(execute(spec))
    assert 0 < max(sizes) <= 8


def test_a_single_example_that_does_not_fit_ends_the_run_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(run.PerExampleGradients, "compact", full)
    with pytest.raises(RaydpError, match="does not even suffice for a single example"):
        list(execute(digits_spec(tmp_path, "dp_sgd", CONFIG)))


def test_what_is_no_lack_of_memory_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(*_: object, **__: object) -> None:
        calls.append(1)
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(run.PerExampleGradients, "compact", broken)
    with pytest.raises(RaydpError, match="RuntimeError"):
        list(execute(digits_spec(tmp_path, "dp_sgd", CONFIG)))
    assert len(calls) == 1


def test_the_errors_of_torch_itself_are_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("something else"))


def test_halving_is_durable_and_stops_at_one(tmp_path: Path) -> None:
    size = MicroBatch(1024, tmp_path / "size")
    size.halve(100)
    assert size.size == MicroBatch(1024, tmp_path / "size").size == 50
    assert MicroBatch(20, tmp_path / "size").size == 20  # the cap holds
    size.halve(3)
    assert size.size == 1
    with pytest.raises(RaydpError):
        size.halve(1)
    (tmp_path / "size").write_text("many")
    with pytest.raises(CorruptFile, match="Remove it"):
        MicroBatch(8, tmp_path / "size")


def test_batches_are_made_anew_each_time() -> None:
    again = Batches(lambda: iter([1, 2]))
    assert list(again) == list(again) == [1, 2]
