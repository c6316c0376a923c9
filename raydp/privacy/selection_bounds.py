"""What choosing the best of a random number of runs costs: upper bounds of epsilon, each from a cited theorem.

A *run* is a mechanism Q that releases (config, model, score); the search repeats it K times on the same data,
independently, and releases the triple of the best score. Q is known by its Renyi curve, by its privacy profile
delta_Q(epsilon) (the larger of both directions), or by one point of it. Every bound here is monotone in what is known
of Q, so an upper bound of the curve or of the profile gives an upper bound of the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from scipy.optimize import brentq

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.privacy.stopping import NegativeBinomial, Poisson, Runs

#: Orders at which Renyi curves are tabulated.
ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(11, 512)))
#: A Renyi divergence at each of ORDERS.
Curve = Sequence[float] | np.ndarray
#: epsilon -> an upper bound of delta at it; not increasing.
Profile = Callable[[float], float]
# Relative widening of a root, so that a bound stays a bound after floating-point root finding.
_ROUNDING = 1e-10
_LARGEST = 1e4


@dataclass(frozen=True, kw_only=True)
class Bound:
    """An upper bound of a search's epsilon at a delta.

    Attributes:
        epsilon: infinite where the theorem has no finite one.
        theorem: its name, for every result that states the number.
        parts: the numbers that it is made of.
    """

    epsilon: float
    theorem: str
    parts: dict[str, float]


def renyi_curve(base: Curve, runs: Runs, *, delta_of: Profile | None = None) -> np.ndarray:
    """The Renyi curve of the search from the curve of one run, at :data:`ORDERS`.

    Papernot & Steinke 2022 (arXiv 2110.03620), Theorem 2 for the negative binomial, Theorem 6 for Poisson.

    Args:
        base: an upper bound of Q's Renyi divergence at each of ORDERS; infinite where none is known. When trials differ
            in their curves, the pointwise maximum over the whole space.
        runs: the distribution of K.
        delta_of: Q's privacy profile; None derives one from ``base``. Only Poisson needs it.
    """
    orders, curve = np.array(ORDERS), np.asarray(base, dtype=float)
    if len(curve) != len(orders) or bool(np.any(curve < 0)) or bool(np.any(np.isnan(curve))):
        raise InvalidValue("base", len(curve), f"must be {len(orders)} numbers >= 0", "Tabulate it at ORDERS.")
    if isinstance(runs, NegativeBinomial):
        with np.errstate(invalid="ignore"):
            hat = np.min((1 - 1 / orders) * curve + math.log(1 / runs.gamma) / orders)
        return curve + (1 + runs.eta) * hat + math.log(runs.mean) / (orders - 1)
    if delta_of is None:

        def delta_of(epsilon: float) -> float:
            return float(rdp.compute_delta(orders, curve, epsilon)[0])

    deltas = np.array([delta_of(math.log1p(1 / (order - 1))) for order in orders])
    return curve + runs.mean * deltas + math.log(runs.mean) / (orders - 1)


def renyi_epsilon(curve: Curve, delta: float) -> tuple[float, float]:
    """(epsilon, order) of a Renyi curve at ORDERS, by dp-accounting (Canonne, Kamath & Steinke 2020, Prop. 12)."""
    delta = _validate.between("delta", delta, 0, 1, low_open=True, high_open=True)
    epsilon, order = rdp.compute_epsilon(np.array(ORDERS), np.asarray(curve, dtype=float), delta)
    return float(epsilon), float(order)


def renyi_bound(base: Curve, runs: Runs, delta: float, *, delta_of: Profile | None = None) -> Bound:
    """Epsilon of the search at ``delta`` from the Renyi curve of one run (:func:`renyi_curve`)."""
    epsilon, order = renyi_epsilon(renyi_curve(base, runs, delta_of=delta_of), delta)
    number = "2" if isinstance(runs, NegativeBinomial) else "6"
    return Bound(
        epsilon=epsilon,
        theorem=f"Renyi bound (Papernot & Steinke 2022, Theorem {number})",
        parts={"order": order},
    )


def hat_allowance(runs: NegativeBinomial, epsilon_hat: float) -> float:
    """The largest delta_Q(epsilon_hat) that the profile bound allows: (e^epsilon_hat - 1) gamma / (1 - gamma)."""
    return min(math.expm1(min(epsilon_hat, 700.0)) * runs.gamma / (1 - runs.gamma), 1.0)


def profile_bound(profile: Profile, runs: Runs, delta: float) -> Bound:
    """Epsilon of the search at ``delta`` from the privacy profile of one run.

    The approach of Koskela, Redberg & Wang 2024 (arXiv 2402.06701). The released triple has the density
    phi'(Q(scores below y)) Q(y), with phi the generating function of K.

    Negative binomial: if delta_Q(e_hat) <= (e^e_hat - 1) gamma/(1 - gamma), the search is
    (e1 + (eta + 1) e_hat, E[K] delta_Q(e1))-DP. For then, with a and b the probabilities of a lower score on two
    neighbouring data sets, 1 - b <= e^e_hat (1 - a) + delta_Q(e_hat), hence 1 - (1 - gamma) b <= e^e_hat (1 - (1 -
    gamma) a), and phi' is a constant times (1 - (1 - gamma) x)^-(eta + 1).

    Poisson: phi'(x) = mu e^(mu (x - 1)) and a - b <= delta_Q(0), so it is (e1 + mu delta_Q(0), mu delta_Q(e1))-DP.

    Both terms are as small as they can be: e1 is the least with E[K] delta_Q(e1) <= delta, e_hat the least allowed.
    """
    delta = _validate.between("delta", delta, 0, 1, low_open=True, high_open=True)
    theorem = "privacy-profile bound (Koskela, Redberg & Wang 2024)"
    first = least(lambda epsilon: profile(epsilon) - delta / runs.mean)
    if isinstance(runs, Poisson):
        distance = profile(0.0)
        parts = {"e1": first, "delta_0": distance}
        return Bound(epsilon=first + runs.mean * distance, theorem=theorem, parts=parts)
    hat = least(lambda epsilon: profile(epsilon) - hat_allowance(runs, epsilon))
    return Bound(epsilon=first + (runs.eta + 1) * hat, theorem=theorem, parts={"e1": first, "e_hat": hat})


def point_profile(epsilon: float, delta: float) -> Profile:
    """The worst profile of anything that is (epsilon, delta)-DP (Kairouz, Oh & Viswanath 2015, arXiv 1311.0776)."""
    epsilon = _validate.between("epsilon", epsilon, 0, 1e3)
    delta = _validate.between("delta", delta, 0, 1, low_open=True, high_open=True)

    def profile(at: float) -> float:
        rest = max(0.0, math.exp(epsilon) - math.exp(min(at, 700.0))) / (1 + math.exp(epsilon))
        return delta + (1 - delta) * rest

    return profile


def point_bound(epsilon: float, delta_run: float, runs: Runs) -> Bound:
    """Epsilon of the search, and E[K] delta_run as ``parts["delta"]``, from one point of Q's profile."""
    found = profile_bound(point_profile(epsilon, delta_run), runs, min(runs.mean * delta_run * (1 + 1e-9), 1 - 1e-12))
    return Bound(
        epsilon=found.epsilon,
        theorem=f"{found.theorem}, from one point of a run's profile",
        parts={**found.parts, "delta": runs.mean * delta_run},
    )


def pure_epsilon(epsilon: float, runs: NegativeBinomial) -> float:
    """(2 + eta) epsilon: the search over runs that are purely epsilon-DP (Papernot & Steinke 2022, Corollary 3).

    >>> from raydp.privacy.selection_bounds import pure_epsilon
    >>> from raydp.privacy.stopping import NegativeBinomial
    >>> pure_epsilon(1.0, NegativeBinomial.with_mean(eta=1, mean=10))
    3.0
    """
    return (2 + runs.eta) * _validate.between("epsilon", epsilon, 0, 1e9)


def subsample_curve(tuning: Curve, final: Curve, fraction: float, *, rest: bool) -> np.ndarray:
    """The Renyi curve of tuning on a Poisson subsample followed by a final run, at ORDERS.

    An example is in the subsample with probability q. ``rest``: the final run sees it only otherwise, so by joint
    convexity of the moments e'(a) = ln(q e^((a-1) tuning(a)) + (1 - q) e^((a-1) final(a))) / (a - 1). Else the final
    run sees all, and its curve is added to the amplified one of tuning (Koskela & Kulkarni 2023, arXiv 2301.11989).
    """
    q = _validate.between("fraction", fraction, 0, 1, low_open=True, high_open=True)
    scale = np.array(ORDERS) - 1
    tune, last = np.asarray(tuning, dtype=float), np.asarray(final, dtype=float)
    other = scale * last if rest else np.zeros_like(scale)
    mixed = np.logaddexp(math.log(q) + scale * tune, math.log1p(-q) + other) / scale
    return mixed if rest else mixed + last


def best(bounds: Sequence[Bound]) -> Bound:
    """The smallest of several valid bounds; of equals the first."""
    return min(bounds, key=lambda bound: bound.epsilon)


def least(excess: Callable[[float], float]) -> float:
    """The smallest epsilon >= 0 with excess(epsilon) <= 0, rounded up; ``excess`` changes its sign once."""
    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
        if high > _LARGEST:
            return math.inf
    root = float(brentq(excess, 0.0, high, xtol=1e-13, rtol=1e-13))
    while excess(root) > 0:  # the root finder may end on the wrong side of it
        root += _ROUNDING * max(root, 1e-3)
    return root


__all__ = [
    "ORDERS",
    "Bound",
    "Curve",
    "Profile",
    "best",
    "hat_allowance",
    "least",
    "point_bound",
    "point_profile",
    "profile_bound",
    "pure_epsilon",
    "renyi_bound",
    "renyi_curve",
    "renyi_epsilon",
    "subsample_curve",
]
