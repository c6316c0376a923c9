"""The cost of a selection against worked numbers, dp-accounting, and exact lower bounds of one instance."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.special import ndtr

from raydp.errors import InvalidValue
from raydp.privacy import gaussian
from raydp.privacy.selection_bounds import (
    ORDERS,
    best,
    point_bound,
    profile_bound,
    pure_epsilon,
    renyi_bound,
    renyi_curve,
    renyi_epsilon,
    subsample_curve,
)
from raydp.privacy.stopping import NegativeBinomial, Poisson, Runs

DELTA = 1e-5
MEANS = (2, 10, 32, 100)


def curve(sigma: float) -> list[float]:
    return [order / (2 * sigma**2) for order in ORDERS]


def profile(sigma: float) -> Callable[[float], float]:
    return lambda epsilon: gaussian.delta(epsilon, 1 / sigma)


def runs_of(shape: float | None, mean: float) -> Runs:
    return Poisson(mu=mean) if shape is None else NegativeBinomial.with_mean(eta=shape, mean=mean)


@pytest.mark.parametrize(("sigma", "epsilon", "order"), [(1, 4.728507, 5.4), (2, 2.165716, 9.6), (4, 1.012551, 18)])
def test_epsilon_of_one_run(sigma: float, epsilon: float, order: float) -> None:
    assert renyi_epsilon(curve(sigma), DELTA) == (pytest.approx(epsilon, abs=1e-6), order)


@pytest.mark.parametrize(
    ("sigma", "shape", "wanted"),
    [
        (1, 0, (5.967539, 7.410410, 8.147549, 8.769534)),
        (1, 1, (6.237515, 8.514478, 9.719328, 10.741147)),
        (1, 2, (6.344665, 9.361765, 11.090790, 12.583300)),
        (1, None, (5.877217, 10.210838, 21.219047, 49.583557)),
        (2, 0, (2.912532, 3.638538, 4.009852, 4.325960)),
        (2, 1, (3.172520, 4.315072, 4.920591, 5.436602)),
        (2, 0.5, (3.058848, 3.997721, 4.480586, 4.889334)),
        (2, None, (2.742991, 4.908152, 10.154406, 20.001461)),
        (4, 0, (1.418383, 1.784136, 1.971578, 2.129860)),
        (4, 1, (1.579530, 2.153654, 2.458057, 2.716167)),
    ],
)
def test_renyi_bound(sigma: float, shape: float | None, wanted: tuple[float, ...]) -> None:
    found = [renyi_bound(curve(sigma), runs_of(shape, mean), DELTA).epsilon for mean in MEANS]
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("sigma", "shape", "wanted"),
    [
        (1, 0, (5.014610, 6.213104, 6.935136, 7.569039)),
        (1, 1, (5.066157, 6.617520, 7.676808, 8.655636)),
        (2, 0, (2.321315, 2.937608, 3.308191, 3.633049)),
        (2, 1, (2.347901, 3.146259, 3.690806, 4.193469)),
        (2, None, (2.469545, 4.228211, 8.693307)),
        (4, 0, (1.092706, 1.405117, 1.592925, 1.757500)),
        (4, 1, (1.106104, 1.510262, 1.785735, 2.039906)),
    ],
)
def test_profile_bound(sigma: float, shape: float | None, wanted: tuple[float, ...]) -> None:
    found = [profile_bound(profile(sigma), runs_of(shape, m), DELTA).epsilon for m in MEANS[: len(wanted)]]
    assert found == pytest.approx(wanted, abs=1e-4)


def test_parts_of_the_profile_bound() -> None:
    found = profile_bound(profile(2), NegativeBinomial(eta=1, gamma=0.1), DELTA)
    assert found.parts == {"e1": pytest.approx(2.254085, abs=1e-6), "e_hat": pytest.approx(0.446087, abs=1e-6)}


def test_renyi_curve_by_hand() -> None:
    """sigma 2, order 8 (e = 1), geometric with mean 10, hat order 8: 1 + 2 (.875 + ln 10 / 8) + ln 10 / 7."""
    by_hand = 1 + 2 * (0.875 + math.log(10) / 8) + math.log(10) / 7
    assert by_hand == pytest.approx(3.654587, abs=1e-6)
    found = renyi_curve(curve(2), NegativeBinomial(eta=1, gamma=0.1))[ORDERS.index(8.0)]
    assert found == pytest.approx(
        min(1 + 2 * ((1 - 1 / hat) * hat / 8 + math.log(10) / hat) + math.log(10) / 7 for hat in ORDERS), abs=1e-9
    )
    assert found < by_hand


@pytest.mark.parametrize("sigma", [1.0, 3.0])
@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 2.0, None])
@pytest.mark.parametrize("mean", [2.0, 17.0])
def test_agreement_with_dp_accounting(sigma: float, shape: float | None, mean: float) -> None:
    orders = np.array(ORDERS)
    accountant = RdpAccountant(orders)
    event = dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(sigma), mean, np.inf if shape is None else shape)
    accountant.compose(event)
    found = renyi_bound(curve(sigma), runs_of(shape, mean), DELTA).epsilon
    assert found == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


def instance(sigma: float, runs: Runs) -> float:
    """Exact epsilon of one search: the score is the Gaussian's output itself, on a grid fine enough to integrate."""
    y, step = np.linspace(-12 * sigma, 12 * sigma + 1, 400_001, retstep=True)

    def density(shift: float) -> np.ndarray:
        below, here = (
            ndtr((y - shift) / sigma),
            np.exp(-((y - shift) ** 2) / 2 / sigma**2) / sigma / math.sqrt(2 * math.pi),
        )
        if isinstance(runs, Poisson):
            return runs.mu * np.exp(runs.mu * (below - 1)) * here
        slope = (1 - (1 - runs.gamma) * below) ** -(runs.eta + 1)
        return runs.mean * runs.gamma ** (runs.eta + 1) * slope * here

    p, q = density(1.0), density(0.0)
    assert p.sum() * step == pytest.approx(1 - (runs.pmf(0)), abs=1e-6)

    def log_delta(epsilon: float) -> float:
        both = (np.maximum(p - math.exp(epsilon) * q, 0).sum(), np.maximum(q - math.exp(epsilon) * p, 0).sum())
        return math.log(max(both) * step + 1e-300) - math.log(DELTA)

    return float(brentq(log_delta, 0.0, 40.0, xtol=1e-8))


@pytest.mark.parametrize(
    ("sigma", "shape", "mean", "epsilon"),
    [(2, 1, 10, 2.253991), (2, 0, 10, 2.253896), (1, 1, 10, 4.886492), (4, 1, 32, 1.123133), (2, None, 10, 2.254032)],
)
def test_instance_below_profile_bound_below_renyi_bound(
    sigma: float, shape: float | None, mean: float, epsilon: float
) -> None:
    runs = runs_of(shape, mean)
    exact = instance(sigma, runs)
    assert exact == pytest.approx(epsilon, abs=1e-4)
    by_profile = profile_bound(profile(sigma), runs, DELTA)
    by_renyi = renyi_bound(curve(sigma), runs, DELTA)
    assert exact < by_profile.epsilon < by_renyi.epsilon
    assert best([by_renyi, by_profile]) is by_profile


@pytest.mark.parametrize(
    ("mean", "by_profile", "by_renyi", "shape"),
    [
        (2, 1.192534, 1.695278, 1),
        (5, 1.442028, 2.081368, 1),
        (10, 1.625446, 2.310766, 1),
        (32, 1.920540, 2.636674, 1),
        (100, 2.192827, 2.913689, 1),
        (10, 1.512753, 1.916986, 0),
        (32, 1.713890, 2.117384, 0),
    ],
)
def test_search_over_runs_of_epsilon_one(mean: float, by_profile: float, by_renyi: float, shape: float) -> None:
    sigma, runs = 3.730631634813, runs_of(shape, mean)
    assert profile_bound(profile(sigma), runs, DELTA).epsilon == pytest.approx(by_profile, abs=1e-4)
    assert renyi_bound(curve(sigma), runs, DELTA).epsilon == pytest.approx(by_renyi, abs=1e-5)


@pytest.mark.parametrize(("epsilon", "wanted"), [(1, 2.591346), (2, 4.920375), (4, 8.272459), (8, 12.598539)])
def test_bound_from_one_point(epsilon: float, wanted: float) -> None:
    found = point_bound(epsilon, 1e-6, NegativeBinomial(eta=1, gamma=0.1))
    assert found.epsilon == pytest.approx(wanted, abs=1e-4)
    assert found.parts["delta"] == pytest.approx(1e-5)


def test_bound_from_one_point_of_thirty_two_runs() -> None:
    found = point_bound(1.0, 3.125e-7, NegativeBinomial(eta=1, gamma=1 / 32))
    assert found.epsilon == pytest.approx(2.859801, abs=1e-4)


def test_one_point_says_less_than_the_profile() -> None:
    runs = NegativeBinomial(eta=1, gamma=0.1)
    epsilon = gaussian.epsilon(1e-6, 0.5)
    assert point_bound(epsilon, 1e-6, runs).epsilon > profile_bound(profile(2), runs, 1e-5).epsilon


def test_pure_runs_cost_three_epsilon_under_a_geometric_number() -> None:
    assert pure_epsilon(0.7, NegativeBinomial(eta=1, gamma=0.2)) == pytest.approx(2.1)


def test_tuning_on_a_subsample() -> None:
    final = curve(2)
    tuning = renyi_curve(final, NegativeBinomial(eta=1, gamma=0.1))
    alone = renyi_epsilon(tuning, DELTA)[0]
    rest = renyi_epsilon(subsample_curve(tuning, final, 0.1, rest=True), DELTA)[0]
    everything = renyi_epsilon(subsample_curve(tuning, final, 0.1, rest=False), DELTA)[0]
    same = renyi_epsilon(tuning + np.array(final), DELTA)[0]
    assert alone == pytest.approx(4.315072, abs=1e-5)
    assert rest == pytest.approx(4.061685, abs=1e-5)
    assert same == pytest.approx(5.438331, abs=1e-5)
    assert rest < everything < same


def test_composition_beats_random_stopping_of_two_runs_by_renyi() -> None:
    two = gaussian.epsilon(DELTA, math.sqrt(2) / 3.730631634813)
    assert two == pytest.approx(1.465170, abs=1e-5)
    assert two < renyi_bound(curve(3.730631634813), runs_of(0, 2), DELTA).epsilon


def test_a_curve_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidValue):
        renyi_curve([1.0], NegativeBinomial(eta=1, gamma=0.1))
