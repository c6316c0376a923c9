import dataclasses
import math

import pytest
from dp_accounting import gaussian_mechanism as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from raydp.errors import Infeasible, InvalidValue
from raydp.privacy import Budget, PhaseSpec, Plan, calibrate, gaussian

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


@pytest.mark.parametrize(("epsilon", "scale"), TABLE)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("steps", [1, 5])
def test_a_plan_on_all_data_takes_the_least_noise_and_knows_its_epsilon_exactly(epsilon, scale, adjacency, steps):
    budget = Budget(epsilon=epsilon, delta=1e-5, adjacency=adjacency)
    spec = PhaseSpec(name="embed", steps=steps, batch_size=128, population=128, clip_norm=1.0)
    plan = calibrate(budget=budget, phases=(spec,))
    sigma = plan.phases[0].noise_multiplier
    assert sigma == pytest.approx(math.sqrt(steps) * gaussian.noise_multiplier(budget), rel=1e-9)
    assert plan.epsilon.upper == pytest.approx(epsilon, rel=1e-9)
    assert plan.epsilon.lower == pytest.approx(epsilon, rel=1e-9)
    assert plan.epsilon.lower <= plan.epsilon.upper <= epsilon
    sensitivity = 2 if adjacency == "replace_one" else 1
    assert gaussian.delta(epsilon, sensitivity * math.sqrt(steps) / sigma) == pytest.approx(1e-5, rel=1e-6)
    assert plan.certificate["prv"].lower <= epsilon and plan.certificate["rdp"].upper >= epsilon * (1 - 1e-9)
    if steps == 1 and adjacency == "replace_one":
        assert sigma / 128 == pytest.approx(scale, rel=2e-3)


def test_a_gaussian_phase_takes_what_a_gaussian_phase_before_it_leaves():
    budget = Budget(epsilon=3, delta=1e-5)
    specs = (
        PhaseSpec(name="first", steps=2, batch_size=50, population=50, clip_norm=1.0, share=0.4),
        PhaseSpec(name="embed", steps=1, batch_size=50, population=50, clip_norm=1.0),
    )
    plan = calibrate(budget=budget, phases=specs)
    mu = math.sqrt(sum(phase.steps / phase.noise_multiplier**2 for phase in plan.phases))
    assert gaussian.delta(3, mu) == pytest.approx(1e-5, rel=1e-6)


class TestClassicalCalibration:
    SPEC = PhaseSpec(name="embed", steps=1, batch_size=128, population=128, clip_norm=1.0, calibration="classical")

    @pytest.mark.parametrize(("epsilon", "true"), CLASSICAL[:5])
    def test_a_plan_says_what_it_really_spends(self, epsilon, true):
        budget = Budget(epsilon=epsilon, delta=1e-5, adjacency="replace_one")
        plan = calibrate(budget=budget, phases=(self.SPEC,))
        sigma = plan.phases[0].noise_multiplier
        assert (sigma / 128) ** 2 == pytest.approx(8 * math.log(1.25e5) / (epsilon * 128) ** 2)
        assert plan.epsilon.upper == pytest.approx(true, rel=3e-3)
        assert not plan.exhausts and Plan.from_json(plan.to_json()) == plan

    @pytest.mark.parametrize(("epsilon", "true"), CLASSICAL[5:])
    def test_it_is_refused_where_it_adds_too_little_noise(self, epsilon, true):
        budget = Budget(epsilon=epsilon, delta=1e-5, adjacency="replace_one")
        with pytest.raises(Infeasible, match=rf"spends epsilon = {true}\d* and not {epsilon}"):
            calibrate(budget=budget, phases=(self.SPEC,))

    def test_it_is_for_one_phase_on_all_data(self):
        with pytest.raises(InvalidValue, match="on all data"):
            dataclasses.replace(self.SPEC, batch_size=64)
        first = PhaseSpec(name="train", steps=1, batch_size=64, population=128, clip_norm=1.0, share=0.5)
        with pytest.raises(InvalidValue, match="only phase"):
            calibrate(budget=Budget(epsilon=1, delta=1e-5), phases=(first, self.SPEC))


def test_the_same_noise_seen_by_either_adjacency():
    sigma = gaussian.noise_multiplier(Budget(epsilon=2, delta=1e-5, adjacency="replace_one"))
    seen = gaussian.by_adjacency(sigma, delta=1e-5)
    assert seen["replace_one"] == pytest.approx(2, rel=1e-9)
    halved = gaussian.noise_multiplier(Budget(epsilon=seen["add_remove"], delta=1e-5))
    assert halved == pytest.approx(sigma, rel=1e-9)
    assert gaussian.by_adjacency(sigma * math.sqrt(3), delta=1e-5, steps=3) == pytest.approx(seen)
