"""The budget of a trial, solved from the budget of the released result under random stopping.

The profile bound (:func:`raydp.privacy.selection_bounds.profile_bound`) asks for a run's privacy profile at two points
only. They are chosen once for a search, and *every* trial is calibrated to satisfy both. A run of the search draws its
hyperparameters from a distribution that does not depend on the data, so its profile is a mixture of the trials'
profiles and satisfies both points as well: the bound holds over the whole space, however much the curves of its plans
differ, and whatever the sampler draws.

For a Poisson number of trials, Theorem 6 of Papernot & Steinke is the smaller bound from about five expected trials on.
It rests on a Renyi divergence, which nothing here certifies of every plan in a space, so it is not used; a geometric or
logarithmic number of the same mean costs less than either.

The two points are where the plan of one reference (the centre of the space) spends all of the budget; another plan
meets one of them exactly and the other with room to spare.
"""

from __future__ import annotations

from collections.abc import Callable

from scipy.optimize import brentq

from raydp.errors import InvalidValue
from raydp.privacy import gaussian
from raydp.privacy.budget import Budget
from raydp.privacy.selection import RandomStopping
from raydp.privacy.selection_bounds import Bound, Profile, hat_allowance, profile_bound
from raydp.privacy.stopping import NegativeBinomial

#: Below it, dp-accounting's profile is not accurate.
SMALLEST_DELTA = 1e-10
_ROUNDS = 3
_CLOSE = 5e-4
_ROUNDING = 1e-9  # more than what the roots of a bound are rounded up by, so that it can be computed again


def trial_budget(rule: RandomStopping, budget: Budget) -> Budget:
    """What each trial may spend when its profile is that of a Gaussian, the limit of many steps.

    Returns:
        A Budget: (e1, delta/E[K]), and as ``further`` the second point: (e_hat, its allowance) under a negative
        binomial number of trials, (0, delta_0) under a Poisson one.

    Raises:
        InvalidValue: the budget leaves too small a delta for a trial.

    >>> from raydp.privacy import Budget, selection
    >>> from raydp.privacy.selection_budget import released, trial_budget
    >>> rule, budget = selection.parse("geometric:10"), Budget(epsilon=3.0, delta=1e-5)
    >>> trial = trial_budget(rule, budget)
    >>> round(trial.epsilon, 2), round(released(rule, trial).epsilon, 4)
    (2.15, 3.0)
    """
    _check(rule, budget)

    def excess(mu: float) -> float:
        return profile_bound(lambda at: gaussian.delta(at, mu), rule.runs, budget.delta).epsilon - budget.epsilon

    high = gaussian.mu(budget.epsilon, budget.delta)  # no selection at all
    low = high
    while excess(low) > 0:
        low /= 2
    mu = float(brentq(excess, low, high, rtol=1e-10))
    return points(rule, budget, lambda at: gaussian.delta(at, mu))


def refined(rule: RandomStopping, budget: Budget, profile_at: Callable[[Budget], Profile]) -> Budget:
    """The trial budget for a reference whose profile is known: spends the search's epsilon within a part in 1,000.

    Args:
        profile_at: calibrates the reference to a trial's budget, and returns its certified profile.
    """
    found = trial_budget(rule, budget)
    for _ in range(_ROUNDS):
        profile = profile_at(found)
        spent = profile_bound(profile, rule.runs, budget.delta).epsilon
        if spent >= budget.epsilon * (1 - _CLOSE):
            break
        found = points(rule, budget, profile)
    return found


def points(rule: RandomStopping, budget: Budget, profile: Profile) -> Budget:
    """The two points of a profile that the bound reads, scaled so that the bound is the search's epsilon exactly."""
    bound = profile_bound(profile, rule.runs, budget.delta)
    scale = budget.epsilon / bound.epsilon * (1 - _ROUNDING)
    first = scale * bound.parts["e1"]
    if isinstance(rule.runs, NegativeBinomial):
        hat = scale * bound.parts["e_hat"]
        second = (hat, hat_allowance(rule.runs, hat) * (1 - _ROUNDING))
    else:
        second = (0.0, scale * bound.parts["delta_0"])
    return Budget(
        epsilon=first,
        delta=budget.delta / rule.runs.mean * (1 - _ROUNDING),
        adjacency=budget.adjacency,
        further=(second,),
    )


def released(rule: RandomStopping, trial: Budget) -> Bound:
    """What the released result costs when every trial satisfies ``trial``: arithmetic on six numbers, for anyone.

    Returns:
        The bound, with the ``delta`` that it holds at among its parts.

    Raises:
        InvalidValue: the budget does not satisfy the condition of the theorem.
    """
    theorem = "privacy-profile bound (Koskela, Redberg & Wang 2024)"
    if len(trial.further) != 1:
        raise InvalidValue("further", trial.further, "must be one point", "Solve it with trial_budget.")
    ((hat, delta_hat),) = trial.further
    runs = rule.runs
    delta = runs.mean * trial.delta
    parts = {"e1": trial.epsilon, "delta_1": trial.delta, "delta": delta}
    if not isinstance(runs, NegativeBinomial):
        if hat != 0.0:
            raise InvalidValue("further.epsilon", hat, "must be 0 for a Poisson number of trials", "Solve it anew.")
        return Bound(
            epsilon=trial.epsilon + runs.mean * delta_hat, theorem=theorem, parts={**parts, "delta_0": delta_hat}
        )
    if delta_hat > hat_allowance(runs, hat):
        raise InvalidValue(
            "further.delta", delta_hat, f"must be at most {hat_allowance(runs, hat):.6g} at {hat:.6g}", "Solve it anew."
        )
    epsilon = trial.epsilon + (runs.eta + 1) * hat
    return Bound(epsilon=epsilon, theorem=theorem, parts={**parts, "e_hat": hat, "delta_hat": delta_hat})


def _check(rule: RandomStopping, budget: Budget) -> None:
    if budget.further:
        raise InvalidValue("budget.further", budget.further, "is solved by random stopping", "Leave it out.")
    if budget.delta / rule.runs.mean < SMALLEST_DELTA:
        raise InvalidValue(
            "budget.delta",
            budget.delta,
            f"leaves each of {rule.runs.mean:.4g} expected trials less than {SMALLEST_DELTA:g}",
            "Choose a larger delta or a smaller mean.",
        )


__all__ = ["points", "refined", "released", "trial_budget"]
