"""The budget of a trial under random stopping: solved back to the budget of the released result."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from raydp.errors import Infeasible, InvalidValue
from raydp.privacy import gaussian
from raydp.privacy.budget import Budget
from raydp.privacy.calibration import SLACK, calibrate, delta_at
from raydp.privacy.mechanism import PhaseSpec
from raydp.privacy.plan import Plan
from raydp.privacy.selection import RandomStopping, parse
from raydp.privacy.selection_bounds import Profile, profile_bound
from raydp.privacy.selection_budget import refined, released, trial_budget

TARGET = Budget(epsilon=3.0, delta=1e-5)
RULES = ["geometric:10", "logarithmic:10", "negative_binomial:-0.5:5", "poisson:5"]


def stopping(text: str) -> RandomStopping:
    rule = parse(text)
    assert isinstance(rule, RandomStopping)
    return rule


def train(**changes: int) -> PhaseSpec:
    values = {"steps": 200, "batch_size": 256, "population": 5000, **changes}
    return PhaseSpec(name="train", clip_norm=1.0, **values)


def calibrated(*phases: PhaseSpec) -> Callable[[Budget], Profile]:
    return lambda budget: delta_at(plan_of(budget, *phases).mechanisms, budget)


def plan_of(budget: Budget, *phases: PhaseSpec) -> Plan:
    return calibrate(budget=budget, phases=phases, cross_check=())


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_one_gaussian_spends_the_target_exactly(text: str, adjacency: str) -> None:
    target = Budget(epsilon=3.0, delta=1e-5, adjacency=adjacency)  # type: ignore[arg-type]
    rule = stopping(text)
    trial = trial_budget(rule, target)
    bound = released(rule, trial)
    assert TARGET.epsilon * (1 - 1e-8) <= bound.epsilon <= TARGET.epsilon
    assert bound.parts["delta"] <= TARGET.delta
    plan = plan_of(trial, train(steps=1, batch_size=5000))
    mu = (2 if adjacency == "replace_one" else 1) / plan.phases[0].noise_multiplier
    spent = profile_bound(lambda at: gaussian.delta(at, mu), rule.runs, TARGET.delta).epsilon
    assert TARGET.epsilon * (1 - 1e-4) <= spent <= TARGET.epsilon


@pytest.mark.parametrize("text", RULES)
def test_a_sampled_mechanism_spends_the_target_within_a_thousandth(text: str) -> None:
    rule = stopping(text)
    trial = refined(rule, TARGET, calibrated(train()))
    assert released(rule, trial).epsilon <= TARGET.epsilon
    plan = plan_of(trial, train())
    spent = profile_bound(delta_at(plan.mechanisms, trial), rule.runs, TARGET.delta).epsilon
    assert TARGET.epsilon * (1 - 1e-3) <= spent <= TARGET.epsilon


def test_plans_of_other_curves_stay_within_both_points() -> None:
    """The reference samples often; these trials do not, or have two phases: none may exceed either point."""
    rule = stopping("geometric:10")
    trial = refined(rule, TARGET, calibrated(train()))
    warm_up = PhaseSpec(name="warmup", steps=40, batch_size=64, population=5000, clip_norm=1.0, share=0.4)
    for phases in ([train(steps=3, batch_size=2000)], [train(steps=900, batch_size=64)], [warm_up, train()]):
        plan = plan_of(trial, *phases)
        ((at, allowed),) = trial.further
        used = (plan.epsilon.upper / trial.epsilon, plan.further[0] / allowed)
        assert max(used) <= 1 and max(used) >= 1 - SLACK
        assert profile_bound(delta_at(plan.mechanisms, trial), rule.runs, TARGET.delta).epsilon <= TARGET.epsilon
        assert delta_at(plan.mechanisms, trial)(at) == plan.further[0]
        assert Plan.from_json(plan.to_json()) == plan


def test_a_warm_up_that_leaves_nothing_at_the_second_point_is_infeasible() -> None:
    trial = Budget(epsilon=3.0, delta=1e-6, further=((0.1, 1e-3),))
    warm_up = PhaseSpec(name="warmup", steps=40, batch_size=64, population=5000, clip_norm=1.0, share=0.9)
    with pytest.raises(Infeasible, match=r"delta = 0.001 at epsilon = 0.1"):
        plan_of(trial, warm_up, train())


def test_a_budget_that_breaks_the_condition_of_the_theorem_is_refused() -> None:
    rule = stopping("geometric:10")
    trial = trial_budget(rule, TARGET)
    ((at, allowed),) = trial.further
    with pytest.raises(InvalidValue, match="at most"):
        released(rule, Budget(epsilon=trial.epsilon, delta=trial.delta, further=((at, allowed * 1.01),)))
    with pytest.raises(InvalidValue, match="one point"):
        released(rule, TARGET)


def test_a_delta_too_small_for_a_trial_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"budget\.delta"):
        trial_budget(stopping("geometric:1000"), Budget(epsilon=1.0, delta=1e-8))


def test_plan_refuses_a_certificate_above_a_further_point() -> None:
    trial = trial_budget(stopping("geometric:10"), TARGET)
    record = plan_of(trial, train()).to_json()
    with pytest.raises(InvalidValue, match="further"):
        Plan.from_json({**record, "further": [record["further"][0] * 2]})
    with pytest.raises(InvalidValue, match="further"):
        Plan.from_json({name: value for name, value in record.items() if name != "further"})


@pytest.mark.parametrize("point", [(-0.1, 0.1), (0.1, 0.0), (0.1, 1.0), (0.1,), "ab", 3])
def test_a_further_point_out_of_range_is_refused(point: object) -> None:
    with pytest.raises(InvalidValue):
        Budget(epsilon=1.0, delta=1e-5, further=(point,))  # type: ignore[arg-type]


def test_budgets_without_further_points_keep_their_json() -> None:
    assert set(TARGET.to_json()) == {"epsilon", "delta", "adjacency"}
    trial = trial_budget(stopping("geometric:10"), TARGET)
    assert Budget.from_json(trial.to_json()) == trial


def test_solving_is_quick() -> None:
    """The bound that is promised is 5 s on an idle core; tests/benchmarks/bench_selection.py measures it."""
    begun = time.perf_counter()
    refined(stopping("geometric:7"), TARGET, calibrated(train(steps=250)))
    assert time.perf_counter() - begun < 20
