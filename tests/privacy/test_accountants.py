import math
import random
import warnings

import numpy as np
import pytest
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism
from scipy.stats import norm

from raydp.errors import InvalidValue, UnknownName
from raydp.privacy import ACCOUNTANTS, Mechanism, epsilon, gaussian
from raydp.privacy.accountants import _pmf, pld
from raydp.privacy.accountants.prv import MAX_GRID, _Truncated


def step(q: float, sigma: float, steps: int) -> Mechanism:
    return Mechanism(noise_multiplier=sigma, sample_rate=q, steps=steps)


CASES = [
    (step(4096 / 50000, 3.0, 2000), 1e-5),
    (step(4096 / 50000, 0.5, 2000), 1e-5),
    (step(0.02, 2.113, 5000), 1e-5),
    (step(0.01, 1.0, 1), 1e-6),
    (step(0.9, 5.0, 10), 1e-8),
    (step(128 / 1080, 1.08029925, 160), 1e-4),  # prv-accountant alone is 0.1 beside the truth here
]


@pytest.mark.parametrize(("mechanism", "delta"), CASES)
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_pld_agrees_with_dp_accounting_from_end_to_end(mechanism: Mechanism, delta: float, relation: str) -> None:
    ours = epsilon([mechanism], delta=delta, adjacency=relation)  # type: ignore[arg-type]
    neighbours = privacy_loss_distribution.NeighborRel
    library = privacy_loss_distribution.from_gaussian_mechanism(
        mechanism.noise_multiplier,
        sampling_prob=mechanism.sample_rate,
        value_discretization_interval=max(ours.upper / 20000, 5e-5),
        neighboring_relation=neighbours.REPLACE_ONE if relation == "replace_one" else neighbours.ADD_OR_REMOVE_ONE,
    ).self_compose(mechanism.steps)
    reported = library.get_epsilon_for_delta(delta)
    assert reported == pytest.approx(ours.upper, rel=5e-4)
    assert ours.lower <= reported
    assert ours.upper - ours.lower <= 6e-4 * ours.upper


@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
@pytest.mark.parametrize(("q", "sigma"), [(0.02, 2.0), (0.5, 0.7), (1e-3, 20.0), (1.0, 3.0)])
def test_vectorised_divergence_equals_the_librarys(direction: str, q: float, sigma: float) -> None:
    mine = _pmf._loss(sigma, q, direction, -50)
    theirs = GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=_pmf.DIRECTIONS[direction])
    low, high = _pmf._support(mine)
    points = np.linspace(low, high, 301)
    np.testing.assert_allclose(
        mine.get_delta_for_epsilon(points), theirs.get_delta_for_epsilon(points), rtol=1e-6, atol=1e-15
    )


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_connect_the_dots_equals_the_librarys(direction: str) -> None:
    pmf = _pmf.pessimistic(2.0, 0.02, direction, _pmf.Shape(1e-3, 10**6, -50.0))
    deltas = _pmf._loss(2.0, 0.02, direction, -50.0).get_delta_for_epsilon(np.arange(pmf.indices[0], 60) * 1e-3)
    reference = pld_pmf.create_pmf_pessimistic_connect_dots(1e-3, np.arange(pmf.indices[0], 60), deltas).to_dense_pmf()
    shared = (pmf.indices < 40) & (pmf.indices >= 0)
    np.testing.assert_allclose(
        pmf.probs[shared], reference._probs[pmf.indices[shared] - pmf.indices[0]], rtol=1e-6, atol=1e-13
    )


@pytest.mark.parametrize("direction", ["remove", "add", "replace"])
@pytest.mark.parametrize(("q", "sigma", "width"), [(0.02, 2.0, 2e-4), (1e-3, 0.5, 0.02), (0.7, 30.0, 1e-3)])
def test_one_step_is_enclosed_at_every_epsilon(direction: str, q: float, sigma: float, width: float) -> None:
    """delta(optimistic) <= delta(mechanism) <= delta(pessimistic): the property that survives composition."""
    shape = _pmf.Shape(width, 10**6, -50.0)
    truth = GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=_pmf.DIRECTIONS[direction])
    below, above = (make(sigma, q, direction, shape) for make in (_pmf.optimistic, _pmf.pessimistic))

    def divergence(pmf: _pmf.Pmf, at: float) -> float:
        return pmf.infinity + float(np.dot(pmf.probs, np.maximum(-np.expm1(at - pmf.losses), 0)))

    assert below.probs.sum() <= 1 + 1e-12
    low, high = _pmf._support(_pmf._loss(sigma, q, direction, -30.0))
    for at in np.linspace(low, high, 80):
        delta = truth.get_delta_for_epsilon(float(at))
        assert divergence(below, at) <= delta * (1 + 1e-6) + 1e-13
        assert divergence(above, at) >= delta * (1 - 1e-6) - 1e-13


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8, 1e-12])
@pytest.mark.parametrize("steps", [1, 30, 5000, 100_000])
def test_grid_encloses_the_exact_gaussian_composition_down_to_1e_12(delta: float, steps: int) -> None:
    """q = 1 forced through the grid: closed form as the oracle, small deltas where a plain FFT drowns in round-off."""
    for target in (0.3, 4.0):
        mu = gaussian.mu(target, delta)
        mechanism = step(1.0, math.sqrt(steps) / mu, steps)
        grid = pld.Grid(epsilon=target, delta=delta, steps=steps)
        upper = pld.bound([mechanism], delta=delta, direction="remove", grid=grid, upper=True)[0]
        lower = pld.bound([mechanism], delta=delta, direction="remove", grid=grid, upper=False)[0]
        assert target * (1 - 5e-4) <= lower <= target <= upper <= target * (1 + 5e-4)


def test_q_one_is_exact_and_composes_by_square_sums() -> None:
    for adjacency, sensitivity in (("add_remove", 1.0), ("replace_one", 2.0)):
        interval = epsilon([step(1, 4, 10), step(1, 3, 1)], delta=1e-5, adjacency=adjacency)  # type: ignore[arg-type]
        truth = gaussian.epsilon(1e-5, sensitivity * math.sqrt(10 / 16 + 1 / 9))
        assert interval.lower <= truth <= interval.upper
        assert interval.upper == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_peers_b12_empty_composition_spends_nothing(accountant: str) -> None:
    interval = epsilon([], delta=1e-5, accountant=accountant)
    assert (interval.lower, interval.estimate, interval.upper) == (0, 0, 0)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("mechanism", [step(1, 1e3, 1), step(1e-4, 50, 1), step(0.1, 1e4, 3)])
def test_peers_b6_epsilon_of_what_touched_data_is_not_zero(accountant: str, mechanism: Mechanism) -> None:
    assert epsilon([mechanism], delta=1e-9, accountant=accountant).upper > 0


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("mechanism", [step(1, 0.5, 1), step(1, 5, 100), step(0.01, 1, 1), step(0.3, 0.8, 2)])
def test_peers_b20_edges_q_one_and_one_step(accountant: str, mechanism: Mechanism) -> None:
    interval = epsilon([mechanism], delta=1e-5, accountant=accountant)
    truth = epsilon([mechanism], delta=1e-5)
    assert interval.lower <= truth.upper and truth.lower <= interval.upper


def test_peers_b5_rdp_uses_the_tight_conversion_and_equals_opacus() -> None:
    ours = epsilon([step(0.02, 2.0, 1000)], delta=1e-5, accountant="rdp").upper
    accountant = RDPAccountant()
    accountant.history = [(2.0, 0.02, 1000)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = accountant.get_epsilon(1e-5)
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_peers_b18_rdp_orders_reach_far_enough_for_small_epsilon() -> None:
    assert epsilon([step(0.02, 300.0, 1000)], delta=1e-5, accountant="rdp").upper < 0.05


def test_rdp_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epsilon([step(0.02, 2.0, 10)], delta=1e-5, accountant="rdp")


def test_peers_b13_b14_prv_refuses_a_large_grid_quickly_and_says_so() -> None:
    interval = epsilon([step(0.5, 5000.0, 100_000)], delta=1e-12, accountant="prv")
    assert interval.accountant == "pld"
    assert interval.fallback is not None and str(MAX_GRID) in interval.fallback


@pytest.mark.parametrize(("mechanism", "delta"), CASES)
def test_prv_interval_contains_the_pld_truth(mechanism: Mechanism, delta: float) -> None:
    prv, truth = (epsilon([mechanism], delta=delta, accountant=name) for name in ("prv", "pld"))
    assert prv.fallback is None
    assert prv.lower <= truth.lower and truth.upper <= prv.upper


@settings(max_examples=40, deadline=None)
@given(q=st.floats(1e-4, 0.99), sigma=st.floats(0.4, 20))
def test_the_mean_that_places_the_prv_grid_is_that_of_the_loss(q: float, sigma: float) -> None:
    """Against the plain integral of the loss over the outputs x, where nothing is steep."""
    variable = _Truncated(PoissonSubsampledGaussianMechanism(q, sigma), -60.0, 60.0)
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 400_001)
    density = q * norm.pdf(x, 1, sigma) + (1 - q) * norm.pdf(x, 0, sigma)
    wanted = np.trapezoid(density * np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2))), x)
    assert float(variable.mean()) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_order_does_not_matter_and_equal_phases_add_their_steps(accountant: str) -> None:
    one, two, three = step(0.02, 3.0, 100), step(0.05, 2.0, 50), step(1.0, 20.0, 1)
    delta = 1e-5
    forward = epsilon([one, two, three], delta=delta, accountant=accountant)
    assert epsilon([three, two, one], delta=delta, accountant=accountant) == forward
    joined = epsilon([step(0.02, 3.0, 150)], delta=delta, accountant=accountant)
    assert epsilon([one, step(0.02, 3.0, 50)], delta=delta, accountant=accountant) == joined


@pytest.mark.parametrize(("target", "sigma"), [(0.5, 25.75), (0.05, 211.6), (0.005, 1636)])
def test_peers_c3_asymptotic_oracle(target: float, sigma: float) -> None:
    """sigma -> q sqrt(T) / mu(eps, delta) for sigma >> 1."""
    q, steps = 4096 / 50000, 2000
    assert q * math.sqrt(steps) / gaussian.mu(target, 1e-5) == pytest.approx(sigma, rel=2e-3)
    interval = epsilon([step(q, sigma, steps)], delta=1e-5)
    assert interval.upper == pytest.approx(target, rel=1e-2)


def test_peers_b19_small_epsilon_stays_small_in_time_and_memory() -> None:
    assert epsilon([step(4096 / 50000, 2600.0, 2000)], delta=1e-5).upper < 0.01


def test_replace_one_costs_more_than_add_remove_and_no_more_than_twice_the_sensitivity() -> None:
    mechanism, doubled = step(0.02, 3.0, 500), step(0.02, 1.5, 500)
    removed = epsilon([mechanism], delta=1e-5).upper
    replaced = epsilon([mechanism], delta=1e-5, adjacency="replace_one")
    assert removed < replaced.lower
    assert replaced.upper < 1.05 * epsilon([doubled], delta=1e-5).upper
    for name in ("prv", "rdp"):
        other = epsilon([mechanism], delta=1e-5, adjacency="replace_one", accountant=name)
        assert other.lower <= replaced.upper and replaced.lower <= other.upper


@settings(max_examples=15, deadline=None)
@given(
    st.floats(-3, 0), st.floats(-0.3, 1.5), st.integers(1, 2000), st.floats(-10, -3), st.floats(1.05, 2), st.randoms()
)
def test_monotone(
    log_q: float, log_sigma: float, steps: int, log_delta: float, factor: float, chance: random.Random
) -> None:
    q, sigma, delta = 10**log_q, 10**log_sigma, 10**log_delta
    base = epsilon([step(q, sigma, steps)], delta=delta)
    assert base.lower <= base.estimate <= base.upper
    less = chance.choice(
        [
            epsilon([step(q, sigma * factor, steps)], delta=delta),
            epsilon([step(q / factor, sigma, steps)], delta=delta),
            epsilon([step(q, sigma, steps)], delta=delta * factor),
        ]
    )
    assert less.lower <= base.upper
    assert epsilon([step(q, sigma, steps), step(q, sigma, 1)], delta=delta).upper >= base.lower


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan, -1e-5])
def test_delta_out_of_range(delta: float) -> None:
    with pytest.raises(InvalidValue, match="delta"):
        epsilon([step(0.1, 1, 1)], delta=delta)


def test_unknown_accountant_lists_the_near_one() -> None:
    with pytest.raises(UnknownName, match="pld"):
        epsilon([step(0.1, 1, 1)], delta=1e-5, accountant="pdl")
