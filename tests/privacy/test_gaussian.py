import math

import pytest
from dp_accounting import gaussian_mechanism as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from raydp.errors import InvalidValue
from raydp.privacy import Budget, gaussian

# N = 128, C = 1, delta = 1e-5, replace-one sensitivity of the mean 1/64.
TABLE = [(0.5, 0.1099), (1, 0.0583), (2, 0.0312), (4, 0.0169), (8, 0.00938), (16, 0.00538), (32, 0.00320)]
CLASSICAL = [(0.5, 0.353), (1, 0.751), (2, 1.61), (4, 3.51), (8, 7.91), (16, 18.9), (32, 49.2)]


@pytest.mark.parametrize(("epsilon", "scale"), TABLE)
def test_methods_3_3_analytic(epsilon: float, scale: float) -> None:
    assert 1 / 64 / gaussian.mu(epsilon, 1e-5) == pytest.approx(scale, rel=2e-3)
    budget = Budget(epsilon=epsilon, delta=1e-5, adjacency="replace_one")
    assert gaussian.noise_multiplier(budget) / 128 == pytest.approx(scale, rel=2e-3)


@pytest.mark.parametrize(("epsilon", "true"), CLASSICAL)
def test_methods_3_3_classical_noise_violates_its_claim_for_large_epsilon(epsilon: float, true: float) -> None:
    mu = epsilon / math.sqrt(2 * math.log(1.25 / 1e-5))
    assert gaussian.epsilon(1e-5, mu) == pytest.approx(true, rel=3e-3)
    assert (gaussian.epsilon(1e-5, mu) > epsilon) == (epsilon > 8.42)


@pytest.mark.parametrize("epsilon", [1e-3, 0.01, 1.0, 64.0, 700.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 1e-3])
def test_delta_at_the_returned_mu_is_delta(epsilon: float, delta: float) -> None:
    mu = gaussian.mu(epsilon, delta)
    assert gaussian.delta(epsilon, mu) == pytest.approx(delta, rel=1e-6)
    assert gaussian.delta(epsilon, mu) <= delta
    assert gaussian.epsilon(delta, mu) == pytest.approx(epsilon, rel=1e-8)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (1.0, 1e-5), (8.0, 1e-5)])
def test_agrees_with_dp_accounting(epsilon: float, delta: float) -> None:
    assert 1 / gaussian.mu(epsilon, delta) == pytest.approx(reference.get_sigma_gaussian(epsilon, delta), rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.01, 100), st.floats(1e-12, 1e-3), st.floats(1.001, 3))
def test_monotone(epsilon: float, delta: float, factor: float) -> None:
    mu = gaussian.mu(epsilon, delta)
    assert gaussian.mu(epsilon * factor, delta) > mu
    assert gaussian.mu(epsilon, delta * factor) > mu


def test_replace_one_needs_twice_the_noise() -> None:
    single = gaussian.noise_multiplier(Budget(epsilon=2, delta=1e-5))
    assert gaussian.noise_multiplier(Budget(epsilon=2, delta=1e-5, adjacency="replace_one")) == 2 * single


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_peers_b14_refuses_values_out_of_range(value: float) -> None:
    with pytest.raises(InvalidValue):
        gaussian.mu(value, 1e-5)
    with pytest.raises(InvalidValue):
        gaussian.epsilon(1e-5, value)
    with pytest.raises(InvalidValue):
        gaussian.mu(1.0, value)
