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
from raydp.privacy.budget import ADJACENCIES, Adjacency, Budget

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

    >>> from raydp.privacy import gaussian
    >>> round(gaussian.epsilon(1e-5, mu=0.25), 3)
    0.926
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

    >>> from raydp.privacy import Budget, gaussian
    >>> round(gaussian.noise_multiplier(Budget(epsilon=1.0, delta=1e-5)), 3)
    3.731
    >>> round(gaussian.noise_multiplier(Budget(epsilon=1.0, delta=1e-5, adjacency="replace_one")), 3)
    7.461
    """
    return sensitivity(budget.adjacency) / mu(budget.epsilon, budget.delta)


def classical_noise_multiplier(budget: Budget) -> float:
    """Sigma of the classical formula, s² = 2 log(1.25/delta) (D/epsilon)² (Dwork & Roth 2014, Theorem A.1).

    With D = 2C/N it is the s² = 8 C² log(1.25/delta)/(epsilon² N²) of DP-DeepSets (arXiv 2606.26772, section 3). Its
    theorem holds for epsilon < 1 only: above (from 8.42 on at delta = 1e-5) it adds too little noise, below more than
    is needed. Ask :func:`epsilon` what it really spends.
    """
    return sensitivity(budget.adjacency) * math.sqrt(2 * math.log(1.25 / budget.delta)) / budget.epsilon


def sensitivity(adjacency: Adjacency) -> float:
    """Sensitivity of a sum of vectors clipped to norm C, in units of C: 1 for ``add_remove``, 2 for ``replace_one``."""
    return 2.0 if _validate.one_of("adjacency", adjacency, ADJACENCIES) == "replace_one" else 1.0


def by_adjacency(noise_multiplier: float, *, delta: float, steps: int = 1) -> dict[Adjacency, float]:
    """Epsilon of the same noise under either adjacency: how a release for one compares with releases for the other.

    ``steps`` releases on all data, with noise of standard deviation sigma·C on the sum. Seen by ``add_remove`` the sum
    moves by at most C, seen by ``replace_one`` by at most 2C: a mechanism for ``replace_one`` is one for
    ``add_remove`` with sigma halved.

    Raises:
        InvalidValue: an argument is out of range.

    >>> from raydp.privacy import gaussian
    >>> {name: round(value, 2) for name, value in gaussian.by_adjacency(4.0, delta=1e-5).items()}
    {'add_remove': 0.93, 'replace_one': 1.99}
    """
    steps = _validate.integer("steps", steps, low=1)
    root = math.sqrt(steps) / _validate.positive("noise_multiplier", noise_multiplier)
    both: tuple[Adjacency, Adjacency] = ("add_remove", "replace_one")
    return {name: epsilon(delta, sensitivity(name) * root) for name in both}
