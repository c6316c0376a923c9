"""One run on several workers is the run of one: batches, noise, ledger, weights, and what becomes of it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raydp import data
from raydp.data import types
from raydp.methods.hypernetwork_training import PublicSets, SetLosses, TrainingOptions, train
from raydp.models import build_model
from raydp.models.hypernetwork import Architecture, Hypernetwork, Layout
from raydp.privacy.budget import Budget
from raydp.privacy.calibration import calibrate
from raydp.privacy.ledger import Ledger, LedgerWriter
from raydp.privacy.noise import NoiseKey
from raydp.tasks import Classification, task
from raydp.training import checkpoint, run
from raydp.training.holdout import phase_of
from raydp.training.optimizer import CoordinateOptimizer
from raydp.training.run import RunSpec, execute
from raydp.training.workers import Workers
from tests.training.helpers import digits_spec, hand_made_plan
from tests.training.processes import Processes, together

FAST = {"epochs": 1, "batch_size": 128}
# Parts of 16 examples: always enough of them for four workers, so that the batch is cut alike for all.
EQUAL = {"micro_batch": 16}


def digest(*arrays: np.ndarray) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def recorded(workers: Workers, spec: RunSpec) -> Any:
    """Execute a run; what it drew, released and reported on this worker."""
    os.environ["RAYDP_CACHE"] = str(spec.directory.parent / "cache")  # nothing that another run has computed
    batches: list[str] = []
    noises: list[str] = []
    parts: list[int] = []
    sample, draw, query = types.poisson_sample, NoiseKey.use_rounded_normals, run.private_gradient

    def sampled(*arguments: Any) -> np.ndarray:
        found = sample(*arguments)
        batches.append(digest(found))
        return found

    def drawn(self: NoiseKey, count: int, scale: float, use: Callable[..., None], *address: str | int) -> None:
        found = np.empty(count, dtype=np.int64)

        def seen(start: int, draws: np.ndarray) -> None:
            found[start : start + len(draws)] = draws  # before ``use``, which may change them
            use(start, draws)

        draw(self, count, scale, seen, *address)
        if address[:2] != ("noise", "holdout"):  # by the first worker alone
            noises.append(digest(found))

    def queried(gradients: Any, **keywords: Any) -> list[Tensor]:
        own = list(gradients)
        parts.append(sum(len(part[0]) for part in own))
        return query(own, **keywords)

    types.poisson_sample, NoiseKey.use_rounded_normals = sampled, drawn  # type: ignore[assignment, method-assign]
    run.private_gradient = queried
    reports = [(report.step, dict(report.metrics), dict(report.diagnostics)) for report in execute(spec, workers)]
    return {"batches": batches, "noises": noises, "parts": parts, "reports": reports}


def weights(spec: RunSpec) -> dict[str, Tensor]:
    return torch.load(spec.directory / "weights.pt", weights_only=True)


def digits(name: str, config: dict[str, Any], **changes: Any) -> Callable[[Path], RunSpec]:
    return lambda directory: digits_spec(directory, name, {**FAST, **config}, **changes)


def measured_through_noise(directory: Path) -> RunSpec:
    """A run whose hold-out is private."""
    phase = phase_of(Classification(), "accuracy", reports=3, population=360)
    plan = calibrate(budget=Budget(epsilon=20.0, delta=1e-3), phases=[phase], cross_check=())
    return digits_spec(directory, "dp_sgd", FAST, holdout_plan=plan, metric="accuracy", **EQUAL)


def deepsets(directory: Path) -> RunSpec:
    """An embedding that is released, by a hypernetwork that was trained on 36 public sets, 3 a step."""
    config: dict[str, Any] = {
        "embedding": 8,
        "encoder_width": 32,
        "decoder": "mlp",
        "decoder_depth": 1,
        "decoder_hidden": 32,
        "epochs": 2,
        "sets_per_step": 3,
        "loss_points": 16,
    }
    return digits_spec(
        directory,
        "dp_deepsets",
        config,
        plan=hand_made_plan("dp_deepsets", config, population=64),
        data="regression:dimension=16",
        data_limit=64,
        public="regression:dimension=16",
        public_limit=40,
        model="linear_map",
        micro_batch=8,
    )


def tiny(directory: Path) -> RunSpec:
    """Half an example a step is what a worker of four can expect."""
    return digits_spec(directory, "dp_sgd", {"steps": 12, "batch_size": 2})


NGD = {"curvature_source": "noise", "noise_examples": 70, "curvature_interval": 4, "learning_rate": 0.3}
AUGMENTED = {"augmentation": "crop", "augmentation_multiplicity": 2}
PRIVATE = {"curvature_source": "private", "curvature_steps": 2, "learning_rate": 0.3}
# name -> what is run, and whether its weights are equal to the last bit whatever the number of workers
RUNS: dict[str, tuple[Callable[[Path], RunSpec], bool]] = {
    "dp_sgd": (digits("dp_sgd", {"momentum": 0.9, "ema_decay": 0.9}, **EQUAL), True),
    "dp_sgd in one part": (digits("dp_sgd", {}), False),
    "tiny batches": (tiny, False),
    "tp_topk": (digits("tp_topk", {"ratio_schedule": "linear_cooling"}, **EQUAL), True),
    "dp_ngd": (digits("dp_ngd", {**NGD, **AUGMENTED}, micro_batch=32), True),
    "dp_ngd, private curvature": (digits("dp_ngd", PRIVATE, **EQUAL), True),
    "private hold-out": (measured_through_noise, True),
    "dp_deepsets": (deepsets, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_one_two_and_four_workers_execute_the_same_run(tmp_path: Path, case: str) -> None:
    make, exactly = RUNS[case]
    specs = {count: make(tmp_path / str(count)) for count in (1, 2, 4)}
    found = {count: together(count, recorded, spec) for count, spec in specs.items()}
    (alone,) = found[1]
    spec = specs[1]
    assert len(alone["batches"]) == spec.plan.steps
    for count in (2, 4):
        for worker in found[count]:
            assert worker["batches"] == alone["batches"] and worker["noises"] == alone["noises"]
            assert worker["reports"] == found[count][0]["reports"]
            assert [step for step, *_ in worker["reports"]] == [step for step, *_ in alone["reports"]]
        # Every example of every batch is in the part of one worker.
        assert [sum(parts) for parts in zip(*(one["parts"] for one in found[count]), strict=True)] == alone["parts"]
        assert all(sum(worker["parts"]) for worker in found[count])
        assert Ledger.read(specs[count].ledger_file) == Ledger.read(spec.ledger_file)
        if spec.holdout_plan is not None:
            assert Ledger.read(specs[count].holdout_ledger_file) == Ledger.read(spec.holdout_ledger_file)
        wanted = weights(spec)
        for key, value in weights(specs[count]).items():
            if exactly:
                assert torch.equal(value, wanted[key]), key
            else:
                torch.testing.assert_close(value, wanted[key], rtol=1e-3, atol=1e-4)
        if exactly:
            assert found[count][0]["reports"] == alone["reports"]


def trained(workers: Workers) -> dict[str, Tensor]:
    """A hypernetwork after some steps of 3 sets each: of four workers one has none."""
    public = data.load_public("regression:dimension=6", limit=20, set_size=16)
    assert public.sets is not None
    model = build_model("linear_map", input_shape=(6,), outputs=1, seed=0)
    layout = Layout.of(model)
    architecture = Architecture(embedding=4, encoder_width=16, decoder="mlp", decoder_depth=1, decoder_hidden=16)
    network = Hypernetwork(features=7, layout=layout, architecture=architecture, clip_norm=1.0, seed=0)
    features = torch.cat([public.inputs, public.targets[:, None]], dim=1)
    train(
        network,
        losses=SetLosses(model, task("regression"), layout.names),
        public=PublicSets(features=features, inputs=public.inputs, targets=public.targets, sets=public.sets),
        noise_std=0.1,
        options=TrainingOptions(steps=20, learning_rate=1e-2, sets=3, loss_points=8, seed=0),
        workers=workers,
    )
    return network.state_dict()


@pytest.mark.slow
def test_a_hypernetwork_is_trained_by_all_workers_together() -> None:
    (alone,) = together(1, trained)
    for count in (2, 4):
        first, *others = together(count, trained)
        for name, value in alone.items():
            torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)
            assert all(torch.equal(first[name], other[name]) for other in others)


def stopped(workers: Workers, spec: RunSpec, queries: int, rank: int, kind: str) -> list[int]:
    """Execute a run in which something happens to one worker at its so-many-th query; the steps that were reported."""
    original, count, seen = run.private_gradient, 0, []

    def query(gradients: Any, **keywords: Any) -> list[Tensor]:
        nonlocal count
        count += 1
        if workers.rank == rank and count == queries:
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a batch of 117")
        return original(gradients, **keywords)

    run.private_gradient = query
    for report in execute(spec, workers):
        seen.append(report.step)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_worker_leaves_a_run_that_one_worker_resumes_to_the_same_end(tmp_path: Path, killed: int) -> None:
    spec = digits_spec(tmp_path / "killed", "tp_topk", FAST, insecure_seed=None, reports=3, **EQUAL)
    ends = Processes(2, stopped, spec, 7, killed, "kill").ends()
    assert ends[killed].error == "died" and ends[1 - killed].error == "WorkerLost"
    ends = Processes(4, stopped, spec, 2, 2, "kill").ends()  # on more workers, which do not come far either
    assert [end.error for end in ends] == ["WorkerLost", "WorkerLost", "died", "WorkerLost"]
    whole = digits_spec(tmp_path / "whole", "tp_topk", FAST, insecure_seed=None, reports=3, **EQUAL)
    whole.key_file.write_bytes(spec.key_file.read_bytes())
    whole.key_file.chmod(0o600)
    assert [report.step for report in execute(spec)][-1] == spec.plan.steps
    together(1, stopped, whole, 0, 0, "")
    assert Ledger.read(spec.ledger_file).mechanisms == Ledger.read(whole.ledger_file).mechanisms
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(spec).items())


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_worker_ends_all_without_its_private_numbers(tmp_path: Path, failing: int) -> None:
    spec = digits_spec(tmp_path, "dp_sgd", FAST, **EQUAL)
    ends = Processes(3, stopped, spec, 2, failing, "error").ends()
    for rank, end in enumerate(ends):
        assert end.error == ("RaydpError" if rank == failing else "WorkerFailed")
        assert "step 1 of phase 'train' failed with RuntimeError" in end.message and "117" not in end.message
    assert Ledger.read(spec.ledger_file).steps("train") == 2  # what was asked is counted, whoever failed


@pytest.mark.slow
def test_all_workers_report_a_divergence(tmp_path: Path) -> None:
    spec = digits_spec(tmp_path, "dp_sgd", {**FAST, "learning_rate": 3e38}, sigma=1000.0)
    ends = Processes(2, recorded, spec).ends()
    assert {end.error for end in ends} == {"Diverged"} and len({end.message for end in ends}) == 1
    assert 1 <= Ledger.read(spec.ledger_file).steps("train") < spec.plan.steps


def drifting(workers: Workers, spec: RunSpec) -> None:
    """One worker's processor rounds otherwise, once."""
    original, steps = CoordinateOptimizer.step, 0

    def step(self: CoordinateOptimizer, update: Any, learning_rate: float) -> None:
        nonlocal steps
        steps += 1
        if workers.rank == 1 and steps == 2:
            update = [part * (1 + 1e-6) for part in update]
        original(self, update, learning_rate)

    CoordinateOptimizer.step = step  # type: ignore[method-assign]
    for report in execute(spec, workers):
        assert report.step < 2, "weights that drifted apart were reported"


@pytest.mark.slow
def test_weights_that_drifted_apart_are_never_reported(tmp_path: Path) -> None:
    spec = digits_spec(tmp_path, "dp_sgd", FAST, reports=4)
    first, second = Processes(2, drifting, spec).ends()
    assert second.error == "RaydpError" and "weights of worker 1 are not those of worker 0" in second.message
    assert first.error == "WorkerFailed" and "weights of worker 1" in first.message
    assert not spec.metrics_file.exists() and checkpoint.load_latest(spec.directory) is None


def leaving(workers: Workers, spec: RunSpec) -> None:
    reports = execute(spec, workers)
    next(reports)
    if workers.rank == 1:
        reports.close()
        return
    list(reports)


@pytest.mark.slow
def test_whoever_stops_iterating_ends_the_others(tmp_path: Path) -> None:
    spec = digits_spec(tmp_path, "dp_sgd", FAST, reports=4)
    first, second = Processes(2, leaving, spec).ends()
    assert second.error is None
    assert first.error == "WorkerFailed" and "worker 1 ended with GeneratorExit" in first.message


def breaking(workers: Workers, spec: RunSpec) -> list[int]:
    seen = []
    for attempt in ("first", "second"):  # of two seeds
        one = dataclasses.replace(spec, directory=spec.directory / attempt)
        for report in execute(one, workers):
            seen.append(report.step)
            if report.done:
                break
        seen += [report.step for report in execute(one, workers)]
    return seen


@pytest.mark.slow
def test_the_last_report_is_the_end_and_the_workers_take_the_next_run(tmp_path: Path) -> None:
    spec = digits_spec(tmp_path, "dp_sgd", FAST, reports=1)
    first, second = together(2, breaking, spec)
    assert first == second == [spec.plan.steps] * 4


@pytest.mark.slow
def test_a_run_that_is_held_elsewhere_is_refused_on_all_workers(
    tmp_path: Path,
) -> None:
    spec = digits_spec(tmp_path, "dp_sgd", FAST)
    spec.directory.mkdir()
    with LedgerWriter(spec.ledger_file, spec.plan):
        first, second = Processes(2, recorded, spec).ends()
    assert first.error == "LedgerRefusal"
    assert second.error == "WorkerFailed" and "LedgerRefusal" in second.message


def differently(workers: Workers, spec: RunSpec) -> None:
    other = dataclasses.replace(spec, micro_batch=spec.micro_batch // (1 + workers.rank))
    list(execute(other, workers))


@pytest.mark.slow
def test_workers_with_other_specifications_are_refused(tmp_path: Path) -> None:
    ends = Processes(2, differently, digits_spec(tmp_path, "dp_sgd", FAST)).ends()
    assert all("has micro_batch = " in end.message for end in ends)
