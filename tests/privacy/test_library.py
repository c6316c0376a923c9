"""The upper bound of a certificate is dp-accounting's own, and an interval says when it is not."""

from __future__ import annotations

import math

import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as distributions

from raydp.privacy import Budget, Mechanism, PhaseSpec, calibrate
from raydp.privacy.accountants import epsilon, library

TWO_PHASES = (
    PhaseSpec(name="warmup", steps=1500, batch_size=1000, population=50_000, clip_norm=1.0, share=0.3),
    PhaseSpec(name="sparse", steps=3500, batch_size=1000, population=50_000, clip_norm=1.0),
)
RELATIONS = {"add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE, "replace_one": NeighboringRelation.REPLACE_ONE}


@pytest.mark.parametrize("adjacency", RELATIONS)
@pytest.mark.parametrize("target", [0.5, 3.0, 8.0])
def test_a_plan_holds_its_budget_by_dp_accounting_alone(target: float, adjacency: str) -> None:
    """A reviewer who trusts the library and nothing of raydp, on a grid of their own, finds the budget kept."""
    budget = Budget(epsilon=target, delta=1e-5, adjacency=adjacency)  # type: ignore[arg-type]
    plan = calibrate(budget=budget, phases=TWO_PHASES)
    assert plan.epsilon.fallback is None
    assert target * (1 - 1e-4) <= plan.epsilon.upper <= target
    total = None
    for mechanism in plan.mechanisms:
        step = distributions.from_gaussian_mechanism(
            mechanism.noise_multiplier,
            sampling_prob=mechanism.sample_rate,
            value_discretization_interval=target / 30_000,
            neighboring_relation=RELATIONS[adjacency],
        )
        composed = step.self_compose(mechanism.steps)
        total = composed if total is None else total.compose(composed)
    assert total is not None
    assert total.get_epsilon_for_delta(1e-5) == pytest.approx(target, rel=3e-4)


def test_out_of_reach_of_the_library_the_interval_says_so_and_is_bounded() -> None:
    found = epsilon([Mechanism(noise_multiplier=2.0, sample_rate=0.02, steps=5000)], delta=1e-12)
    assert found.fallback is not None and "not accurate at delta = 1e-12" in found.fallback
    assert math.isfinite(found.upper) and found.upper > found.lower > 0


def test_a_grid_too_large_is_refused_before_it_is_built() -> None:
    with pytest.raises(library.OutOfReach, match="grid points"):
        library.upper_bound(
            [Mechanism(noise_multiplier=0.3, sample_rate=0.5, steps=10)], delta=1e-5, adjacency="add_remove", width=1e-7
        )


def test_the_library_is_not_asked_below_its_round_off() -> None:
    with pytest.raises(library.OutOfReach, match="not accurate"):
        library.upper_bound(
            [Mechanism(noise_multiplier=1.0, sample_rate=0.1, steps=10)],
            delta=1e-11,
            adjacency="add_remove",
            width=1e-3,
        )
