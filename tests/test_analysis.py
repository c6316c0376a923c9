"""Oracle capture, and the theory of arXiv 2606.04375 by its numbers and by simulation."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn

from raydp import analysis, data
from raydp.errors import InvalidValue
from raydp.geometry import Support, top_k
from raydp.methods.scores import random_ranking
from raydp.training.gradients import PerExampleGradients

SIZES = [30, 20]


def gradient() -> list[torch.Tensor]:
    return list(torch.linspace(-1, 2, 50).split(SIZES))


def test_capture_of_a_known_support() -> None:
    found = analysis.oracle_capture(
        [torch.tensor([3.0, 0.0]), torch.tensor([4.0, 0.0])],
        Support(indices=(torch.tensor([0]), torch.tensor([], dtype=torch.long))),
    )
    assert found.capture == pytest.approx(9 / 25)
    assert found.expected_random == 1 / 4
    assert found.best == pytest.approx(16 / 25)
    assert found.information == pytest.approx((9 / 25 - 1 / 4) / (16 / 25 - 1 / 4))


def test_the_best_support_reaches_the_best_and_all_coordinates_reach_one() -> None:
    best = analysis.oracle_capture(gradient(), top_k(torch.cat(gradient()).square(), 10, SIZES))
    assert best.capture == pytest.approx(best.best) and best.information == pytest.approx(1.0)
    everything = analysis.oracle_capture(gradient(), top_k(torch.zeros(50), 50, SIZES))
    assert everything.capture == everything.best == everything.expected_random == 1.0
    assert everything.information == 0.0


def test_a_random_support_captures_its_share_on_average() -> None:
    captures = [
        analysis.oracle_capture(gradient(), top_k(random_ranking(50, seed=seed), 10, SIZES)) for seed in range(600)
    ]
    mean = np.mean([found.capture for found in captures])
    error = np.std([found.capture for found in captures]) / np.sqrt(len(captures))
    assert abs(mean - captures[0].expected_random) < 4 * error


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_a_gradient_without_energy_is_refused(bad: float) -> None:
    with pytest.raises(InvalidValue, match="squared norm"):
        analysis.oracle_capture([torch.full((4,), bad)], Support(indices=(torch.tensor([0]),)))


def test_the_gradient_is_the_mean_over_all_examples_and_the_access_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = data.load("digits", limit=61)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with caplog.at_level(logging.WARNING, logger="raydp.data"):
        found = analysis.non_private_gradient(model, dataset, reason="a test of the oracle", batch_size=20)
    assert "NON-PRIVATE" in caplog.text and "a test of the oracle" in caplog.text
    examples = dataset.private.non_private("the reference of the test")
    rows = PerExampleGradients(model)(dataset.normalization.apply(examples.inputs), examples.targets)
    for part, row in zip(found, rows, strict=True):
        torch.testing.assert_close(part.float(), row.mean(dim=0).flatten(), rtol=1e-4, atol=1e-6)


def test_one_step_criterion_is_the_error_of_simulated_steps() -> None:
    parts, noise = gradient(), 0.7
    support = top_k(torch.cat(parts).square(), 20, SIZES)
    found = analysis.one_step_errors(parts, support, noise)
    generator = np.random.default_rng(0)
    truth = torch.cat(parts).numpy()
    mask = np.zeros(50, dtype=bool)
    mask[torch.cat([support.indices[0], support.indices[1] + 30]).numpy()] = True
    noisy = truth + noise * generator.standard_normal((20_000, 50))
    assert found.dense == pytest.approx(np.square(noisy - truth).sum(axis=1).mean(), rel=0.01)
    assert found.masked == pytest.approx(np.square(np.where(mask, noisy, 0) - truth).sum(axis=1).mean(), rel=0.01)
    outside = float(np.square(truth[~mask]).sum())
    assert found.restriction_helps == (outside < 30 * noise**2)
    assert not analysis.one_step_errors(parts, support, 1e-3).restriction_helps


def simulated_scores(gradient: float, noise: float, steps: int, generator: np.random.Generator) -> np.ndarray:
    released = gradient + noise * generator.standard_normal((40_000, steps))
    return np.square(released).mean(axis=1) - noise**2


def test_the_variance_of_scores_is_that_of_simulated_scores() -> None:
    scores = simulated_scores(0.8, 1.3, 20, np.random.default_rng(1))
    assert scores.mean() == pytest.approx(0.64, abs=4 * scores.std() / 200)
    assert analysis.score_variance(0.8, 1.3, 20) == pytest.approx(scores.var(), rel=0.03)


def test_misranking_has_the_published_numbers_and_bounds_the_simulation() -> None:
    """G = (0.8, 0.3), nu = 1, T1 = 50: true 0.066, Cantelli 0.31, Chebyshev 0.46."""
    found = analysis.misranking_bounds(stronger=0.8, weaker=0.3, noise_std=1.0, steps=50)
    assert found.chebyshev == pytest.approx(0.46, abs=0.005)
    assert found.cantelli == pytest.approx(0.31, abs=0.005)
    generator = np.random.default_rng(2)
    strong, weak = (simulated_scores(value, 1.0, 50, generator) for value in (0.8, 0.3))
    assert float(np.mean(strong <= weak)) == pytest.approx(0.066, abs=0.005)


def test_misranking_asks_for_an_order() -> None:
    with pytest.raises(InvalidValue, match="stronger"):
        analysis.misranking_bounds(stronger=0.3, weaker=-0.3, noise_std=1.0, steps=50)
