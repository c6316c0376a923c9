"""What tuning on a subsample costs: against exact integrals of one instance, and against dp-accounting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld

from raydp.privacy import accountants, gaussian
from raydp.privacy.budget import Budget
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.selection import Subsample
from raydp.privacy.selection_bounds import ORDERS, least, renyi_epsilon, subsample_curve
from raydp.privacy.selection_subsample import AMPLIFIED, BY_PARTS, subsample_bound

BUDGET = Budget(epsilon=1.0, delta=1e-5)


def one_shot(sigma: float, times: int = 1) -> tuple[Mechanism, ...]:
    return (Mechanism(noise_multiplier=sigma, sample_rate=1.0, steps=times),)


def exact(tuning: float, final: float, q: float, delta: float, *, rest: bool) -> float:
    """Epsilon of the instance in which tuning and final run release one sum each, by integration over the plane."""
    t, f = (np.linspace(-9 * sigma, 9 * sigma + 1, 1501) for sigma in (tuning, final))
    cell = (t[1] - t[0]) * (f[1] - f[0])

    def density(at: np.ndarray, sigma: float, shift: float) -> np.ndarray:
        return np.exp(-((at - shift) ** 2) / 2 / sigma**2) / sigma / math.sqrt(2 * math.pi)

    def plane(of_t: float, of_f: float) -> np.ndarray:
        return np.outer(density(t, tuning, of_t), density(f, final, of_f))

    with_x = q * plane(1, 0 if rest else 1) + (1 - q) * plane(0, 1)
    without = plane(0, 0)
    assert with_x.sum() * cell == pytest.approx(1, abs=1e-6)

    def excess(epsilon: float) -> float:
        factor = math.exp(epsilon)
        both = (np.maximum(p - factor * r, 0).sum() * cell for p, r in ((with_x, without), (without, with_x)))
        return max(both) - delta

    return least(excess)


@pytest.mark.parametrize("final", ["rest", "all"])
@pytest.mark.parametrize(("tuning", "last", "q"), [(1.0, 2.0, 0.1), (0.7, 1.5, 0.02), (2.0, 2.0, 0.5), (3.0, 1.0, 0.3)])
def test_no_instance_exceeds_the_bound(tuning: float, last: float, q: float, final: str) -> None:
    rule = Subsample(fraction=q, final=final)
    bound = subsample_bound(one_shot(tuning), one_shot(last), rule, BUDGET)
    found = exact(tuning, last, q, BUDGET.delta, rest=final == "rest")
    whole = accountants.epsilon(
        [*one_shot(tuning), *one_shot(last)], delta=BUDGET.delta, adjacency="add_remove", accountant="pld"
    )
    assert found <= bound.epsilon * (1 + 1e-6)
    assert found >= 0.5 * bound.epsilon  # the bound says something about the instance
    assert bound.epsilon <= whole.upper * (1 + 1e-6)


@pytest.mark.parametrize(
    ("tuning", "last", "q", "final", "theorem"),
    [
        ((2.0, 20), 2.0, 0.5, "rest", BY_PARTS),
        ((2.0, 20), 4.0, 0.02, "rest", AMPLIFIED),
        ((8.0, 1), 8.0, 0.01, "all", AMPLIFIED),
        ((2.0, 1), 2.0, 0.9, "all", BY_PARTS),
    ],
)
def test_the_smaller_bound_is_named_and_below_the_renyi_bound(
    tuning: tuple[float, int], last: float, q: float, final: str, theorem: str
) -> None:
    found = subsample_bound(one_shot(*tuning), one_shot(last), Subsample(fraction=q, final=final), BUDGET)
    assert found.theorem == theorem
    curves = [[steps * order / 2 / sigma**2 for order in ORDERS] for sigma, steps in (tuning, (last, 1))]
    for rest in {final == "rest", False}:  # on the rest, the curve of the adaptive composition holds as well
        assert found.epsilon < renyi_epsilon(subsample_curve(curves[0], curves[1], q, rest=rest), BUDGET.delta)[0]


def test_by_hand_where_both_are_gaussian() -> None:
    """q = 1/2, sigma 2 each, on the rest: the mixture of two equal profiles is that profile."""
    bound = subsample_bound(one_shot(2.0), one_shot(2.0), Subsample(fraction=0.5), BUDGET)
    assert bound.epsilon <= gaussian.epsilon(1e-5, 0.5) * (1 + 1e-9)
    assert bound.theorem == BY_PARTS and bound.epsilon == pytest.approx(1.993091, abs=1e-5)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("final", ["rest", "all"])
def test_delta_by_parts_is_that_of_dp_accounting(adjacency: str, final: str) -> None:
    budget = Budget(epsilon=1.0, delta=1e-5, adjacency=adjacency)  # type: ignore[arg-type]
    tuning = Mechanism(noise_multiplier=1.0, sample_rate=0.02, steps=800)
    last = Mechanism(noise_multiplier=0.9, sample_rate=0.02, steps=100)
    bound = subsample_bound([tuning], [last], Subsample(fraction=0.7, final=final), budget)
    assert bound.theorem == BY_PARTS
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE if adjacency == "add_remove" else NeighboringRelation.REPLACE_ONE

    def profile(*mechanisms: Mechanism) -> float:
        whole = None
        for item in mechanisms:
            one = pld.from_gaussian_mechanism(
                item.noise_multiplier,
                sampling_prob=item.sample_rate,
                neighboring_relation=relation,
                value_discretization_interval=1e-4,
            ).self_compose(item.steps)
            whole = one if whole is None else whole.compose(one)
        assert whole is not None
        return float(whole.get_delta_for_epsilon(bound.epsilon))

    inside = profile(tuning) if final == "rest" else profile(tuning, last)
    assert 0.7 * inside + 0.3 * profile(last) == pytest.approx(1e-5, rel=0.02)


def test_more_trials_a_larger_fraction_and_a_smaller_delta_cost_more() -> None:
    def cost(times: int, q: float, delta: float = 1e-5) -> float:
        budget = Budget(epsilon=1.0, delta=delta)
        return subsample_bound(one_shot(2.0, times), one_shot(2.0), Subsample(fraction=q), budget).epsilon

    assert cost(5, 0.1) < cost(6, 0.1) < cost(6, 0.2) < cost(6, 0.2, 1e-6)


def test_before_anything_ran_and_before_the_final_run() -> None:
    rule = Subsample(fraction=0.1)
    assert subsample_bound([], [], rule, BUDGET).epsilon == 0.0
    alone = subsample_bound(one_shot(1.0), [], rule, BUDGET).epsilon
    assert 0 < alone < gaussian.epsilon(1e-5, 1.0)
    assert alone < subsample_bound(one_shot(1.0), one_shot(2.0), rule, BUDGET).epsilon
