"""A run executes exactly its plan, can be killed anywhere, and ends as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from raydp.errors import Diverged, InvalidValue, LedgerRefusal, RaydpError
from raydp.methods.two_phase import TwoPhasePolicy
from raydp.privacy.ledger import Ledger
from raydp.privacy.noise import NoiseKey
from raydp.training import checkpoint, run
from raydp.training.run import RunSpec, execute
from tests.training.helpers import digits_spec, hand_made_plan

FAST = {"epochs": 2, "batch_size": 128, "learning_rate": 0.5}


def weights(spec: RunSpec) -> dict[str, torch.Tensor]:
    return torch.load(spec.directory / "weights.pt", weights_only=True)


def assert_equal_weights(left: RunSpec, right: RunSpec) -> None:
    found, wanted = weights(left), weights(right)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["dp_sgd", "tp_topk", "tp_rand", "on_topk", "on_rand"])
def test_a_run_spends_its_plan_exactly_and_learns(tmp_path: Path, name: str) -> None:
    spec = digits_spec(tmp_path, name, {**FAST, "epochs": 8})
    reports = list(execute(spec))
    ledger = Ledger.read(spec.ledger_file)
    ledger.check(spec.plan)
    assert [ledger.steps(phase.name) for phase in spec.plan.phases] == [phase.steps for phase in spec.plan.phases]
    assert [report.step for report in reports][-1] == spec.plan.steps and reports[-1].done
    assert reports[-1].metrics["accuracy"] > 0.5
    assert not list(spec.directory.glob("checkpoint-*"))


def test_the_key_is_private_while_the_run_lives_and_gone_when_it_is_done(tmp_path: Path) -> None:
    spec = digits_spec(tmp_path, "dp_sgd", FAST, insecure_seed=None)
    reports = execute(spec)
    next(reports)
    assert os.stat(spec.key_file).st_mode & 0o777 == 0o600
    list(reports)
    assert not spec.key_file.exists()


def test_without_an_insecure_seed_two_runs_differ(tmp_path: Path) -> None:
    specs = [digits_spec(tmp_path / str(i), "dp_sgd", FAST, insecure_seed=None) for i in range(2)]
    for spec in specs:
        list(execute(spec))
    assert any(
        not torch.equal(a, b) for a, b in zip(weights(specs[0]).values(), weights(specs[1]).values(), strict=True)
    )


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    from raydp.training import run
    from tests.training.helpers import digits_spec

    steps = 0
    original = run.private_gradient

    def dying(*arguments, **keywords):
        global steps
        steps += 1
        released = original(*arguments, **keywords)
        if steps == int(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)  # after the query, in the middle of the step
        return released

    run.private_gradient = dying
    config = eval(sys.argv[3])
    for report in run.execute(digits_spec(Path(sys.argv[1]), sys.argv[2], config, insecure_seed=None)):
        print(report.step, flush=True)
    """
)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (
            "dp_sgd",
            {**FAST, "momentum": 0.9, "ema_decay": 0.99, "augmentation": "crop", "augmentation_multiplicity": 2},
        ),
        ("tp_topk", {**FAST, "optimizer": "adam", "learning_rate": 0.01, "ratio_schedule": "linear_cooling"}),
        ("on_topk", FAST),
    ],
)
def test_kill_in_the_middle_of_a_step_then_resume_equals_an_uninterrupted_run(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    killed = digits_spec(tmp_path / "killed", name, config, insecure_seed=None)
    for die_at in (9, 6):  # the second process dies again, 6 steps after the checkpoint that it resumed from
        process = subprocess.run(
            [sys.executable, "-c", KILLED, str(tmp_path / "killed"), name, repr(config), str(die_at)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert process.returncode == -signal.SIGKILL, process.stderr
    whole = digits_spec(tmp_path / "whole", name, config, insecure_seed=None)
    whole.key_file.write_bytes(killed.key_file.read_bytes())  # the same secret, so the same batches and noise
    whole.key_file.chmod(0o600)
    list(execute(killed))
    list(execute(whole))
    assert_equal_weights(killed, whole)
    assert Ledger.read(killed.ledger_file).mechanisms == Ledger.read(whole.ledger_file).mechanisms
    lines = [json.loads(line) for line in killed.metrics_file.read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})


def test_a_finished_run_says_its_last_report_again_and_runs_nothing(tmp_path: Path) -> None:
    spec = digits_spec(tmp_path, "dp_sgd", FAST)
    last = list(execute(spec))[-1]
    before = spec.ledger_file.read_bytes()
    (again,) = execute(spec)
    assert again.done and again.metrics["accuracy"] == last.metrics["accuracy"]
    assert spec.ledger_file.read_bytes() == before


def test_a_torn_newest_checkpoint_falls_back_and_ends_the_same(tmp_path: Path) -> None:
    spec = digits_spec(tmp_path / "a", "tp_topk", FAST, reports=6)
    reports = execute(spec)
    for _ in range(3):
        next(reports)
    reports.close()
    newest = sorted(spec.directory.glob("checkpoint-*.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    list(execute(spec))
    whole = digits_spec(tmp_path / "b", "tp_topk", FAST, reports=6)
    list(execute(whole))
    assert_equal_weights(spec, whole)


def test_steps_without_their_key_are_never_run_again_with_other_noise(tmp_path: Path) -> None:
    spec = digits_spec(tmp_path, "dp_sgd", FAST, insecure_seed=None)
    reports = execute(spec)
    next(reports)
    reports.close()
    NoiseKey.destroy(spec.key_file)
    with pytest.raises(RaydpError, match=r"key .* is gone"):
        next(execute(spec))


def test_nothing_is_visible_before_ledger_and_checkpoint_hold_it(tmp_path: Path) -> None:
    spec = digits_spec(tmp_path, "tp_topk", FAST, reports=5)
    for report in execute(spec):
        ledger = Ledger.read(spec.ledger_file)
        assert sum(ledger.steps(phase.name) for phase in spec.plan.phases) >= report.step
        state = checkpoint.load_latest(spec.directory)
        assert report.done or (state is not None and state["step"] == report.step)


def test_divergence_ends_the_run_with_its_steps_in_the_ledger(tmp_path: Path) -> None:
    spec = digits_spec(tmp_path, "dp_sgd", {**FAST, "learning_rate": 3e38}, sigma=1000.0)
    with pytest.raises(Diverged, match="after step"):
        list(execute(spec))
    assert 1 <= Ledger.read(spec.ledger_file).steps("train") < spec.plan.steps


def test_micro_batches_change_neither_the_ledger_nor_the_result(tmp_path: Path) -> None:
    found = []
    for size in (16, 1000):
        spec = digits_spec(tmp_path / str(size), "tp_topk", FAST, micro_batch=size)
        list(execute(spec))
        found.append((weights(spec), Ledger.read(spec.ledger_file).mechanisms))
    assert found[0][1] == found[1][1]
    for name, value in found[0][0].items():
        torch.testing.assert_close(value, found[1][0][name], rtol=1e-3, atol=1e-4)


def test_a_plan_of_another_population_or_config_does_not_train(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="N = 1437"):
        next(execute(digits_spec(tmp_path / "a", "dp_sgd", FAST, plan=hand_made_plan("dp_sgd", FAST, population=1000))))
    other = hand_made_plan("dp_sgd", {**FAST, "epochs": 3})
    with pytest.raises(InvalidValue, match="phases that the method asks for"):
        next(execute(digits_spec(tmp_path / "b", "dp_sgd", FAST, plan=other)))
    with pytest.raises(LedgerRefusal):
        first = digits_spec(tmp_path / "c", "dp_sgd", FAST)
        next(iter(execute(first)))
        config = {**FAST, "clip_norm": 2.0}
        next(execute(digits_spec(tmp_path / "c", "dp_sgd", config)))


def test_paired_runs_share_the_warm_up_and_nothing_else(tmp_path: Path) -> None:
    """tp_topk and tp_rand of one seed: one warm-up computation; the sparse phases draw independent noise."""
    pairing = tmp_path / "pairing.key"
    NoiseKey.generate().save(pairing)
    released: dict[str, list[torch.Tensor]] = {}
    original = run.private_gradient
    for name in ("tp_topk", "tp_rand"):
        spec = digits_spec(
            tmp_path / name, name, {**FAST, "active_ratio": 1.0}, insecure_seed=None, pairing_file=pairing
        )
        seen: list[torch.Tensor] = []

        def spy(batches: Any, seen: list[torch.Tensor] = seen, **keywords: Any) -> list[torch.Tensor]:
            found = original(batches, **keywords)
            seen.append(torch.cat(found))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "private_gradient", spy)
            list(execute(spec))
        released[name] = seen
    warmup = spec.plan.phase("warmup").steps
    for step, (left, right) in enumerate(zip(released["tp_topk"], released["tp_rand"], strict=True)):
        assert torch.equal(left, right) == (step < warmup)


def test_pairing_needs_the_same_computation(tmp_path: Path) -> None:
    """Another learning rate is another warm-up: shared noise would cancel and leave the data, so it is not shared."""
    pairing = tmp_path / "pairing.key"
    NoiseKey.generate().save(pairing)
    keys = []
    for index, rate in enumerate((0.5, 0.5, 0.6)):
        config = {**FAST, "learning_rate": rate}
        spec = digits_spec(tmp_path / str(index), "tp_topk", config, insecure_seed=None, pairing_file=pairing)
        spec.directory.mkdir(parents=True)
        with run.LedgerWriter(spec.ledger_file, spec.plan) as ledger:
            keys.append(run._Run(spec, ledger).keys["warmup"].rounded_normals(8, 1e6, "noise").tolist())
    assert keys[0] == keys[1] != keys[2]


def test_the_average_of_weights_is_what_is_evaluated_and_released(tmp_path: Path) -> None:
    plain, averaged = (
        digits_spec(tmp_path / str(decay), "dp_sgd", {**FAST, "ema_decay": decay}) for decay in (0.0, 0.999)
    )
    last = [list(execute(spec))[-1].metrics["loss"] for spec in (plain, averaged)]
    assert last[0] != last[1]
    assert any(not torch.equal(a, b) for a, b in zip(weights(plain).values(), weights(averaged).values(), strict=True))


def test_a_policy_sees_what_was_released_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query a step, and the very tensors that it released go to the policy: no un-noised ones."""
    released: list[object] = []
    seen: list[object] = []
    query, observe = run.private_gradient, TwoPhasePolicy.observe

    def recorded(*arguments: object, **named: object) -> object:
        released.append(query(*arguments, **named))  # type: ignore[arg-type]
        return released[-1]

    def watched(self: TwoPhasePolicy, phase: str, step: int, found: list[torch.Tensor]) -> None:
        seen.append(found)
        observe(self, phase, step, found)

    monkeypatch.setattr(run, "private_gradient", recorded)
    monkeypatch.setattr(TwoPhasePolicy, "observe", watched)
    spec = digits_spec(tmp_path, "tp_topk", FAST)
    list(execute(spec))
    assert len(seen) == spec.plan.steps
    assert len(released) == len(seen) and all(a is b for a, b in zip(seen, released, strict=True))


def test_the_ledger_holds_a_step_before_a_checkpoint_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, save, saved = digits_spec(tmp_path, "tp_topk", FAST), checkpoint.save, []

    def checked(directory: Path, step: int, state: dict[str, Any]) -> Path:
        ledger = Ledger.read(spec.ledger_file)  # what another process would find on disk now
        assert sum(ledger.steps(phase.name) for phase in spec.plan.phases) == step
        saved.append(step)
        return save(directory, step, state)

    monkeypatch.setattr(checkpoint, "save", checked)
    assert [report.step for report in execute(spec)] == saved


@pytest.mark.parametrize("name", ["dp_sgd", "tp_topk"])
def test_passes_in_bfloat16_change_the_weights_and_not_the_mechanism(tmp_path: Path, name: str) -> None:
    config = {"epochs": 2, "batch_size": 128, "learning_rate": 1.0}
    specs = [digits_spec(tmp_path / kind, name, config, precision=kind) for kind in ("float32", "bfloat16")]
    ends = [list(execute(spec))[-1] for spec in specs]
    exact, rough = (Ledger.read(spec.ledger_file) for spec in specs)
    assert exact.mechanisms == rough.mechanisms
    assert any(not torch.equal(a, b) for a, b in zip(*(weights(spec).values() for spec in specs), strict=True))
    assert ends[1].metrics["accuracy"] == pytest.approx(ends[0].metrics["accuracy"], abs=0.1)
