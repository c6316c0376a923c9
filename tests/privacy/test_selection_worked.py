"""Worked numbers of whole searches: composition, DP-SGD trials, budgets solved back, and cheap probes before a run."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq

from raydp.privacy import gaussian
from raydp.privacy.selection_bounds import ORDERS, profile_bound, renyi_bound, renyi_epsilon
from raydp.privacy.stopping import NegativeBinomial, Poisson, Runs

DELTA = 1e-5


def geometric(mean: float) -> Runs:
    return NegativeBinomial.with_mean(eta=1, mean=mean)


def logarithmic(mean: float) -> Runs:
    return NegativeBinomial.with_mean(eta=0, mean=mean)


def gaussian_curve(sigma: float, times: int = 1) -> np.ndarray:
    return times * np.array(ORDERS) / (2 * sigma**2)


def sampled_curve(*phases: tuple[float, int], q: float = 0.01) -> np.ndarray:
    """Of DP-SGD, by dp-accounting: (sigma, steps) of each phase."""
    accountant = RdpAccountant(np.array(ORDERS))
    for sigma, steps in phases:
        accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma)), steps)
    return np.array(accountant._rdp)  # it has no other way out


@pytest.mark.parametrize(
    ("sigma", "exact"),
    [
        (1, (4.377178, 6.572970, 17.856587, 39.382815)),
        (2, (1.993091, 2.943225, 7.511276, 15.456156)),
        (4, (0.926342, 1.356467, 3.341409, 6.572970)),
    ],
)
def test_composed_runs(sigma: float, exact: tuple[float, ...]) -> None:
    found = [gaussian.epsilon(DELTA, math.sqrt(times) / sigma) for times in (1, 2, 10, 32)]
    assert found == pytest.approx(exact, abs=1e-6)


def test_composed_runs_by_renyi_moments() -> None:
    found = [renyi_epsilon(gaussian_curve(2, times), DELTA)[0] for times in (1, 2, 10, 32, 100)]
    assert found == pytest.approx((2.165716, 3.188992, 8.079406, 16.512876, 35.081754), abs=1e-5)


@pytest.mark.parametrize(
    ("runs", "by", "wanted"),
    [
        (geometric, renyi_bound, (1.695278, 2.081368, 2.310766, 2.636674, 2.913689)),
        (logarithmic, renyi_bound, (1.524906, 1.773770, 1.916986, 2.117384, 2.287026)),
        (geometric, profile_bound, (1.192534, 1.442028, 1.625446, 1.920540, 2.192827)),
        (logarithmic, profile_bound, (1.178175, 1.378795, 1.512753, 1.713890, 1.890148)),
    ],
)
def test_searches_over_trials_of_epsilon_one(
    runs: Callable[[float], Runs], by: Callable[..., object], wanted: tuple[float, ...]
) -> None:
    sigma = 3.730631634813
    for mean, epsilon in zip((2, 5, 10, 32, 100), wanted, strict=True):
        if by is renyi_bound:
            found, tolerance = renyi_bound(gaussian_curve(sigma), runs(mean), DELTA), 1e-5
        else:
            found, tolerance = profile_bound(lambda at: gaussian.delta(at, 1 / sigma), runs(mean), DELTA), 1e-4
        assert found.epsilon == pytest.approx(epsilon, abs=tolerance)


def test_compositions_of_trials_of_epsilon_one() -> None:
    mu = gaussian.mu(1.0, DELTA)
    assert 1 / mu == pytest.approx(3.730631634813, abs=1e-9)
    found = [gaussian.epsilon(DELTA, math.sqrt(times) * mu) for times in (2, 5, 10, 32, 100, 8, 20)]
    wanted = (1.465170, 2.442084, 3.618592, 7.143371, 14.429270, 3.185796, 5.406928)
    assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("mean", "log", "geom", "poisson", "composed"),
    [
        (2, 2.785605, 3.014420, 2.581752, 2.866458),
        (10, 3.522633, 4.103271, 4.329498, 6.712757),
        (32, 3.934104, 4.721552, 8.489291, 13.242502),
    ],
)
def test_searches_over_dp_sgd(mean: int, log: float, geom: float, poisson: float, composed: float) -> None:
    base = sampled_curve((1.0, 1000))
    assert renyi_epsilon(base, DELTA)[0] == pytest.approx(2.101367, abs=1e-5)
    found = [renyi_bound(base, runs, DELTA).epsilon for runs in (logarithmic(mean), geometric(mean), Poisson(mu=mean))]
    assert [*found, renyi_epsilon(mean * base, DELTA)[0]] == pytest.approx((log, geom, poisson, composed), abs=1e-5)


def test_two_phases_in_one_trial() -> None:
    assert renyi_epsilon(sampled_curve((0.8, 300), (1.2, 700)), DELTA)[0] == pytest.approx(2.827508, abs=1e-5)


@pytest.mark.parametrize(
    ("runs", "sigma", "base"), [(logarithmic(10), 2.414577, 1.616108), (geometric(10), 2.878421, 1.330470)]
)
def test_a_trial_solved_for_a_total_by_renyi_moments(runs: Runs, sigma: float, base: float) -> None:
    found = brentq(lambda s: renyi_bound(gaussian_curve(s), runs, DELTA).epsilon - 3.0, 1.0, 10.0, xtol=1e-9)
    assert found == pytest.approx(sigma, abs=1e-5)
    assert gaussian.epsilon(DELTA, 1 / found) == pytest.approx(base, abs=1e-5)


@pytest.mark.parametrize(
    ("times", "sigma", "each"),
    [
        (1, 1.390593, 3.0),
        (10, 4.397443, 0.834989),
        (32, 7.866385, 0.442463),
        (9, 4.171780, 0.884602),  # eight probes and the final run
        (17, 5.733564, None),
        (33, 7.988351, None),
    ],
)
def test_a_run_solved_for_a_composed_total(times: int, sigma: float, each: float | None) -> None:
    found = math.sqrt(times) / gaussian.mu(3.0, DELTA)
    assert found == pytest.approx(sigma, abs=1e-6)
    if each is not None:
        assert gaussian.epsilon(DELTA, 1 / found) == pytest.approx(each, abs=1e-6)


@pytest.mark.parametrize(
    ("total", "probe", "left"), [(3.0, 0.1, 2.993031), (3.0, 0.3, 2.947541), (1.0, 0.1, 0.983729), (1.0, 0.3, 0.872353)]
)
def test_cheap_probes_leave_the_final_run_nearly_everything(total: float, probe: float, left: float) -> None:
    """Two trials of a small epsilon whose results are extrapolated (Panda et al.), then the run."""
    mu = math.sqrt(gaussian.mu(total, DELTA) ** 2 - 2 * gaussian.mu(probe, DELTA) ** 2)
    assert gaussian.epsilon(DELTA, mu) == pytest.approx(left, abs=1e-6)
    if (total, probe) == (3.0, 0.1):
        parts = (gaussian.mu(total, DELTA), gaussian.mu(probe, DELTA), 1 / mu)
        assert parts == pytest.approx((0.719117, 0.032521, 1.393446), abs=1e-6)


def test_theorem_6_is_below_the_profile_bound_from_some_five_runs_on() -> None:
    """Which is why a search over a Poisson number of trials is not as cheap as it could be: it rests on profiles."""

    def delta_of(at: float) -> float:
        return gaussian.delta(at, 0.5)

    def both(mean: float) -> tuple[float, float]:
        runs = Poisson(mu=mean)
        by_moments = renyi_bound(gaussian_curve(2), runs, DELTA, delta_of=delta_of).epsilon
        return by_moments, profile_bound(delta_of, runs, DELTA).epsilon

    assert [min(both(mean)) == both(mean)[0] for mean in (1, 2, 5, 10, 32)] == [False, False, True, True, True]
    geometric_profile = profile_bound(delta_of, geometric(10), DELTA).epsilon
    assert geometric_profile < min(both(10))  # and a geometric number is cheaper than either
