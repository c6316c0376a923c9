"""The audit proves what it says: below the true epsilon with the stated confidence, close to it with many samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from raydp.errors import InvalidValue
from raydp.privacy import gaussian
from raydp.privacy.audit import (
    clopper_pearson,
    epsilon_lower_bound,
    one_run_epsilon,
    one_run_lower_bound,
    one_run_p_value,
)


def gaussian_scores(mu: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(mu, 1, count), generator.normal(0, 1, count)


@pytest.mark.parametrize(("mu", "delta"), [(0.5, 1e-2), (1.0, 1e-3), (1.0, 1e-5), (2.0, 1e-3)])
def test_the_bound_on_a_gaussian_mechanism_is_below_the_truth_and_at_least_half_of_it(mu: float, delta: float) -> None:
    truth = gaussian.epsilon(delta, mu)
    inside, outside = gaussian_scores(mu, 1_000_000, seed=1)
    found = epsilon_lower_bound(inside, outside, delta=delta)
    assert truth / 2 <= found.epsilon_lower <= truth


def test_the_confidence_is_kept_on_randomised_response() -> None:
    """Two scores only, so there is no slack in the choice of a threshold: the bound is over the truth in <= 5 %."""
    epsilon = 1.0
    keep = math.exp(epsilon) / (1 + math.exp(epsilon))
    generator = np.random.default_rng(0)
    over = 0
    for repetition in range(400):
        inside = (generator.random(400) < keep).astype(float)
        outside = (generator.random(400) >= keep).astype(float)
        bound = epsilon_lower_bound(inside, outside, delta=0.0, seed=repetition).epsilon_lower
        over += bound > epsilon
    assert over <= binom.ppf(0.999, 400, 0.05)


def test_a_mechanism_that_leaks_tenfold_is_caught() -> None:
    claim = gaussian.epsilon(1e-5, 0.5)
    inside, outside = gaussian_scores(5.0, 2000, seed=2)
    assert epsilon_lower_bound(inside, outside, delta=1e-5).epsilon_lower > claim


def test_equal_worlds_prove_nothing() -> None:
    inside, outside = gaussian_scores(0.0, 4000, seed=3)
    assert epsilon_lower_bound(inside, outside, delta=1e-5).epsilon_lower < 0.1


def test_the_second_inequality_is_used_where_it_says_more() -> None:
    """A mechanism that sometimes proves absence, and never presence: only true negatives can tell."""
    generator = np.random.default_rng(4)
    inside = np.ones(4000)
    outside = (generator.random(4000) < 0.8).astype(float)
    found = epsilon_lower_bound(inside, outside, delta=0.0)
    assert found.inverted and found.epsilon_lower > math.log(0.15 / 0.01)
    assert found.true_rate == pytest.approx(0.2, abs=0.03) and found.false_rate == 0.0


@pytest.mark.parametrize("trials", [1, 10, 137])
def test_clopper_pearson_covers(trials: int) -> None:
    """For every probability, the chance that a limit is on the wrong side of it is at most the tail."""
    lower, upper = clopper_pearson(np.arange(trials + 1), trials, 0.025)
    for probability in np.linspace(0.01, 0.99, 25):
        chances = binom.pmf(np.arange(trials + 1), trials, probability)
        assert chances[lower > probability].sum() <= 0.025 + 1e-12
        assert chances[upper < probability].sum() <= 0.025 + 1e-12


def test_clopper_pearson_equals_the_rule_of_three_and_its_mirror() -> None:
    lower, upper = clopper_pearson(np.array([0, 100]), 100, 0.05)
    assert lower[0] == 0 and upper[1] == 1
    assert upper[0] == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-9)
    assert lower[1] == pytest.approx(0.05 ** (1 / 100), rel=1e-9)


@pytest.mark.parametrize(
    ("inside", "delta", "confidence", "field"),
    [
        ([1.0], 0.0, 0.95, "with_canary"),
        ([1.0, float("nan")], 0.0, 0.95, "with_canary"),
        ([1.0, 2.0], 1.0, 0.95, "delta"),
        ([1.0, 2.0], 0.0, 1.0, "confidence"),
    ],
)
def test_bad_input_is_refused_by_name(inside: list[float], delta: float, confidence: float, field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        epsilon_lower_bound(inside, [0.0, 1.0], delta=delta, confidence=confidence)


class TestOneRun:
    def test_without_delta_it_is_a_binomial_test(self) -> None:
        """e^ε/(1 + e^ε) is the accuracy of randomised response, for which the theorem is an equality."""
        epsilon = 1.0
        right = math.exp(epsilon) / (1 + math.exp(epsilon))
        for correct in (0, 50, 73, 100):
            found = one_run_p_value(correct, 100, 200, epsilon=epsilon, delta=0.0)
            assert found == pytest.approx(binom.sf(correct - 1, 100, right), rel=1e-9, abs=1e-300)

    def test_delta_adds_what_the_theorem_says(self) -> None:
        """Against the sum written out: m·delta·max_i (2/i)·P[v - i <= W < v]."""
        correct, guesses, canaries, delta = 40, 50, 120, 1e-4
        right = 1 / (1 + math.exp(-0.7))
        chances = [
            sum(binom.pmf(w, guesses, right) for w in range(correct - i, correct)) for i in range(1, correct + 1)
        ]
        wanted = binom.sf(correct - 1, guesses, right)
        wanted += canaries * delta * max(2 / i * chance for i, chance in enumerate(chances, start=1))
        assert one_run_p_value(correct, guesses, canaries, epsilon=0.7, delta=delta) == pytest.approx(wanted, rel=1e-9)

    def test_the_confidence_is_kept_on_randomised_response(self) -> None:
        """Each coin answered truly with probability e^ε/(1 + e^ε): the bound is over ε in at most 5 % of the runs."""
        epsilon, generator, over = 1.0, np.random.default_rng(0), 0
        for _ in range(60):
            included = generator.random(200) < 0.5
            told = np.where(generator.random(200) < 1 / (1 + math.exp(-epsilon)), included, ~included)
            scores = told + 1e-3 * generator.random(200)
            over += one_run_lower_bound(scores, included, delta=0.0).epsilon_lower > epsilon
        assert over <= binom.ppf(0.999, 60, 0.05)

    def test_what_is_told_is_found_and_what_is_not_is_not(self) -> None:
        generator = np.random.default_rng(1)
        included = generator.random(1000) < 0.5
        blind = one_run_lower_bound(generator.random(1000), included, delta=1e-5)
        assert blind.epsilon_lower == 0.0
        told = one_run_lower_bound(included + 0.1 * generator.random(1000), included, delta=1e-5)
        assert told.correct == told.guesses and 4 < told.epsilon_lower <= told.reach
        half = one_run_lower_bound(included + generator.normal(0, 1, 1000), included, delta=1e-5)
        assert 0 < half.epsilon_lower < told.epsilon_lower

    def test_a_larger_delta_excuses_more(self) -> None:
        found = [one_run_epsilon(95, 100, 200, delta=delta, confidence=0.95) for delta in (0.0, 1e-5, 1e-3)]
        assert found == sorted(found, reverse=True)
        assert one_run_p_value(95, 100, 200, epsilon=found[1], delta=1e-5) <= 0.05

    @pytest.mark.parametrize(
        ("scores", "included", "field"),
        [([1.0], [True], "scores"), ([1.0, 2.0], [True], "scores"), ([1.0, math.nan], [True, False], "scores")],
    )
    def test_bad_input_is_refused_by_name(self, scores: list[float], included: list[bool], field: str) -> None:
        with pytest.raises(InvalidValue, match=field):
            one_run_lower_bound(scores, included, delta=0.0)
