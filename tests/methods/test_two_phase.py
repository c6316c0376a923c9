"""TP-TopK: what is frozen stays, scores are what the lemma says, and rho = 1 is DP-SGD in two phases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from raydp.errors import InvalidValue
from raydp.geometry import support_size, top_k
from raydp.methods import method, scores
from raydp.methods.two_phase import TwoPhasePolicy
from raydp.training import run
from raydp.training.run import execute
from tests.training.helpers import digits_spec, hand_made_plan, setting

FAST = {"epochs": 2, "batch_size": 128, "learning_rate": 0.5}


def policy(
    config: dict[str, Any], sizes: tuple[int, ...], *, sigma: float = 1.0, name: str = "tp_topk"
) -> TwoPhasePolicy:
    chosen = method(name)
    found = chosen.policy(chosen.parse(config), setting(name, config, sizes, sigma=sigma))
    assert isinstance(found, TwoPhasePolicy)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"optimizer": "adam", "learning_rate": 0.01},
        {"optimizer": "adam", "learning_rate": 0.01, "weight_decay": 0.1},
    ],
)
@pytest.mark.parametrize("name", ["tp_topk", "tp_rand"])
def test_frozen_coordinates_stay_bit_identical(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    spec = digits_spec(tmp_path, name, {**FAST, **changes})
    spec.directory.mkdir(parents=True)
    warmup = spec.plan.phase("warmup").steps
    with run.LedgerWriter(spec.ledger_file, spec.plan) as ledger:
        state = run._Run(spec, ledger)
        frozen: list[torch.Tensor] = []
        for phase, step in list(state._steps_left()):
            if state.step == warmup:
                frozen = [parameter.detach().clone().flatten() for parameter in state.parameters]
            state._advance(phase, step)
            if state.step > warmup:
                assert state.geometry is not None and state.geometry.support is not None
                for parameter, before, active in zip(state.parameters, frozen, state.geometry.support, strict=True):
                    kept = torch.ones(before.numel(), dtype=torch.bool)
                    kept[active] = False
                    assert torch.equal(parameter.detach().flatten()[kept], before[kept])
                    assert active.numel() == 0 or not torch.equal(parameter.detach().flatten()[active], before[active])


def test_active_weights_move_by_what_was_released_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "learning_rate": 0.5}
    spec = digits_spec(tmp_path, "tp_topk", {**FAST, **plain})
    spec.directory.mkdir(parents=True)
    released: list[list[torch.Tensor]] = []
    original = run.private_gradient

    def recorded(*arguments: Any, **keywords: Any) -> list[torch.Tensor]:
        found = original(*arguments, **keywords)
        released.append([part.clone() for part in found])
        return found

    monkeypatch.setattr(run, "private_gradient", recorded)
    compared = 0
    with run.LedgerWriter(spec.ledger_file, spec.plan) as ledger:
        state = run._Run(spec, ledger)
        for phase, step in list(state._steps_left()):
            expected = [parameter.detach().clone().flatten() for parameter in state.parameters]
            state._advance(phase, step)
            if phase.name != "sparse":
                continue
            assert state.geometry is not None and state.geometry.support is not None
            for after, wanted, active, part in zip(
                state.parameters, expected, state.geometry.support, released[-1], strict=True
            ):
                wanted[active] -= 0.5 * part
                torch.testing.assert_close(after.detach().flatten(), wanted, rtol=0, atol=1e-6)
                compared += active.numel()
    assert compared > 0


def test_scores_have_the_mean_and_the_variance_of_lemma_5_2() -> None:
    """E[a_p] = G_p², Var(a_p) = (4 G_p² nu² + 2 nu⁴)/T1, by Monte Carlo over coordinates of one signal."""
    config = {"epochs": 20, "batch_size": 100, "warmup_fraction": 0.5}
    coordinates = 20_000
    for signal in (0.0, 0.05):
        found = policy(config, (coordinates,), sigma=5.0)
        nu = 5.0 / 100
        generator = torch.Generator().manual_seed(1)
        steps = hand_made_plan("tp_topk", config).phase("warmup").steps
        for step in range(steps):
            found.observe("warmup", step, [signal + nu * torch.randn(coordinates, generator=generator)])
        variance = (4 * signal**2 * nu**2 + 2 * nu**4) / steps
        assert float(found.scores.mean()) == pytest.approx(signal**2, abs=5 * math.sqrt(variance / coordinates))
        assert float(found.scores.var()) == pytest.approx(variance, rel=0.05)


def test_scores_are_a_function_of_what_was_released_only() -> None:
    """Replacing the private data while the released gradients stay changes nothing: the policy sees nothing else."""
    released = [[torch.randn(6), torch.randn(4)] for _ in range(5)]
    found = [policy(FAST, (6, 4)) for _ in range(2)]
    for each in found:
        for step, gradient in enumerate(released):
            each.observe("warmup", step, gradient)
    assert torch.equal(found[0].scores, found[1].scores)
    expected = torch.stack([torch.cat(g).double() for g in released]).square().mean(0) - (1.0 / 128) ** 2
    torch.testing.assert_close(found[0].scores, expected)


@pytest.mark.parametrize(("ratio", "d", "k"), [(0.4, 26_010, 10_404), (0.29, 100, 29), (1.0, 7, 7), (0.001, 10, 1)])
def test_support_size_is_the_floor_of_rho_d(ratio: float, d: int, k: int) -> None:
    assert support_size(ratio, d) == k


def test_rho_one_is_dense_dp_sgd_with_two_noise_multipliers(tmp_path: Path) -> None:
    specs = [digits_spec(tmp_path / n, n, {**FAST, "active_ratio": 1.0}) for n in ("tp_topk", "tp_rand")]
    found = []
    for spec in specs:
        list(execute(spec))
        found.append(torch.load(spec.directory / "weights.pt", weights_only=True))
    for name, value in found[0].items():  # an insecure seed pairs everything, and every coordinate is active
        assert torch.equal(value, found[1][name])
    assert [phase.name for phase in specs[0].plan.phases] == ["warmup", "sparse"]


@pytest.mark.parametrize(
    ("steps", "ratio", "expected"),
    [
        (10, 0.1, 0.52), (10, 0.2, 0.79), (10, 0.4, 0.99), (10, 0.6, 1.00),
        (100, 0.1, 0.47), (100, 0.2, 0.73), (100, 0.4, 0.98), (100, 0.6, 1.00),
        (1000, 0.1, 0.45), (1000, 0.2, 0.71), (1000, 0.4, 0.97), (1000, 0.6, 1.00),
    ],
)  # fmt: skip
def test_null_concentration_table(steps: int, ratio: float, expected: float) -> None:
    k = support_size(ratio, 20_000)
    assert scores.null_concentration(steps=steps, coordinates=20_000, k=k) == pytest.approx(expected, abs=0.02)


def test_concentration_of_pure_noise_is_its_null() -> None:
    """The simulated null and the diagnostic agree where there is no signal: kappa above k/d proves nothing."""
    config = {"epochs": 20, "batch_size": 100, "warmup_fraction": 0.5}
    d = 20_000
    found = policy(config, (d,))
    steps = hand_made_plan("tp_topk", config).phase("warmup").steps
    for step in range(steps):
        found.observe("warmup", step, [torch.randn(d) / 100])
    support = top_k(found.scores, support_size(0.1, d), (d,))
    null = scores.null_concentration(steps=steps, coordinates=d, k=support_size(0.1, d))
    assert scores.concentration(found.scores, support, (d,)) == pytest.approx(null, abs=0.02)
    assert null > 0.4


def test_linear_cooling_nests_its_supports_and_ends_at_rho() -> None:
    config = {**FAST, "epochs": 10, "ratio_schedule": "linear_cooling", "active_ratio": 0.3}
    found = policy(config, (600, 400))
    found.observe("warmup", 0, [torch.randn(600), torch.randn(400)])
    plan = hand_made_plan("tp_topk", config)
    per_epoch = 1437 // 128
    earlier: set[int] | None = None
    sizes = []
    for step in range(0, plan.phase("sparse").steps, per_epoch):
        support = found.geometry("sparse", step).support
        assert support is not None
        now = set(support[0].tolist()) | {600 + index for index in support[1].tolist()}
        assert earlier is None or now < earlier
        earlier, _ = now, sizes.append(len(now))
    assert sizes[0] == 1000 and sizes[-1] == 300


def test_supports_of_the_two_variants_have_one_size_and_differ() -> None:
    found = {}
    for name in ("tp_topk", "tp_rand"):
        each = policy(FAST, (600, 400), name=name)
        generator = torch.Generator().manual_seed(0)
        each.observe("warmup", 0, [torch.randn(600, generator=generator), torch.randn(400, generator=generator)])
        support = each.geometry("sparse", 0).support
        assert support is not None
        found[name] = support
    assert sum(map(len, found["tp_topk"])) == sum(map(len, found["tp_rand"])) == 400
    assert not torch.equal(found["tp_topk"][0], found["tp_rand"][0])


def test_one_step_cannot_be_split() -> None:
    chosen = method("tp_topk")
    with pytest.raises(InvalidValue, match=r"epochs = 1.*at least 2"):
        chosen.phases(chosen.parse({"epochs": 1, "batch_size": 1000}), population=1437)
