"""The analytic Gaussian mechanism (Balle & Wang, ICML 2018, arXiv 1805.06530, Theorem 8).

A release of sensitivity D with noise N(0, s² I) is characterised by mu = D/s alone, and a composition of
releases on all data by mu = sqrt(sum of mu_t²). Everything is computed in log space, so that e^epsilon never
overflows.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

from raydp import _validate
from raydp.privacy.budget import Budget

# Relative widening of a root, so that a bound stays a bound after floating-point root finding.
_ROUNDING = 1e-12


def _log_delta(epsilon: float, mu: float) -> float:
    """log delta(epsilon; mu); minus infinity where it underflows."""
    log_a = float(log_ndtr(mu / 2 - epsilon / mu))
    log_b = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    gap = log_b - log_a
    return log_a + math.log(-math.expm1(gap)) if gap < 0 else -math.inf


def delta(epsilon: float, mu: float) -> float:
    """Delta of the Gaussian mechanism: Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu).

    Args:
        epsilon: >= 0.
        mu: sensitivity over noise standard deviation, > 0.

    Raises:
        InvalidValue: an argument is out of range or not finite.
    """
    epsilon = _validate.between("epsilon", epsilon, 0, 1e9)
    return math.exp(_log_delta(epsilon, _validate.positive("mu", mu)))


def epsilon(delta: float, mu: float) -> float:
    """The smallest epsilon >= 0 at which the Gaussian mechanism of that mu is (epsilon, delta)-DP.

    Raises:
        InvalidValue: delta outside (0, 1), mu not positive, or either not finite.
    """
    target = math.log(_validate.between("delta", delta, 0, 1, low_open=True, high_open=True))
    mu = _validate.positive("mu", mu)
    if _log_delta(0.0, mu) <= target:
        return 0.0
    # delta <= Phi(mu/2 - eps/mu), hence this upper end of the bracket; it is exact up to the dropped term.
    high = mu * (mu / 2 - float(ndtri(math.exp(target))))
    return float(brentq(lambda value: _log_delta(value, mu) - target, 0.0, high, xtol=1e-300, rtol=1e-14))


def mu(epsilon: float, delta: float) -> float:
    """The largest mu whose Gaussian mechanism is (epsilon, delta)-DP; rounded down.

    Raises:
        InvalidValue: epsilon not positive, delta outside (0, 1), or either not finite.
    """
    epsilon = _validate.positive("epsilon", epsilon)
    target = math.log(_validate.between("delta", delta, 0, 1, low_open=True, high_open=True))
    low = high = 1.0
    while _log_delta(epsilon, low) > target:
        low /= 2
    while _log_delta(epsilon, high) <= target:
        high *= 2
    root = brentq(lambda value: max(_log_delta(epsilon, value), -1e6) - target, low, high, xtol=1e-300, rtol=1e-14)
    return float(root) * (1 - _ROUNDING)


def noise_multiplier(budget: Budget) -> float:
    """The smallest sigma (noise standard deviation over clip norm C) of one release on all data within the budget.

    ``add_remove``: the sum has sensitivity C, sigma = 1/mu. ``replace_one``: sensitivity 2C, sigma = 2/mu.
    """
    sensitivity = 2.0 if budget.adjacency == "replace_one" else 1.0
    return sensitivity / mu(budget.epsilon, budget.delta)
