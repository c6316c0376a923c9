"""What a search's selection costs, and what the same budget would allow under the other rules, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from scipy.optimize import brentq

from raydp.errors import Infeasible, InvalidValue
from raydp.methods.base import Config
from raydp.privacy import gaussian
from raydp.privacy.budget import Budget
from raydp.privacy.plan import Plan
from raydp.privacy.selection import Public, RandomStopping, Subsample
from raydp.privacy.selection_bounds import ORDERS, renyi_epsilon, subsample_curve
from raydp.privacy.selection_budget import released, trial_budget
from raydp.privacy.stopping import NegativeBinomial
from raydp.search import subsample
from raydp.search.definition import Search
from raydp.search.spending import Carried

_LEVELS = (0.5, 0.9, 0.95, 0.99)
_FRACTION = 0.1


def describe(search: Search, plan: Plan, config: Config, *, before: Carried = ()) -> dict[str, Any]:
    """The JSON form: ``rule``, ``theorem``, what a trial and the released result cost, and :func:`alternatives`.

    Args:
        plan, config: of one trial, such as the one at the centre of the space.
        before: what earlier searches spent on the same people.
    """
    rule, trial = search.rule, search.trial_budget
    record: dict[str, Any] = {
        "rule": rule.rule,
        "theorem": rule.theorem,
        "epsilon_of_a_trial": plan.epsilon.upper,
        "delta_of_a_trial": trial.delta,
    }
    runs = search.trials * search.seeds
    if isinstance(rule, RandomStopping):
        bound = released(rule, trial)
        record["further_points_of_a_trial"] = [list(point) for point in trial.further]
        record["epsilon_of_the_released_result"] = bound.epsilon
        record["bound"] = bound.theorem
        record["expected_runs"] = rule.runs.mean
        record["quantiles_of_runs"] = {f"{level:.0%}": rule.runs.quantile(level) for level in _LEVELS}
        record["probability_of_no_run"] = rule.runs.pmf(0)
        runs = max(2, round(rule.runs.mean))
    elif isinstance(rule, Public):
        record["epsilon_of_the_released_result"] = 0.0
    elif isinstance(rule, Subsample):
        record.update(_subsample(search, rule, config, plan, runs, before))
    record["same_budget_under_other_rules"] = alternatives(search.budget, runs)
    return record


def _subsample(
    search: Search, rule: Subsample, config: Config, plan: Plan, runs: int, before: Carried
) -> dict[str, Any]:
    """What tuning with ``runs`` runs of this plan and a final run of its config would cost, if all of them finish."""
    record: dict[str, Any] = {
        "fraction": rule.fraction,
        "expected_examples_of_a_trial": search.population(),
        "expected_examples_of_the_final_run": search.population(final=True),
    }
    try:
        carried = search.final_config(config)
        final = search.plan_for(carried, final=True, cross_check=())
    except (Infeasible, InvalidValue) as error:
        return {**record, "no_final_run": str(error)}
    changed = {name: value for name, value in carried.items() if config.get(name) != value}
    earlier = [mechanism for _, spent in before for mechanism in spent]
    bound = subsample.cost(rule, search.budget, plan.mechanisms * runs, final.mechanisms, earlier)
    return {
        **record,
        "final_run_changes": changed,
        "epsilon_of_the_final_run": final.epsilon.upper,
        "epsilon_of_the_released_result": bound.epsilon,
        "bound": bound.theorem,
        "runs_on_the_subsample": runs,
    }


def alternatives(budget: Budget, runs: int) -> dict[str, float]:
    """Rule -> epsilon (at the budget's delta) that one trial may spend when the released result spends the budget.

    For trials whose profile is a Gaussian's, the limit of many steps; a comparison, not a certificate.

    Args:
        runs: trials that are composed, or expected under random stopping; at least 1.
    """

    def of_trial(mu: float) -> float:
        return gaussian.epsilon(budget.delta, mu)

    whole = gaussian.mu(budget.epsilon, budget.delta)
    found = {
        "public, no private run in the search": budget.epsilon,
        f"composition of {runs} runs": of_trial(whole / math.sqrt(runs)),
    }
    if runs > 1:
        for name, eta in (("logarithmic", 0.0), ("geometric", 1.0)):
            rule = RandomStopping(runs=NegativeBinomial.with_mean(eta=eta, mean=runs))
            trial = trial_budget(rule, budget)
            found[f"random stopping, {name}, {runs} runs expected"] = of_trial(gaussian.mu(trial.epsilon, trial.delta))

    def subsampled(mu: float) -> float:
        one = [order * mu**2 / 2 for order in ORDERS]
        curve = subsample_curve([runs * value for value in one], one, _FRACTION, rest=True)
        return renyi_epsilon(curve, budget.delta)[0]

    name = f"subsample of {_FRACTION:g} for {runs} composed runs, final run on the rest (by Renyi moments)"
    found[name] = of_trial(_largest(lambda mu: subsampled(mu) - budget.epsilon, whole))
    return found


def _largest(excess: Callable[[float], float], high: float) -> float:
    """The largest mu <= high with excess(mu) <= 0, for an increasing function."""
    if excess(high) <= 0:
        return high
    low = high
    while excess(low) > 0:
        low /= 2
    return float(brentq(excess, low, 2 * low, rtol=1e-6)) * (1 - 1e-6)


__all__ = ["alternatives", "describe"]
