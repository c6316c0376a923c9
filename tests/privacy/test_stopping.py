"""The number of trials: its distributions against worked numbers, sums and a million draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydp.errors import InvalidValue
from raydp.privacy import stopping
from raydp.privacy.noise import NoiseKey
from raydp.privacy.stopping import NegativeBinomial, Poisson


@pytest.mark.parametrize(
    ("eta", "gamma", "mean", "one", "three", "median", "p95"),
    [
        (1, 0.1, 10.0, 0.1, 0.271, 7, 29),
        (1, 1 / 32, 32.0, 0.03125, 0.090851, 22, 95),
        (0, 0.1, 3.90865, 0.390865, 0.672288, 2, 13),
        (0, 0.01, 21.497577, 0.214976, 0.391621, 6, 97),
        (0.5, 0.05, 12.236068, 0.136803, 0.311441, 7, 41),
        (-0.5, 0.01, 5.5, 0.55, 0.753507, 1, 23),
        (2, 0.1, 18.181818, 0.018182, 0.072182, 15, 44),
    ],
)
def test_negative_binomial_has_the_worked_numbers(
    eta: float, gamma: float, mean: float, one: float, three: float, median: int, p95: int
) -> None:
    runs = NegativeBinomial(eta=eta, gamma=gamma)
    assert runs.mean == pytest.approx(mean, abs=1e-6)
    assert runs.pmf(1) == pytest.approx(one, abs=1e-6)
    assert sum(map(runs.pmf, (1, 2, 3))) == pytest.approx(three, abs=1e-6)
    assert (runs.quantile(0.5), runs.quantile(0.95)) == (median, p95)
    assert runs.pmf(0) == 0.0


@pytest.mark.parametrize(
    ("eta", "mean", "gamma"),
    [
        (0, 2, 0.284668137),
        (0, 10, 0.026918260),
        (0, 32, 0.006088535),
        (0, 100, 0.001542115),
        (0.5, 10, 0.0625),
        (1, 7, 1 / 7),
        (2, 2, 0.618033989),
        (2, 10, 0.170820393),
        (-0.5, 10, 0.002770083),
    ],
)
def test_gamma_is_solved_for_a_mean(eta: float, mean: float, gamma: float) -> None:
    assert NegativeBinomial.with_mean(eta=eta, mean=mean).gamma == pytest.approx(gamma, abs=1e-9)


@pytest.mark.parametrize(
    ("runs", "quantiles"),
    [
        (NegativeBinomial(eta=1, gamma=0.1), (7, 22, 29, 44)),
        (NegativeBinomial(eta=1, gamma=1 / 32), (22, 73, 95, 146)),
        (NegativeBinomial.with_mean(eta=0, mean=10), (4, 26, 41, 81)),
        (Poisson(mu=10), (10, 14, 15, 18)),
        (Poisson(mu=32), (32, 39, 42, 46)),
    ],
)
def test_quantiles(runs: stopping.Runs, quantiles: tuple[int, ...]) -> None:
    assert tuple(runs.quantile(level) for level in (0.5, 0.9, 0.95, 0.99)) == quantiles


def test_poisson_may_draw_nothing() -> None:
    assert Poisson(mu=10).pmf(0) == pytest.approx(4.54e-5, abs=1e-8)


@settings(deadline=None, max_examples=40)
@given(eta=st.floats(-0.5, 5), mean=st.floats(1.01, 100))
def test_probabilities_add_up_and_have_the_stated_mean(eta: float, mean: float) -> None:
    runs = NegativeBinomial.with_mean(eta=eta, mean=mean)
    counts = np.arange(1, runs._cumulative.size + 1, dtype=float)
    probabilities = np.exp(runs.log_pmf(counts))
    assert probabilities.sum() == pytest.approx(1, abs=1e-9)
    assert float(counts @ probabilities) == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(
    "runs", [NegativeBinomial(eta=1, gamma=0.1), NegativeBinomial.with_mean(eta=-0.5, mean=4), Poisson(mu=3)]
)
def test_draws_follow_the_distribution(runs: stopping.Runs) -> None:
    """20,000 keys: each count within five standard deviations, and the chi-squared sum as well."""
    root, total = NoiseKey.insecure(7), 20_000
    draws = np.array([runs.draw(root.derive(index)) for index in range(total)])
    counts = np.arange(runs.first, runs.quantile(0.999) + 1)
    expected = total * np.array([runs.pmf(int(count)) for count in counts])
    seen = np.array([(draws == count).sum() for count in counts])
    assert np.all(np.abs(seen - expected) <= 5 * np.sqrt(expected) + 1)
    large = expected >= 20
    statistic = (((seen - expected) ** 2) / expected)[large].sum()
    assert statistic < large.sum() + 5 * np.sqrt(2 * large.sum())
    assert draws.mean() == pytest.approx(runs.mean, rel=0.1)


def test_a_key_draws_the_same_number_again() -> None:
    key, runs = NoiseKey.generate(), NegativeBinomial(eta=1, gamma=0.01)
    assert runs.draw(key) == runs.draw(key)
    assert len({runs.draw(NoiseKey.generate()) for _ in range(20)}) > 1


@pytest.mark.parametrize("runs", [NegativeBinomial(eta=0.3, gamma=0.2), Poisson(mu=4.5)])
def test_json_round_trip(runs: stopping.Runs) -> None:
    assert stopping.from_json(runs.to_json()) == runs


@pytest.mark.parametrize(
    "values", [{"eta": -1, "gamma": 0.1}, {"eta": 1, "gamma": 0}, {"eta": 1, "gamma": 1.0}, {"eta": 1, "gamma": 1e-9}]
)
def test_values_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(InvalidValue):
        NegativeBinomial(**values)


@pytest.mark.parametrize("mean", [0.5, 1.0, float("nan"), 1e9])
def test_a_mean_out_of_reach_is_refused(mean: float) -> None:
    with pytest.raises(InvalidValue):
        NegativeBinomial.with_mean(eta=1, mean=mean)
